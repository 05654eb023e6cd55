"""Products with stored weights: few rows at once without BLAS, and tiles of floats for BLAS.

A weight stays in its file's form. For few rows of x each thread walks over its share of the weight's rows,
unpacks two of them into a scratch that stays in the first-level cache, and multiplies them with every row
of x. A dot product has one fixed order (`sums.dot`), so a row's result never depends on its company.
"""

from functools import cache

from numba.extending import register_jitable

from cutaway.engines.cpu.compiling import Kernel
from cutaway.engines.cpu.sums import dot, dots_2x4
from cutaway.engines.cpu.unpack import unpack_row
from cutaway.engines.cpu.vectors import address, arguments, index_at, put_one


@register_jitable
def _stored_row(rows: int, row_bytes: int, order: int, row: int):  # type: ignore[no-untyped-def]
    """Where the stored bytes of weight row `row` lie; `order` is the address of a permutation, or 0."""
    return address(rows) + row_bytes * (row if order == 0 else index_at(address(order) + 8 * row))


@cache
def few_rows(kind: str) -> Kernel:
    """The kernel of `kind` for few rows of x: y[t, o] = x[t] · w[o].

    Arguments: the stored weight's address, its bytes from row to row, the address of its order or 0, d_out,
    d_in; the address of x, float32 `[n_x, d_in]`, and n_x; the addresses of y, float32 `[n_x, d_out]`, and of
    a scratch, float32 `[parts, 2, d_in]`.
    """

    def few_rows_kernel(given: int, part: int, parts: int) -> None:
        rows, row_bytes, order, d_out, d_in, x, n_x, y, scratch = arguments(given, 9)
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

    return Kernel(few_rows_kernel, f"few rows by {kind} weights", "q" * 9)


@cache
def unpack_tile(kind: str) -> Kernel:
    """The kernel of `kind` that writes weight rows `first:last` as float32 `[last - first, d_in]`.

    Arguments: the stored weight as for `few_rows`, d_in, first, last, and the address to write at.
    """

    def unpack_tile_kernel(given: int, part: int, parts: int) -> None:
        rows, row_bytes, order, d_in, first, last, out = arguments(given, 7)
        n = last - first
        for row in range(n * part // parts, n * (part + 1) // parts):
            stored = _stored_row(rows, row_bytes, order, first + row)
            unpack_row(kind, stored, address(out) + row * d_in * 4, d_in)

    return Kernel(unpack_tile_kernel, f"many rows by {kind} weights", "q" * 7)
