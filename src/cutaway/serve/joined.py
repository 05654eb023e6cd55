"""The values of a text whose rows were computed by several passes, joined when somebody reads them.

Each pass left the rows of its own tokens; a text that grows, or shares its beginning with a former one, refers to them
and computes only what is new. Nothing is written into what another run refers to.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np

from cutaway.points import Point

MOST_PARTS = 32  # that a text is joined from; past it the latest are copied into one
_JOINED_AT_ONCE = 16
_REMEMBERED = 48_000_000  # bytes of joined values that a run holds on to


class Part:
    """What one pass left of the points it kept: rows `[0, rows)` of it, along each value's T axis."""

    def __init__(self, values: Mapping[Point, np.ndarray], rows: int) -> None:
        self.values, self.rows = values, rows
        self._lengths: np.ndarray | None = None

    @cached_property
    def nbytes(self) -> int:
        """Bytes of its values, those that stand at two addresses counted once."""
        return sum({_place(value): value.nbytes for value in self.values.values()}.values())

    def lengths(self, points: Sequence[Point]) -> np.ndarray:
        """The lengths of the rows at `points`, `[points, rows]` float32; worked out once, for the same points."""
        if self._lengths is None:
            self._lengths = np.stack([row_lengths(self.values[point]) for point in points])
        return self._lengths

    def cut(self, rows: int) -> "Part":
        """A copy of its first rows."""
        return joined_part([(self, rows)])


def row_lengths(values: np.ndarray) -> np.ndarray:
    """The length of each row of `[T, d]`, float32 `[T]`."""
    return np.sqrt(np.einsum("td,td->t", values, values)).astype("<f4")


Used = tuple[Part, int]  # a part, and how many of its first rows a text has


def shortened(parts: Sequence[Used], rows: int) -> list[Used]:
    """The first `rows` rows of a text. A part of which less than half is left is copied, so that the rest can go."""
    kept: list[Used] = []
    for part, used in parts:
        taken = min(used, rows)
        if taken == 0:
            break
        kept.append((part.cut(taken), taken) if 2 * taken < part.rows else (part, taken))
        rows -= taken
    return kept


def lengthened(parts: Sequence[Used], part: Part) -> list[Used]:
    """A text and what follows it."""
    longer = [*parts, (part, part.rows)]
    if len(longer) <= MOST_PARTS:
        return longer
    one = joined_part(longer[-_JOINED_AT_ONCE:])
    return [*longer[:-_JOINED_AT_ONCE], (one, one.rows)]


def joined_part(parts: Sequence[Used]) -> Part:
    """One part with copies of all these rows."""
    shared = set(parts[0][0].values).intersection(*(part.values for part, _ in parts[1:]))
    values: dict[Point, np.ndarray] = {}
    made: dict[tuple, np.ndarray] = {}
    for point in parts[0][0].values:
        if point not in shared:
            continue
        sources = tuple(_place(part.values[point]) for part, _ in parts)  # what stands at two addresses is copied once
        if sources not in made:
            made[sources] = _joined(point, parts)
        values[point] = made[sources]
    return Part(values, sum(rows for _, rows in parts))


def _place(value: np.ndarray) -> tuple:
    """Where an array lies: what stands at two addresses is one array there."""
    return value.__array_interface__["data"][0], value.shape, value.strides


def _joined(point: Point, parts: Sequence[Used]) -> np.ndarray:
    axis = point.info.shape.index("T")
    return np.concatenate([_first(part.values[point], axis, rows) for part, rows in parts], axis=axis)


def _first(value: np.ndarray, axis: int, rows: int) -> np.ndarray:
    return value[(slice(None),) * axis + (slice(0, rows),)]


class Joined(Mapping[Point, np.ndarray]):
    """The values at `points` of a whole text, each put together when it is read."""

    def __init__(self, parts: Sequence[Used], points: Sequence[Point]) -> None:
        self._parts = list(parts)
        self._points = dict.fromkeys(points)
        self._made: OrderedDict[Point, np.ndarray] = OrderedDict()
        self._lock = threading.Lock()

    def __getitem__(self, point: Point) -> np.ndarray:
        if point not in self._points:
            raise KeyError(point)
        if len(self._parts) == 1:
            part, rows = self._parts[0]
            return _first(part.values[point], point.info.shape.index("T"), rows)
        with self._lock:
            if point in self._made:
                self._made.move_to_end(point)
                return self._made[point]
        made = _joined(point, self._parts)
        with self._lock:
            self._made[point] = made
            while len(self._made) > 1 and sum(value.nbytes for value in self._made.values()) > _REMEMBERED:
                self._made.popitem(last=False)
        return made

    def __contains__(self, point: object) -> bool:
        return point in self._points

    def __iter__(self) -> Iterator[Point]:
        return iter(self._points)

    def __len__(self) -> int:
        return len(self._points)
