"""What several commands take: a model and an engine, a prompt, numbers."""

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from cutaway.errors import CutawayError
from cutaway.reading import Unreadable, decoded

if TYPE_CHECKING:
    from cutaway.model import Model

DEFAULT_MODEL = "smollm2-135m"


def add_model(parser: argparse.ArgumentParser) -> None:
    """--model, --engine and --dtype."""
    parser.add_argument(
        "--model",
        metavar="MODEL",
        default=DEFAULT_MODEL,
        help="a name (cutaway models lists them), a GGUF file, a folder with config.json and safetensors, or "
        f"hf:owner/name; {DEFAULT_MODEL} if not given",
    )
    add_engine(parser)


def add_engine(parser: argparse.ArgumentParser) -> None:
    """--engine and --dtype."""
    parser.add_argument(
        "--engine",
        default="auto",
        metavar="ENGINE",
        help="auto (if not given), cpu, numpy or torch; torch:cuda names the device",
    )
    parser.add_argument(
        "--dtype", metavar="DTYPE", help="float32; float64 on numpy and torch; bfloat16 or float16 on torch"
    )


def add_prompt(parser: argparse.ArgumentParser) -> None:
    """The prompt as text, or --ids."""
    parser.add_argument(
        "prompt", nargs="?", help='the text; "-" reads it from standard input, without its last line break'
    )
    parser.add_argument("--ids", metavar="IDS", help='token ids in place of a text, as in --ids "0 5 6"')


def read_prompt(options: argparse.Namespace) -> str | list[int]:
    """The prompt that was given. Raises CutawayError where there is none, or two."""
    if options.ids is not None and options.prompt is not None:
        raise CutawayError("Both a text and --ids were given; give one of them.")
    if options.ids is not None:
        return read_ids(options.ids)
    if options.prompt is None:
        raise CutawayError('There is no prompt: give a text in quotation marks, "-" for standard input, or --ids.')
    return _from_stdin() if options.prompt == "-" else str(options.prompt)


def read_ids(text: str) -> list[int]:
    """ "0 5 6" or "0, 5, 6" as numbers. Raises CutawayError for anything else."""
    ids = []
    for word in text.replace(",", " ").split():
        if not (word.isascii() and word.lstrip("-").isdecimal()):
            raise CutawayError(f'--ids holds {word!r}; token ids are whole numbers with spaces between, as in "0 5 6".')
        ids.append(int(word))
    return ids


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """How a token is picked: the options that `generate` and `chat` share."""
    picking = parser.add_argument_group("how a token is picked")
    picking.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        metavar="T",
        help="0 takes the likeliest; 1 (if not given) draws fairly",
    )
    picking.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest only")
    picking.add_argument("--top-p", type=float, metavar="P", help="draw from the likeliest that make up P together")
    picking.add_argument(
        "--min-p", type=float, metavar="P", help="draw from those at least P times as likely as the first"
    )
    picking.add_argument(
        "--typical-p", type=float, metavar="P", help="draw from those nearest to the entropy that make up P together"
    )
    picking.add_argument(
        "--repetition-penalty", type=float, metavar="R", help="divide the logits of what stands in the text (1: not)"
    )
    picking.add_argument("--presence-penalty", type=float, metavar="X", help="subtract X from what was said already")
    picking.add_argument("--frequency-penalty", type=float, metavar="X", help="subtract X as often as it was said")
    picking.add_argument(
        "--logit-bias",
        action="append",
        default=[],
        metavar="ID=X",
        help="add X to the logit of a token id (-inf bans it); repeatable",
    )
    picking.add_argument(
        "--order", default="cutaway", metavar="ORDER", help="of the stages: cutaway (if not given), hf, vllm, llama.cpp"
    )
    picking.add_argument("--seed", type=int, metavar="N", help="makes the draws repeatable")


def sampling_settings(options: argparse.Namespace) -> dict[str, Any]:
    """What was said of it, as `model.generate` takes it."""
    named = ("temperature", "top_k", "top_p", "min_p", "seed", "typical_p", "order")
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    return {name: getattr(options, name) for name in (*named, *penalties)} | {"logit_bias": _biases(options.logit_bias)}


def _biases(given: list[str]) -> dict[int, float] | None:
    biases = {}
    for text in given:
        token, _, bias = text.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise CutawayError(f"--logit-bias is {text!r}; it takes a token id and a number, as in 260=-1.5.") from None
    return biases or None


def _from_stdin() -> str:
    if sys.stdin.isatty():
        end = "Ctrl-Z and Enter" if sys.platform == "win32" else "Ctrl-D"
        print(f"cutaway: reading the prompt from standard input; end it with {end}.", file=sys.stderr)
    try:
        text = decoded(sys.stdin.buffer.read())
    except Unreadable as error:
        raise CutawayError(f"Standard input cannot be read: {error}.") from None
    return text.removesuffix("\n").removesuffix("\r")


def load_model(options: argparse.Namespace) -> "Model":
    """The model that the options name, on the engine that they name; what slows it down is told."""
    from cutaway.model import load

    model = load(options.model, engine=options.engine, dtype=options.dtype)
    if model.engine.note:
        print(f"cutaway: {model.engine.note}", file=sys.stderr)
    return model


def print_json(data: Any) -> None:
    """One JSON document in UTF-8: indented for people, one line for programs. Never NaN or Infinity."""
    indent = 2 if sys.stdout.isatty() else None
    print(json.dumps(data, ensure_ascii=False, allow_nan=False, indent=indent))


def megabytes(size: int) -> str:
    """Bytes as people read them."""
    if size < 1e6:
        return f"{size / 1e3:,.0f} kB"
    return f"{size / 1e6:,.0f} MB" if size < 1e9 else f"{size / 1e9:,.1f} GB"
