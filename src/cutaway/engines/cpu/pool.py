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
import platform
import sys
import threading
from functools import cache
from time import perf_counter
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from cutaway.engines.cpu.compiling import compile_native
from cutaway.engines.cpu.vectors import I8, I64, operation

# The memory that the threads share, in 64-bit words, eight (a cache line) apart.
_NEXT, _DONE, _FUNCTION, _ARGUMENTS, _YIELD, _WORDS = 0, 8, 16, 17, 18, 32
# The word _NEXT: the kernel's serial number · 2^32 + its parts · 2^16 + parts already claimed.
_WATCHES = 60000  # looks at the counter before a helper goes to sleep: about 2 ms, longer than any gap in a pass
_PATIENCE = 4000  # looks at _DONE before the caller offers its processor to others
_LATE = 0.0003  # seconds of waiting, beyond half the caller's own work, that tell of a helper put aside
_PENALTIES = (0.002, 0.05)  # seconds for which kernels then run without helpers, at least and at most
_FORGIVEN_AFTER = 256


def _word(builder: Any, shared: Any, index: int) -> Any:
    return builder.inttoptr(builder.add(shared, I64(8 * index)), I64.as_pointer())


@operation(types.int64, types.int64)
def _claim(builder: Any, shared: Any) -> Any:
    """Claim the next part: parts · 2^16 + part, or −1 where all are claimed."""
    result = cgutils.alloca_once_value(builder, I64(-1))
    word = _word(builder, shared, _NEXT)
    seen = builder.load_atomic(word, "acquire", 8)
    part = builder.and_(seen, I64(0xFFFF))
    parts = builder.and_(builder.lshr(seen, I64(16)), I64(0xFFFF))
    with builder.if_then(builder.icmp_signed("<", part, parts)):
        swapped = builder.cmpxchg(word, seen, builder.add(seen, I64(1)), "acq_rel", "acquire")
        with builder.if_then(builder.extract_value(swapped, 1)):
            builder.store(builder.and_(seen, I64(0xFFFFFFFF)), result)
        with builder.if_then(builder.not_(builder.extract_value(swapped, 1))):
            builder.store(I64(-2), result)  # another was quicker: look again
    return builder.load(result)


@operation(types.void, types.int64, types.int64)
def _run(builder: Any, shared: Any, claimed: Any) -> Any:
    """Run a claimed part of the present kernel and count it as done."""
    kind = ir.FunctionType(ir.VoidType(), [I64] * 3)
    function = builder.inttoptr(builder.load(_word(builder, shared, _FUNCTION)), kind.as_pointer())
    part, parts = builder.and_(claimed, I64(0xFFFF)), builder.lshr(claimed, I64(16))
    builder.call(function, [builder.load(_word(builder, shared, _ARGUMENTS)), part, parts])
    builder.atomic_rmw("add", _word(builder, shared, _DONE), I64(1), "acq_rel")
    return ir.Constant(I8.as_pointer(), None)


@operation(types.int64, types.int64)
def _done(builder: Any, shared: Any) -> Any:
    """How many parts of the present kernel are done."""
    return builder.load_atomic(_word(builder, shared, _DONE), "acquire", 8)


@operation(types.void, types.int64, types.int64)
def _publish(builder: Any, shared: Any, word: Any) -> Any:
    """Let the parts be claimed; whatever was written before is seen by whoever claims one."""
    builder.store_atomic(word, _word(builder, shared, _NEXT), "release", 8)
    return ir.Constant(I8.as_pointer(), None)


@operation(types.void)
def _pause(builder: Any) -> Any:
    """Tell the processor that this is a waiting loop."""
    if platform.machine().lower() in ("x86_64", "amd64", "i386", "i686"):
        nothing = ir.FunctionType(ir.VoidType(), [])
        builder.call(cgutils.get_or_insert_function(builder.module, nothing, "llvm.x86.sse2.pause"), [])
    else:
        builder.fence("seq_cst")
    return ir.Constant(I8.as_pointer(), None)


@operation(types.void, types.int64)
def _yield(builder: Any, shared: Any) -> Any:
    """Offer the processor to another thread."""
    kind = ir.FunctionType(ir.IntType(32), [])
    builder.call(builder.inttoptr(builder.load(_word(builder, shared, _YIELD)), kind.as_pointer()), [])
    return ir.Constant(I8.as_pointer(), None)


def _help(shared: int, watches: int, unused: int) -> None:
    """A helper's turn: run what parts it can claim, until it has looked `watches` times in vain."""
    idle = 0
    while idle < watches:
        claimed = _claim(shared)
        if claimed >= 0:
            _run(shared, claimed)
            idle = 0
        else:
            idle += 1
            _pause()


def _lead(shared: int, unused: int, word: int) -> None:
    """The caller's turn: offer the parts, and run those that it can claim itself."""
    _publish(shared, word)
    claimed = _claim(shared)
    while claimed != -1:
        if claimed >= 0:
            _run(shared, claimed)
        claimed = _claim(shared)


def _wait(shared: int, patience: int, parts: int) -> None:
    """Wait for the parts that helpers have begun; after a while, offer them this processor."""
    looks = 0
    while _done(shared) < parts:
        looks += 1
        if looks < patience:
            _pause()
        else:
            _yield(shared)


NATIVE = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


@cache
def _turns() -> tuple[Any, Any, Any]:
    """The three loops, compiled."""
    help_, lead, wait = (NATIVE(compile_native(loop)) for loop in (_help, _lead, _wait))
    return help_, lead, wait


class Pool:
    """`helpers` threads beside whoever calls; made once for a process, and anew in a forked child."""

    def __init__(self, helpers: int) -> None:
        self._shared = (ctypes.c_int64 * (_WORDS + 8))()
        first = ctypes.addressof(self._shared)
        self._skip = -first % 64 // 8  # words up to the start of a cache line
        self._address = first + 8 * self._skip
        self._serial = 0
        self._help, self._lead, self._wait = _turns()
        self._alone_until = 0.0  # when helpers are asked again
        self._penalty = _PENALTIES[0]
        self._in_time = 0  # kernels in a row for which no helper was late
        windows = sys.platform == "win32"
        system = ctypes.CDLL("kernel32" if windows else None)
        give_way = system.SwitchToThread if windows else system.sched_yield
        self._shared[self._skip + _YIELD] = ctypes.cast(give_way, ctypes.c_void_p).value or 0
        self._asleep: list[threading.Lock] = []  # a lock for each helper that sleeps, which wakes it
        for _ in range(helpers):
            threading.Thread(target=self._serve, name="cutaway kernels", daemon=True).start()

    def run(self, function: int, arguments: int, parts: int) -> None:
        """Run the parts (at most 65,535) of the kernel at an address. One call at a time.

        A helper that was put aside by the system in the middle of a part costs a wait of milliseconds. On a
        busy machine that would happen all the time, so after each such wait kernels run without helpers for a
        while: 2 ms, then 4, up to 50 while it goes on happening, less again once it stops.
        """
        start = perf_counter()
        if start < self._alone_until:
            NATIVE(function)(arguments, 0, 1)
            return
        self._shared[self._skip + _FUNCTION] = function
        self._shared[self._skip + _ARGUMENTS] = arguments
        self._shared[self._skip + _DONE] = 0
        self._serial = (self._serial + 1) % (1 << 31)
        for _ in range(min(len(self._asleep), parts - 1)):
            self._asleep.pop().release()
        self._lead(self._address, 0, self._serial << 32 | parts << 16)
        if self._shared[self._skip + _DONE] < parts:
            own_end = perf_counter()
            self._wait(self._address, _PATIENCE, parts)
            now = perf_counter()
            if now - own_end > _LATE + (own_end - start) / 2:
                self._alone_until, self._in_time = now + self._penalty, 0
                self._penalty = min(2 * self._penalty, _PENALTIES[1])
                return
        self._in_time += 1
        if self._in_time == _FORGIVEN_AFTER:
            self._in_time, self._penalty = 0, max(self._penalty / 2, _PENALTIES[0])

    def _serve(self) -> None:
        """A helper's life."""
        sleeping = threading.Lock()
        sleeping.acquire()
        while True:
            self._help(self._address, _WATCHES, 0)
            self._asleep.append(sleeping)
            sleeping.acquire()
