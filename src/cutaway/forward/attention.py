"""Attention: the one stage in which a token reads from other tokens (chapters 7 to 9).

It works through blocks of query rows: the scores of a block (`[H, R, S]`) are dotted, scaled, masked and
softmaxed in one scratch, then mix the values. So no T × T array exists unless somebody asks for one, and who
asks gets the very numbers that were used: `pattern_blocks` is the only code that makes them.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from cutaway.engines.layout import BLOCK, Layout, Segment, row_blocks
from cutaway.engines.protocol import Array, Engine, Linear
from cutaway.forward.run import Run
from cutaway.points import Tap
from cutaway.spec import AttentionSpec


def attention(run: Run, spec: AttentionSpec, weights: Mapping, x: Array, layer: int, tap: Tap) -> Array:
    """softmax(QKᵀ / √d_head + M) V for each head, the heads joined by W_O: `[T, d]` → `[T, d]`.

    With caches, keys and values are appended to the cache of each segment's slot, and its queries see all
    that is in there.
    """
    engine, layout = run.engine, run.layout
    q = tap("attn.q", _split(engine.linear(x, weights["attn.q"], layout), spec.n_heads))  # [H, T, d_head]
    k = tap("attn.k", _split(engine.linear(x, weights["attn.k"], layout), spec.n_kv_heads))  # [H_kv, T, d_head]
    v = tap("attn.v", _split(engine.linear(x, weights["attn.v"], layout), spec.n_kv_heads))
    if spec.rotary is not None:
        turn = run.rotations[spec.rotary]
        q = tap("attn.q_rot", engine.rotate(q, *turn, spec.rotary.pairing))
        k = tap("attn.k_rot", engine.rotate(k, *turn, spec.rotary.pairing))
    z = engine.empty(q.shape)
    for index, segment in enumerate(layout.segments):
        here = slice(segment.start, segment.stop)
        keys, values = k[:, here], v[:, here]
        if run.caches is not None:
            keys, values = run.caches[segment.slot].append(layer, segment.position, keys, values)
        mixed = z[:, here]
        for rows, pattern in pattern_blocks(engine, spec, q[:, here], keys, segment, index, tap):
            mixed[:, rows] = engine.mix(pattern, values[:, : pattern.shape[-1]])
    z = tap("attn.z", z)
    return tap("attn.raw", engine.linear(join_heads(z), weights["attn.o"], layout))


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
            scores = tap.rows("attn.scores", engine.scale(dots, spec.score_scale), index, rows.start)
            masked = tap.rows("attn.masked", engine.mask(scores, first, last), index, rows.start)
            yield rows, tap.rows("attn.pattern", engine.softmax(masked), index, rows.start)


def visible(spec: AttentionSpec, segment: Segment, rows: slice) -> tuple[np.ndarray, np.ndarray]:
    """Which keys each query row may see, as half-open ranges `first[r] <= key < last[r]` (chapter 8.2)."""
    positions = np.arange(segment.position + rows.start, segment.position + rows.stop)
    first = np.zeros_like(positions)
    last = positions + 1 if spec.causal else np.full_like(positions, segment.end)
    return first, last


def head_outputs(engine: Engine, weights: Mapping, z: Array, layout: Layout) -> Array:
    """What each head adds through its own slice of W_O, `[H, T, d_head]` → `[H, T, d]`, without the bias.

    Each head is sent through W_O with all the other heads silent: the sum over heads is `attn.raw`.
    """
    slice_of = Linear(weights["attn.o"].weight)
    outputs = []
    for head in range(len(z)):
        alone = engine.array(np.zeros(z.shape))
        alone[head] = z[head]
        outputs.append(engine.numpy(engine.linear(join_heads(alone), slice_of, layout)))
    return engine.array(np.stack(outputs))


def join_heads(z: Array) -> Array:
    """`[H, T, d_head]` → `[T, H · d_head]`: the heads side by side."""
    return z.swapaxes(0, 1).reshape(z.shape[1], -1)


def _split(x: Array, n_heads: int) -> Array:
    """`[T, n_heads · d_head]` → `[n_heads, T, d_head]`."""
    return x.reshape(len(x), n_heads, -1).swapaxes(0, 1)
