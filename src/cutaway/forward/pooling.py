"""One vector for a whole text, out of the rows of its tokens (Reimers & Gurevych 2019)."""

from typing import Literal, get_args

import numpy as np

from cutaway.engines.layout import Layout
from cutaway.errors import CutawayError

Pooling = Literal["mean", "first"]


def one_vector_each(rows: np.ndarray, layout: Layout, pooling: Pooling = "mean", *, unit: bool = False) -> np.ndarray:
    """`[T, d]` of packed sequences → `[sequences, d]`: the mean of each one's own rows, or its first row.

    No other sequence and no pad takes part. Sums are in float64, the result is in the type of `rows`. With `unit`
    each vector is brought to length 1, so that a dot product of two is their cosine. Raises CutawayError for
    another `pooling`.
    """
    if pooling not in get_args(Pooling):
        raise CutawayError(f"The pooling is {pooling!r}; it must be 'mean' or 'first'.")
    own = [rows[segment.start : segment.stop].astype(np.float64) for segment in layout.segments]
    vectors = np.stack([part.mean(axis=0) if pooling == "mean" else part[0] for part in own])
    if unit:
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        vectors = vectors / np.where(lengths == 0, 1.0, lengths)  # a vector of zeros has no direction: it stays
    return vectors.astype(rows.dtype)
