"""Which part of a value is meant: positions, heads, neurons, experts, keys, tokens, as the axes of a point allow."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cutaway.errors import CutawayError
from cutaway.points import Point, shape_of, shape_symbols
from cutaway.spec import ModelSpec
from cutaway.spec.check import is_whole

# What an axis is called where a part of it is chosen.
AXES = {"T": "positions", "H": "heads", "H_kv": "heads", "d_ff": "neurons", "E": "experts", "S": "keys", "V": "tokens"}
SELECTIONS = ("positions", "heads", "neurons", "experts", "keys", "tokens")


@dataclass(frozen=True, eq=False)
class Place:
    """Where a block of numbers stands: its point, and which indices its axes hold.

    `positions` are those of its rows in the text, `int [R]`; `indices` the index of every axis in the whole value,
    in order. `rows_of` is the whole value, `known` what earlier points of the pass were seen at.
    """

    point: Point
    spec: ModelSpec
    positions: np.ndarray
    indices: tuple[np.ndarray, ...]
    prompt_length: int
    whole: np.ndarray
    known: dict[Point, np.ndarray] = field(default_factory=dict)

    @property
    def symbols(self) -> tuple[str, ...]:
        return self.point.info.shape

    def axis(self, *symbols: str) -> int | None:
        """Which axis is one of these; None where none is."""
        found = [index for index, symbol in enumerate(self.symbols) if symbol in symbols]
        return found[0] if found else None

    @property
    def heads(self) -> np.ndarray | None:
        """The heads (for keys and values: key/value heads) that the block holds; None where the point has none."""
        axis = self.axis("H", "H_kv")
        return None if axis is None else self.indices[axis]

    @property
    def keys(self) -> np.ndarray:
        """The positions of the keys of a T × T point."""
        return self.indices[-1]


def selection(name: str, value: Any) -> Any:
    """A choice in its one form: None, a tuple of whole numbers or, for positions, a range "a:b" of them."""
    if value is None:
        return None
    if name == "positions" and isinstance(value, slice):
        value = f"{'' if value.start is None else value.start}:{'' if value.stop is None else value.stop}"
    if name == "positions" and isinstance(value, str):
        try:
            _ends(value)
        except ValueError:
            raise CutawayError(f"positions is {value!r}; a range of them is written '5:', ':-1' or '2:8'.") from None
        return value
    listed = (value,) if is_whole(value) else value
    if isinstance(listed, str) or not isinstance(listed, Sequence | np.ndarray | range) or len(listed) == 0:
        raise CutawayError(f"{name} is {value!r}; it must be a list of whole numbers, as in [0, 5].")
    for one in listed:
        if not is_whole(one):
            raise CutawayError(f"{name} holds {one!r}; it must be a list of whole numbers, as in [0, 5].")
        if one < 0 and name not in ("positions", "source_positions"):
            raise CutawayError(f"{name} holds {one}; it must be a list of whole numbers from 0, as in [0, 5].")
    return tuple(int(one) for one in listed)


def check_selection(edit: Any, point: Point, spec: ModelSpec, length: int, *, grows: bool) -> None:
    """Raise CutawayError for a choice that the point has no axis for, or that is not there.

    `length` is that of the prompt; with `grows` later positions will come.
    """
    symbols, sizes = point.info.shape, shape_of(point, spec, length)
    slots = point.name.startswith("moe.") and "k" in symbols
    for name in SELECTIONS:
        chosen = getattr(edit, name)
        if chosen is None or (name == "experts" and slots):
            continue
        axes = [index for index, symbol in enumerate(symbols) if AXES.get(symbol) == name]
        if not axes:
            shown = ", ".join(shape_symbols(point, spec))
            raise CutawayError(f"{point} is [{shown}] and has no {name} to choose from; leave {name}= out.")
        if name == "positions" and isinstance(chosen, str):
            start, stop = _resolved(chosen, length)
            if (stop is not None and stop <= start) or (start >= length and not grows):
                raise CutawayError(f"The positions {chosen!r} hold none of the prompt's 0 to {length - 1}.")
            continue
        size = sizes[axes[0]]
        for one in chosen:
            low = -size if name == "positions" else 0
            if one < low or (one >= size and not (grows and name in ("positions", "keys"))):
                what = "the prompt" if name in ("positions", "keys") else str(point)
                kind = "key/value heads" if symbols[axes[0]] == "H_kv" else name
                raise CutawayError(
                    f"{name[:-1].capitalize()} {one} was asked for; {what} has {kind} 0 to {size - 1}"
                    f"{_whose(one, size, point, spec) if kind != name else '.'}"
                )


def _whose(head: int, size: int, point: Point, spec: ModelSpec) -> str:
    """Which of the key/value heads serves a query head, for who meant that one."""
    n_heads = spec.layers[point.layer or 0].attention.n_heads
    if head >= n_heads:
        return "."
    return f", which an edit counts; query head {head} is served by {head * size // n_heads}."


def rows_chosen(chosen: Any, positions: np.ndarray, length: int) -> np.ndarray:
    """Which of the rows at these `positions` are meant: their indices."""
    if chosen is None:
        return np.arange(len(positions))
    if isinstance(chosen, str):
        start, stop = _resolved(chosen, length)
        inside = positions >= start
        return np.flatnonzero(inside if stop is None else inside & (positions < stop))
    return np.flatnonzero(np.isin(positions, resolved_positions(chosen, length)))


def resolved_positions(chosen: Sequence[int], length: int) -> list[int]:
    """Negative positions count from the end of the prompt."""
    return [one + length if one < 0 else one for one in chosen]


def first_position(chosen: Any, length: int, *, last: bool = False) -> int:
    """The first position that such a choice can hold; with `last` the last one of a list."""
    if chosen is None:
        return 0
    if isinstance(chosen, str):
        return _resolved(chosen, length)[0]
    return (max if last else min)(resolved_positions(chosen, length))


def in_words(edit: Any) -> str:
    """The address and what is selected there, as people read it."""
    chosen = [f"{name} {_listed(getattr(edit, name))}" for name in SELECTIONS if getattr(edit, name) is not None]
    return ", ".join([" and ".join(edit.at), *chosen])


def _listed(chosen: Any) -> str:
    return f"[{chosen}]" if isinstance(chosen, str) else ", ".join(map(str, chosen))


def _ends(text: str) -> tuple[int | None, int | None]:
    start, stop = text.split(":")
    return (int(start) if start else None), (int(stop) if stop else None)


def _resolved(text: str, length: int) -> tuple[int, int | None]:
    start, stop = (end + length if end is not None and end < 0 else end for end in _ends(text))
    return max(start or 0, 0), stop
