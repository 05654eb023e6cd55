"""The threads that run a kernel's parts, and how they take turns without waiting for one another.

Numba's own layers divide a loop among threads in advance and wait for each of them. On a machine with other
work that is ruinous: whenever the system has put one of them aside, all wait for its turn, some 8 ms a kernel
where the kernel takes 0.05. (Measured with two busy processes beside: a pass of 210 products took 1,600 ms
in place of 18.) They also differ from system to system: `omp` needs libgomp and breaks in forked children,
`workqueue` takes 100 µs to start and ends the process when two threads start one.

Here parts are claimed one by one from a counter in memory. The calling thread claims like the rest and waits
only for parts that another has begun. A helper that is asleep or put aside is simply not missed. Helpers
watch the counter for a moment after each kernel, so that in a stream of kernels the next one starts within a
microsecond, and then go to sleep.
"""

import ctypes
import sys
import threading
from functools import cache
from math import inf
from time import perf_counter
from typing import Any

from cutaway.engines.cpu.compiling import machine_code
from cutaway.engines.cpu.shared_words import LEFT, THREADS, WORDS, YIELD

_WATCHES = 60000  # looks at the counter before a helper goes to sleep: about 2 ms, longer than any gap in a pass
_TICK = 4e-10  # seconds, about

NATIVE = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)


@cache
def _turns() -> tuple[Any, Any, Any]:
    """The three loops, compiled."""
    help_, lead, alone = (NATIVE(machine_code(f"pool.{loop}_kernel")) for loop in ("help", "lead", "alone"))
    return help_, lead, alone


class Pool:
    """`helpers` threads beside whoever calls; made once for a process, and anew in a forked child."""

    def __init__(self, helpers: int) -> None:
        self._shared = (ctypes.c_int64 * (WORDS + 8))()
        first = ctypes.addressof(self._shared)
        self._skip = -first % 64 // 8  # words up to the start of a cache line
        self._address = first + 8 * self._skip
        self._help, self._lead, self._alone = _turns()
        self._alone_until = 0.0 if helpers else inf  # when helpers are woken again
        windows = sys.platform == "win32"
        system = ctypes.CDLL("kernel32" if windows else None)
        give_way = system.SwitchToThread if windows else system.sched_yield
        self._shared[self._skip + YIELD] = ctypes.cast(give_way, ctypes.c_void_p).value or 0
        self._shared[self._skip + THREADS] = helpers + 1
        self._asleep: list[threading.Lock] = []  # a lock for each helper that sleeps, which wakes it
        for worker in range(1, helpers + 1):  # whoever calls is worker 0
            threading.Thread(target=self._serve, args=(worker,), name="cutaway kernels", daemon=True).start()

    def run(self, phases: int, count: int) -> None:
        """Run `count` phases, whose table (see `code.pool.lead_kernel`) is at an address. One call at a time.

        A phase has at most 65,535 parts. A helper that was put aside by the system in the middle of a part costs a
        wait of milliseconds; after it the phases run without helpers for a while (`lead_kernel` says for how long).
        """
        if self._alone_until and perf_counter() < self._alone_until:
            self._alone(0, phases, count, 0)
            return
        for _ in range(len(self._asleep)):
            self._asleep.pop().release()
        self._lead(self._address, phases, count, 0)
        if left := self._shared[self._skip + LEFT]:
            self._alone_until = perf_counter() + left * _TICK

    def _serve(self, worker: int) -> None:
        """A helper's life."""
        sleeping = threading.Lock()
        sleeping.acquire()
        while True:
            self._help(self._address, _WATCHES, worker, 0)
            self._asleep.append(sleeping)
            sleeping.acquire()
