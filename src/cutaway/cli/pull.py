"""`cutaway pull`: bring a model onto this machine."""

import argparse

from cutaway.cli.arguments import DEFAULT_MODEL, megabytes, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name",
        nargs="?",
        default=DEFAULT_MODEL,
        metavar="NAME",
        help=f"a name that cutaway models lists, or hf:owner/name; {DEFAULT_MODEL} if not given",
    )
    parser.add_argument("--force", action="store_true", help="fetch it again even if it is here")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace) -> int:
    from cutaway.checkpoints import fetch

    path = fetch.fetch(options.name, force=options.force)
    size = sum(f.stat().st_size for f in ([path] if path.is_file() else path.glob("*.safetensors")))
    if options.json:
        print_json({"name": options.name, "path": str(path), "bytes": size})
    else:
        print(f"{options.name} is here: {path} ({megabytes(size)}).")
    return 0
