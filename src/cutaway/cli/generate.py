"""`cutaway generate`: a text continued, shown as it comes."""

import argparse
import sys
import time
from typing import TYPE_CHECKING

from cutaway.cli.arguments import add_model, add_prompt, load_model, print_json, read_prompt
from cutaway.errors import CutawayError

if TYPE_CHECKING:
    from cutaway.model import Model

_ENDED = {
    "length": "as many as --max-tokens asked for",
    "stop token": "ended by the model itself",
    "stop string": "ended at a --stop text",
    "context": "ended where the model's learned positions end",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_prompt(parser)
    add_model(parser)
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="at most so many tokens (128)")
    parser.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        metavar="T",
        help="0 takes the likeliest; 1 (if not given) draws fairly",
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest only")
    parser.add_argument("--top-p", type=float, metavar="P", help="draw from the likeliest that make up P together")
    parser.add_argument(
        "--min-p", type=float, metavar="P", help="draw from those at least P times as likely as the first"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="makes the draws repeatable")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    parser.add_argument("--chat", action="store_true", help="send the prompt as a user's message to a chat model")
    parser.add_argument("--json", action="store_true", help="print one JSON document at the end")


def run(options: argparse.Namespace) -> int:
    given = read_prompt(options)
    if options.chat and not isinstance(given, str):
        raise CutawayError("--chat wraps a text into the model's chat template; ids stay as they are, so leave it out.")
    model = load_model(options)
    prompt: str | list[int] = given
    if options.chat:
        if not given:
            raise CutawayError("The prompt is empty; a chat needs at least one character from the user.")
        prompt = model.tokenizer.apply_chat_template([{"role": "user", "content": given}])
    if options.json:
        return _as_json(model, prompt, options)
    return _as_text(model, given, prompt, options)


def _settings(options: argparse.Namespace) -> dict:
    return {
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "min_p": options.min_p,
        "seed": options.seed,
        "stop": options.stop,
    }


def _as_json(model: "Model", prompt: str | list[int], options: argparse.Namespace) -> int:
    response = model.generate(prompt, **_settings(options))
    print_json(
        {
            "model": model.spec.name,
            "engine": model.engine.name,
            "settings": _settings(options),
            "prompt": prompt if isinstance(prompt, str) else None,
            "prompt_ids": response.prompt_ids,
            "text": response.text,
            "tokens": [
                {"id": token, "piece": model.piece(token), "logprob": logprob}
                for token, logprob in zip(response.tokens, response.logprobs, strict=True)
            ],
            "finish": response.finish,
            "prompt_seconds": response.prompt_seconds,
            "decode_seconds": response.decode_seconds,
            "tokens_per_second": response.tokens_per_second,
        }
    )
    return 0


def _as_text(model: "Model", given: str | list[int], prompt: str | list[int], options: argparse.Namespace) -> int:
    steps = model.stream(prompt, **_settings(options))  # wrong settings are refused here, before anything is shown
    watched = sys.stdout.isatty()
    begun = first = time.perf_counter()
    count, finish, last = 0, "length", ""
    try:
        for step in steps:
            if count == 0:
                first = time.perf_counter()
                if watched:
                    _show_prompt(given, "\n" if options.chat else "")
            text = _harmless(step.text) if watched else step.text
            if text:
                last = text
                sys.stdout.write(text)
                sys.stdout.flush()
            count += 1
            finish = step.finish or finish
    finally:
        if watched and count:
            print(flush=True)
    if not watched and not last.endswith("\n"):
        print(file=sys.stderr)  # both may end up in one place, and the text ends where the model ended it
    _tell(model, prompt, count, finish, first - begun, time.perf_counter() - first)
    return 0


def _show_prompt(prompt: str | list[int], end: str) -> None:
    from rich.console import Console
    from rich.text import Text

    shown = prompt if isinstance(prompt, str) else " ".join(map(str, prompt)) + " →"
    Console(highlight=False).print(Text(_harmless(shown), style="dim"), end=end, soft_wrap=True)
    sys.stdout.flush()


def _harmless(text: str) -> str:
    """Control characters spelt out: a model may write any, and a terminal would obey them."""
    return "".join(c if c in "\n\t" or not (ord(c) < 32 or 127 <= ord(c) < 160) else f"\\x{ord(c):02x}" for c in text)


def _tell(model: "Model", prompt: str | list[int], count: int, finish: str, prompt_time: float, rest: float) -> None:
    """How it ended and how fast it went: one line on standard error."""
    from rich.console import Console
    from rich.text import Text

    length = len(model.tokenizer.encode(prompt)) if isinstance(prompt, str) else len(prompt)
    speed = f", {(count - 1) / rest:,.1f} tokens/s" if count > 1 and rest > 0 else ""
    line = (
        f"{_counted(count, 'token')}, {_ENDED[finish]}; {_counted(length, 'prompt token')} in {prompt_time:.2f} s"
        f"{speed} ({model.engine.name} engine)"
    )
    Console(stderr=True, highlight=False).print(Text(line, style="dim"), soft_wrap=True)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count != 1 else ''}"
