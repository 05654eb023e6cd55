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
    is stored as row `order[r]` of `rows`: a permuted checkpoint is read in place, not copied, and `rows` may
    hold more rows than the weight has.
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
        if not self.shape:
            raise CutawayError("A weight has one dimension at least; a single number is a vector of one.")
        block = BLOCKS[self.kind]
        width = self.shape[-1]
        if width % block.weights:
            raise CutawayError(f"A row of {width} weights is no whole number of {self.kind} blocks of {block.weights}.")
        n_rows = prod(self.shape[:-1])
        if self.order is not None:
            n_rows = self._check_order(self.order, n_rows)
        expected = (n_rows, width // block.weights * block.bytes)
        if self.rows.shape != expected or self.rows.dtype != np.uint8:
            raise CutawayError(
                f"A {self.kind} weight of shape {list(self.shape)} needs rows of uint8 {list(expected)}, "
                f"not {self.rows.dtype} {list(self.rows.shape)}."
            )

    def _check_order(self, order: np.ndarray, n_rows: int) -> int:
        """How many rows are stored, once `order` is known to name one of them for each row of the weight."""
        stored = self.rows.shape[0]
        if order.shape != (n_rows,):
            raise CutawayError(
                f"The order of a weight of shape {list(self.shape)} names {n_rows} rows, not {list(order.shape)}."
            )
        if order.size and not 0 <= order.min() <= order.max() < stored:
            raise CutawayError(
                f"The order names rows from {order.min()} to {order.max()}; rows 0 to {stored - 1} are stored."
            )
        return stored

    @classmethod
    def of(cls, array: np.ndarray) -> "Weight":
        """Wrap a float array (float64, float32 or float16), without copying when it is contiguous."""
        kind = _NUMPY_KINDS.get(array.dtype.name)
        if kind is None:
            raise CutawayError(f"A weight is made from float64, float32 or float16, not from {array.dtype}.")
        array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))  # a .npy file may be big endian
        flat = array.reshape(prod(array.shape[:-1]), array.shape[-1])
        return cls(kind, array.shape, flat.view(np.uint8))

    @property
    def nbytes(self) -> int:
        """Bytes of the stored form."""
        return prod(self.shape[:-1]) * self.rows.shape[1]

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
        """The rows with these indices `[T, d_in]`: an embedding lookup.

        Raises CutawayError for an index below 0 (Python would count from the end) or past the last row.
        """
        chosen = np.asarray(ids, dtype=np.intp)
        n_rows = prod(self.shape[:-1])
        listed = chosen.ravel().tolist()
        if listed and not 0 <= min(listed) <= max(listed) < n_rows:
            outside = chosen[(chosen < 0) | (chosen >= n_rows)]
            raise CutawayError(f"Row {outside[0]} was asked for; the weight has {n_rows} rows, counted from 0.")
        if self.order is not None:
            chosen = self.order[chosen]
        return dequantise(self.rows[chosen], self.kind).astype(dtype, copy=False)

    def row_slice(self, start: int, stop: int) -> "Weight":
        """`start:stop` of the first axis as a weight of its own: a fused QKV or a stack of experts taken apart.

        On the same bytes. Of a matrix these are rows (outputs), of a vector numbers, of a stack matrices.
        """
        if not 0 <= start <= stop <= self.shape[0]:
            raise CutawayError(f"There is no part {start}:{stop} of a first axis of {self.shape[0]}.")
        shape = (stop - start, *self.shape[1:])
        if len(self.shape) == 1:
            size = self._bytes_per_number()
            return replace(self, shape=shape, rows=self.rows[:, start * size : stop * size])
        per_item = prod(self.shape[1:-1])  # rows in a matrix of a stack; 1 for a matrix
        part = slice(start * per_item, stop * per_item)
        if self.order is not None:
            return replace(self, shape=shape, order=self.order[part])
        return replace(self, shape=shape, rows=self.rows[part])

    def expert(self, index: int) -> "Weight":
        """Matrix `[d_out, d_in]` number `index` of a stack `[E, d_out, d_in]`, on the same bytes."""
        if len(self.shape) != 3:
            raise CutawayError(f"A weight of shape {list(self.shape)} is no stack of experts.")
        return replace(self.row_slice(index, index + 1), shape=self.shape[1:])

    def reorder(self, order: np.ndarray) -> "Weight":
        """The weight whose row r is what was row `order[r]`; of a vector, number r.

        Of a matrix or a vector `order` may name only some (q, k and v that stand interleaved in one tensor). A
        matrix keeps its bytes; a vector, which is one row, is copied. In a stack the rows of all matrices are
        counted through.
        """
        order = np.asarray(order, dtype=np.intp)
        stored = self.shape[0] if len(self.shape) == 1 else prod(self.shape[:-1])
        if order.size and not 0 <= order.min() <= order.max() < stored:
            raise CutawayError(f"The order names rows from {order.min()} to {order.max()}; there are {stored}.")
        if len(self.shape) == 1:
            numbers = self.rows.reshape(stored, self._bytes_per_number())
            return replace(self, shape=order.shape, rows=numbers[order].reshape(1, -1))
        shape = (*order.shape, self.shape[-1]) if len(self.shape) == 2 else self.shape
        return replace(self, shape=shape, order=order if self.order is None else self.order[order])

    def _bytes_per_number(self) -> int:
        """Bytes of one number of a vector; quantised vectors, which nobody stores, cannot be taken apart."""
        block = BLOCKS[self.kind]
        if block.weights != 1:
            raise CutawayError(f"A {self.kind} vector cannot be taken apart: its blocks hold {block.weights} numbers.")
        return block.bytes
