"""Products with stored weights: few rows at once without BLAS, and tiles of floats for BLAS.

A weight stays in its file's form. For few rows of x each thread walks over its share of the weight's rows,
unpacks two of them into a scratch that stays in the first-level cache, and multiplies them with every row
of x. A dot product has one fixed order (`vectors.dot`), so a row's result never depends on its company.
"""

from functools import cache

from numba import prange
from numba.extending import register_jitable

from cutaway.engines.cpu.compiling import Kernel
from cutaway.engines.cpu.sums import dot, dots_2x4
from cutaway.engines.cpu.unpack import unpack_row
from cutaway.engines.cpu.vectors import address, index_at, put_one


@register_jitable
def _stored_row(rows: int, row_bytes: int, order: int, row: int):  # type: ignore[no-untyped-def]
    """Where the stored bytes of weight row `row` lie; `order` is the address of a permutation, or 0."""
    return address(rows) + row_bytes * (row if order == 0 else index_at(address(order) + 8 * row))


@cache
def few_rows(kind: str) -> Kernel:
    """The kernel of `kind` for few rows of x: y[t, o] = x[t] · w[o]."""

    def few_rows_kernel(
        rows: int,  # address of the stored weight
        row_bytes: int,
        order: int,
        d_out: int,
        d_in: int,
        x: int,  # address of float32 [n_x, d_in]
        n_x: int,
        y: int,  # address of float32 [n_x, d_out]
        scratch: int,  # address of float32 [parts, 2, d_in]
        parts: int,
    ) -> None:
        for part in prange(parts):
            step = d_in * 4
            w, inputs, outputs = address(scratch) + 2 * step * part, address(x), address(y)
            out, stop = d_out * part // parts, d_out * (part + 1) // parts
            while out < stop:
                taken = min(2, stop - out)
                for i in range(taken):
                    unpack_row(kind, _stored_row(rows, row_bytes, order, out + i), w + i * step, d_in)
                t = 0
                while taken == 2 and n_x - t >= 4:
                    target = outputs + (t * d_out + out) * 4
                    dots_2x4(w, step, inputs + t * step, step, d_in, target, 4, d_out * 4)
                    t += 4
                while t < n_x:
                    for i in range(taken):
                        total = dot(w + i * step, inputs + t * step, d_in)
                        put_one(outputs + (t * d_out + out + i) * 4, total)
                    t += 1
                out += taken

    return Kernel(few_rows_kernel, f"few rows by {kind} weights", parallel=True)


@cache
def unpack_tile(kind: str) -> Kernel:
    """The kernel of `kind` that writes weight rows `first:last` as float32 `[last - first, d_in]` at `out`."""

    def unpack_tile_kernel(
        rows: int, row_bytes: int, order: int, d_in: int, first: int, last: int, out: int, parts: int
    ) -> None:
        for part in prange(parts):
            n = last - first
            for row in range(first + n * part // parts, first + n * (part + 1) // parts):
                stored = _stored_row(rows, row_bytes, order, row)
                unpack_row(kind, stored, address(out) + (row - first) * d_in * 4, d_in)

    return Kernel(unpack_tile_kernel, f"many rows by {kind} weights", parallel=True)
