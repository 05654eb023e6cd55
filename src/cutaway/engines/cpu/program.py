"""Kernels that run one after another without Python between them.

A program is a list of phases; a phase is one task or several that do not wait for one another. Arguments that change
from run to run are named places, set before it. All of it, arguments, tasks and phases, lies in one array of 64-bit
words, as the pool reads it.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cutaway.engines.cpu.kernel import Kernel, place
from cutaway.engines.cpu.threads import launch_phases


@dataclass(frozen=True)
class Place:
    """An argument that is set before a run: the value of `name`, plus `offset` bytes."""

    name: str
    offset: int = 0

    def __add__(self, offset: int) -> "Place":
        return Place(self.name, self.offset + offset)


Argument = int | float | Place


@dataclass(frozen=True)
class Task:
    """A kernel with its arguments, whole numbers, addresses or places, and floats; and its parts."""

    kernel: Kernel
    arguments: tuple[Argument, ...]
    parts: int | Place = 1


@dataclass(frozen=True, eq=False)
class Words:
    """Some words of a program: word `where[i]` takes value number `which[i]`, plus `offsets[i]` bytes."""

    program: np.ndarray
    where: np.ndarray
    which: np.ndarray
    offsets: np.ndarray

    def set(self, values: Sequence[int] | np.ndarray) -> None:
        """Give the places their values for the runs to come."""
        self.program[self.where] = np.asarray(values, np.int64)[self.which] + self.offsets


class Program:
    """Phases, made once and run often; what `words_of` gives is set between the runs."""

    def __init__(self, phases: Sequence[Sequence[Task]], named: Sequence[Mapping[str, str]] = ()) -> None:
        """`named` says of each phase by which other names its places are called in the whole."""
        words: list[int] = []
        places: dict[str, list[tuple[int, int]]] = {}

        def write(argument: Argument, names: Mapping[str, str]) -> None:
            if isinstance(argument, Place):
                places.setdefault(names.get(argument.name, argument.name), []).append((len(words), argument.offset))
                argument = 0
            words.append(argument if isinstance(argument, int) else _bits(argument))

        own_names = named or [{}] * len(phases)
        starts = []
        for phase, names in zip(phases, own_names, strict=True):
            for task in phase:
                starts.append(len(words))
                for argument in task.arguments:
                    write(argument, names)
        at_tasks, task_starts = len(words), iter(starts)
        self.words = np.zeros(at_tasks + 3 * len(starts) + 2 * len(phases), np.int64)
        first, tables = place(self.words), []
        for phase, names in zip(phases, own_names, strict=True):
            tables += [first + 8 * len(words), len(phase)]
            for task in phase:
                words += [task.kernel.address, first + 8 * next(task_starts)]
                write(task.parts, names)
        self._phases, self._count = first + 8 * len(words), len(phases)
        self.words[:] = words + tables
        self._places = {name: np.array(where, np.int64).T for name, where in places.items()}

    def words_of(self, names: Sequence[str]) -> "Words":
        """Where these places stand, to be set together; a name that the program does not use is ignored."""
        none = np.empty((2, 0), np.int64)
        found = [self._places.get(name, none) for name in names]
        which = np.repeat(np.arange(len(names)), [part.shape[1] for part in found])
        where, offsets = np.concatenate([none, *found], axis=1)
        return Words(self.words, where, which, offsets)

    def run(self) -> None:
        """All phases, in order, by the whole pool."""
        launch_phases(self._phases, self._count)


def _bits(number: float) -> int:
    return struct.unpack("q", struct.pack("d", number))[0]
