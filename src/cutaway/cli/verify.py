"""`cutaway verify`: does this model, on this engine, compute what it says?"""

import argparse
import math
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from cutaway.cli.arguments import add_engine, load_model, print_json

if TYPE_CHECKING:
    from cutaway.trace.verification.identities import Check


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a name, a GGUF file, a folder with config.json and safetensors, or hf:owner/name",
    )
    add_engine(parser)
    parser.add_argument(
        "--against",
        choices=("transformers",),
        help="compare with the same checkpoint in transformers instead, layer by layer (needs the test extra)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document at the end")


def run(options: argparse.Namespace) -> int:
    model = load_model(options)
    checking = model.compare if options.against else model.verify
    if options.json:
        checks = list(checking())
        print_json(
            {
                "model": model.spec.name,
                "engine": model.engine.name,
                "dtype": model.engine.dtype.name,
                "holds": all(check.holds for check in checks),
                "checks": [_plain(check) for check in checks],
            }
        )
        return 0 if all(check.holds for check in checks) else 1

    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    watched = sys.stdout.isatty()
    print(f"{model.spec.name}, {model.engine.name} engine, {model.engine.dtype.name}")
    print("        off by   may be   what must hold (where it is off most)")
    held = failed = 0
    with console.status("running the model in several ways …") if watched else nullcontext():
        first: str | None = None
        for check in checking():
            first = first or (None if check.holds else check.name)
            held, failed = held + check.holds, failed + (not check.holds)
            verdict = Text("ok    ", style="#3fa58f") if check.holds else Text("FAILED", style="bold red")
            if watched:
                console.print(Text.assemble(verdict, f"  {_told(check)}"), soft_wrap=True)
            else:
                print(f"{verdict.plain}  {_told(check)}", flush=True)
    total = held + failed
    if options.against:
        print(
            f"All {total} points agree with {options.against}."
            if first is None
            else f"The two first part at {first}; {failed} of {total} points differ by more than rounding."
        )
        return 1 if failed else 0
    print(f"All {total} identities hold." if not failed else f"{failed} of {total} identities do not hold.")
    return 1 if failed else 0


def _told(check: "Check") -> str:
    """The largest deviation, how large it may be, the identity, and where it is furthest off."""
    most = "exact" if check.tolerance == 0 else f"≤ {check.tolerance:.0e}"
    found = "0" if check.deviation == 0 else f"{check.deviation:.1e}"
    where = f" ({check.where})" if check.where and check.deviation != 0 else ""
    return f"{found:<7}  {most:<7}  {check.name}{where}"


def _plain(check: "Check") -> dict[str, Any]:
    return {
        "name": check.name,
        "deviation": check.deviation if math.isfinite(check.deviation) else None,
        "tolerance": check.tolerance,
        "holds": check.holds,
        "where": check.where or None,
    }
