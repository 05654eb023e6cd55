"""Bringing each row back to a standard size (chapter 12.2)."""

import numpy as np

from cutaway.engines.protocol import Array, Engine, Gain
from cutaway.spec import NormSpec


def norm(engine: Engine, spec: NormSpec, gain: Gain | None, x: Array) -> Array:
    """`[T, d]` → `[T, d]`, row by row: LayerNorm subtracts the mean, RMSNorm does not."""
    if gain is None:  # a norm without learned numbers
        gain = Gain(engine.array(np.ones(x.shape[-1])))
    if spec.kind == "layer":
        return engine.layer_norm(x, gain, spec.eps)
    return engine.rms_norm(x, gain, spec.eps)


def norm_heads(engine: Engine, spec: NormSpec, gain: Gain | None, x: Array) -> Array:
    """`[H, T, d_head]` → the same, each head's row by itself."""
    return norm(engine, spec, gain, x.reshape(-1, x.shape[-1])).reshape(x.shape)
