"""`cutaway count`: parameters, work and bytes of a configuration, without its weights."""

import argparse
from typing import TYPE_CHECKING, Any

from cutaway.cli.arguments import DEFAULT_MODEL, print_json
from cutaway.errors import CutawayError

if TYPE_CHECKING:
    from cutaway.spec import ModelSpec

SIZES = ("layers", "d_model", "heads", "kv_heads", "d_head", "d_ff", "vocab", "n_max")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a name of the catalog (gpt2, llama-2-70b, deepseek-v3, …), a config.json, a folder with one, a GGUF file",
    )
    parser.add_argument("--compare", metavar="OTHER", help="a second configuration, side by side")
    parser.add_argument("--tokens", type=int, default=512, metavar="T", help="length of the pass that is counted (512)")
    parser.add_argument("--context", type=int, metavar="C", help="cached tokens that bytes are told for (T)")
    parser.add_argument("--shapes", action="store_true", help="list every weight and activation shape, at T and 2T")
    parser.add_argument("--measure", action="store_true", help="measure this machine and bound the tokens a second")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    own = parser.add_argument_group("a configuration of your own, in place of MODEL")
    own.add_argument("--like", choices=("gpt2", "llama"), help="its shape (gpt2)")
    for name in SIZES:
        own.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N")


def run(options: argparse.Namespace) -> int:
    from cutaway.checkpoints.load import spec_of
    from cutaway.trace.capture.counted import counted, shapes, speed_bounds

    if options.tokens < 1 or (options.context is not None and options.context < 0):
        raise CutawayError(
            f"--tokens is {options.tokens}, --context {options.context}; both count tokens, from 1 and 0."
        )
    if options.model is not None:
        given = [f"--{n.replace('_', '-')}" for n in SIZES if getattr(options, n) is not None]
        given += ["--like"] if options.like is not None else []
        if given:
            raise CutawayError(f"{options.model} has its own sizes; leave out {', '.join(given)}, or the name.")
    specs = [_own_spec(options) if options.model is None else spec_of(options.model)]
    if options.compare is not None:
        specs.append(spec_of(options.compare))
    context = options.tokens if options.context is None else options.context
    told = [counted(spec, options.tokens, context) for spec in specs]
    if options.measure:
        from cutaway.engines.measure import measure

        machine = measure()
        for spec, facts in zip(specs, told, strict=True):
            if spec.causal:
                facts["speed"] = speed_bounds(spec, context, machine.bytes_per_second, machine.flops_per_second)
    if options.shapes:
        for spec, facts in zip(specs, told, strict=True):
            facts["shapes"] = shapes(spec, options.tokens)
    if options.json:
        print_json(told[0] if len(told) == 1 else {"configurations": told})
        return 0
    from cutaway.cli.counted_text import compared, lines

    print("\n".join(lines(told[0]) if len(told) == 1 else compared(*told)))
    return 0


def _own_spec(options: argparse.Namespace) -> "ModelSpec":
    """A GPT-2-like or Llama-like spec from the sizes given."""
    from cutaway.spec.builders import gpt2_like, llama_like

    given: dict[str, Any] = {name: getattr(options, name) for name in SIZES if getattr(options, name) is not None}
    if not given:
        raise CutawayError(
            f"No configuration was named; try `cutaway count {DEFAULT_MODEL}`, or give sizes: "
            "`cutaway count --layers 96 --d-model 12288 --heads 96`."
        )
    missing = [f"--{n.replace('_', '-')}" for n in ("layers", "d_model", "heads") if n not in given]
    if missing:
        raise CutawayError(f"A configuration of your own needs {', '.join(missing)} as well.")
    for name, value in given.items():
        if value < 1:
            raise CutawayError(f"--{name.replace('_', '-')} is {value}; it must be at least 1.")
    d_model, heads = given["d_model"], given["heads"]
    if d_model % heads and "d_head" not in given:
        raise CutawayError(
            f"--d-model {d_model} cannot be split into {heads} equal heads; give --d-head, or a multiple."
        )
    if options.like != "llama":
        odd = [f"--{n.replace('_', '-')}" for n in ("kv_heads", "d_head") if n in given]
        if odd:
            raise CutawayError(
                f"A GPT-2 has no {' or '.join(odd)}: every head has its own keys, d/H wide; use --like llama."
            )
        return gpt2_like(
            "your own",
            vocab_size=given.get("vocab", 50257),
            d_model=d_model,
            n_layers=given["layers"],
            n_heads=heads,
            n_max=given.get("n_max", 2048),
            d_ff=given.get("d_ff"),
        )
    return llama_like(
        "your own",
        vocab_size=given.get("vocab", 32000),
        d_model=d_model,
        n_layers=given["layers"],
        n_heads=heads,
        n_kv_heads=given.get("kv_heads", heads),
        d_ff=given.get("d_ff", -(-8 * d_model // 3 // 256) * 256),
        d_head=given.get("d_head"),
        context_length=given.get("n_max"),
    )
