"""Who listens to whom most: the strongest attention edge of a layer, found without ever holding T × T weights."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cutaway.forward.attention import pattern_blocks, visible
from cutaway.points import Point, Unwatched
from cutaway.trace.plan import made_from
from cutaway.trace.trace import Trace


@dataclass(frozen=True)
class Edge:
    """Query position `query` gives `weight` of its attention to key position `key`, in head `head`."""

    head: int
    query: int
    key: int
    weight: float


def strongest_edge(trace: Trace, layer: int) -> Edge | None:
    """The edge of layer `layer` with the largest weight; None where the trace did not keep its pattern.

    Edges to the first token and of a token to itself are passed over as long as there is any other: heads
    that have nothing to say rest there, and so those edges are the strongest of almost every layer.
    """
    if f"layers.{layer}.attn.pattern" not in trace:
        return None
    best: dict[str, Edge] = {}
    for positions, pattern in _blocks(trace, layer):
        queries = np.asarray(positions)[:, None]
        keys = np.arange(pattern.shape[-1])[None, :]
        itself = queries == keys
        kinds = {"other": ~itself & (keys > 0), "first": ~itself & (keys == 0), "itself": itself}
        for kind, of_this_kind in kinds.items():
            weights = np.where(of_this_kind, pattern, 0.0)
            head, row, key = np.unravel_index(int(weights.argmax()), weights.shape)
            weight = float(weights[head, row, key])
            if weight > (best[kind].weight if kind in best else 0.0):
                best[kind] = Edge(int(head), int(positions[int(row)]), int(key), weight)
    return best.get("other") or best.get("first") or best.get("itself")


def hidden_cells(trace: Trace, layer: int) -> np.ndarray:
    """What the mask of a layer forbids, `bool [T, S]`, by the very rule of the pass."""
    segment = trace._layout.segments[0]
    first, last = visible(trace.spec.layers[layer].attention, segment, slice(0, segment.length))
    keys = np.arange(segment.end)[None, :]
    hidden = np.asarray((keys < first[:, None]) | (keys >= last[:, None]))
    return hidden if trace._rows is None else hidden[trace._rows]


def _blocks(trace: Trace, layer: int) -> Iterator[tuple[Sequence[int], np.ndarray]]:
    """The positions of some query rows, and their pattern `[H, R, S]`; all rows in turn."""
    at = Point("attn.pattern", layer)
    kept = [trace._values.get(source) for source in made_from(trace.spec, at)]
    if trace._rows is not None or any(value is None for value in kept):
        first = trace.past
        rows = range(first, first + trace[at].shape[1]) if trace._rows is None else (trace._rows + first).tolist()
        yield rows, trace[at]
        return
    attention, segment = trace.spec.layers[layer].attention, trace._layout.segments[0]
    q, k = kept
    for rows, pattern in pattern_blocks(trace._engine, attention, q, k, segment, 0, Unwatched()):
        yield range(segment.position + rows.start, segment.position + rows.stop), trace._engine.numpy(pattern)
