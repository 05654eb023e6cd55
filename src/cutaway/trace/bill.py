"""What looking costs, known before the run: the shapes and the bytes of what a pass computes."""

from collections.abc import Iterable
from math import prod

from cutaway.points import Point, points_of, shape_of
from cutaway.spec import ModelSpec


def activation_bytes(spec: ModelSpec, tokens: int, points: Iterable[Point] | None = None, itemsize: int = 4) -> int:
    """Bytes of these points (every point, where None) stored in full, `itemsize` bytes a number."""
    chosen = points_of(spec) if points is None else points
    return sum(prod(shape_of(point, spec, tokens)) for point in chosen) * itemsize


def activation_shapes(spec: ModelSpec, tokens: int) -> dict[Point, tuple[int, ...]]:
    """Every point with its shape in a pass over `tokens` tokens; T stands in all of them (chapter 13.4)."""
    return {point: shape_of(point, spec, tokens) for point in points_of(spec)}
