"""Finding the leading of a row, and the fewest that reach a share, without sorting it.

The leading come from a partition, and a set that has to reach a share is found by parting what is in question, so that
a vocabulary of 49,152 costs tens of microseconds.
"""

import numpy as np

from cutaway.generate.scratch import Scratch

IN_QUESTION = 256  # so few candidates are sorted; more are parted first
BINS = 2048


def largest(row: np.ndarray, count: int) -> np.ndarray:
    """Places, ascending, of the `count` largest; the lowest places among equals."""
    if count >= len(row):
        return np.arange(len(row))
    least = np.partition(row, len(row) - count)[len(row) - count]
    places = np.flatnonzero(row >= least)
    if len(places) == count:
        return places
    surplus = len(places) - count
    return np.delete(places, np.flatnonzero(row[places] == least)[-surplus:])


def smallest_set(order: np.ndarray, weights: np.ndarray, target: float, scratch: Scratch) -> np.ndarray:
    """Places, ascending, of the smallest set of the largest of `order` whose weights sum to `target` or more.

    All are thrown into bins by their place between smallest and largest; the sum crosses the target in one of
    the bins, and only what lies in that one is looked at again.
    """
    chosen = np.zeros(len(order), dtype=bool)
    places, reached = np.arange(0), 0.0
    keys, shares, whole = order, weights, True
    while len(keys) > IN_QUESTION:
        low, width = float(keys.min()), float(keys.max()) - float(keys.min())
        if not 0 < width < np.inf or not BINS / width < np.inf:  # all alike, or so far apart that no bins can be
            break
        height = np.subtract(keys, low, out=scratch.row(len(keys)))
        bins = np.multiply(height, BINS / width, out=height).astype(np.int32)
        from_top = reached + np.cumsum(np.bincount(bins, shares, minlength=BINS + 1)[::-1])
        crossed = min(int(np.searchsorted(from_top, target, side="left")), BINS)
        above, inside = bins > BINS - crossed, np.flatnonzero(bins == BINS - crossed)
        reached = float(from_top[crossed - 1]) if crossed else reached
        if whole:
            chosen, places, whole = above, inside, False
        else:
            chosen[places[above]] = True
            places = places[inside]
        keys, shares = keys[inside], shares[inside]
    if whole:
        places = np.arange(len(order))
    ranked = places[np.argsort(-keys, kind="stable")]
    sums = reached + np.cumsum(weights[ranked])
    chosen[ranked[: int(np.searchsorted(sums, target, side="left")) + 1]] = True
    return np.flatnonzero(chosen)
