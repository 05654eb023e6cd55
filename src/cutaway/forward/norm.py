"""Bringing each row back to a standard size (chapter 12.2)."""

from cutaway.engines.protocol import Array, Engine, Gain
from cutaway.spec import NormSpec


def norm(engine: Engine, spec: NormSpec, gain: Gain, x: Array) -> Array:
    """`[T, d]` → `[T, d]`, row by row: LayerNorm subtracts the mean, RMSNorm does not."""
    if spec.kind == "layer":
        return engine.layer_norm(x, gain, spec.eps)
    return engine.rms_norm(x, gain, spec.eps)
