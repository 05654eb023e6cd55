"""A long pass is seen to move: a bar over the layers, on a terminal and after a second; no number is touched."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cutaway.engines.protocol import Array
from cutaway.points import Tap, Unwatched
from cutaway.progress import progress
from cutaway.spec import ModelSpec


@contextmanager
def layers_shown(spec: ModelSpec, tap: Tap | None = None) -> Iterator[Tap]:
    """A tap to run one pass of `spec` with, in place of `tap`, that moves a bar whenever a layer is done."""
    with progress(f"Running {spec.name}", spec.n_layers, "layers", after=1.0) as advance:
        yield _LayerByLayer(tap if tap is not None else Unwatched(), advance)


class _LayerByLayer:
    """Hands everything on to another tap; that layer i shows something says that all before it are done."""

    def __init__(self, tap: Tap, advance: Callable[[int], None]) -> None:
        self._tap = tap
        self._advance = advance
        self._done = 0
        self.shown = tap.shown
        self.altered = tap.altered

    def __call__(self, name: str, value: Array) -> Array:
        return self._tap(name, value)

    def rows(self, name: str, value: Array, segment: int, start: int) -> Array:
        return self._tap.rows(name, value, segment, start)

    def at(self, layer: int) -> Tap:
        return _InALayer(self, self._tap.at(layer), layer)

    def reached(self, layer: int) -> None:
        if layer > self._done:
            self._advance(layer - self._done)
            self._done = layer


class _InALayer:
    """The other tap's in one layer."""

    def __init__(self, whole: _LayerByLayer, tap: Tap, layer: int) -> None:
        self._whole, self._tap, self._layer = whole, tap, layer
        self.shown = tap.shown
        self.altered = tap.altered

    def __call__(self, name: str, value: Array) -> Array:
        self._whole.reached(self._layer)
        return self._tap(name, value)

    def rows(self, name: str, value: Array, segment: int, start: int) -> Array:
        return self._tap.rows(name, value, segment, start)

    def at(self, layer: int) -> Tap:
        return self._whole.at(layer)
