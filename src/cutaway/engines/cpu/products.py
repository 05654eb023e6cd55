"""Products with stored weights, of one row of x or of a thousand.

A weight stays in its file's form. Few rows of x are multiplied with each stored row as it is read. For many, each
thread walks over its share of the weight's rows, unpacks a few of them into a scratch that stays in the first-level
cache, and multiplies them with every row of x. A dot product has one fixed order (`sums.dot`), so a row's result never
depends on its company, nor on how many rows there are: BLAS, which rounds differently with their number, is not
needed, and is no faster at these sizes.
"""

from functools import cache

from numba.extending import register_jitable

from cutaway.engines.cpu.arithmetic import floats_upto, put_upto
from cutaway.engines.cpu.compiling import Kernel
from cutaway.engines.cpu.program import Place, Task
from cutaway.engines.cpu.sums import KEPT_BYTES, STRETCH, TILE_LEFT, TILE_RIGHT, long_dots_of_group
from cutaway.engines.cpu.threads import thread_count
from cutaway.engines.cpu.unpack import stored_dots, stored_row, unpack_row
from cutaway.engines.cpu.vectors import LANES, address, arguments

PARTS = 4  # parts of a product for each thread, so that a thread that is late costs little
SMALLEST_PART = 1 << 14  # weights; waking another thread for fewer costs more than it saves
FEW = 6  # rows of x up to which stored rows are multiplied as they are read
_STRIP = 1 << 16  # numbers of x multiplied with all weights before the next: 256 kB, part of a second-level cache
_PANEL = 64  # results of each row of x that are put down together: whole cache lines, whatever the steps of y


@cache
def few_rows(kind: str) -> Kernel:
    """The kernel of `kind` for up to FEW rows of x: y[t, o] = x[t] · w[o].

    Arguments: the stored weight's address, its bytes from row to row, the address of its order or 0, d_out,
    d_in; the address of x, float32 `[n_x, d_in]`, and n_x; the address of y, float32 `[n_x, d_out]`.
    """

    def few_rows_kernel(given: int, part: int, parts: int) -> None:
        rows, row_bytes, order, d_out, d_in, x, n_x, y = arguments(given, 8)
        groups, step = (d_out + 3) // 4, d_out * 4
        begin, stop = groups * part // parts * 4, min(groups * (part + 1) // parts * 4, d_out)
        xs, target = address(x), address(y)
        if n_x == 1:
            stored_dots(kind, 1, rows, row_bytes, order, begin, stop, xs, n_x, d_in, target, step)
        elif n_x <= 3:
            stored_dots(kind, 3, rows, row_bytes, order, begin, stop, xs, n_x, d_in, target, step)
        else:
            stored_dots(kind, FEW, rows, row_bytes, order, begin, stop, xs, n_x, d_in, target, step)

    return Kernel(few_rows_kernel, f"products of few rows with {kind} weights", "q" * 8)


@cache
def many_rows(kind: str) -> Kernel:
    """The kernel of `kind` for any number of rows of x; arguments as those of `few_rows`, and a scratch.

    The scratch is float32 `[parts, many_rows_scratch(d_in, n_x)]`; it is given as its address and its second size.
    """

    def many_rows_kernel(given: int, part: int, parts: int) -> None:
        rows, row_bytes, order, d_out, d_in, x, n_x, y, scratch, scratch_size = arguments(given, 10)
        step, strip = d_in * 4, _strip(d_in, n_x)
        w = address(scratch) + 4 * scratch_size * part
        kept = w + TILE_LEFT * step
        results = kept + strip * KEPT_BYTES
        groups = (d_out + TILE_LEFT - 1) // TILE_LEFT
        begin, stop = groups * part // parts * TILE_LEFT, min(groups * (part + 1) // parts * TILE_LEFT, d_out)
        at = 0
        while at < n_x:
            n_here, panel = min(n_x - at, strip), begin
            xs = address(x) + at * step
            while panel < stop:
                wide = min(_PANEL, stop - panel)
                inside = 0
                while inside < wide:
                    taken = min(TILE_LEFT, wide - inside)
                    for i in range(taken):
                        unpack_row(kind, stored_row(rows, row_bytes, order, panel + inside + i), w + i * step, d_in)
                    long_dots_of_group(w, taken, xs, n_here, d_in, kept, results + inside * 4, _PANEL * 4)
                    inside += taken
                for row in range(n_here):
                    source, target = results + row * _PANEL * 4, address(y) + ((at + row) * d_out + panel) * 4
                    for i in range(0, wide, LANES):
                        put_upto(target + i * 4, floats_upto(source + i * 4, wide - i), wide - i)
                panel += wide
            at += n_here

    return Kernel(many_rows_kernel, f"products with {kind} weights", "q" * 10)


@register_jitable
def _strip(d_in: int, n_x: int) -> int:
    """Rows of x that are multiplied with all weights before the next: whole tiles."""
    most = max(TILE_RIGHT, _STRIP // min(max(d_in, 1), STRETCH) // TILE_RIGHT * TILE_RIGHT)
    return min(most, n_x)


def many_rows_scratch(d_in: int, n_x: int) -> int:
    """Numbers of scratch that each part of `many_rows` needs: unpacked weights, sums between stretches, results."""
    return TILE_LEFT * d_in + _strip(d_in, n_x) * (KEPT_BYTES // 4 + _PANEL)


def parts_of(d_out: int, d_in: int, n_x: int) -> int:
    """In how many parts a product is done."""
    work = d_out * d_in * max(1, n_x // 8)
    return max(1, min(PARTS * thread_count(), work // SMALLEST_PART))


def product_task(
    kind: str, stored: tuple[int, int, int], shape: tuple[int, ...], x: Place, y: Place, scratch: Place, n_x: int
) -> tuple[Task, int]:
    """A product as a task of a program, and how many numbers of scratch it needs.

    `stored` is where the weight lies: address, bytes from row to row, address of its order or 0.
    """
    d_out, d_in = shape
    given, parts = (*stored, d_out, d_in, x, n_x, y), parts_of(d_out, d_in, n_x)
    if n_x <= FEW:
        return Task(few_rows(kind), given, parts), 0
    size = many_rows_scratch(d_in, n_x)
    return Task(many_rows(kind), (*given, scratch, size), parts), parts * size
