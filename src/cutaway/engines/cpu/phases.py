"""Phases of kernels, written down one after another, and the arrays that lie between them."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from cutaway.engines.cpu import elementwise
from cutaway.engines.cpu.kernel import place
from cutaway.engines.cpu.products import product_task
from cutaway.engines.cpu.program import Argument, Place, Task
from cutaway.engines.protocol import Ending, Gain, Linear
from cutaway.spec import NormSpec


class Phases:
    """What is common to all that is written down as phases. `x` is set before a run, and each name of these:

    `shapes` names the points with the arrays that hold them, heads as `[T, H, width]`; where two points are one
    array, `same_as` says of which other. `order` has all of them as the pass makes them. `scratch` names what lies
    between the steps of a kernel, with how many numbers.
    """

    def __init__(self, engine: Any, weights: Mapping[str, Any], rows: int) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.scratch: dict[str, int] = {}
        self.same_as: dict[str, str] = {}
        self.order: list[str] = []
        self.phases: list[list[Task]] = []
        self.alive: list[np.ndarray] = []  # the vectors that it reads, so that they stay where they are
        self._engine, self._weights, self._rows = engine, weights, rows

    def _products(
        self, x: Place, names: Mapping[str, int | None], points: Mapping[str, str] | None = None
    ) -> list[Place]:
        """Projections of one x, side by side; what they give goes by their own names or those of `points`.

        Where a projection's outputs belong to heads, `names` says to how many.
        """
        products: list[Task] = []
        biases: list[Task] = []
        results: list[Place] = []
        for name, heads in names.items():
            linear: Linear = self._weights[name]
            d_out = linear.weight.shape[0]
            point = (points or {}).get(name, name)
            y = self._buffer(point, d_out) if heads is None else self._buffer(point, heads, d_out // heads)
            scratch = Place(f"unpacked {len(products)}")
            kind, shape, stored = linear.weight.kind, linear.weight.shape, self._engine.stored_at(linear.weight)
            task, size = product_task(kind, stored, shape, x, y, scratch, self._rows)
            self.scratch[scratch.name] = max(size, self.scratch.get(scratch.name, 0))
            products.append(task)
            if linear.bias is not None:
                bias = self._vector(linear.bias)
                biases.append(self._task("add", y, bias, y, self._rows * d_out, d_out))
            results.append(y)
        self.phases.append(products)
        self.phases += [[bias] for bias in biases]
        return results

    def _norm(
        self, norm: NormSpec, weight: str, x: Place, name: str, rows: int, width: int, heads: int | None = None
    ) -> Place:
        gain: Gain | None = self._weights.get(weight)
        if gain is None:  # a norm without learned numbers
            gain = Gain(np.ones(width, np.float32))
        out = self._buffer(name, width) if heads is None else self._buffer(name, heads, width)
        shift = 0 if gain.bias is None else self._vector(gain.bias)
        sizes = (rows, width, float(norm.eps), int(norm.kind == "layer"))
        self._do("norm", x, self._vector(gain.gain), shift, out, *sizes, parts=elementwise.parts_of(rows * width))
        return out

    def _add(self, a: Place, b: Place, out: Place, n: int) -> None:
        self._do("add", a, b, out, n, n)

    def _do(self, kernel: str, *arguments: Argument, parts: int = 1) -> None:
        self.phases.append([self._task(kernel, *arguments, parts=parts)])

    def _task(self, kernel: str, *arguments: Argument, parts: int = 1) -> Task:
        return Task(elementwise.kernels()[kernel], arguments, parts)

    def _buffer(self, name: str, *shape: int, point: bool = True) -> Place:
        self.shapes[name] = (self._rows, *shape)
        if point:
            self.order.append(name)
        return Place(name)

    def _vector(self, values: np.ndarray) -> int:
        """Where a vector lies, for as long as the program lives."""
        self.alive.append(self._engine.array(values))
        return place(self.alive[-1])

    def _d_out(self, name: str) -> int:
        return self._weights[name].weight.shape[0]


class EndingPhases(Phases):
    """The norm before the head and the head: "x" to "final.norm", where there is a norm, and "logits"."""

    def __init__(self, engine: Any, ending: Ending, rows: int) -> None:
        super().__init__(engine, {"final.norm": ending.gain, "head": ending.head}, rows)
        read = Place("x")
        if ending.norm is not None:
            d_model = ending.head.weight.shape[1]
            read = self._norm(ending.norm, "final.norm", read, "final.norm", rows, d_model)
        self._products(read, {"head": None}, {"head": "logits"})
