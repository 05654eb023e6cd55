"""How many threads compute, through which of Numba's layers, and who may start them when.

The layers, measured with 210 products of a small model a pass on two cores: `omp` starts a parallel
region in 5 to 10 microseconds, `workqueue` in about 100. So `omp` comes first where the system has it and
`workqueue`, which Numba brings along everywhere, is the spare. `tbb` lies between the two and is taken before
`workqueue` where it is installed. NUMBA_THREADING_LAYER, if set, decides instead.

`workqueue` ends the process when two threads start kernels at once, so one lock covers every start; `omp`
ends a forked child that starts one, so a child computes in its one thread.
"""

import ctypes
import os
import threading
from collections.abc import Callable
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import numba
import numpy as np

from cutaway.errors import CutawayError

LAYERS = ["omp", "tbb", "workqueue"]

_lock = threading.RLock()
_local = threading.local()
_started = False  # whether this process has started parallel kernels
_forked = False  # whether it was forked from one that had


def _after_fork() -> None:
    global _lock, _forked
    _lock = threading.RLock()  # whoever held it stayed behind in the parent
    _forked = _started


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
    """Run all parts of the kernel at an address, on as many threads; one kernel at a time in a process.

    A single part runs at once in the calling thread, and so does everything in a forked child, one part
    after another: the numbers are the same. The GIL is released meanwhile.
    """
    if parts == 1 or _forked:
        call = _NATIVE(function)
        for part in range(parts):
            call(arguments, part, parts)
        return
    with _lock:
        if not getattr(_local, "ready", False):
            _prepare()
        _runner(function, arguments, parts)


_NATIVE = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
_runner: Callable[[int, int, int], None]


def _prepare() -> None:
    """Choose the layer, once, and tell Numba how many threads this Python thread's kernels get."""
    global _started, _runner
    count = thread_count()
    if not _started:
        from cutaway.engines.cpu.compiling import parallel_runner

        if "NUMBA_THREADING_LAYER_PRIORITY" not in os.environ:
            numba.config.THREADING_LAYER_PRIORITY = LAYERS
        numba.config.NUMBA_NUM_THREADS = max(count, numba.config.NUMBA_NUM_THREADS)
        _limit_blas(count)
        _runner = parallel_runner()
        _started = True
    numba.set_num_threads(count)
    _local.ready = True


def _limit_blas(count: int) -> None:
    """Give NumPy's OpenBLAS as many threads; it knows this process's affinity but not CUTAWAY_THREADS."""
    library = _openblas()
    if library is not None:
        library(count)


@cache
def _openblas() -> Any:
    """OpenBLAS's own function that sets its number of threads; None where NumPy uses something else."""
    folder = Path(np.__file__).parent
    for file in [*(folder.parent / "numpy.libs").glob("*openblas*"), *(folder / ".dylibs").glob("*openblas*")]:
        try:
            library = ctypes.CDLL(str(file))
        except OSError:
            continue
        for name in ("scipy_openblas_set_num_threads64_", "scipy_openblas_set_num_threads"):
            if hasattr(library, name):
                return getattr(library, name)
    return None


def describe() -> dict[str, str | int]:
    """What computes here, for `cutaway doctor`: threads and why, Numba and its layer, NumPy and its BLAS."""
    with _lock:
        if not _started and not _forked:
            _prepare()
            _runner(0, 0, 0)  # Numba names the layer only once it runs
    layer = "none" if _forked else numba.threading_layer()
    why = "this process was forked while its parent computed" if _forked else _layer_why(layer)
    config: Any = np.show_config(mode="dicts")
    blas = config["Build Dependencies"]["blas"]
    reason = "CUTAWAY_THREADS" if os.environ.get("CUTAWAY_THREADS", "").strip() else "processors it may use"
    return {
        "threads": thread_count(),
        "threads_from": reason,
        "processors": os.cpu_count() or 1,
        "layer": layer,
        "layer_why": why,
        "numba": numba.__version__,
        "numpy": np.__version__,
        "blas": f"{blas['name']} {blas['version']}",
    }


def _layer_why(layer: str) -> str:
    if os.environ.get("NUMBA_THREADING_LAYER"):
        return "NUMBA_THREADING_LAYER asks for it"
    return {
        "omp": "OpenMP, the quickest to start",
        "tbb": "Intel TBB; OpenMP, which starts quicker, is not on this system (libgomp)",
    }.get(layer, "Numba's own; neither OpenMP (libgomp) nor TBB is on this system, and small models run slower")
