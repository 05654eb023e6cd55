"""A weight as it lies in its file: the stored bytes of each row, never unpacked until it is used."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from cutaway.engines.blocks import BLOCKS, dequantise
from cutaway.errors import CutawayError

_NUMPY_KINDS = {"float64": "F64", "float32": "F32", "float16": "F16"}


@dataclass(frozen=True, eq=False)
class Weight:
    """A stored array: a matrix `[d_out, d_in]`, a vector `[d]`, or a stack `[E, d_out, d_in]`.

    `kind` names the storage format as GGUF does ("F32", "BF16", "Q4_1", …; `blocks.BLOCKS` lists them).
    `rows` holds the bytes, `uint8 [number of rows, bytes per row]`, usually a view of a memory map; a row
    is the last axis, which no format's block ever crosses. Where `order` is given, row r of the weight
    is stored as row `order[r]` of `rows`: a permuted checkpoint is read in place, not copied.
    """

    kind: str
    shape: tuple[int, ...]
    rows: np.ndarray
    order: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.kind not in BLOCKS:
            raise CutawayError(
                f"Weights of type {self.kind} cannot be computed with; the types that can are {', '.join(BLOCKS)}."
            )
        block = BLOCKS[self.kind]
        width = self.shape[-1]
        if width % block.weights:
            raise CutawayError(f"A row of {width} weights is no whole number of {self.kind} blocks of {block.weights}.")
        expected = (prod(self.shape[:-1]), width // block.weights * block.bytes)
        if self.rows.shape != expected or self.rows.dtype != np.uint8:
            raise CutawayError(
                f"A {self.kind} weight of shape {list(self.shape)} needs rows of uint8 {list(expected)}, "
                f"not {self.rows.dtype} {list(self.rows.shape)}."
            )

    @classmethod
    def of(cls, array: np.ndarray) -> "Weight":
        """Wrap a float array (float64, float32 or float16), without copying when it is contiguous."""
        kind = _NUMPY_KINDS.get(array.dtype.name)
        if kind is None:
            raise CutawayError(f"A weight is made from float64, float32 or float16, not from {array.dtype}.")
        array = np.ascontiguousarray(array)
        flat = array.reshape(prod(array.shape[:-1]), array.shape[-1])
        return cls(kind, array.shape, flat.view(np.uint8))

    @property
    def nbytes(self) -> int:
        """Bytes of the stored form."""
        return self.rows.nbytes

    def dequantise(self, dtype: np.dtype | type, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows `start:stop` as floats `[stop - start, d_in]`; of everything, in the weight's own shape.

        The stored value is worked out in float32, exactly as the format defines it (float64 storage keeps
        its own precision), and then converted to `dtype`.
        """
        whole = start == 0 and stop is None
        chosen = self.rows[start:stop] if self.order is None else self.rows[self.order[start:stop]]
        values = dequantise(chosen, self.kind).astype(dtype, copy=False)
        return values.reshape(self.shape) if whole else values

    def take(self, ids: Sequence[int] | np.ndarray, dtype: np.dtype | type) -> np.ndarray:
        """The rows with these indices `[T, d_in]`: an embedding lookup."""
        chosen = np.asarray(ids, dtype=np.intp)
        if self.order is not None:
            chosen = self.order[chosen]
        return dequantise(self.rows[chosen], self.kind).astype(dtype, copy=False)

    def row_slice(self, start: int, stop: int) -> "Weight":
        """Rows `start:stop` of a matrix as a weight of its own, on the same bytes (a fused QKV taken apart)."""
        if self.order is not None:
            return replace(self, shape=(stop - start, *self.shape[1:]), order=self.order[start:stop])
        return replace(self, shape=(stop - start, *self.shape[1:]), rows=self.rows[start:stop])

    def reorder(self, order: np.ndarray) -> "Weight":
        """The same bytes, read so that row r is what was row `order[r]`."""
        order = np.asarray(order, dtype=np.intp)
        return replace(self, order=order if self.order is None else self.order[order])
