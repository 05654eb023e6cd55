"""Passes that pages look at: held by an id, the least recently used let go of past a number of bytes."""

import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from cutaway.errors import CutawayError
from cutaway.points import Point, dot_inputs, layer_names, points_of
from cutaway.serve.arithmetic import Arithmetic
from cutaway.trace.bill import activation_bytes
from cutaway.trace.derive import row_blocks_point
from cutaway.trace.edits import Edit
from cutaway.trace.plan import OVERVIEW, made_from
from cutaway.trace.recorder import ROW_BLOCKS

if TYPE_CHECKING:
    from cutaway.model import Model
    from cutaway.trace import Prompt, Trace

ALL_AT_ONCE = 96_000_000  # bytes up to which a pass keeps everything
MOST_BYTES = 1_200_000_000  # of all runs together; the latest stays whatever it weighs
_WHOLE_SQUARES = 512  # tokens up to which T × T points of all heads are worked out at once
_SQUARES = 6  # heads' squares of long prompts that a run holds on to


class Run:
    """One pass and what has been looked at of it."""

    def __init__(self, model: "Model", prompt: "Prompt", edits: Sequence[Edit] = ()) -> None:
        self.id = secrets.token_urlsafe(9)
        self.model = model
        self.edits = tuple(edits)
        self.prompt = prompt
        ids = prompt.ids
        everything = points_of(model.spec)
        size = model.engine.dtype.itemsize
        made = (*ROW_BLOCKS, "attn.head_out", "logits")
        cheap = [point for point in everything if point.name not in made]
        self.captured: Literal["all", "overview"] = "all"
        self.nbytes = activation_bytes(model.spec, len(ids), cheap, size)
        if self.nbytes > ALL_AT_ONCE:
            self.captured = "overview"
            everything = _overview(model)
            self.nbytes = activation_bytes(
                model.spec, len(ids), [point for point in everything if point.name not in made], size
            )
        # Patterns, not points one by one: each of hundreds would be looked for among hundreds.
        self.trace: Trace = self._traced(ids, ["*"] if self.captured == "all" else _patterns(everything))
        self._more: list[Trace] = []
        self._squares: OrderedDict[tuple[Point, int], np.ndarray] = OrderedDict()
        self._lock = threading.Lock()
        edited = {place for report in self.trace.edits for place in report.fired} if self.edits else set()
        pieces = self.trace.prompt.pieces
        self.arithmetic = Arithmetic(self.trace.spec, model.parameters, self.value, self.square, pieces, edited)

    @property
    def length(self) -> int:
        return len(self.trace.prompt.ids)

    def missing(self, points: Iterable[Point]) -> list[Point]:
        """Those of `points` that no pass has kept so far."""
        return [point for point in points if self._holding(point) is None]

    def capture(self, points: Sequence[Point]) -> None:
        """Run the pass again for these points; it gives the same numbers, bit for bit."""
        wanted = self.missing(points)
        if wanted:
            sources = {source for point in wanted for source in made_from(self.model.spec, point)}
            self._more = [*self._more[-1:], self._traced(self.trace.prompt.ids, [*wanted, *sources])]

    def value(self, point: Point) -> np.ndarray:
        """The tensor at `point`, which must have been captured."""
        trace = self._holding(point)
        if trace is None:
            raise CutawayError(f"{point} has not been computed in this run.")
        if point.name == "logits" and self.length > _WHOLE_SQUARES:
            raise CutawayError(f"The logits of all {self.length} positions are too many to hold; ask for the last row.")
        return trace[point]

    def square(self, point: Point, head: int) -> np.ndarray:
        """`[T, S]` of one head of a T × T point; of long prompts only the heads that are looked at are worked out."""
        if self.length <= _WHOLE_SQUARES or self.edits:  # what was edited is stored, not worked out again
            return self.value(point)[head]
        key = (point, head)
        with self._lock:
            if key in self._squares:
                self._squares.move_to_end(key)
                return self._squares[key]
        spec, engine = self.trace.spec, self.model.engine
        q, k = (self.value(source) for source in made_from(spec, point))
        group = head * len(k) // len(q)
        made = engine.numpy(
            row_blocks_point(engine, spec, point, engine.array(q[head : head + 1]), engine.array(k[group : group + 1]))
        )[0]
        with self._lock:
            self._squares[key] = made
            while len(self._squares) > _SQUARES:
                self._squares.popitem(last=False)
        return made

    def layer_points(self, layer: int) -> list[Point]:
        """All that stands in a layer, and the stream before it."""
        before = Point("resid_post", layer - 1) if layer > 0 else Point("embed.out")
        return [before, *(Point(name, layer) for name in layer_names(self.model.spec, layer))]

    def _traced(self, ids: Sequence[int], points: Sequence[Point | str]) -> "Trace":
        return self.model.trace(list(ids), points=list(dict.fromkeys(points)), edits=self.edits)

    def _holding(self, point: Point) -> "Trace | None":
        return next((trace for trace in (self.trace, *reversed(self._more)) if point in trace), None)


def _patterns(points: Sequence[Point]) -> list[str]:
    """Patterns that name these points, in as few words as they can where they stand in every layer."""
    return list({point.name if point.layer is None else f"layers.*.{point.name}": None for point in points})


def _overview(model: "Model") -> list[Point]:
    """What the overviews read: streams and what is added, and what the patterns follow from."""
    spec = model.spec
    kept = (*OVERVIEW, "resid_mid")
    chosen = [point for point in points_of(spec) if point.layer is None or point.name in kept]
    chosen += [Point("resid_pre", i) for i in range(spec.n_layers) if spec.layers[i].parallel]
    inputs = [Point(name, i) for i in range(spec.n_layers) for name in dot_inputs(spec.layers[i].attention)]
    return [point for point in points_of(spec) if point in {*chosen, *inputs}]


class Runs:
    """The runs that are held, by id."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._held: OrderedDict[str, Run] = OrderedDict()
        self._most = most_bytes
        self._lock = threading.Lock()

    def add(self, run: Run) -> None:
        """Hold a run; the least recently used go where all together weigh too much."""
        with self._lock:
            self._held[run.id] = run
            while len(self._held) > 1 and sum(held.nbytes for held in self._held.values()) > self._most:
                self._held.popitem(last=False)

    def get(self, name: str) -> Run:
        """The run of this id. Raises KeyError where it is not held (any more)."""
        with self._lock:
            self._held.move_to_end(name)
            return self._held[name]

    def __len__(self) -> int:
        return len(self._held)
