"""The values that a pass left, and those that follow from them: one array for each address that a trace may read."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from cutaway.engines.layout import BLOCK, Layout
from cutaway.engines.protocol import Engine
from cutaway.forward.parameters import Parameters
from cutaway.points import ROW_BLOCKS, Point
from cutaway.spec import ModelSpec
from cutaway.trace.capture.plan import Plan, made_from
from cutaway.trace.capture.recorder import Cut
from cutaway.trace.capture.reductions import Accumulator, Reduced
from cutaway.trace.derive import head_out_point, logits_point, pattern_rows, row_blocks_point


class Values:
    """`kept` are the arrays of one pass over one sequence; `cut` says which rows and heads of it are read.

    With `already` the pass itself kept no more than that part (but of what others are made from); without, the rest
    is let go here.
    """

    def __init__(
        self,
        engine: Engine,
        spec: ModelSpec,
        parameters: Parameters,
        plan: Plan,
        layout: Layout,
        kept: Mapping[Any, Any],
        cut: Cut,
        *,
        already: bool = False,
    ) -> None:
        self._engine, self._spec, self._parameters = engine, spec, parameters
        self._plan, self._layout, self._cut = plan, layout, cut
        # A dict is emptied by the pass that filled it; other mappings put their values together when they are read.
        self.kept: Mapping[Any, Any] = dict(kept) if isinstance(kept, dict) else kept
        self._whole = cut.whole
        if not already:
            made = {p for p in plan.points if plan.sources(spec, p) != [p]}
            needed = {source for point in made for source in made_from(spec, point)}
            self._whole = frozenset(needed | {p for p in kept if isinstance(kept[p], dict)})
            some = [p for p in kept if isinstance(p, Point) and p not in self._whole]
            self.kept = {**kept, **{point: self._part(point, self._numpy(kept[point])) for point in some}}

    def stored(self, at: Point | Reduced) -> bool:
        """Whether this value lies there as it is read."""
        return at in self.kept

    def read(self, at: Point | Reduced, made: Mapping[Any, np.ndarray] | None = None) -> np.ndarray:
        """The value at an address of the plan; `made` are others that were worked out before."""
        if at in self.kept:
            value = self.kept[at]
            if isinstance(at, Reduced):
                return np.asarray(value)
            held = self._numpy(value[0] if isinstance(value, dict) else value)  # a T × T point is kept by segment
            return self._part(at, held) if at in self._whole else held
        if isinstance(at, Reduced):
            return self._reduced(at)
        if at.name in ROW_BLOCKS:
            q, k = (self.kept[source] for source in made_from(self._spec, at))
            begun = self._begun(at, made or {}) if self._cut.rows is None and self._cut.heads is None else {}
            return self._part(at, self._numpy(row_blocks_point(self._engine, self._spec, at, q, k, begun)))
        source = made_from(self._spec, at)[0]
        if at.name == "attn.head_out":
            rows = self._rows_in(source)
            return self._in_order(at, source, self._head_out(at, source, rows), rows)
        rows = self._rows_in(source)
        return self._in_order(at, source, self._logits(source, rows), rows)

    def _begun(self, at: Point, made: Mapping[Any, np.ndarray]) -> dict[str, np.ndarray]:
        """Those of the layer's T × T points that were worked out before, by their names."""
        names = {Point(name, at.layer): name for name in ROW_BLOCKS}
        return {name: made[point] for point, name in names.items() if point in made}

    def pattern_rows(self, layer: int) -> Iterator[tuple[np.ndarray, np.ndarray]] | None:
        """The pattern of a layer in blocks, made again from its queries and keys; None where it is stored."""
        at = Point("attn.pattern", layer)
        if self._cut.rows is not None or self._cut.heads is not None or at in self.kept or at not in self._plan.points:
            return None
        q, k = (self.kept[source] for source in made_from(self._spec, at))
        return pattern_rows(self._engine, self._spec, layer, q, k)

    def _numpy(self, value: Any) -> np.ndarray:
        return value if isinstance(value, np.ndarray) else self._engine.numpy(value)

    def _part(self, point: Point, value: np.ndarray) -> np.ndarray:
        return Cut(self._cut.rows, self._cut.heads).part(point, self._spec, value)

    def _rows_in(self, source: Point) -> np.ndarray:
        """The rows of the pass that are worked out, ascending: those asked for, or all."""
        return np.arange(self._layout.rows) if self._cut.rows is None else np.unique(self._cut.rows)

    def _source_rows(self, source: Point, rows: np.ndarray) -> np.ndarray:
        """The source's values of these ascending rows."""
        value = self._numpy(self.kept[source])
        at = rows
        if source not in self._whole and self._cut.rows is not None:  # kept in the order asked for
            first = {int(row): index for index, row in reversed(list(enumerate(self._cut.rows)))}
            at = np.array([first[int(row)] for row in rows], dtype=np.intp)
        axis = source.info.shape.index("T")
        return value if len(at) == value.shape[axis] and (at == np.arange(len(at))).all() else np.take(value, at, axis)

    def _head_out(self, point: Point, source: Point, rows: np.ndarray) -> np.ndarray:
        z = self._engine.array(self._source_rows(source, rows))
        heads = self._cut.heads if source not in self._whole else None
        made = head_out_point(self._engine, self._spec, self._parameters, point, z, self._layout, rows.tolist(), heads)
        value = self._numpy(made)
        return value if heads is not None or self._cut.heads is None else value[list(self._cut.heads)]

    def _logits(self, source: Point, rows: np.ndarray) -> np.ndarray:
        final = self._engine.array(self._source_rows(source, rows))
        return self._numpy(logits_point(self._engine, self._spec, self._parameters, final, self._layout, rows.tolist()))

    def _in_order(self, point: Point, source: Point, value: np.ndarray, rows: np.ndarray) -> np.ndarray:
        if self._cut.rows is None:
            return value
        return np.take(value, np.searchsorted(rows, self._cut.rows), axis=point.info.shape.index("T"))

    def _reduced(self, at: Reduced) -> np.ndarray:
        """A reduction of what is worked out, a block of rows at a time."""
        point, source = at.point, made_from(self._spec, at.point)[0]
        order = np.arange(self._layout.rows) if self._cut.rows is None else self._cut.rows
        axis, taker = point.info.shape.index("T"), None
        work = self._head_out if point.name == "attn.head_out" else lambda _, source, rows: self._logits(source, rows)
        for start in range(0, len(order), BLOCK):
            where = np.arange(start, min(start + BLOCK, len(order)))
            rows, back = np.unique(order[where], return_inverse=True)
            block = np.take(work(point, source, rows), back, axis=axis)
            if taker is None:
                whole = (*block.shape[:axis], len(order), *block.shape[axis + 1 :])
                taker = Accumulator(at.reduction, whole, axis, block.dtype)
            taker.take(block, where)
        return taker.result() if taker is not None else np.empty(0)
