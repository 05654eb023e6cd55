"""Attention: the one stage in which a token reads from other tokens (chapters 7 to 9).

It works through blocks of query rows: the scores of a block (`[H, R, S]`) are dotted, scaled, masked and
softmaxed in one scratch, then mix the values. So no T × T array exists unless somebody asks for one, and who
asks gets the very numbers that were used: `pattern_blocks` makes them, or an engine that has the same bits at once.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from cutaway.engines.layout import BLOCK, Layout, Segment, row_blocks
from cutaway.engines.low_rank import unheard
from cutaway.engines.protocol import Array, Engine, Linear, Scoring
from cutaway.forward.heads import Projected, join_heads, split_heads
from cutaway.forward.latent_attention import latent_heads, with_earlier
from cutaway.forward.norm import norm_heads
from cutaway.forward.run import Run
from cutaway.points import ROW_BLOCKS, Tap
from cutaway.spec import AttentionSpec, NormSpec, QueryGrowth


def attention(run: Run, spec: AttentionSpec, weights: Mapping, x: Array, layer: int, tap: Tap) -> Array:
    """softmax(QKᵀ / √d_head + M) V for each head, the heads joined by W_O: `[T, d]` → `[T, d]`.

    With caches, keys and values are appended to the cache of each segment's slot, and its queries see all
    that is in there.
    """
    engine, layout = run.engine, run.layout
    project = heads if spec.latent is None else latent_heads
    q, k, v, stored = project(run, spec, weights, x, tap)  # [H, T, d_head], [H_kv, T, d_head], [H_kv, T, d_value]
    z = None
    for index, segment in enumerate(layout.segments):
        here = slice(segment.start, segment.stop)
        keys, values = k[:, here], v[:, here]
        if run.caches is not None:
            one, other = run.caches[segment.slot].append(
                layer, segment.position, stored[0][:, here], stored[1][:, here]
            )
            if spec.latent is None:
                keys, values = one, other
            elif segment.position > 0:
                keys, values = with_earlier(run, spec, weights, one, other, keys, values)
        fused = _at_once(engine, spec, q[:, here], keys, values, segment, tap)
        if fused is not None and len(layout.segments) == 1:
            z = fused
            break
        if z is None:  # so that to join the heads takes no copy
            z = engine.empty((len(x), spec.n_heads, spec.value_width)).swapaxes(0, 1)
        mixed = z[:, here]
        if fused is not None:
            mixed[...] = fused
            continue
        for rows, pattern in pattern_blocks(engine, spec, q[:, here], keys, segment, index, tap):
            mixed[:, rows] = engine.mix(pattern, values[:, : pattern.shape[-1]])
    z = tap("attn.z", z)
    raw = engine.linear(join_heads(z), weights["attn.o"], layout)
    if "attn.head_out" in tap.altered:  # else nobody needs the heads' parts one by one
        raw = _with_parts_shown(engine, spec, weights, z, raw, layout, tap)
    return tap("attn.raw", raw)


def _at_once(
    engine: Engine, spec: AttentionSpec, q: Array, keys: Array, values: Array, segment: Segment, tap: Tap
) -> Array | None:
    """A segment's z by the engine's fused attention; None where it has none, or that could not say or show the same."""
    attend = getattr(engine, "attend", None)
    if attend is None or not (tap.shown | tap.altered).isdisjoint(ROW_BLOCKS):
        return None
    return attend(q, keys, values, scoring(spec, segment, slice(0, segment.length)))


def heads(run: Run, spec: AttentionSpec, weights: Mapping, x: Array, tap: Tap) -> Projected:
    """Queries, keys and values by one projection each, normed and turned as the spec says."""
    engine, layout = run.engine, run.layout
    q = tap("attn.q", split_heads(engine.linear(x, weights["attn.q"], layout), spec.n_heads))
    k = tap("attn.k", split_heads(engine.linear(x, weights["attn.k"], layout), spec.n_kv_heads))
    v = tap("attn.v", split_heads(engine.linear(x, weights["attn.v"], layout), spec.n_kv_heads))
    if spec.qk_norm is not None and not spec.norm_after_rotary:
        q, k = _norm_queries_and_keys(engine, spec.qk_norm, weights, q, k, tap)
    if spec.rotary is not None:
        turn = run.rotations[spec.rotary]
        q = tap("attn.q_rot", engine.rotate(q, *turn, spec.rotary.pairing))
        k = tap("attn.k_rot", engine.rotate(k, *turn, spec.rotary.pairing))
    if spec.qk_norm is not None and spec.norm_after_rotary:
        q, k = _norm_queries_and_keys(engine, spec.qk_norm, weights, q, k, tap)
    return q, k, v, (k, v)


def _norm_queries_and_keys(
    engine: Engine, spec: NormSpec, weights: Mapping, q: Array, k: Array, tap: Tap
) -> tuple[Array, Array]:
    return (
        tap("attn.q_normed", norm_heads(engine, spec, weights.get("attn.q_norm"), q)),
        tap("attn.k_normed", norm_heads(engine, spec, weights.get("attn.k_norm"), k)),
    )


def pattern_blocks(
    engine: Engine, spec: AttentionSpec, q: Array, keys: Array, segment: Segment, index: int, tap: Tap
) -> Iterator[tuple[slice, Array]]:
    """The attention pattern of one segment, block by block: its rows, and `[H, R, S]` weights that sum to 1.

    q is `[H, T, d_head]`, keys `[H_kv, past + T, d_head]`. S reaches to the last key that the block may see.
    The array is a scratch: it is the caller's until the next block is asked for.
    """
    for block in row_blocks(segment, BLOCK):
        steps = [slice(block.start, block.stop)]
        if block.size == 0:  # left-over rows one by one, as in decoding, so that both round alike
            steps = [slice(row, row + 1) for row in range(block.start, block.stop)]
        for step in steps:
            rows = slice(step.start - segment.start, step.stop - segment.start)
            first, last = visible(spec, segment, rows)
            seen = int(last.max())
            dots = tap.rows("attn.dots", engine.dots(q[:, rows], keys[:, :seen]), index, rows.start)
            scores = tap.rows("attn.scores", scored(engine, spec, dots, segment, rows), index, rows.start)
            masked = tap.rows("attn.masked", engine.mask(scores, first, last), index, rows.start)
            yield rows, tap.rows("attn.pattern", engine.softmax(masked), index, rows.start)


def scored(engine: Engine, spec: AttentionSpec, dots: Array, segment: Segment, rows: slice) -> Array:
    """Dot products `[H, R, S]` to scores, in place: scaled (chapter 7.4), and grown or capped where the spec says."""
    scores = engine.scale(dots, spec.score_scale)
    if spec.growth is not None:
        scores *= engine.array(_growth(spec.growth, segment, rows)[:, None])
    return scores if spec.cap is None else engine.cap(scores, spec.cap)


def scoring(spec: AttentionSpec, segment: Segment, rows: slice) -> Scoring:
    """The same rule, and `visible`, told to a fused form of attention."""
    grown = None if spec.growth is None else _growth(spec.growth, segment, rows)
    return Scoring(spec.score_scale, *visible(spec, segment, rows), growth=grown, cap=spec.cap)


def _growth(spec: QueryGrowth, segment: Segment, rows: slice) -> np.ndarray:
    stretches = (_positions(segment, rows) + 1) // spec.every
    return 1 + spec.strength * np.log1p(stretches)


def visible(spec: AttentionSpec, segment: Segment, rows: slice) -> tuple[np.ndarray, np.ndarray]:
    """Which keys each query row may see, as half-open ranges `first[r] <= key < last[r]` (chapter 8.2)."""
    positions = _positions(segment, rows)
    first = np.zeros_like(positions)
    if spec.window is not None:  # the window counts the token itself
        first = np.maximum(first, positions - spec.window + 1)
    last = positions + 1 if spec.causal else np.full_like(positions, segment.end)
    if spec.chunk is not None:
        first = np.maximum(first, positions // spec.chunk * spec.chunk)
        last = np.minimum(last, (positions // spec.chunk + 1) * spec.chunk)
    return first, last


def _positions(segment: Segment, rows: slice) -> np.ndarray:
    return np.arange(segment.position + rows.start, segment.position + rows.stop)


def head_outputs(
    engine: Engine, spec: AttentionSpec, weights: Mapping, z: Array, layout: Layout, heads: Sequence[int] | None = None
) -> Array:
    """What each head adds through its own slice of W_O, `[H, T, d_head]` → `[H, T, d]`, without the bias.

    Each head is sent through W_O with all the other heads silent: the sum over heads is `attn.raw`. With `heads`,
    z holds these heads only. `layout` says how the rows of z are multiplied (`Layout.only`).
    """
    slice_of = Linear(weights["attn.o"].weight, added=unheard(weights["attn.o"]))
    of_part = getattr(engine, "linear_of_part", lambda *_: None)
    made = None
    for index, (own, head) in enumerate(zip(z, range(spec.n_heads) if heads is None else heads, strict=True)):
        part = of_part(own, slice_of, head * spec.value_width)
        if part is None:
            alone = engine.array(np.zeros((spec.n_heads, *own.shape)))
            alone[head] = own
            part = engine.linear(join_heads(alone), slice_of, layout)
        if made is None:
            made = engine.empty((len(z), *part.shape))
        made[index] = part
    return made


def _with_parts_shown(
    engine: Engine, spec: AttentionSpec, weights: Mapping, z: Array, raw: Array, layout: Layout, tap: Tap
) -> Array:
    """`attn.raw` once each head's part was shown: where one came back changed, the row is the sum of the parts."""
    parts = head_outputs(engine, spec, weights, z, layout.only(range(layout.rows)))
    given = tap("attn.head_out", parts)
    if given is not parts and getattr(given, "requires_grad", False):  # an edit may cut and change no number
        rows = np.arange(layout.rows)
    else:
        rows = np.flatnonzero((engine.numpy(given) != engine.numpy(parts)).any(axis=(0, 2)))
    joined = engine.copy(raw)
    summed = given[:, rows].sum(0)
    bias = weights["attn.o"].bias
    joined[rows] = summed if bias is None else summed + bias
    return joined
