"""`cutaway models`: what is here, and what can be had."""

import argparse
import sys

from cutaway.cli.arguments import megabytes, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace) -> int:
    from cutaway.checkpoints.sources import KnownModel, known_models

    known = known_models()
    if options.json:
        print_json({"models": [_plain(model) for model in known]})
        return 0
    if not sys.stdout.isatty():
        names, licences = (max(len(getattr(m, k)) for m in known) for k in ("name", "licence"))
        for model in known:
            state = "here    " if model.here else "not here"
            size = megabytes(model.size_bytes)
            print(
                f"{model.name:<{names}}  {state}  {size:>7}  {model.licence:<{licences}}  {model.title}  {model.where}"
            )
        return 0

    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    wide = max(len(model.name) for model in known)

    def told(model: KnownModel) -> Text:
        return Text.assemble(
            ("● ", "#3fa58f") if model.here else ("○ ", "dim"),
            (f"{model.name:<{wide}}", "bold" if model.here else ""),
            f"  {megabytes(model.size_bytes):>7}  {model.title}",
        )

    for model in known:
        console.print(told(model), no_wrap=True, overflow="ellipsis")
        indent = " " * (wide + 13)
        console.print(Text(f"{indent}{model.licence}. {model.where}", style="dim"), soft_wrap=True)
    console.print(
        Text("● here  ○ can be fetched. hf:owner/name reads any model of the Hub, a path any file.", style="dim")
    )
    return 0


def _plain(model: object) -> dict:
    names = ("name", "title", "licence", "size_bytes", "where", "here")
    path = getattr(model, "path", None)
    return {name: getattr(model, name) for name in names} | {"path": None if path is None else str(path)}
