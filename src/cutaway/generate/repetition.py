"""How much a text repeats itself, and whether it has run into a loop that it will not leave (chapter 14.1)."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

GRAM = 4  # tokens of a run that counts as a repetition when it stood before
CERTAIN = 3  # so many rounds at the end make a loop
SHORT = 8  # and so many tokens, so that "ha ha ha" is none yet


@dataclass(frozen=True)
class Loop:
    """The text ends in `rounds` rounds of the same `period` tokens (the last may be broken off), from token `start`."""

    start: int
    period: int
    rounds: float


@dataclass(frozen=True)
class Repetition:
    """`repeated` is the share of tokens that end a run of four that stood in the text before (0: nothing was said
    twice). `distinct` is the share of different pairs of neighbours among all pairs. `loop` is the one that the
    text ends in, None where it ends in none."""

    repeated: float
    distinct: float
    loop: Loop | None


def repetition(tokens: Sequence[int]) -> Repetition:
    """Measure a response, given as ids."""
    ids = list(tokens)
    runs = [tuple(ids[at : at + GRAM]) for at in range(len(ids) - GRAM + 1)]
    pairs = list(itertools.pairwise(ids))
    return Repetition(
        repeated=(len(runs) - len(set(runs))) / len(runs) if runs else 0.0,
        distinct=len(set(pairs)) / len(pairs) if pairs else 1.0,
        loop=ending_loop(ids),
    )


def ending_loop(ids: Sequence[int]) -> Loop | None:
    """The loop with the shortest period in which the ids end: three rounds at least, eight tokens at least."""
    for period in range(1, len(ids) // CERTAIN + 1):
        start = len(ids) - period
        while start > 0 and ids[start - 1] == ids[start - 1 + period]:
            start -= 1
        length = len(ids) - start
        if length >= CERTAIN * period and length >= SHORT:
            return Loop(start, period, length / period)
    return None
