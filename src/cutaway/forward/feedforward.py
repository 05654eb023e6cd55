"""The feed-forward network: what each token does with what it has gathered (chapter 11). Rows never mix here."""

from collections.abc import Mapping

from cutaway.engines.protocol import Array
from cutaway.forward.run import Run
from cutaway.points import Tap
from cutaway.spec import FeedForwardSpec


def feed_forward(run: Run, spec: FeedForwardSpec, weights: Mapping, x: Array, tap: Tap) -> Array:
    """down(φ(up x)) or, gated, down(φ(gate x) · up x): `[T, d]` → `[T, d]`."""
    engine, layout = run.engine, run.layout
    if spec.gated:
        gate = tap("mlp.gate", engine.linear(x, weights["mlp.gate"], layout))
        up = tap("mlp.up", engine.linear(x, weights["mlp.up"], layout))
        act = engine.activate(gate, spec.activation) * up  # [T, d_ff]
    else:
        act = engine.activate(tap("mlp.up", engine.linear(x, weights["mlp.up"], layout)), spec.activation)
    return tap("mlp.raw", engine.linear(tap("mlp.act", act), weights["mlp.down"], layout))
