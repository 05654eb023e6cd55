"""`cutaway score`: how likely a model finds texts, token by token; perplexity of a corpus; divergence of two models."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutaway.cli.arguments import add_model, load_model, print_json
from cutaway.errors import CutawayError
from cutaway.reading import read_text

if TYPE_CHECKING:
    from cutaway.trace.texts.score import Score, Total


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="texts, each scored by itself")
    parser.add_argument(
        "--file",
        type=Path,
        metavar="FILE",
        help="score a corpus: each line of a .jsonl file is a text; any other file is one text as a whole",
    )
    add_model(parser)
    parser.add_argument("--against", metavar="MODEL2", help="also tell how far this model's predictions are from it")
    parser.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="read longer texts in windows of N tokens (what the model was made for)",
    )
    parser.add_argument(
        "--stride", type=int, metavar="N", help="windows move on by N tokens (half of the context, if not given)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document, with every token's numbers")


def run(options: argparse.Namespace) -> int:
    if bool(options.texts) == (options.file is not None):
        given = "Both texts and --file were given" if options.texts else "There is no text"
        raise CutawayError(f"{given}: give one or more texts in quotation marks, or --file.")
    texts = options.texts if options.file is None else _corpus(options.file)
    model = load_model(options)
    other = None
    if options.against is not None:
        from cutaway.model import load

        other = load(options.against, engine=options.engine, dtype=options.dtype)

    from cutaway.trace.drawing.score import draw_score, told
    from cutaway.trace.texts.score import Total

    total, listed = Total(), []
    for score in model.scores(texts, context=options.context, stride=options.stride, against=other):
        total.add(score)
        if options.json:
            listed.append(_told(score))
        elif options.file is None:
            draw_score(score)
    if options.json:
        print_json({"model": model.spec.name, "against": options.against, "texts": listed, "total": _summed(total)})
    elif total.texts > 1 or options.file is not None:
        last = score if total.texts == 1 else None
        print(f"{total.texts:,} text{'s' if total.texts != 1 else ''}: {told(total, last)}")
    return 0


def _corpus(path: Path) -> Any:
    """The texts of a file: lines of JSON, or all of it as one."""
    if path.suffix in (".jsonl", ".ndjson"):
        return path
    return [read_text(path)]


def _told(score: "Score") -> dict[str, Any]:
    def plain(values: Any) -> list[float | None]:
        return [None if value != value else max(float(value), -1e308) for value in values.tolist()]

    tokens = zip(score.ids, score.prompt.pieces, plain(score.logprobs), strict=True)
    listed: list[dict[str, Any]] = [{"id": id, "piece": piece, "logprob": value} for id, piece, value in tokens]
    if score.divergence is not None:
        for token, value in zip(listed, plain(score.divergence), strict=True):
            token["divergence"] = value
    return {"text": score.prompt.text, "tokens": listed, "context": score.context, "stride": score.stride} | {
        "scored": score.scored,
        "logprob": score.total,
        "perplexity": score.perplexity if score.scored else None,
    }


def _summed(total: "Total") -> dict[str, Any]:
    told: dict[str, Any] = {"texts": total.texts, "tokens": total.tokens, "scored": total.scored}
    if total.scored:
        told |= {"logprob": total.logprob, "loss": total.loss, "perplexity": total.perplexity}
        told |= {"divergence": total.divergence} if total.compared else {}
    return told
