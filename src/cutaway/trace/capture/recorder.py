"""Watching a pass: the tap that keeps the values of the points that were asked for."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cutaway.engines.layout import Layout
from cutaway.engines.protocol import Array, Engine
from cutaway.points import Point
from cutaway.spec import ModelSpec
from cutaway.trace.capture.reductions import Accumulator, Reduced
from cutaway.trace.capture.spill import Spill

# What stands in the cells that no block computed: those past the last key that the block may see.
UNSEEN = {"attn.masked": -np.inf, "attn.pattern": 0.0, "attn.dots": np.nan, "attn.scores": np.nan}

__all__ = ["Cut", "Recorder"]


@dataclass(frozen=True, eq=False)
class Cut:
    """Which part of values is kept: `rows` of the (only) sequence, some `heads`; of the points `whole` everything."""

    rows: np.ndarray | None = None
    heads: tuple[int, ...] | None = None
    whole: frozenset[Point] = frozenset()

    def heads_of(self, point: Point, spec: ModelSpec) -> np.ndarray | None:
        """The heads that are kept of a point; where keys and values have fewer, those that serve the chosen ones."""
        symbols = point.info.shape
        if self.heads is None or point in self.whole or not {"H", "H_kv"} & set(symbols):
            return None
        if "H" in symbols:
            return np.array(self.heads)
        attention = spec.layers[point.layer or 0].attention
        group = attention.n_heads // attention.n_kv_heads
        return np.array(sorted({head // group for head in self.heads}))

    def rows_of(self, point: Point) -> np.ndarray | None:
        return None if point in self.whole or "T" not in point.info.shape else self.rows

    def part(self, point: Point, spec: ModelSpec, value: np.ndarray) -> np.ndarray:
        """What is kept of a whole value: itself, or a copy of a part of it."""
        heads, rows = self.heads_of(point, spec), self.rows_of(point)
        if heads is not None:
            value = value[heads]
        return value if rows is None else np.take(value, rows, axis=point.info.shape.index("T"))


class Recorder:
    """A tap that keeps `wanted` points of one packed pass, for every segment by itself.

    Values are kept as they are, not copied: no stage writes into an array that it has shown. Only the blocks
    of T × T points stand in a scratch and are copied. Of `reduced` points the reductions are kept, made as the
    values come by; `cut` keeps a part of every value, `spill` keeps them in a file (both need `spec`).
    """

    def __init__(
        self,
        engine: Engine,
        layout: Layout,
        wanted: Iterable[Point],
        *,
        spec: ModelSpec | None = None,
        reduced: Sequence[Reduced] = (),
        cut: Cut | None = None,
        spill: Spill | None = None,
    ) -> None:
        self._engine, self._layout, self._spec, self._spill = engine, layout, spec, spill
        self._cut = cut if cut is not None and (cut.rows is not None or cut.heads is not None) else None
        self.kept: dict[Point | Reduced, Any] = {}
        self._wanted = frozenset(wanted)
        self._reduced: dict[Point, list[Reduced]] = {}
        for one in reduced:
            self._reduced.setdefault(one.point, []).append(one)
        self._takers: dict[Reduced, Accumulator] = {}
        names: dict[int | None, set[str]] = {}
        for point in (*self._wanted, *self._reduced):
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
        if self._cut is not None or self._spill is not None or point in self._reduced:
            part = self._engine.numpy(value)
            if self._cut is not None and self._spec is not None:
                part = self._cut.part(point, self._spec, part)
            for one in self._reduced.get(point, ()):
                rows = point.info.shape.index("T")
                taker = Accumulator(one.reduction, part.shape, rows, part.dtype)
                taker.take(part, np.arange(part.shape[rows]))
                self.kept[one] = taker.result()
            if part is not value:  # a part, or an engine's own array: this is what is kept
                value = part
        if point in self._wanted:
            self.kept[point] = value if self._spill is None else self._spill.store(self._engine.numpy(value))

    def keep_rows(self, point: Point, value: Array, index: int, start: int) -> None:
        """Copy a block `[H, R, S]` into the segment's whole `[H, T, past + T]`, or what is kept of it."""
        segment = self._layout.segments[index]
        heads = rows = None
        if self._cut is not None and self._spec is not None:
            heads, rows = self._cut.heads_of(point, self._spec), self._cut.rows_of(point)
            value = self._engine.numpy(value)
        if heads is not None:
            value = value[heads]
        here, count = np.arange(start, start + value.shape[1]), segment.length
        if rows is not None:
            here = np.flatnonzero((rows >= start) & (rows < start + value.shape[1]))
            value, count = value[:, rows[here] - start], len(rows)
        shape = (value.shape[0], count, segment.end)
        if point in self._wanted:
            wholes = self.kept.setdefault(point, {})
            if index not in wholes:
                if self._spill is not None:
                    whole = self._spill.empty(shape, self._engine.numpy(value).dtype)
                else:
                    whole = self._engine.empty(shape) if self._cut is None else np.empty(shape, value.dtype)
                wholes[index] = whole
            where, seen = slice(start, start + value.shape[1]) if rows is None else here, value.shape[2]
            wholes[index][:, where, :seen] = value if self._spill is None else self._engine.numpy(value)
            wholes[index][:, where, seen:] = UNSEEN[point.name]
        for one in self._reduced.get(point, ()):
            if one not in self._takers:
                dtype = self._engine.numpy(value).dtype
                self._takers[one] = Accumulator(one.reduction, shape, 1, dtype, UNSEEN[point.name])
            self._takers[one].take(self._engine.numpy(value), here)
            if self._takers[one].complete:  # what it adds up in is more than what is left of it
                self.kept[one] = self._takers.pop(one).result()

    def finish(self) -> None:
        """After the pass: what was gathered block by block is put together."""
        for one, taker in self._takers.items():
            self.kept[one] = taker.result()
        self._takers.clear()


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
