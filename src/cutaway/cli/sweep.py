"""`cutaway sweep`: run many prompts and write what was asked for to a folder, resumable."""

import argparse
from pathlib import Path
from typing import Any

from cutaway.cli.arguments import add_model, load_model, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="the prompts: .jsonl, or text with one prompt on each line")
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="where the files go")
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
    parser.add_argument("--heads", metavar="IDS", help="keep these heads only")
    parser.add_argument(
        "--edit", action="append", default=[], metavar="JSON", help="change the passes, as in cutaway trace"
    )
    parser.add_argument(
        "--layout",
        default="prompts",
        metavar="NAME",
        help="prompts (if not given), rows (for dictionary learning) or table (Parquet, one number each)",
    )
    parser.add_argument("--values", metavar="DTYPE", help="write floats as float16, float32 or float64")
    parser.add_argument("--json", action="store_true", help="print one JSON document about the files")


def run(options: argparse.Namespace) -> int:
    positions = _numbers("--positions", options.positions)
    heads = _numbers("--heads", options.heads)
    model = load_model(options)
    folder = model.sweep(
        options.file,
        options.point,
        to=options.to,
        positions=positions,
        heads=heads,
        edits=options.edit,
        reduce=options.reduce,
        layout=options.layout,
        dtype=options.values,
    )
    told: dict[str, Any] = {
        "folder": str(folder.path),
        "prompts": len(folder),
        "files": [file.name for file in folder.files],
        "bytes": sum(file.stat().st_size for file in folder.files),
    }
    if options.json:
        print_json(told)
    else:
        from cutaway.trace.bill import in_units

        count = len(folder.files)
        print(
            f"{len(folder):,} prompts in {count:,} file{'s' if count != 1 else ''} of {folder.path}, "
            f"{in_units(told['bytes'])}"
        )
    return 0


def _numbers(option: str, text: str | None) -> list[int] | None:
    from cutaway.errors import CutawayError

    if text is None:
        return None
    words = text.replace(",", " ").split()
    if not words or not all(word.removeprefix("-").isdecimal() and word.isascii() for word in words):
        raise CutawayError(f'{option} is {text!r}; it takes whole numbers with spaces between, as in "0 -1".')
    return [int(word) for word in words]
