"""One layer: attention gathers, the feed-forward processes, and both only add to the stream (chapter 12)."""

from collections.abc import Mapping

from cutaway.engines.protocol import Array, Engine
from cutaway.forward.attention import attention
from cutaway.forward.experts import experts
from cutaway.forward.feedforward import feed_forward
from cutaway.forward.norm import norm
from cutaway.forward.run import Run
from cutaway.points import Tap
from cutaway.spec import ExpertsSpec, LayerSpec


def block(run: Run, spec: LayerSpec, weights: Mapping, x: Array, layer: int, tap: Tap) -> Array:
    """`[T, d]` → `[T, d]`. Pre-norm: x + f(norm x). Post-norm: norm(x + f(x)). Parallel: x + a(norm x) + f(norm x)."""
    engine = run.engine
    x = tap("resid_pre", x)
    read = _before(engine, spec, weights, "attn", x, tap)
    gathered = attention(run, spec.attention, weights, read, layer, tap)
    gathered = _given(engine, spec, weights, "attn", gathered, tap)
    if spec.parallel:
        if not spec.shared_norm:
            read = _before(engine, spec, weights, "mlp", x, tap)
        return tap(
            "resid_post",
            x + gathered + _given(engine, spec, weights, "mlp", _process(run, spec, weights, read, tap), tap),
        )
    x = tap("resid_mid", _after(engine, spec, weights, "attn", x, gathered, tap))

    processed = _process(run, spec, weights, _before(engine, spec, weights, "mlp", x, tap), tap)
    processed = _given(engine, spec, weights, "mlp", processed, tap)
    return tap("resid_post", _after(engine, spec, weights, "mlp", x, processed, tap))


def _process(run: Run, spec: LayerSpec, weights: Mapping, read: Array, tap: Tap) -> Array:
    if isinstance(spec.feed_forward, ExpertsSpec):
        return experts(run, spec.feed_forward, weights, read, tap)
    return feed_forward(run, spec.feed_forward, weights, read, tap)


def _before(engine: Engine, spec: LayerSpec, weights: Mapping, part: str, x: Array, tap: Tap) -> Array:
    """What the sub-layer reads: the stream itself, or its norm."""
    if spec.norm is None or spec.placement == "post":
        return x
    return tap(f"{part}.norm", norm(engine, spec.norm, weights.get(f"{part}.norm"), x))


def _given(engine: Engine, spec: LayerSpec, weights: Mapping, part: str, out: Array, tap: Tap) -> Array:
    """What the sub-layer adds: what it worked out, or the norm of that."""
    if spec.out_norm is not None:
        out = norm(engine, spec.out_norm, weights.get(f"{part}.out_norm"), out)
    return tap(f"{part}.out", out)


def _after(engine: Engine, spec: LayerSpec, weights: Mapping, part: str, x: Array, out: Array, tap: Tap) -> Array:
    """The stream that goes on: the sum, or its norm."""
    if spec.norm is None or spec.placement == "pre":
        return x + out
    return norm(engine, spec.norm, weights.get(f"{part}.norm"), tap(f"{part}.sum", x + out))
