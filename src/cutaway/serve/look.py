"""A run as one request reads it: what it asked for stays, whatever the run lets go of meanwhile."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from cutaway.engines.layout import Layout
from cutaway.errors import CutawayError
from cutaway.points import Point
from cutaway.serve.arithmetic import Arithmetic
from cutaway.trace.capture.plan import made_from
from cutaway.trace.derive import head_out_point, row_blocks_point
from cutaway.trace.drawing.edges import hidden_cells

if TYPE_CHECKING:
    from cutaway.model import Model
    from cutaway.serve.runs import Run
    from cutaway.trace import Prompt, Trace

_WHOLE_SQUARES = 512  # tokens up to which T × T points of all heads are worked out at once


class Look:
    """The values of a run that `traces` hold."""

    def __init__(self, run: "Run", traces: "Sequence[Trace]") -> None:
        self._run, self._traces = run, tuple(traces)
        self.model: Model = run.model
        self.trace: Trace = run.trace
        self.prompt: Prompt = run.trace.prompt
        self.length = run.length

    def missing(self, points: Iterable[Point]) -> list[Point]:
        """Those of `points` that no pass behind this look has kept."""
        return [point for point in points if not any(point in trace for trace in self._traces)]

    @property
    def arithmetic(self) -> Arithmetic:
        """What explains single numbers."""
        run = self._run
        return Arithmetic(
            run.trace.spec, run.model.parameters, self.value, self.one_head, self.prompt.pieces, run.edited_points
        )

    def value(self, point: Point) -> np.ndarray:
        """The tensor at `point`, which must have been captured."""
        if point.name == "logits" and self.length > _WHOLE_SQUARES:
            raise CutawayError(f"The logits of all {self.length} positions are too many to hold; ask for the last row.")
        return self._holding(point)[point]

    def one_head(self, point: Point, head: int) -> np.ndarray:
        """`[T, S]` of one head of a T × T point, or its `[T, d]` of `attn.head_out`; the same bits as among all heads.

        Only the heads that are looked at are worked out: of T × T points in long prompts, of `attn.head_out`, where
        every head takes a product with all of W_O, in any.
        """
        if point.name == "attn.head_out":
            if str(point) in self._run.edited_points:  # what was edited is stored, not worked out again
                return self.value(point)[head]
            return self._run.squares.get((point, head), lambda: self._through_output(point, head))
        if self.length <= _WHOLE_SQUARES or self._run.edits:  # what was edited is stored, not worked out again
            return self.value(point)[head]
        return self._run.squares.get((point, head), lambda: self._square(point, head))

    def hidden(self, layer: int) -> np.ndarray:
        """What the mask of a layer forbids, `bool [T, S]`."""
        rule = self.trace.spec.layers[layer].attention
        key = (rule.causal, rule.window, rule.chunk)
        return self._run.hidden.get(key, lambda: hidden_cells(self.trace, layer))

    def _square(self, point: Point, head: int) -> np.ndarray:
        spec, engine = self.trace.spec, self.model.engine
        q, k = (self._holding(point)[source] for source in made_from(spec, point))
        group = head * len(k) // len(q)
        one = engine.array(q[head : head + 1]), engine.array(k[group : group + 1])
        made: np.ndarray = engine.numpy(row_blocks_point(engine, spec, point, *one))[0]
        return made

    def _through_output(self, point: Point, head: int) -> np.ndarray:
        model, z = self.model, self.value(Point("attn.z", point.layer))[head : head + 1]
        layout = Layout.of([self.length])
        made = head_out_point(
            model.engine,
            self.trace.spec,
            model.parameters,
            point,
            model.engine.array(z),
            layout,
            range(self.length),
            [head],
        )
        out: np.ndarray = model.engine.numpy(made)[0]
        return out

    def _holding(self, point: Point) -> "Trace":
        for trace in self._traces:
            if point in trace:
                return trace
        raise CutawayError(f"{point} has not been computed in this run.")
