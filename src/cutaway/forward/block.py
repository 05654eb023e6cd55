"""One layer: attention gathers, the feed-forward processes, and both only add to the stream (chapter 12)."""

from collections.abc import Mapping

from cutaway.engines.protocol import Array, Engine
from cutaway.forward.attention import attention
from cutaway.forward.feedforward import feed_forward
from cutaway.forward.norm import norm
from cutaway.forward.run import Run
from cutaway.points import Tap
from cutaway.spec import LayerSpec


def block(run: Run, spec: LayerSpec, weights: Mapping, x: Array, layer: int, tap: Tap) -> Array:
    """`[T, d]` → `[T, d]`. Pre-norm: x + f(norm x). Post-norm: norm(x + f(x))."""
    engine = run.engine
    x = tap("resid_pre", x)
    out = attention(run, spec.attention, weights, _before(engine, spec, weights, "attn", x, tap), layer, tap)
    x = tap("resid_mid", _after(engine, spec, weights, "attn", x, tap("attn.out", out), tap))

    out = feed_forward(run, spec.feed_forward, weights, _before(engine, spec, weights, "mlp", x, tap), tap)
    return tap("resid_post", _after(engine, spec, weights, "mlp", x, tap("mlp.out", out), tap))


def _before(engine: Engine, spec: LayerSpec, weights: Mapping, part: str, x: Array, tap: Tap) -> Array:
    """What the sub-layer reads: the stream itself, or its norm."""
    if spec.norm is None or spec.placement == "post":
        return x
    return tap(f"{part}.norm", norm(engine, spec.norm, weights[f"{part}.norm"], x))


def _after(engine: Engine, spec: LayerSpec, weights: Mapping, part: str, x: Array, out: Array, tap: Tap) -> Array:
    """The stream that goes on: the sum, or its norm."""
    if spec.norm is None or spec.placement == "pre":
        return x + out
    return norm(engine, spec.norm, weights[f"{part}.norm"], tap(f"{part}.sum", x + out))
