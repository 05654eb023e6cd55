"""How many threads compute, and how work is spread over them: kernels' parts, and products by BLAS."""

import ctypes
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cutaway.errors import CutawayError

if TYPE_CHECKING:
    from cutaway.engines.cpu.pool import Pool

_lock = threading.RLock()  # one kernel at a time in a process
_pool: "Pool | None" = None
_workers: ThreadPoolExecutor | None = None


def _after_fork() -> None:
    """In a forked child: the parent's threads are not here, and whoever held the lock stayed behind."""
    global _lock, _pool, _workers, _blas_lock, _blas_users
    _lock, _pool, _workers = threading.RLock(), None, None
    _blas_lock, _blas_users = threading.Lock(), 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@cache
def thread_count() -> int:
    """How many threads compute: CUTAWAY_THREADS, else as many as this process may use processors.

    Raises CutawayError where CUTAWAY_THREADS is no whole number from 1 to the number of processors.
    """
    usable = _usable_processors()
    asked = os.environ.get("CUTAWAY_THREADS", "").strip()
    if not asked:
        return usable
    most = max(os.cpu_count() or 1, usable)
    if not asked.isdecimal() or not 1 <= int(asked) <= most:
        raise CutawayError(
            f"CUTAWAY_THREADS is {asked!r}; it must be a whole number from 1 to {most}, the processors here."
        )
    return int(asked)


def _usable_processors() -> int:
    """Processors that this process may run on: its affinity, and its control group's share."""
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    else:
        allowed = os.cpu_count() or 1
    return max(1, int(min(allowed, _control_group_share())))


def _control_group_share(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float:
    """How many processors' time the control groups grant (version 2 `cpu.max`, or version 1); else infinity.

    A group's parents limit it too, so each folder up to the root counts.
    """
    share = inf
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return share
    for line in lines:
        _, controllers, place = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / controllers if controllers else root
        for top_folder in {top, root / "cpu"} if controllers else {top}:
            folder = top_folder / place.lstrip("/")
            for here in [folder, *folder.parents]:
                if not here.is_relative_to(root):
                    break
                share = min(share, _quota(here))
    return share


def _quota(folder: Path) -> float:
    try:
        if (limit := folder / "cpu.max").exists():
            quota, period = limit.read_text().split()[:2]
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        return inf if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return inf


def launch(function: int, arguments: int, parts: int) -> None:
    """Run all parts of the kernel at an address; a single part in the calling thread, more by the pool.

    Python threads take turns. The GIL is released meanwhile.
    """
    global _pool
    if parts == 1:
        _NATIVE(function)(arguments, 0, 1)
        return
    with _lock:
        if _pool is None:
            from cutaway.engines.cpu.pool import Pool

            _pool = Pool(thread_count() - 1)
        _pool.run(function, arguments, parts)


_NATIVE = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


def share(work: Callable[[int], None], items: int) -> None:
    """Call `work` for each of `range(items)`, spread over the threads; for work that releases the GIL.

    Items are claimed one by one, and a thread that has not begun when all are claimed is not waited for.
    """
    global _workers
    helpers = min(thread_count(), items) - 1
    if helpers < 1:
        for item in range(items):
            work(item)
        return
    claims = itertools.count()

    def run() -> None:
        while (item := next(claims)) < items:
            work(item)

    with _lock:
        if _workers is None:
            _workers = ThreadPoolExecutor(thread_count() - 1, thread_name_prefix="cutaway products")
        begun = [_workers.submit(run) for _ in range(helpers)]
    try:
        run()
    finally:
        for future in begun:
            if not future.cancel():
                future.result()


_blas_lock = threading.Lock()
_blas_users = 0
_blas_threads = 1


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """OpenBLAS with one thread while the block runs: `share` spreads its products instead.

    Its own threads spin and wait for one another, which with other work on the machine made products three
    times slower than one thread; and what it rounds would depend on their number. Where NumPy uses another
    BLAS, that one decides for itself.
    """
    global _blas_users, _blas_threads
    library = _openblas()
    if library is None:
        yield
        return
    set_threads, get_threads = library
    with _blas_lock:
        if _blas_users == 0:
            _blas_threads = get_threads()
            set_threads(1)
        _blas_users += 1
    try:
        yield
    finally:
        with _blas_lock:
            _blas_users -= 1
            if _blas_users == 0:
                set_threads(_blas_threads)


@cache
def _openblas() -> tuple[Any, Any] | None:
    """OpenBLAS's functions that set and tell its number of threads; None where NumPy uses something else."""
    folder = Path(np.__file__).parent
    for file in [*(folder.parent / "numpy.libs").glob("*openblas*"), *(folder / ".dylibs").glob("*openblas*")]:
        try:
            library = ctypes.CDLL(str(file))
        except OSError:
            continue
        for end in ("64_", ""):
            names = [f"scipy_openblas_{verb}_num_threads{end}" for verb in ("set", "get")]
            if all(hasattr(library, name) for name in names):
                return getattr(library, names[0]), getattr(library, names[1])
    return None


def describe() -> dict[str, str | int]:
    """What computes here, for `cutaway doctor`: threads and why so many, Numba, NumPy and its BLAS."""
    import numba

    config: Any = np.show_config(mode="dicts")
    blas = config["Build Dependencies"]["blas"]
    asked = os.environ.get("CUTAWAY_THREADS", "").strip()
    return {
        "threads": thread_count(),
        "threads_from": "CUTAWAY_THREADS" if asked else "the processors that this process may use",
        "processors": os.cpu_count() or 1,
        "layer": "Cutaway's own threads; Numba only compiles",
        "numba": numba.__version__,
        "numpy": np.__version__,
        "blas": f"{blas['name']} {blas['version']}",
        "blas_threads": "as many as compute" if _openblas() is None else "one in each of our threads",
    }
