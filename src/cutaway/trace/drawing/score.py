"""A scored text in the terminal: each token on a colour that says how much it surprised, and the sums."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.text import Text

from cutaway.trace.drawing.page import Page, number, quoted, weight_style

if TYPE_CHECKING:
    from cutaway.trace.texts.score import Score, Total

_FULL = 10.0  # nats from which on a token has the brightest colour: a chance of 1 in 22,000
_NAMED = 5  # the most surprising tokens that are listed


def draw_score(score: "Score", console: Console | None = None) -> None:
    """The text with its tokens coloured from dark (expected) to bright (a surprise), and the most surprising ones.

    Plain output has one line for each token: its position, ln p, the divergence where there is one, the token.
    """
    page = Page.on(console)
    if page.plain:
        for line in _table(score):
            page.line(line)
    else:
        _heat(page, score)
    page.line(told(score.sums, score))


def told(total: "Total", score: "Score | None" = None) -> str:
    """The sums in one line."""
    if total.scored == 0:
        return f"{total.tokens:,} tokens, none of which is predicted from another"
    parts = [f"{total.scored:,} of {total.tokens:,} tokens scored"]
    parts += [f"ln p = {total.logprob:.4f}", f"loss {total.loss:.4f} nats", f"perplexity {total.perplexity:.4f}"]
    if total.compared:
        parts.append(f"divergence {total.divergence:.4g} nats")
    if score is not None and score.context is not None:
        parts.append(f"windows of {score.context:,} tokens, {score.stride:,} apart")
    return ", ".join(parts)


def _heat(page: Page, score: "Score") -> None:
    text = Text()
    for piece, logprob in zip(_pieces(score), score.logprobs, strict=True):
        style = "dim" if np.isnan(logprob) else weight_style((min(-logprob, _FULL) / _FULL) ** 2)
        text.append(piece.replace("\\n", "⏎"), style=style)
        if "\\n" in piece:
            text.append("\n")
    page.console.print(text, highlight=False, soft_wrap=False)
    legend = Text("−ln p: ")
    for nats in (0, 2, 4, 6, 8, 10):
        legend.append(f" {nats}{'+' if nats == _FULL else ''} ", style=weight_style((nats / _FULL) ** 2))
    page.line()
    page.line(legend)
    order = np.argsort(np.nan_to_num(score.logprobs, nan=1.0), kind="stable")[: min(_NAMED, score.scored)]
    for position in order:
        logprob = score.logprobs[position]
        page.line(f"{position:>6}  {number(float(logprob))}  {quoted(_pieces(score)[position])}")


def _table(score: "Score") -> Iterator[str]:
    yield f"{'position':>8}  {'ln p':>9}{'  divergence' if score.divergence is not None else ''}  token"
    for position, piece in enumerate(_pieces(score)):
        logprob = score.logprobs[position]
        line = f"{position:>8}  {'–' if np.isnan(logprob) else f'{logprob:.4f}':>9}"
        if score.divergence is not None:
            value = score.divergence[position]
            line += f"  {'–' if np.isnan(value) else f'{value:.4g}':>10}"
        yield f"{line}  {quoted(piece)}"


def _pieces(score: "Score") -> tuple[str, ...]:
    return score.prompt.pieces
