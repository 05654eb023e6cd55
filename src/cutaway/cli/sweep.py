"""`cutaway sweep`: run many prompts, and show what was asked for of each or write it to a folder, resumable."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutaway.cli.arguments import add_model, load_model, print_json
from cutaway.errors import CutawayError

if TYPE_CHECKING:
    from cutaway.trace.trace import Trace

_SHOWN = 6  # numbers of a value that stand on its line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="the prompts")
    parser.add_argument(
        "--file", type=Path, metavar="FILE", help="prompts from a file: .jsonl, or text with one prompt on each line"
    )
    parser.add_argument(
        "--to", type=Path, metavar="FOLDER", help="write the values there; run again after a kill, it goes on"
    )
    parser.add_argument(
        "--point",
        action="append",
        required=True,
        metavar="ADDRESS",
        help='what to keep: "layers.*.resid_post", "layers.3.attn.pattern | top(5)"; as often as wanted',
    )
    add_model(parser)
    parser.add_argument("--reduce", metavar="HOW", help="reduce every point: last, mean, norm, top(5), …")
    parser.add_argument("--positions", metavar="IDS", help='keep these rows only, as in --positions "0 -1"')
    parser.add_argument(
        "--heads", metavar="IDS", help="keep these query heads only, and the key/value heads that serve them"
    )
    parser.add_argument(
        "--edit", action="append", default=[], metavar="JSON", help="change the passes, as in cutaway trace"
    )
    parser.add_argument(
        "--layout",
        metavar="NAME",
        help="prompts (if not given), rows (for dictionary learning) or table (Parquet, one number each)",
    )
    parser.add_argument("--values", metavar="DTYPE", help="write floats as float16, float32 or float64")
    parser.add_argument("--json", action="store_true", help="print one JSON document about the files")


def run(options: argparse.Namespace) -> int:
    if bool(options.texts) == (options.file is not None):
        given = "Both prompts and --file were given" if options.texts else "There is no prompt"
        raise CutawayError(f"{given}: give one or more texts in quotation marks, or --file.")
    if options.to is None and (options.layout is not None or options.values is not None or options.json):
        raise CutawayError("--layout, --values and --json are about files; say where they go with --to FOLDER.")
    settings: dict[str, Any] = {
        "positions": _numbers("--positions", options.positions),
        "heads": _numbers("--heads", options.heads),
        "edits": options.edit,
        "reduce": options.reduce,
    }
    prompts = options.texts or options.file
    model = load_model(options)
    if options.to is None:
        for index, trace in enumerate(model.sweep(prompts, options.point, **settings)):
            _draw(index, trace)
        return 0
    layout = {"layout": options.layout or "prompts", "dtype": options.values}
    folder = model.sweep(prompts, options.point, to=options.to, **settings, **layout)
    told: dict[str, Any] = {
        "folder": str(folder.path),
        "prompts": len(folder),
        "files": [file.name for file in folder.files],
        "bytes": sum(file.stat().st_size for file in folder.files),
    }
    if options.json:
        print_json(told)
    else:
        from cutaway.trace.capture.bill import in_units

        count = len(folder.files)
        print(
            f"{len(folder):,} prompts in {count:,} file{'s' if count != 1 else ''} of {folder.path}, "
            f"{in_units(told['bytes'])}"
        )
    return 0


def _draw(index: int, trace: "Trace") -> None:
    """One prompt: of each value its shape and its first numbers."""
    from cutaway.trace.drawing.page import Page, numbers
    from cutaway.trace.trace import shortened

    page = Page.on()
    text = "" if trace.prompt.text is None else f" {shortened(trace.prompt.text, 60)}"
    page.line(f"{index}{text}, {len(trace.prompt.ids):,} tokens")
    for address in trace.points:
        value = trace[address]
        shape = ", ".join(map(str, value.shape))
        line = numbers(value.reshape(-1)[:_SHOWN].tolist(), _SHOWN)
        page.line(f"  {address:<36} [{shape}]{line.plain}{' …' if value.size > _SHOWN else ''}")


def _numbers(option: str, text: str | None) -> list[int] | None:
    if text is None:
        return None
    words = text.replace(",", " ").split()
    if not words or not all(word.removeprefix("-").isdecimal() and word.isascii() for word in words):
        raise CutawayError(f'{option} is {text!r}; it takes whole numbers with spaces between, as in "0 -1".')
    return [int(word) for word in words]
