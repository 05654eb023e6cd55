"""Watching a pass: the tap that keeps the values of the points that were asked for."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from cutaway.engines.layout import Layout
from cutaway.engines.protocol import Array, Engine
from cutaway.points import Point

ROW_BLOCKS = ("attn.dots", "attn.scores", "attn.masked", "attn.pattern")  # made block by block, T × T in all

# What stands in the cells that no block computed: those past the last key that the block may see.
_UNSEEN = {"attn.masked": -np.inf, "attn.pattern": 0.0, "attn.dots": np.nan, "attn.scores": np.nan}


class Recorder:
    """A tap that keeps `wanted` points of one packed pass, for every segment by itself.

    Values are kept as they are, not copied: no stage writes into an array that it has shown. Only the blocks
    of T × T points stand in a scratch and are copied.
    """

    def __init__(self, engine: Engine, layout: Layout, wanted: Iterable[Point]) -> None:
        self._engine = engine
        self._layout = layout
        self.kept: dict[Point, Any] = {}
        names: dict[int | None, set[str]] = {}
        for point in wanted:
            names.setdefault(point.layer, set()).add(point.name)
        self._names = {layer: frozenset(inside) for layer, inside in names.items()}
        self._here = _LayerTap(self, None)

    @property
    def shown(self) -> frozenset[str]:
        return self._here.shown

    @property
    def altered(self) -> frozenset[str]:
        return self._here.altered

    def __call__(self, name: str, value: Array) -> Array:
        return self._here(name, value)

    def rows(self, name: str, value: Array, segment: int, start: int) -> Array:
        return value

    def at(self, layer: int) -> "_LayerTap":
        return _LayerTap(self, layer)

    def names(self, layer: int | None) -> frozenset[str]:
        """The points wanted in this layer or, with None, outside the layers."""
        return self._names.get(layer, frozenset())

    def keep(self, point: Point, value: Array) -> None:
        self.kept[point] = value

    def keep_rows(self, point: Point, value: Array, index: int, start: int) -> None:
        """Copy a block `[H, R, S]` into the segment's whole `[H, T, past + T]`."""
        segment = self._layout.segments[index]
        wholes = self.kept.setdefault(point, {})
        if index not in wholes:
            whole = self._engine.empty((value.shape[0], segment.length, segment.end))
            whole[...] = _UNSEEN[point.name]
            wholes[index] = whole
        wholes[index][:, start : start + value.shape[1], : value.shape[2]] = value


class _LayerTap:
    """The recorder's tap in one layer (or, with None, outside the layers)."""

    altered: frozenset[str] = frozenset()

    def __init__(self, recorder: Recorder, layer: int | None) -> None:
        self._recorder = recorder
        self._layer = layer
        self.shown = recorder.names(layer)

    def __call__(self, name: str, value: Array) -> Array:
        if name in self.shown:
            self._recorder.keep(Point(name, self._layer), value)
        return value

    def rows(self, name: str, value: Array, segment: int, start: int) -> Array:
        if name in self.shown:
            self._recorder.keep_rows(Point(name, self._layer), value, segment, start)
        return value

    def at(self, layer: int) -> "_LayerTap":
        return self._recorder.at(layer)
