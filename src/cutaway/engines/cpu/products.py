"""Products with stored weights, of one row of x or of a thousand.

A weight stays in its file's form. Each thread walks over its share of the weight's rows, unpacks a few of them
into a scratch that stays in the first-level cache, and multiplies them with every row of x. A dot product has one
fixed order (`sums.dot`), so a row's result never depends on its company, nor on how many rows there are: BLAS,
which rounds differently with their number, is not needed, and is no faster at these sizes.
"""

from functools import cache

from numba.extending import register_jitable

from cutaway.engines.cpu.compiling import Kernel
from cutaway.engines.cpu.sums import TILE_LEFT, TILE_RIGHT, dots_of_group
from cutaway.engines.cpu.unpack import unpack_row
from cutaway.engines.cpu.vectors import address, arguments, index_at

STRIP = 1 << 16  # numbers of x multiplied with all weights before the next: 256 kB, an eighth of a second-level cache


@register_jitable
def stored_row(rows: int, row_bytes: int, order: int, row: int):  # type: ignore[no-untyped-def]
    """Where the stored bytes of weight row `row` lie; `order` is the address of a permutation, or 0."""
    return address(rows) + row_bytes * (row if order == 0 else index_at(address(order) + 8 * row))


@cache
def product(kind: str) -> Kernel:
    """The kernel of `kind`: y[t, o] = x[t] · w[o].

    Arguments: the stored weight's address, its bytes from row to row, the address of its order or 0, d_out,
    d_in; the address of x, float32 `[n_x, d_in]`, and n_x; the addresses of y, float32 `[n_x, d_out]`, and of
    a scratch, float32 `[parts, TILE_LEFT, d_in]`.
    """

    def product_kernel(given: int, part: int, parts: int) -> None:
        rows, row_bytes, order, d_out, d_in, x, n_x, y, scratch = arguments(given, 9)
        step = d_in * 4
        w, inputs, outputs = address(scratch) + TILE_LEFT * step * part, address(x), address(y)
        groups = (d_out + TILE_LEFT - 1) // TILE_LEFT
        begin, stop = groups * part // parts * TILE_LEFT, min(groups * (part + 1) // parts * TILE_LEFT, d_out)
        strip = max(TILE_RIGHT, STRIP // d_in)
        at = 0
        while at < n_x:
            upto = min(n_x, at + strip)
            out = begin
            while out < stop:
                taken = min(TILE_LEFT, stop - out)
                for i in range(taken):
                    unpack_row(kind, stored_row(rows, row_bytes, order, out + i), w + i * step, d_in)
                xs, target = inputs + at * step, outputs + (at * d_out + out) * 4
                dots_of_group(w, step, taken, xs, step, upto - at, d_in, target, d_out * 4)
                out += taken
            at = upto

    return Kernel(product_kernel, f"products with {kind} weights", "q" * 9)
