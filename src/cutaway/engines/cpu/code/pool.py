"""The loops of the threads that run a kernel's parts (`engines/cpu/pool.py` tells how they take turns)."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import register_jitable

from cutaway.engines.cpu.code.vectors import I8, I64, operation
from cutaway.engines.cpu.processor import IS_X86
from cutaway.engines.cpu.shared_words import ALONE_UNTIL, DONE, LEFT, NEXT, PENALTY, SERIAL, TASKS, THREADS, YIELD

PATIENCE = 4000  # looks at DONE before the caller offers its processor to others
MOST_WAIT = 700_000  # ticks (0.3 ms) of waiting, beyond half the caller's own, that tell of a helper put aside
PENALTIES = (500_000, 100_000_000)  # ticks (0.2 and 50 ms) for which a late helper is left out, at least and at most
SOON = (
    10_000_000  # ticks (5 ms) after it was asked again: a helper late within them is asked again later than last time
)


def _word(builder: Any, shared: Any, index: int) -> Any:
    return builder.inttoptr(builder.add(shared, I64(8 * index)), I64.as_pointer())


@operation(types.int64, types.int64)
def _claim(builder: Any, shared: Any) -> Any:
    """Claim the next part: parts · 2^16 + part, or −1 where all are claimed."""
    result = cgutils.alloca_once_value(builder, I64(-1))
    word = _word(builder, shared, NEXT)
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


@operation(types.void, types.int64, types.int64, types.int64, types.int64, types.int64)
def _call(builder: Any, function: Any, arguments: Any, part: Any, parts: Any, worker: Any) -> Any:
    """Run one part of a kernel."""
    kind = ir.FunctionType(ir.VoidType(), [I64] * 4)
    builder.call(builder.inttoptr(function, kind.as_pointer()), [arguments, part, parts, worker])
    return ir.Constant(I8.as_pointer(), None)


@operation(types.void, types.int64)
def _count(builder: Any, shared: Any) -> Any:
    """Count one part of the present phase as done."""
    builder.atomic_rmw("add", _word(builder, shared, DONE), I64(1), "acq_rel")
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
def _run(shared: int, claimed: int, worker: int) -> None:
    """Run a claimed part of the present phase: find the task that it belongs to, and count it as done.

    Threads claim in turn, mostly; so that each gets neighbours, of which it has fetched the beginning already, a task's
    parts are claimed in the order 0, n/2, 1, n/2 + 1 … (of two threads).
    """
    part, task, threads = claimed & 0xFFFF, _shared(shared, TASKS), _shared(shared, THREADS)
    while part >= _shared(task, 2):
        part -= _shared(task, 2)
        task += 24
    parts = _shared(task, 2)
    if parts % threads == 0:
        part = part % threads * (parts // threads) + part // threads
    _call(_shared(task, 0), _shared(task, 1), part, parts, worker)
    _count(shared)


@operation(types.int64, types.int64)
def _done(builder: Any, shared: Any) -> Any:
    """How many parts of the present kernel are done."""
    return builder.load_atomic(_word(builder, shared, DONE), "acquire", 8)


@operation(types.void, types.int64, types.int64)
def _publish(builder: Any, shared: Any, word: Any) -> Any:
    """Let the parts be claimed; whatever was written before is seen by whoever claims one."""
    builder.store_atomic(word, _word(builder, shared, NEXT), "release", 8)
    return ir.Constant(I8.as_pointer(), None)


@operation(types.int64)
def _ticks(builder: Any) -> Any:
    """The processor's clock, where a program may read it; else always 0, and then no helper counts as late."""
    if not IS_X86:
        return I64(0)
    kind = ir.FunctionType(I64, [])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.readcyclecounter"), [])


@operation(types.void)
def _pause(builder: Any) -> Any:
    """Tell the processor that this is a waiting loop."""
    if IS_X86:
        nothing = ir.FunctionType(ir.VoidType(), [])
        builder.call(cgutils.get_or_insert_function(builder.module, nothing, "llvm.x86.sse2.pause"), [])
    else:
        builder.fence("seq_cst")
    return ir.Constant(I8.as_pointer(), None)


@operation(types.void, types.int64)
def _yield(builder: Any, shared: Any) -> Any:
    """Offer the processor to another thread."""
    kind = ir.FunctionType(ir.IntType(32), [])
    builder.call(builder.inttoptr(builder.load(_word(builder, shared, YIELD)), kind.as_pointer()), [])
    return ir.Constant(I8.as_pointer(), None)


def help_kernel(shared: int, watches: int, worker: int) -> None:
    """A helper's turn: run what parts it can claim, until it has looked `watches` times in vain."""
    idle = 0
    while idle < watches:
        claimed = _claim(shared)
        if claimed >= 0:
            _run(shared, claimed, worker)
            idle = 0
        else:
            idle += 1
            _pause()


def lead_kernel(shared: int, phases: int, count: int) -> None:
    """The caller's turn: phase after phase, offer the parts, run those that it can claim itself, wait for the rest.

    A phase is a table of tasks and their number; a task is a kernel, its arguments and its parts. After a helper was
    late, phases are done without helpers for a while.
    """
    alone_until = _shared(shared, ALONE_UNTIL)
    for phase in range(count):
        tasks, n_tasks = _shared(phases, 2 * phase), _shared(phases, 2 * phase + 1)
        parts = 0
        for task in range(n_tasks):
            parts += _shared(tasks, 3 * task + 2)
        if parts == 1 or _ticks() < alone_until:
            for task in range(n_tasks):
                _call(_shared(tasks, 3 * task), _shared(tasks, 3 * task + 1), 0, 1, 0)
            continue
        _set(shared, TASKS, tasks)
        _set(shared, DONE, 0)
        serial = (_shared(shared, SERIAL) + 1) & 0x7FFFFFFF
        _set(shared, SERIAL, serial)
        _publish(shared, serial << 32 | parts << 16)
        published = _ticks()
        claimed = _claim(shared)
        while claimed != -1:
            if claimed >= 0:
                _run(shared, claimed, 0)
            claimed = _claim(shared)
        if _done(shared) < parts:
            since, looks = _ticks(), 0
            while _done(shared) < parts:
                looks += 1
                if looks < PATIENCE:
                    _pause()
                else:  # whoever is late may be waiting for this very processor
                    _yield(shared)
            # Once costs a wait. On a busy machine a helper is put aside again and again: that costs more than to do
            # without, so whoever is late soon after it was asked again is asked less and less often.
            if _ticks() - since > MOST_WAIT + (since - published) // 2:
                again = published - alone_until < SOON
                penalty = min(2 * _shared(shared, PENALTY), PENALTIES[1]) if again else PENALTIES[0]
                alone_until = _ticks() + penalty
                _set(shared, PENALTY, penalty)
                _set(shared, ALONE_UNTIL, alone_until)
    _set(shared, LEFT, max(alone_until - _ticks(), 0))


def alone_kernel(unused: int, phases: int, count: int) -> None:
    """All phases in the calling thread."""
    for phase in range(count):
        tasks, n_tasks = _shared(phases, 2 * phase), _shared(phases, 2 * phase + 1)
        for task in range(n_tasks):
            _call(_shared(tasks, 3 * task), _shared(tasks, 3 * task + 1), 0, 1, 0)
