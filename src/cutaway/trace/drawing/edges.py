"""Who listens to whom most: the strongest attention edge of a layer, found without ever holding T × T weights."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cutaway.engines.layout import Segment
from cutaway.forward.attention import visible

if TYPE_CHECKING:
    from cutaway.trace.trace import Trace


@dataclass(frozen=True)
class Edge:
    """Query position `query` gives `weight` of its attention to key position `key`, in head `head`."""

    head: int
    query: int
    key: int
    weight: float


def strongest_edge(trace: "Trace", layer: int) -> Edge | None:
    """The edge of layer `layer` with the largest weight; None where the trace did not keep its pattern.

    Edges to the first token and of a token to itself are passed over as long as there is any other: heads
    that have nothing to say rest there, and so those edges are the strongest of almost every layer.
    """
    if f"layers.{layer}.attn.pattern" not in trace:
        return None
    best: dict[str, Edge] = {}
    for positions, pattern in trace.pattern_rows(layer):
        queries = positions[:, None]
        keys = np.arange(pattern.shape[-1])[None, :]
        itself = queries == keys
        kinds = {"other": ~itself & (keys > 0), "first": ~itself & (keys == 0), "itself": itself}
        for kind, of_this_kind in kinds.items():
            weights = np.where(of_this_kind, pattern, 0.0)
            head, row, key = np.unravel_index(int(weights.argmax()), weights.shape)
            weight = float(weights[head, row, key])
            if weight > (best[kind].weight if kind in best else 0.0):
                best[kind] = Edge(int(head), int(positions[row]), int(key), weight)
    return best.get("other") or best.get("first") or best.get("itself")


def hidden_cells(trace: "Trace", layer: int) -> np.ndarray:
    """What the mask of a layer forbids, `bool [T, S]`, by the very rule of the pass; of the rows that are held."""
    segment = Segment(0, len(trace.prompt.ids), trace.past)
    first, last = visible(trace.spec.layers[layer].attention, segment, slice(0, segment.length))
    keys = np.arange(segment.end)[None, :]
    hidden: np.ndarray = (keys < first[:, None]) | (keys >= last[:, None])
    return hidden[trace.rows]
