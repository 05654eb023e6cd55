"""Working out a point from the stored ones, with the very functions of the pass or others with the same bits."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from cutaway.engines.layout import Layout
from cutaway.engines.protocol import Array, Engine
from cutaway.forward.attention import head_outputs, pattern_blocks, scored, scoring
from cutaway.forward.head import logits
from cutaway.forward.parameters import Parameters
from cutaway.points import Point, Unwatched
from cutaway.spec import ModelSpec
from cutaway.trace.capture.recorder import Recorder

_WHOLE = ("attn.dots", "attn.scores")  # defined for every pair of tokens, seen or not


def row_blocks_point(
    engine: Engine, spec: ModelSpec, point: Point, q: Array, k: Array, begun: Mapping[str, Array] | None = None
) -> Array:
    """`attn.dots`, `.scores`, `.masked` or `.pattern` of one sequence, `[H, T, T]`, from its q and k.

    A causal pass does not compare a block's queries with keys that none of them may see; those cells of
    `dots` and `scores` are filled in here in the same way, `masked` has −∞ there and `pattern` 0. `begun` are
    the layer's others that are there already: each is a step on the way to the next.
    """
    layer = point.layer or 0
    attention = spec.layers[layer].attention
    layout = Layout.of([q.shape[1]])
    square = getattr(engine, "square", None)
    if square is not None:
        segment = layout.segments[0]
        return square(point.name, q, k, scoring(attention, segment, slice(0, segment.length)), begun)
    recorder = Recorder(engine, layout, [point])
    for rows, pattern in pattern_blocks(engine, attention, q, k, layout.segments[0], 0, recorder.at(layer)):
        seen = pattern.shape[-1]
        if point.name in _WHOLE and seen < k.shape[1]:
            rest = engine.dots(q[:, rows], k[:, seen:])
            if point.name == "attn.scores":
                rest = scored(engine, attention, rest, layout.segments[0], rows)
            recorder.kept[point][0][:, rows, seen:] = rest
    return recorder.kept[point][0]


def pattern_rows(
    engine: Engine, spec: ModelSpec, layer: int, q: Array, k: Array
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The pattern of one sequence from its q and k, in blocks: positions of the rows, and `[H, R, S]` weights.

    The weights stand in a scratch: they are the caller's until the next block is asked for.
    """
    segment = Layout.of([q.shape[1]]).segments[0]
    for rows, pattern in pattern_blocks(engine, spec.layers[layer].attention, q, k, segment, 0, Unwatched()):
        yield np.arange(rows.start, rows.stop), engine.numpy(pattern)


def head_out_point(
    engine: Engine,
    spec: ModelSpec,
    parameters: Parameters,
    point: Point,
    z: Array,
    layout: Layout,
    rows: Sequence[int],
    heads: Sequence[int] | None = None,
) -> Array:
    """`attn.head_out` `[H, rows, d]` from the heads' mixes in these rows of the layout; `heads` where z holds some."""
    layer = point.layer or 0
    attention = spec.layers[layer].attention
    return head_outputs(engine, attention, parameters.layers[layer], z, layout.only(rows), heads)


def logits_point(
    engine: Engine, spec: ModelSpec, parameters: Parameters, final: Array, layout: Layout, rows: Sequence[int]
) -> Array:
    """`logits` of these rows of the layout, `[rows, V]`, from the same rows of what the head reads."""
    return logits(engine, spec, parameters, final, layout, rows)
