"""How many threads compute, and how the parts of a kernel are spread over them."""

import ctypes
import os
import threading
from contextlib import AbstractContextManager
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


def _after_fork() -> None:
    """In a forked child: the parent's threads are not here, and whoever held the lock stayed behind."""
    global _lock, _pool
    _lock, _pool = threading.RLock(), None


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


def own_turn() -> AbstractContextManager[bool]:
    """Held by a Python thread, it keeps all others' kernels waiting; in a forked child nobody holds it."""
    return _lock


def launch(function: int, arguments: int, parts: int) -> None:
    """Run all parts of the kernel at an address; a single part in the calling thread, more by the pool.

    Python threads take turns. The GIL is released meanwhile.
    """
    if parts == 1:
        _NATIVE(function)(arguments, 0, 1, 0)
        return
    with _lock:
        task = _one_phase
        task[2], task[3], task[4] = function, arguments, parts
        _the_pool().run(ctypes.addressof(task), 1)


def launch_phases(phases: int, count: int) -> None:
    """Run `count` phases, whose table is at an address: one after another, the parts of each by the whole pool.

    A phase is the address of a table of tasks, and how many there are; a task is a kernel's address, that of its
    arguments, and its parts.
    """
    with _lock:
        _the_pool().run(phases, count)


def _the_pool() -> "Pool":
    global _pool
    if _pool is None:
        from cutaway.engines.cpu.pool import Pool

        _pool = Pool(thread_count() - 1)
    return _pool


_one_phase = (ctypes.c_int64 * 5)()  # a phase of one task, which follows it
_one_phase[0], _one_phase[1] = ctypes.addressof(_one_phase) + 16, 1
_NATIVE = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)


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
        "blas_used_by": "the numpy engine",
    }
