"""A layer in one operation of the engine, where it has one and nobody needs the stages: the same bits, sooner."""

from collections.abc import Mapping

from cutaway.engines.layout import Segment
from cutaway.engines.protocol import Array, Attended
from cutaway.errors import CutawayError
from cutaway.forward.attention import scoring
from cutaway.forward.run import Run
from cutaway.points import Tap
from cutaway.spec import AttentionSpec, LayerSpec


def fused_layer(run: Run, spec: LayerSpec, weights: Mapping, x: Array, layer: int, tap: Tap) -> Array | None:
    """`[T, d]` → `[T, d]`, or None where the engine has no such operation or declines; then the stages do it."""
    fused = getattr(run.engine, "block", None)
    if fused is None or tap.altered or spec.attention.latent is not None or getattr(weights, "adapted", False):
        return None
    turn = None if spec.attention.rotary is None else run.rotations[spec.attention.rotary]
    attended = [_attended(run, spec.attention, layer, segment) for segment in run.layout.segments]
    out = fused(spec, weights, x, turn, attended, tap)
    if out is not None:
        run.fused.add(layer)
    return out


def _attended(run: Run, spec: AttentionSpec, layer: int, segment: Segment) -> Attended:
    if run.caches is not None:
        cache = run.caches[segment.slot]
        if cache.length != segment.position:
            raise CutawayError(
                f"The cache holds {cache.length} tokens, not the {segment.position} before this segment."
            )
        keys, values = cache.reserve(layer, segment.end)
    else:
        keys = run.engine.empty((spec.n_kv_heads, segment.length, spec.d_head))
        values = run.engine.empty((spec.n_kv_heads, segment.length, spec.value_width))
    # By the spec's identity: it outlives the run, and to hash it for each layer takes longer than a small kernel.
    rule = run.remembered((id(spec), segment.start), lambda: scoring(spec, segment, slice(0, segment.length)))
    return Attended(segment.length, segment.position, keys, values, rule)
