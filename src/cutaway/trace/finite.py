"""Where a number first stopped being one."""

from collections.abc import Callable, Sequence

import numpy as np

from cutaway.engines.protocol import Array, Engine
from cutaway.forward.parameters import Parameters
from cutaway.forward.transformer import transformer
from cutaway.points import POINTS, Point, Tap
from cutaway.spec import ModelSpec
from cutaway.trace.edits.kinds import COMPETING


class _Found(Exception):
    """Ends the pass at the first value that is not finite."""


class _Finder:
    """A tap that stops the pass where a NaN (or, where −∞ does not stand for being left out, an infinity) appears."""

    shown = frozenset(POINTS)
    altered: frozenset[str] = frozenset()

    def __init__(self, engine: Engine, layer: int | None = None) -> None:
        self._engine, self._layer = engine, layer

    def __call__(self, name: str, value: Array) -> Array:
        if name != "tokens":
            self._check(name, self._engine.numpy(value))
        return value

    def rows(self, name: str, value: Array, segment: int, start: int) -> Array:
        self._check(name, self._engine.numpy(value))
        return value

    def at(self, layer: int) -> "_Finder":
        return _Finder(self._engine, layer)

    def _check(self, name: str, value: np.ndarray) -> None:
        bad = np.isnan(value) if name in COMPETING else ~np.isfinite(value)
        if bad.any():
            index = np.unravel_index(int(np.argmax(bad)), value.shape)
            raise _Found(Point(name, self._layer), value[index], [int(i) for i in index])


def first_nonfinite(
    engine: Engine,
    spec: ModelSpec,
    parameters: Parameters,
    ids: Sequence[int] | np.ndarray,
    types: np.ndarray | None = None,
    around: Callable[[Tap], Tap] | None = None,
) -> str:
    """Run the whole of `ids` again and say, in one sentence, where the numbers first broke, and by which weight.

    `around` puts the edits of the pass around the tap that looks.
    """
    finder: Tap = _Finder(engine) if around is None else around(_Finder(engine))
    try:
        transformer(engine, spec, parameters, [np.asarray(ids)], tap=finder, types=types)
    except _Found as found:
        point, value, index = found.args
        prefix = "" if point.layer is None else f"layers.{point.layer}."
        broken = [n for n in parameters.stored if n.startswith(prefix) and not _finite(parameters, n)]
        cause = f"; {broken[0]} holds values that are not finite" if broken else ""
        return f"{point} is {value} at {index}{cause}."
    return "the logits are not finite."


def _finite(parameters: Parameters, name: str) -> bool:
    weight = parameters.stored[name]
    dtype = np.float64 if weight.kind == "F64" else np.float32  # which holds all that it can hold
    for start in range(0, len(weight.rows), 4096):
        if not np.isfinite(weight.dequantise(dtype, start, start + 4096)).all():
            return False
    return True
