"""A program of kernels: every part of every task once, no phase before the one before it is done."""

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from cutaway.engines.cpu import compiling, threads
from cutaway.engines.cpu.code.native import object_of
from cutaway.engines.cpu.code.vectors import address, arguments, as_float, float_at, put_one
from cutaway.engines.cpu.kernel import Kernel, place
from cutaway.engines.cpu.program import Place, Program, Task


def _count(given: int, part: int, parts: int) -> None:
    # a task's own cells, one for each of ten shares of its work: plus `step`
    cells, shares, bits_of_step = arguments(given, 3)
    for share in range(shares * part // parts, shares * (part + 1) // parts):
        here = address(cells) + share * 4
        put_one(here, float_at(here) + as_float(bits_of_step))


def _lowest(given: int, part: int, parts: int) -> None:
    # the lowest of n cells, into every share of the results
    cells, n, out, shares = arguments(given, 4)
    lowest = float_at(address(cells))
    for cell in range(n):
        lowest = min(lowest, float_at(address(cells) + cell * 4))
    for share in range(shares * part // parts, shares * (part + 1) // parts):
        put_one(address(out) + share * 4, lowest)


@cache
def count() -> Kernel:
    return compiled(_count, "qqd")


@cache
def lowest() -> Kernel:
    return compiled(_lowest, "qqqq")


def compiled(function: Callable[[int, int, int], None], layout: str) -> Kernel:
    kernel = Kernel(f"test.{function.__name__}", layout)
    kernel._address = compiling.load(object_of(function))
    return kernel


@pytest.mark.parametrize("helped", [True, False], ids=["by all threads", "by the caller alone"])
def test_each_phase_sees_all_that_the_one_before_it_did(helped: bool) -> None:
    """Tasks of unequal numbers of parts side by side; the next phase reads their cells, run after run."""
    cells, out = np.zeros(30, np.float32), np.full(7, -1, np.float32)
    tasks = [
        Task(count(), (Place("cells") + 40 * i, 10, 1.0), parts)
        for i, parts in enumerate((1, 7, Place("parts of the last")))
    ]
    program = Program([tasks, [Task(lowest(), (Place("cells"), 30, Place("out"), 7), 3)], [tasks[0]], tasks[1:]])
    program.words_of(["cells", "no such place", "out"]).set([place(cells), 1, place(out)])
    parts_of_the_last = program.words_of(["parts of the last"])
    pool = threads._the_pool()
    before = pool._alone_until
    try:
        for run in range(600):
            pool._alone_until = 0.0 if helped and threads.thread_count() > 1 else float("inf")
            parts_of_the_last.set([1 + run % 10])
            program.run()
            assert (cells == 2 * (run + 1)).all()
            assert (out == 2 * run + 1).all()
    finally:
        pool._alone_until = before


def test_a_place_with_an_offset_is_set_wherever_it_stands() -> None:
    cells = np.zeros(40, np.float32)
    program = Program([[Task(count(), (Place("cells", 40), 10, 0.5)), Task(count(), (Place("cells"), 10, 2.0))]])
    there = program.words_of(["cells"])
    there.set([place(cells)])
    program.run()
    there.set([place(cells) + 80])
    program.run()
    assert cells.tolist() == [2.0] * 10 + [0.5] * 10 + [2.0] * 10 + [0.5] * 10
