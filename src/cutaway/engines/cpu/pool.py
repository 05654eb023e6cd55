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
from math import inf
from time import perf_counter
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import register_jitable

from cutaway.engines.cpu.compiling import compile_native
from cutaway.engines.cpu.vectors import I8, I64, operation

# The memory that the threads share, in 64-bit words, eight (a cache line) apart.
_NEXT, _DONE, _TASKS, _YIELD, _SERIAL, _WAITED, _OWN, _WORDS = 0, 8, 16, 17, 18, 19, 20, 32
# The word _NEXT: the phase's serial number · 2^32 + its parts · 2^16 + parts already claimed.
_WATCHES = 60000  # looks at the counter before a helper goes to sleep: about 2 ms, longer than any gap in a pass
_PATIENCE = 4000  # looks at _DONE before the caller offers its processor to others
_LATE = 700_000  # ticks (0.3 ms) of waiting, beyond half the caller's own, that tell of a helper put aside
_PENALTIES = (0.002, 0.05)  # seconds for which kernels then run without helpers, at least and at most
_FORGIVEN_AFTER = 256
_IS_X86 = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")


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


@operation(types.void, types.int64, types.int64, types.int64, types.int64)
def _call(builder: Any, function: Any, arguments: Any, part: Any, parts: Any) -> Any:
    """Run one part of a kernel."""
    kind = ir.FunctionType(ir.VoidType(), [I64] * 3)
    builder.call(builder.inttoptr(function, kind.as_pointer()), [arguments, part, parts])
    return ir.Constant(I8.as_pointer(), None)


@operation(types.void, types.int64)
def _count(builder: Any, shared: Any) -> Any:
    """Count one part of the present phase as done."""
    builder.atomic_rmw("add", _word(builder, shared, _DONE), I64(1), "acq_rel")
    return ir.Constant(I8.as_pointer(), None)


@operation(types.int64, types.int64, types.int64)
def _shared(builder: Any, shared: Any, index: Any) -> Any:
    """A word of the shared memory, or of any table."""
    return builder.load(builder.inttoptr(builder.add(shared, builder.mul(index, I64(8))), I64.as_pointer()))


@operation(types.void, types.int64, types.int64, types.int64)
def _set(builder: Any, shared: Any, index: Any, value: Any) -> Any:
    """Set a word of the shared memory."""
    builder.store(value, builder.inttoptr(builder.add(shared, builder.mul(index, I64(8))), I64.as_pointer()))
    return ir.Constant(I8.as_pointer(), None)


@register_jitable
def _run(shared: int, claimed: int) -> None:
    """Run a claimed part of the present phase: find the task that it belongs to, and count it as done."""
    part, task = claimed & 0xFFFF, _shared(shared, _TASKS)
    while part >= _shared(task, 2):
        part -= _shared(task, 2)
        task += 24
    _call(_shared(task, 0), _shared(task, 1), part, _shared(task, 2))
    _count(shared)


@operation(types.int64, types.int64)
def _done(builder: Any, shared: Any) -> Any:
    """How many parts of the present kernel are done."""
    return builder.load_atomic(_word(builder, shared, _DONE), "acquire", 8)


@operation(types.void, types.int64, types.int64)
def _publish(builder: Any, shared: Any, word: Any) -> Any:
    """Let the parts be claimed; whatever was written before is seen by whoever claims one."""
    builder.store_atomic(word, _word(builder, shared, _NEXT), "release", 8)
    return ir.Constant(I8.as_pointer(), None)


@operation(types.int64)
def _ticks(builder: Any) -> Any:
    """The processor's clock, where a program may read it; else always 0, and then no helper counts as late."""
    if not _IS_X86:
        return I64(0)
    kind = ir.FunctionType(I64, [])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.readcyclecounter"), [])


@operation(types.void)
def _pause(builder: Any) -> Any:
    """Tell the processor that this is a waiting loop."""
    if _IS_X86:
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


def _lead(shared: int, phases: int, count: int) -> None:
    """The caller's turn: phase after phase, offer the parts, run those that it can claim itself, wait for the rest.

    A phase is a table of tasks and their number; a task is a kernel, its arguments and its parts.
    """
    begun, waited = _ticks(), 0
    for phase in range(count):
        tasks, n_tasks = _shared(phases, 2 * phase), _shared(phases, 2 * phase + 1)
        parts = 0
        for task in range(n_tasks):
            parts += _shared(tasks, 3 * task + 2)
        if parts == 1:
            _call(_shared(tasks, 0), _shared(tasks, 1), 0, 1)
            continue
        _set(shared, _TASKS, tasks)
        _set(shared, _DONE, 0)
        serial = (_shared(shared, _SERIAL) + 1) & 0x7FFFFFFF
        _set(shared, _SERIAL, serial)
        _publish(shared, serial << 32 | parts << 16)
        claimed = _claim(shared)
        while claimed != -1:
            if claimed >= 0:
                _run(shared, claimed)
            claimed = _claim(shared)
        if _done(shared) < parts:
            since, looks = _ticks(), 0
            while _done(shared) < parts:
                looks += 1
                if looks < _PATIENCE:
                    _pause()
                else:  # whoever is late may be waiting for this very processor
                    _yield(shared)
            waited += _ticks() - since
    _set(shared, _WAITED, waited)
    _set(shared, _OWN, _ticks() - begun - waited)


def _alone(unused: int, phases: int, count: int) -> None:
    """All phases in the calling thread."""
    for phase in range(count):
        tasks, n_tasks = _shared(phases, 2 * phase), _shared(phases, 2 * phase + 1)
        for task in range(n_tasks):
            _call(_shared(tasks, 3 * task), _shared(tasks, 3 * task + 1), 0, 1)


NATIVE = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


@cache
def _turns() -> tuple[Any, Any, Any]:
    """The three loops, compiled."""
    help_, lead, alone = (NATIVE(compile_native(loop)) for loop in (_help, _lead, _alone))
    return help_, lead, alone


class Pool:
    """`helpers` threads beside whoever calls; made once for a process, and anew in a forked child."""

    def __init__(self, helpers: int) -> None:
        self._shared = (ctypes.c_int64 * (_WORDS + 8))()
        first = ctypes.addressof(self._shared)
        self._skip = -first % 64 // 8  # words up to the start of a cache line
        self._address = first + 8 * self._skip
        self._help, self._lead, self._alone = _turns()
        self._alone_until = 0.0 if helpers else inf  # when helpers are asked again
        self._penalty = _PENALTIES[0]
        self._in_time = 0  # runs in a row in which no helper was late
        windows = sys.platform == "win32"
        system = ctypes.CDLL("kernel32" if windows else None)
        give_way = system.SwitchToThread if windows else system.sched_yield
        self._shared[self._skip + _YIELD] = ctypes.cast(give_way, ctypes.c_void_p).value or 0
        self._asleep: list[threading.Lock] = []  # a lock for each helper that sleeps, which wakes it
        for _ in range(helpers):
            threading.Thread(target=self._serve, name="cutaway kernels", daemon=True).start()

    def run(self, phases: int, count: int) -> None:
        """Run `count` phases, whose table (see `_lead`) is at an address. One call at a time.

        A phase has at most 65,535 parts. A helper that was put aside by the system in the middle of a part costs a
        wait of milliseconds. On a busy machine that would happen all the time, so after each such wait kernels run
        without helpers for a while: 2 ms, then 4, up to 50 while it goes on happening, less again once it stops.
        """
        if self._alone_until and perf_counter() < self._alone_until:
            self._alone(0, phases, count)
            return
        for _ in range(len(self._asleep)):
            self._asleep.pop().release()
        self._lead(self._address, phases, count)
        waited = self._shared[self._skip + _WAITED]
        if waited > _LATE + self._shared[self._skip + _OWN] / 2:
            self._alone_until, self._in_time = perf_counter() + self._penalty, 0
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
