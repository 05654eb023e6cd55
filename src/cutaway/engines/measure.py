"""How fast this machine moves numbers and multiplies them: the two bounds of what a model could run at."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Machine:
    """Bytes a second read from memory, and float32 operations a second in a large product."""

    bytes_per_second: float
    flops_per_second: float


def measure(seconds: float = 0.4) -> Machine:
    """Measure both, each for about `seconds`; the best of several runs, since other work only ever slows one."""
    # 256 MB, read by as many threads as BLAS uses: a matrix times a vector is all reading.
    matrix, vector = np.ones((1 << 13, 1 << 13), np.float32), np.ones(1 << 13, np.float32)
    a, b = np.ones((1024, 1024), np.float32), np.ones((1024, 1024), np.float32)
    reading = _best(lambda: matrix @ vector, seconds)
    product = _best(lambda: a @ b, seconds)
    return Machine(matrix.nbytes / reading, 2 * 1024**3 / product)


def _best(run: Callable[[], object], seconds: float) -> float:
    run()
    best, begun = float("inf"), time.perf_counter()
    while time.perf_counter() - begun < seconds:
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best
