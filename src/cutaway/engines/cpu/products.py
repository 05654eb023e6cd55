"""Products with stored weights, of one row of x or of a thousand.

A weight stays in its file's form. Few rows of x are multiplied with each stored row as it is read. For many, each
thread walks over its share of the weight's rows, unpacks a few of them into a scratch that stays in the first-level
cache, and multiplies them with every row of x. A dot product has one fixed order (`sums.dot`), so a row's result never
depends on its company, nor on how many rows there are: BLAS, which rounds differently with their number, is not
needed, and is no faster at these sizes.
"""

from functools import cache

from cutaway.engines.cpu.kernel import Kernel
from cutaway.engines.cpu.processor import FEW, GROUP, KEPT_BYTES, PANEL, TILE_LEFT, UNDIVIDED, padded, strip
from cutaway.engines.cpu.program import Place, Task
from cutaway.engines.cpu.threads import thread_count

PARTS = 4  # parts of a product for each thread, so that a thread that is late costs little
SMALLEST_PART = 1 << 14  # weights; waking another thread for fewer costs more than it saves


@cache
def few_rows(kind: str) -> Kernel:
    """The kernel of `kind` for up to FEW rows of x; `code.products.few_rows` says its arguments."""
    return Kernel("products.few_rows", "q" * 8, kind)


@cache
def many_rows(kind: str) -> Kernel:
    """The kernel of `kind` for any number of rows of x; `code.products.many_rows` says its arguments."""
    return Kernel("products.many_rows", "q" * 10, kind)


def many_rows_scratch(d_in: int, n_x: int) -> int:
    """Numbers of scratch that each thread of `many_rows` needs: unpacked weights, sums between stretches, results."""
    return GROUP * padded(d_in) + strip(d_in, n_x) * (GROUP // TILE_LEFT * KEPT_BYTES // 4 + PANEL)


@cache
def parts_of(d_out: int, d_in: int, n_x: int) -> int:
    """In how many parts a product is done: as many as leave each thread the same share of the weight's rows."""
    threads, work = thread_count(), d_out * d_in * max(1, n_x // 8)
    most = max(1, min(PARTS * threads, work // SMALLEST_PART))
    groups = -(-d_out // (4 if n_x <= FEW else UNDIVIDED))  # rows that stay together

    def longest_share(parts: int) -> int:
        return parts // threads * -(-groups // parts)

    whole = range(most // threads * threads, 0, -threads)  # the most parts first
    return min(whole, key=longest_share, default=most)


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
    return Task(many_rows(kind), (*given, scratch, size), parts), thread_count() * size
