"""All heads at once: every pattern of some layers as a small triangle, and what each head's pattern is like."""

from collections.abc import Iterator

import numpy as np

from cutaway.serve.protocol import WEIGHT_STEPS, AtlasHeader, HeadScores
from cutaway.serve.slices import framed
from cutaway.trace import Trace

SIDE = 64  # cells that a pattern is pooled to
_TINY = np.float32(1e-37)  # whose logarithm is finite in float32 too
_AT_ONCE = 256  # tokens up to which a whole pattern is taken at once


def atlas(trace: Trace, first: int, stop: int) -> bytes:
    """The patterns of layers `first:stop`, pooled to at most 64 × 64, and the scores of their heads."""
    length = len(trace.prompt.ids)
    side = min(length, SIDE)
    triangle = trace.spec.causal
    lower = np.tril_indices(side)
    codes: list[np.ndarray] = []
    scores: list[HeadScores] = []
    repeats = _repeats(trace.prompt.ids)
    for layer in range(first, stop):
        tiles, sums = _walked(trace, layer, side, repeats)
        coded = (1 + np.rint(tiles * WEIGHT_STEPS)).astype(np.uint8)
        codes.append((coded[:, lower[0], lower[1]] if triangle else coded).ravel())
        scores += [_scores(row, length, len(repeats), triangle) for row in sums]
    header = AtlasHeader(first, stop, len(scores) // max(stop - first, 1), side, triangle, scores)
    return framed(header, np.concatenate(codes))


def blocks(trace: Trace, layer: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """A layer's pattern: positions of query rows and `[H, R, S]`, at once where it is small."""
    if len(trace.prompt.ids) <= _AT_ONCE:
        pattern = trace[f"layers.{layer}.attn.pattern"]
        yield np.arange(pattern.shape[1]), pattern
    else:
        yield from trace.pattern_rows(layer)


def _walked(trace: Trace, layer: int, side: int, repeats: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tiles `[H, side, side]` (the largest weight of each), and per head the sums of its scores `[H, 5]`."""
    length = len(trace.prompt.ids)
    heads = trace.spec.layers[layer].attention.n_heads
    starts = np.arange(side) * length // side
    tile_of = np.searchsorted(starts, np.arange(length), side="right") - 1
    tiles = np.zeros((heads, side, side))
    sums = np.zeros((heads, 5))
    for rows, p in blocks(trace, layer):
        at = np.arange(len(rows))
        later = rows > 0
        sums[:, 0] += p[:, at[later], rows[later] - 1].sum(axis=1, dtype=np.float64)
        sums[:, 1] += p[:, later, 0].sum(axis=1, dtype=np.float64)
        sums[:, 2] += p[:, at, rows].sum(axis=1, dtype=np.float64)
        seen = np.count_nonzero(p, axis=2)
        surprise = np.log(np.maximum(p, _TINY))
        surprise *= p
        share = -surprise.sum(axis=2, dtype=np.float64) / np.log(np.maximum(seen, 2))  # of the most it could be
        sums[:, 3] += np.where(seen > 1, share, 0.0).sum(axis=1)
        for query, key in repeats[(repeats[:, 0] >= rows[0]) & (repeats[:, 0] <= rows[-1])]:
            sums[:, 4] += p[:, query - rows[0], key]
        if side == length:
            tiles[:, rows, : p.shape[2]] = p
        else:
            across = np.maximum.reduceat(p, starts[starts < p.shape[2]], axis=2)
            for row in np.unique(tile_of[rows]):
                strip = tiles[:, row, : across.shape[2]]
                np.maximum(strip, across[:, tile_of[rows] == row].max(axis=1), out=strip)
    return tiles, sums


def _repeats(ids: tuple[int, ...]) -> np.ndarray:
    """(query, key) pairs, `[n, 2]`: for each token seen before, what followed its latest earlier place."""
    latest: dict[int, int] = {}
    pairs = []
    for position, token in enumerate(ids):
        if token in latest:
            pairs.append((position, latest[token] + 1))
        latest[token] = position
    return np.array(pairs, dtype=np.intp).reshape(-1, 2)


def _scores(sums: np.ndarray, length: int, repeats: int, causal: bool) -> HeadScores:
    later = max(length - 1, 1)
    spread = later if causal else length  # the first row of a causal pattern has one key, and no entropy
    induction = round(float(sums[4]) / repeats, 4) if repeats else None
    previous, first, itself, entropy = (
        round(float(total) / count, 4) for total, count in zip(sums[:4], (later, later, length, spread), strict=True)
    )
    return HeadScores(previous, first, itself, entropy, induction)
