"""The complete forward pass: ids in, one row of logits per asked position out (chapters 2 and 3)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from cutaway.engines.layout import Layout
from cutaway.engines.protocol import Array, Ending, Engine, Stacked
from cutaway.forward.block import block
from cutaway.forward.cache import KVCache
from cutaway.forward.embedding import embedding
from cutaway.forward.fused import fused_layers
from cutaway.forward.head import ending, logits, pooled
from cutaway.forward.norm import norm
from cutaway.forward.parameters import Parameters
from cutaway.forward.run import Run
from cutaway.points import Tap, Unwatched
from cutaway.spec import ModelSpec


@dataclass(frozen=True, eq=False)
class Pass:
    """What a forward pass leaves: the stream that the head reads `[T, d]`, and the logits `[rows asked, V]`.

    An encoder without a head leaves no logits. `fused` are the layers that the engine ran in one operation; the
    stages ran all others.
    """

    layout: Layout
    final: Array
    logits: Array | None
    fused: frozenset[int]


def transformer(
    engine: Engine,
    spec: ModelSpec,
    parameters: Parameters,
    sequences: Sequence[np.ndarray],
    *,
    caches: Sequence[KVCache] | None = None,
    tap: Tap | None = None,
    rows: Iterable[int] | None = None,
    types: np.ndarray | None = None,
) -> Pass:
    """Run the model over one or more sequences of ids, packed one after another, never padded.

    Without caches, vectors `[T, d]` may stand in the place of all ids.
    With `caches`, one per sequence, each sequence goes on where its cache ends. `rows` are the packed rows
    whose logits are worked out, ascending: by default the last row of each sequence. `types`, one per row, tell
    the sentences of a pair apart in models that know them.
    """
    # A broken weight makes NaN or infinity, which whoever takes the logits finds and explains (`trace.finite`);
    # NumPy's warnings about the same would only stand before that sentence.
    tap = tap if tap is not None else Unwatched()
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        return _transformer(engine, spec, parameters, sequences, caches, tap, rows, types)


def _transformer(
    engine: Engine,
    spec: ModelSpec,
    parameters: Parameters,
    sequences: Sequence[np.ndarray],
    caches: Sequence[KVCache] | None,
    tap: Tap,
    rows: Iterable[int] | None,
    types: np.ndarray | None,
) -> Pass:
    layout = Layout.of(map(len, sequences), None if caches is None else [cache.length for cache in caches])
    for cache, ids in zip(caches or (), sequences, strict=False):
        cache.refuse_unsettled(len(ids))
    asked = layout.last_rows if rows is None else list(rows)
    run = Run.of(engine, spec, layout, caches)
    x = embedding(run, spec, parameters, np.concatenate(sequences), tap, types)
    x, final, scores = _layers(run, spec, parameters, x, tap, ending(spec, parameters, layout, asked, tap))
    for cache, ids in zip(caches or (), sequences, strict=False):
        cache.advance(ids)
    if spec.final_norm is not None:
        x = tap("final.norm", norm(engine, spec.final_norm, parameters.final_norm, x) if final is None else final)
    if spec.pooler:
        tap("pooler.out", pooled(engine, parameters, x, layout))
    if spec.headless:
        return Pass(layout, x, None, frozenset(run.fused))
    if scores is None:
        scores = logits(engine, spec, parameters, x, layout, asked)
    return Pass(layout, x, tap("logits", scores), frozenset(run.fused))


def _layers(run: Run, spec: ModelSpec, parameters: Parameters, x: Array, tap: Tap, ending: Ending | None) -> Stacked:
    """Layer after layer, `[T, d]` → `[T, d]`: by its stages, or several at once where the engine can, which then runs
    the ending too.
    """
    taps = [tap.at(i) for i in range(spec.n_layers)]
    stacked, i = Stacked(x), 0
    while i < spec.n_layers:
        done, stacked = fused_layers(run, spec, parameters, stacked.x, i, taps, ending)
        if not done:
            stage = partial(block, run, spec.layers[i])
            stacked = Stacked(parameters.layers[i].through(stage, stacked.x, i, taps[i]))
        i += done or 1
    return stacked
