"""The tap: the one-line protocol through which a stage shows a value, and may be handed another."""

from typing import Any, Protocol

Array = Any


class Tap(Protocol):
    """How a stage shows a value, and may be handed another to go on with.

    `tap(name, value)` returns what the stage continues with: the value itself, unless someone edits it.
    `tap.rows(name, value, segment, start)` does the same for a block of query rows of a `[H, R, S]` point,
    whose first row is row `start` of its segment. `tap.at(i)` is the tap of layer i.

    `shown` names the points of this layer (outside the layers: of the rest) that somebody wants to see, `altered`
    those at which a value may come back changed. What is in neither may be worked out in any way that gives the
    same result, and need not be shown.
    """

    @property
    def shown(self) -> frozenset[str]: ...

    @property
    def altered(self) -> frozenset[str]: ...

    def __call__(self, name: str, value: Array) -> Array: ...

    def rows(self, name: str, value: Array, segment: int, start: int) -> Array: ...

    def at(self, layer: int) -> "Tap": ...


class Unwatched:
    """The tap of a pass that nobody looks at."""

    shown: frozenset[str] = frozenset()
    altered: frozenset[str] = frozenset()

    def __call__(self, name: str, value: Array) -> Array:
        return value

    def rows(self, name: str, value: Array, segment: int, start: int) -> Array:
        return value

    def at(self, layer: int) -> "Unwatched":
        return self
