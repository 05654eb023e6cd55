"""Measuring two sides in turns, and how much of the machine others took meanwhile."""

import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

Run = Callable[[], float]  # one run; its seconds
REST = 0.3  # seconds between turns: threads of OpenMP spin for up to 0.2 after their work, and would spin into the next


@dataclass(frozen=True)
class Turn:
    """One run of each side, and how many processors other processes (or the host) took meanwhile."""

    ours: float
    theirs: float | None
    elsewhere: float  # NaN: not known


@dataclass(frozen=True)
class Turns:
    """The turns that count, and how many were set aside because others were busy."""

    kept: list[Turn]
    set_aside: int

    @property
    def elsewhere(self) -> float | None:
        """Processors that others took, median."""
        known = [turn.elsewhere for turn in self.kept if not math.isnan(turn.elsewhere)]
        return statistics.median(known) if known else None


def in_turns(
    ours: Run,
    theirs: Run | None,
    repeats: int,
    *,
    quiet: float,
    most: int,
    processes: Iterable[int],
    told: Callable[[int, int], None] = lambda kept, set_aside: None,
) -> Turns:
    """Ours, theirs, ours, theirs, …, after one unmeasured run of each.

    A pair during which others took more than `quiet` processors is set aside, until there are `repeats` quiet ones or
    `most` were run; then the `repeats` least disturbed count. The choice looks at the others' work, never at the times.
    `processes` are the ids of our own workers.
    """
    ours()
    if theirs is not None:
        theirs()
    turns: list[Turn] = []
    processes = list(processes)
    while len(turns) < most and sum(_is_quiet(turn, quiet) for turn in turns) < repeats:
        first, *others = _watched(ours, processes)
        second = None
        if theirs is not None:
            second, *later = _watched(theirs, processes)
            others = [sum(pair) for pair in zip(others, later, strict=True)]
        turns.append(Turn(first, second, others[0] / others[1]))
        told(sum(_is_quiet(turn, quiet) for turn in turns), sum(not _is_quiet(turn, quiet) for turn in turns))
    kept = sorted(turns, key=lambda turn: 0.0 if math.isnan(turn.elsewhere) else turn.elsewhere)[:repeats]
    return Turns([turn for turn in turns if turn in kept], len(turns) - len(kept))


def _watched(run: Run, processes: list[int]) -> tuple[float, float, float]:
    """The seconds of a run; meanwhile, processor seconds of others (NaN: not known), and seconds on the clock."""
    time.sleep(REST)
    before = Usage.now(processes)
    seconds = run()
    return seconds, *Usage.now(processes).others_since(before)


def _is_quiet(turn: Turn, most: float) -> bool:
    return math.isnan(turn.elsewhere) or turn.elsewhere <= most


@dataclass(frozen=True)
class Usage:
    """Processor seconds since the machine started: of everything, and of the benchmark's own processes."""

    clock: float
    all: float | None
    own: float

    @classmethod
    def now(cls, processes: Iterable[int]) -> "Usage":
        """Linux tells; elsewhere `all` is None."""
        stat = Path("/proc/stat")
        if not stat.exists():
            return cls(time.perf_counter(), None, 0.0)
        tick = os.sysconf("SC_CLK_TCK")
        user, nice, system, _, _, irq, softirq, steal = map(int, stat.read_text().splitlines()[0].split()[1:9])
        own = sum(_processor_seconds(process) for process in processes)
        used = os.times()
        own += used.user + used.system + used.children_user + used.children_system
        return cls(time.perf_counter(), (user + nice + system + irq + softirq + steal) / tick, own)

    def others_since(self, before: "Usage") -> tuple[float, float]:
        """Processor seconds that others took, NaN where not known, and the seconds that passed."""
        passed = max(self.clock - before.clock, 1e-9)
        if self.all is None or before.all is None:
            return math.nan, passed
        return max(0.0, (self.all - before.all) - (self.own - before.own)), passed


def _processor_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def busy_process() -> Iterator[int]:
    """A process that does nothing but work, for as long as the block runs; its id."""
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield child.pid
    finally:
        child.kill()
        child.wait()
