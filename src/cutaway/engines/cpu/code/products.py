"""Products with stored weights, of one row of x or of a thousand."""

from collections.abc import Callable

from numba.extending import register_jitable

from cutaway.engines.cpu.code.arithmetic import floats_upto, put_upto
from cutaway.engines.cpu.code.sums import long_dots_of_group, padded_width
from cutaway.engines.cpu.code.unpack import stored_dots, stored_row, unpack_row
from cutaway.engines.cpu.code.vectors import address, arguments
from cutaway.engines.cpu.processor import GROUP, KEPT_BYTES, LANES, PANEL, TILE_LEFT, UNDIVIDED, WEAVES, strip

strip_rows = register_jitable(strip)
WOVEN = 4 * LANES * TILE_LEFT  # bytes from sixteen numbers of a row to its next, woven


def few_rows(kind: str) -> Callable[[int, int, int], None]:
    """The kernel of `kind` for up to FEW rows of x: y[t, o] = x[t] · w[o].

    Arguments: the stored weight's address, its bytes from row to row, the address of its order or 0, d_out,
    d_in; the address of x, float32 `[n_x, d_in]`, and n_x; the address of y, float32 `[n_x, d_out]`.
    """

    def few_rows_kernel(given: int, part: int, parts: int) -> None:
        rows, row_bytes, order, d_out, d_in, x, n_x, y = arguments(given, 8)
        groups, step = (d_out + 3) // 4, d_out * 4
        begin, stop = groups * part // parts * 4, min(groups * (part + 1) // parts * 4, d_out)
        xs, target = address(x), address(y)
        stored_dots(kind, rows, row_bytes, order, begin, stop, xs, n_x, d_in, target, step)

    return few_rows_kernel


def many_rows(kind: str) -> Callable[[int, int, int, int], None]:
    """The kernel of `kind` for any number of rows of x; arguments as those of `few_rows`, and a scratch.

    The scratch is float32 `[threads, many_rows_scratch(d_in, n_x)]`; it is given as its address and its second size.
    Each thread has its own, which stays in its caches.
    """

    def many_rows_kernel(given: int, part: int, parts: int, worker: int) -> None:
        rows, row_bytes, order, d_out, d_in, x, n_x, y, scratch, scratch_size = arguments(given, 10)
        step, row, strip = d_in * 4, padded_width(d_in) * 4, strip_rows(d_in, n_x)
        w = address(scratch) + 4 * scratch_size * worker
        kept = w + GROUP * row
        results = kept + strip * (GROUP // TILE_LEFT * KEPT_BYTES)
        groups = (d_out + UNDIVIDED - 1) // UNDIVIDED
        begin, stop = groups * part // parts * UNDIVIDED, min(groups * (part + 1) // parts * UNDIVIDED, d_out)
        at = 0
        while at < n_x:
            n_here, panel = min(n_x - at, strip), begin
            xs = address(x) + at * step
            while panel < stop:
                wide = min(PANEL, stop - panel)
                inside = 0
                while inside < wide:
                    taken = min(GROUP, wide - inside)
                    whole = taken // TILE_LEFT * TILE_LEFT
                    for i in range(taken):
                        source = stored_row(rows, row_bytes, order, panel + inside + i)
                        if WEAVES and i < whole:
                            place = i % TILE_LEFT
                            unpack_row(kind, source, w + ((i - place) * row + place * 4 * LANES), d_in, WOVEN)
                        else:
                            unpack_row(kind, source, w + i * row, d_in, 4 * LANES)
                    long_dots_of_group(w, taken, xs, n_here, d_in, kept, results + inside * 4, PANEL * 4)
                    inside += taken
                for t in range(n_here):
                    source, target = results + t * PANEL * 4, address(y) + ((at + t) * d_out + panel) * 4
                    for i in range(0, wide, LANES):
                        put_upto(target + i * 4, floats_upto(source + i * 4, wide - i), wide - i)
                panel += wide
            at += n_here

    return many_rows_kernel
