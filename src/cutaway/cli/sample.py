"""`cutaway sample`: the sampling lab. One row of logits under several temperatures and filters, and drawn from."""

import argparse
from typing import TYPE_CHECKING, Any

from cutaway.cli.arguments import add_model, add_prompt, load_model, print_json, read_prompt
from cutaway.errors import CutawayError

if TYPE_CHECKING:
    import numpy as np

    from cutaway.generate.lab import Row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_prompt(parser)
    parser.add_argument(
        "--logits",
        metavar="LOGITS",
        help='logits in place of a prompt, as in "validate=8.3 check=7.1 rest*400=0" (400 tokens of logit 0)',
    )
    add_model(parser)
    parser.add_argument(
        "--temperatures", metavar="TS", help='temperatures side by side ("0.3 0.7 1 1.5 2" if not given)'
    )
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="the one that is drawn at (1)")
    parser.add_argument("--top-k", metavar="KS", help='look at these, as in "5 40"; one alone is also drawn through')
    parser.add_argument("--top-p", metavar="PS", help='the same for top-p, as in "0.9 0.95 0.99"')
    parser.add_argument("--min-p", metavar="PS", help="the same for min-p")
    parser.add_argument("--typical-p", metavar="PS", help="the same for typical")
    parser.add_argument(
        "--order", default="cutaway", metavar="ORDER", help="cutaway (if not given), hf, vllm, llama.cpp"
    )
    parser.add_argument("--rows", type=int, default=10, metavar="N", help="how many tokens are named (10)")
    parser.add_argument("--draws", type=int, default=1000, metavar="N", help="how many are drawn (1000)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="makes the draws repeatable (0 if not given)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace) -> int:
    from cutaway.generate.draw_lab import draw_lab, told
    from cutaway.generate.lab import TEMPERATURES, lab
    from cutaway.generate.sampling import Sampling

    if options.rows < 1:
        raise CutawayError(f"--rows is {options.rows}; ask for at least 1.")
    if options.seed < 0:
        raise CutawayError(f"The seed is {options.seed}; it must be 0 or a positive whole number.")
    filters = _filters(options)
    single: dict[str, Any] = {name: value for name, value in filters if [n for n, _ in filters].count(name) == 1}
    sampling = Sampling(options.temperature, order=options.order, **single)
    for name, value in filters:
        alone: dict[str, Any] = {name: value}
        Sampling(**alone)  # refuses what cannot be before a model is loaded
    temperatures = TEMPERATURES if options.temperatures is None else _numbers("--temperatures", options.temperatures)
    for temperature in temperatures:
        Sampling(temperature)
    title, logits, rows = _logits(options)
    seen = lab(
        logits, rows, sampling, temperatures=temperatures, filters=filters, draws=options.draws, seed=options.seed
    )
    if options.json:
        print_json(told(seen))
    else:
        draw_lab(seen, title)
    return 0


def _logits(options: argparse.Namespace) -> "tuple[str, np.ndarray, list[Row]]":
    """What they are those of, the logits, and the tokens that are named: those given, or the likeliest."""
    from cutaway.generate.lab import Row, likeliest_rows, read_logits
    from cutaway.trace.drawing.page import quoted
    from cutaway.trace.trace import shortened

    if options.logits is not None:
        if options.prompt is not None or options.ids is not None:
            raise CutawayError("Both --logits and a prompt were given; give one of them.")
        logits, rows = read_logits(options.logits)
        return f"{len(logits):,} logits given on the command line", logits, rows[: options.rows]
    prompt = read_prompt(options)
    model = load_model(options)
    logits = model.trace(prompt, points=[]).last_logits
    likeliest = likeliest_rows(logits, options.rows)
    text = "".join(model.prompt(prompt).pieces) if isinstance(prompt, list) else prompt
    title = f"The next token of {model.spec.name} after {shortened(text, 80)}"
    return title, logits, [Row(quoted(model.piece(row.ids[0])), row.ids, row.logit) for row in likeliest]


def _filters(options: argparse.Namespace) -> list[tuple[str, float]]:
    """Every filter to look at by itself, in the order of the stages."""
    found: list[tuple[str, float]] = []
    for name in ("top_k", "top_p", "min_p", "typical_p"):
        given = getattr(options, name)
        if given is not None:
            values = _numbers(f"--{name.replace('_', '-')}", given)
            found += [(name, int(v) if name == "top_k" and v == int(v) else v) for v in values]
    return found


def _numbers(option: str, text: str) -> list[float]:
    numbers = []
    for word in text.replace(",", " ").split():
        try:
            numbers.append(float(word))
        except ValueError:
            raise CutawayError(
                f'{option} holds {word!r}; it takes numbers with spaces between, as in "0.3 1 2".'
            ) from None
    if not numbers:
        raise CutawayError(f"{option} is empty; it takes at least one number.")
    return numbers
