"""The graph of a pass: its values as tensors that remember how they were made, and the way back through them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cutaway.engines.layout import Layout
from cutaway.engines.protocol import Array, Engine
from cutaway.errors import CutawayError, UnknownPoint
from cutaway.forward.layers_shown import layers_shown
from cutaway.forward.parameters import Parameters
from cutaway.forward.transformer import transformer
from cutaway.points import Pattern, Point, Tap, parse_point
from cutaway.spec import ModelSpec
from cutaway.trace.capture.bill import WHOLE_NUMBERS
from cutaway.trace.capture.plan import Plan, make_plan
from cutaway.trace.capture.recorder import UNSEEN

Metric = Callable[["Tensors"], Any]  # a number (a tensor of one element) from the tensors of a pass
RAW, HEAD_OUT = "attn.raw", "attn.head_out"


class GraphTap:
    """A tap that keeps the values of a pass as they hang together, so that gradients can be followed back.

    Values that nothing was computed for (the rows looked up in the embeddings) begin the graph. The blocks of T × T
    points are kept one by one, as the pass made and used them.
    """

    altered: frozenset[str] = frozenset()

    def __init__(
        self, wanted: frozenset[Point], kept: dict[Point, Any] | None = None, layer: int | None = None
    ) -> None:
        self.kept: dict[Point, Any] = {} if kept is None else kept
        self._wanted, self._layer = wanted, layer
        self.shown = frozenset(point.name for point in wanted if point.layer == layer)

    def __call__(self, name: str, value: Array) -> Array:
        numbers = not isinstance(value, np.ndarray)  # ids and the experts chosen are whole numbers, in NumPy
        if numbers and not value.requires_grad:
            value = value.detach().requires_grad_()
        if name in self.shown:
            self.kept[Point(name, self._layer)] = value
        return value

    def rows(self, name: str, value: Array, segment: int, start: int) -> Array:
        if name in self.shown:
            self.kept.setdefault(Point(name, self._layer), []).append(value)
        return value

    def at(self, layer: int) -> "GraphTap":
        return GraphTap(self._wanted, self.kept, layer)


class Tensors(Mapping[str, Any]):
    """The values of a pass as tensors that remember how they were made: what a metric is computed from.

    Reads like a trace: `tensors["layers.3.attn.z"]`, `tensors.logits`, `tensors.last_logits`.
    """

    def __init__(self, spec: ModelSpec, plan: Plan, kept: dict[Point, Any], length: int) -> None:
        self._spec, self._kept, self._length = spec, kept, length
        made = {str(point): point for point in plan.points if point.name not in (*WHOLE_NUMBERS, HEAD_OUT)}
        self._addresses = made | ({} if spec.headless else {"logits": Point("logits")})

    def __iter__(self) -> Iterator[str]:
        return iter(self._addresses)

    def __len__(self) -> int:
        return len(self._addresses)

    def __getitem__(self, point: str | Point) -> Any:
        """The tensor at an address. Raises UnknownPoint for one that was not asked for, or that is not of the graph."""
        at = self._addresses.get(str(point)) or parse_point(point, self._spec)
        if at.name in WHOLE_NUMBERS:
            raise UnknownPoint(f"{at} holds whole numbers: nothing can be followed back from there.")
        if at.name == HEAD_OUT:
            raise UnknownPoint(f"{at} is worked out after the pass; compute the metric from attn.z or attn.raw.")
        if str(at) not in self._addresses:
            raise UnknownPoint(f"{at} was not captured in this trace; ask for it: points=[…, {str(at)!r}].")
        kept = self._kept[at]
        return _one_below_the_other(kept, self._length, UNSEEN[at.name]) if isinstance(kept, list) else kept

    @property
    def logits(self) -> Any:
        """`[T, V]`: the scores of the next token after each position."""
        return self["logits"]

    @property
    def last_logits(self) -> Any:
        """`[V]`: the scores of the next token after the whole prompt."""
        return self["logits"][-1]


class Graph:
    """The tensors of one pass, the way back through them, and the gradients that were last worked out."""

    def __init__(self, engine: Engine, spec: ModelSpec, plan: Plan, kept: dict[Point, Any], length: int) -> None:
        self.tensors = Tensors(spec, plan, kept, length)
        self._engine, self._spec, self._kept, self._length = engine, spec, kept, length
        self._points = [point for point in plan.points if point.name not in WHOLE_NUMBERS]
        self.grad: Gradients | None = None

    def values(self) -> dict[Point, Any]:
        """What was kept, out of the graph, as a trace holds it."""
        found: dict[Point, Any] = {}
        for point, kept in self._kept.items():
            if isinstance(kept, list):
                blocks = [block.detach() for block in kept]
                found[point] = {0: _one_below_the_other(blocks, self._length, UNSEEN[point.name])}
            else:
                found[point] = kept if isinstance(kept, np.ndarray) else kept.detach()
        return found

    def backward(self, metric: Any) -> None:
        """Gradients of `metric` at every point of the plan."""
        import torch

        with torch.enable_grad():
            value = metric(self.tensors) if callable(metric) else metric
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            what = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise CutawayError(
                f"The metric is {what}; it must be one number, computed with torch from the tensors that it is given "
                "(or from `tensors` of the trace), as in lambda run: run.logits[-1, 7]."
            )
        if not value.requires_grad:
            raise CutawayError("The metric was made from nothing of this pass, so that it has no gradient anywhere.")
        places = {place: self._kept[place] for place in map(_where, self._points)}
        tensors = [tensor for kept in places.values() for tensor in (kept if isinstance(kept, list) else [kept])]
        # The graph is kept: another metric of the same pass costs another way back, not another pass.
        ones = [torch.ones_like(value)]
        found = torch.autograd.grad([value], tensors, ones, retain_graph=True, allow_unused=True)
        if tensors and all(slope is None for slope in found):
            raise CutawayError("The metric depends on none of the points that this trace kept.")
        left = iter(torch.zeros_like(t) if slope is None else slope for t, slope in zip(tensors, found, strict=True))
        slopes = {}
        for place, kept in places.items():
            if isinstance(kept, list):  # 0 for pairs that no block compared
                slope = _one_below_the_other([next(left) for _ in kept], self._length, 0.0)
            else:
                slope = next(left)
            slopes[place] = self._engine.numpy(slope)
        self.grad = Gradients(self._spec, {point: self._shaped(point, slopes[_where(point)]) for point in self._points})

    def _shaped(self, point: Point, slope: np.ndarray) -> np.ndarray:
        if point.name == HEAD_OUT:
            slope = np.broadcast_to(slope, (self._spec.layers[point.layer or 0].attention.n_heads, *slope.shape))
        slope = slope.view()
        slope.flags.writeable = False
        return slope


def _where(point: Point) -> Point:
    """Where the gradient of a point is found: the heads' outputs share that of `attn.raw`, which is their sum."""
    return Point(RAW, point.layer) if point.name == HEAD_OUT else point


def _one_below_the_other(blocks: Sequence[Any], length: int, unseen: float) -> Any:
    """The blocks `[H, R, S]` of a T × T point as one tensor `[H, T, T]`."""
    import torch

    wide = [torch.nn.functional.pad(block, (0, length - block.shape[-1]), value=unseen) for block in blocks]
    return torch.cat(wide, dim=1)


class Gradients(Mapping[str, np.ndarray]):
    """By address, how fast the metric grows with each number at that point: arrays shaped like the trace's."""

    def __init__(self, spec: ModelSpec, slopes: dict[Point, np.ndarray]) -> None:
        self._spec = spec
        self._slopes = {str(point): slope for point, slope in slopes.items()}

    def __iter__(self) -> Iterator[str]:
        return iter(self._slopes)

    def __len__(self) -> int:
        return len(self._slopes)

    def __getitem__(self, point: str | Point) -> np.ndarray:
        """The gradient at an address. Raises UnknownPoint where the trace did not keep it, or it has none."""
        at = str(point) if str(point) in self._slopes else str(parse_point(point, self._spec))
        if at not in self._slopes:
            if parse_point(at, self._spec).name in WHOLE_NUMBERS:
                raise UnknownPoint(f"{at} holds whole numbers, at which nothing has a gradient.")
            raise UnknownPoint(f"{at} was not captured in this trace; ask for it: points=[…, {at!r}].")
        return self._slopes[at]


@dataclass(frozen=True, eq=False)
class ConnectedRun:
    """A pass with its graph: the last stream and all logits in NumPy, and what a trace is made from."""

    plan: Plan
    layout: Layout
    values: dict[Point, Any]
    final: np.ndarray
    logits: np.ndarray | None
    graph: Graph


def run_connected(
    engine: Engine,
    spec: ModelSpec,
    parameters: Parameters,
    sequence: np.ndarray,
    points: Pattern | Iterable[Pattern] | None,
    types: np.ndarray | None = None,
    altered: frozenset[Point] = frozenset(),
    around: Callable[[Tap, Layout], Tap] = lambda tap, layout: tap,
) -> ConnectedRun:
    """One pass over ids `[T]` or vectors `[T, d]` whose values stay connected, on an engine that keeps gradients.

    `around` puts edits around the tap that keeps the values, which act at the points `altered`.
    """
    import torch

    plan = make_plan(spec, points, stored=True, altered=altered, tokens=sequence.ndim == 1)
    if plan.reduced:
        point = plan.reduced[0].point
        raise CutawayError(f"{plan.reduced[0]} is a reduction, which has no gradient; ask for {point} itself.")
    outer = {Point(RAW, point.layer) for point in plan.points if point.name == HEAD_OUT}
    wanted = plan.kept | outer | (set() if spec.headless else {Point("logits")})
    graph_tap, layout = GraphTap(wanted), Layout.of([len(sequence)])
    with torch.enable_grad(), layers_shown(spec, around(graph_tap, layout)) as tap:
        ran = transformer(engine, spec, parameters, [sequence], tap=tap, rows=range(len(sequence)), types=types)
    graph = Graph(engine, spec, plan, graph_tap.kept, layout.rows)
    logits = None if ran.logits is None else engine.numpy(ran.logits)
    return ConnectedRun(plan, layout, graph.values(), engine.numpy(ran.final), logits, graph)
