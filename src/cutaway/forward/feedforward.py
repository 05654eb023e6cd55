"""The feed-forward network: what each token does with what it has gathered (chapter 11). Rows never mix here."""

from collections.abc import Mapping

from cutaway.engines.layout import Layout
from cutaway.engines.protocol import Array, Engine
from cutaway.forward.run import Run
from cutaway.points import Tap, Unwatched
from cutaway.spec import FeedForwardSpec


def feed_forward(run: Run, spec: FeedForwardSpec, weights: Mapping, x: Array, tap: Tap) -> Array:
    """The feed-forward of a layer, every step shown: `[T, d]` → `[T, d]`."""
    return tap("mlp.raw", perceptron(run.engine, spec, weights, "mlp", x, run.layout, tap))


def perceptron(
    engine: Engine, spec: FeedForwardSpec, weights: Mapping, name: str, x: Array, layout: Layout, tap: Tap | None = None
) -> Array:
    """down(φ(up x)) or, gated, down(φ(gate x) · up x), with the weights whose names begin with `name`."""
    tap = tap if tap is not None else Unwatched()
    if spec.gated:
        gate = tap(f"{name}.gate", engine.linear(x, weights[f"{name}.gate"], layout))
        up = tap(f"{name}.up", engine.linear(x, weights[f"{name}.up"], layout))
        act = engine.activate(gate, spec.activation, times=up)  # [T, d_ff]
    else:
        act = engine.activate(tap(f"{name}.up", engine.linear(x, weights[f"{name}.up"], layout)), spec.activation)
    return engine.linear(tap(f"{name}.act", act), weights[f"{name}.down"], layout)
