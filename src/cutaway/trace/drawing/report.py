"""A trace as plain data: what `cutaway trace --json` prints, and what the drawing draws."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from cutaway.errors import CutawayError
from cutaway.points import Point, parse_point, points_of, shape_symbols
from cutaway.progress import progress
from cutaway.spec import ModelSpec
from cutaway.spec.check import is_whole
from cutaway.trace.drawing.edges import strongest_edge
from cutaway.trace.drawing.edits import edits_told
from cutaway.trace.prompt import Prompt

if TYPE_CHECKING:
    from cutaway.trace.trace import Trace


def report(
    trace: "Trace",
    layer: int = 0,
    head: int | None = None,
    top: int = 10,
    point: str | Point | None = None,
    origin: str | None = None,
    first: int = 8,
) -> dict[str, Any]:
    """The pass as dicts, lists, text and finite numbers (null stands for −∞ and for what is not a number).

    `stages` are those outside the layers and those of layer `layer`, each with the `first` numbers of one row:
    that of token `row`, the last one, of head `head` (0 where not given) where a stage has heads. `layers` has one
    entry per layer, whose norms are means over the tokens but the first. With `point`, `values` holds that tensor
    whole. Of a run with edits it tells what each of them did (`edits_told`), for which the unedited pass runs. Raises
    CutawayError for a layer, head or point that the model does not have, or the trace did not keep.
    """
    spec = trace.spec
    layer = layer_index(spec, layer)
    row_head = 0 if head is None else head_index(spec, layer, head)
    wanted = None if point is None else parse_point(point, spec)
    whole: dict[str, Any] = {}
    if wanted is not None:
        value = trace[wanted]
        whole = {"point": {**_told(spec, wanted), "shape": list(value.shape)}, "values": plain_numbers(value)}
    return {
        **opening(spec, trace.engine, trace.dtype, trace.prompt, origin, trace.past),
        "layer": layer,
        "head": row_head,
        "row": int(trace.rows[-1]),
        "stages": _stages(trace, layer, row_head, first),
        "layers": _layers(trace),
        "next_tokens": [
            {"id": t.id, "piece": t.text, "logit": t.logit, "probability": t.probability}
            for t in (trace.next_tokens(top) if trace.predicts else [])
        ],
        **edits_told(trace, top),
        **whole,
    }


def opening(
    spec: ModelSpec, engine: str, dtype: str, prompt: Prompt, origin: str | None = None, past: int = 0
) -> dict[str, Any]:
    """What can be told before a pass has run: the model, the prompt, and its tokens."""
    return {
        "model": _model_facts(spec, engine, dtype, origin),
        "prompt": {"text": prompt.text, "added": prompt.added, "past": past},
        "tokens": [
            {"position": past + i, "id": token, "piece": piece}
            for i, (token, piece) in enumerate(zip(prompt.ids, _pieces(prompt), strict=True))
        ],
    }


def _model_facts(spec: ModelSpec, engine: str, dtype: str, origin: str | None) -> dict[str, Any]:
    """What runs; a number that differs from layer to layer is null."""
    return {
        "name": spec.name,
        "origin": origin,
        "parameters": spec.count().total,
        "layers": spec.n_layers,
        "heads": spec.same_in_all_layers("attention.n_heads"),
        "kv_heads": spec.same_in_all_layers("attention.n_kv_heads"),
        "d_head": spec.same_in_all_layers("attention.d_head"),
        "d_model": spec.d_model,
        "d_ff": spec.same_in_all_layers("feed_forward.d_ff"),
        "vocab_size": spec.vocab_size,
        "engine": engine,
        "dtype": dtype,
    }


def layer_index(spec: ModelSpec, layer: int) -> int:
    """`layer` counted from 0; a negative one counts from the end. Raises CutawayError outside the model."""
    if not is_whole(layer):
        raise CutawayError(f"The layer is {layer!r}; it must be a whole number.")
    if not -spec.n_layers <= layer < spec.n_layers:
        raise CutawayError(
            f"There is no layer {layer}: {spec.name} has layers 0 to {spec.n_layers - 1} (-1 is the last)."
        )
    return layer % spec.n_layers


def head_index(spec: ModelSpec, layer: int, head: int) -> int:
    """`head` counted from 0; a negative one counts from the end. Raises CutawayError outside the layer."""
    heads = spec.layers[layer].attention.n_heads
    if not is_whole(head):
        raise CutawayError(f"The head is {head!r}; it must be a whole number.")
    if not -heads <= head < heads:
        raise CutawayError(
            f"There is no head {head}: layer {layer} of {spec.name} has heads 0 to {heads - 1} (-1 is the last)."
        )
    return head % heads


def plain_numbers(value: np.ndarray) -> list[Any]:
    """Nested lists; null where a number is not finite."""
    if value.dtype.kind in "iu" or np.isfinite(value).all():
        listed: list[Any] = value.tolist()
        return listed
    swapped: list[Any] = np.where(np.isfinite(value), value.astype(object), np.asarray(None)).tolist()
    return swapped


def row_of(point: Point, value: np.ndarray, spec: ModelSpec, head: int) -> np.ndarray:
    """The row that stands for a value: the last token's, of `head` or of the key/value head that it uses."""
    for symbol in point.info.shape[:-1]:
        if symbol == "T":
            at = -1
        elif symbol == "H":
            at = head
        elif symbol == "H_kv":
            attention = spec.layers[point.layer or 0].attention
            at = head * attention.n_kv_heads // attention.n_heads
        else:
            at = 0
        value = value[at]
    return value


def _pieces(prompt: Prompt) -> tuple[str, ...]:
    return prompt.pieces or tuple(str(token) for token in prompt.ids)


def _told(spec: ModelSpec, point: Point) -> dict[str, Any]:
    info = point.info
    return {
        "point": str(point),
        "shape_symbols": list(shape_symbols(point, spec)),
        "meaning": info.meaning,
        "reason": info.reason,
        "chapter": info.chapter,
    }


def _stages(trace: "Trace", layer: int, head: int, first: int) -> list[dict[str, Any]]:
    points = [at for at in points_of(trace.spec) if at.layer is None or at.layer == layer]
    stages = []
    with progress("Reading the stages", len(points), "stages", after=1.0) as advance:
        for point in points:
            stages.append(_stage(trace, point, head, first))
            advance(1)
    return stages


def _stage(trace: "Trace", point: Point, head: int, first: int) -> dict[str, Any]:
    """One stage; `norm` and `values` are those of the row that `row_of` picks, null where nothing was captured."""
    told = _told(trace.spec, point)
    if point.name == "logits":  # of all rows only the last is at hand: the others are a large product
        rows = trace["tokens"].shape[0] if "tokens" in trace else len(trace.prompt.ids)
        shape, row = [rows, trace.spec.vocab_size], trace.last_logits
    elif point in trace:
        value = trace[point]
        shape, row = list(value.shape), row_of(point, value, trace.spec, head)
    else:
        return {**told, "shape": None, "norm": None, "values": None}
    norm = float(np.linalg.norm(row.astype(np.float64))) if row.dtype.kind == "f" else None
    return {
        **told,
        "shape": shape,
        "norm": norm if norm is not None and math.isfinite(norm) else None,
        "values": plain_numbers(row[:first]),
    }


def _layers(trace: "Trace") -> list[dict[str, Any]]:
    layers = []
    with progress("Reading every layer", trace.spec.n_layers, "layers", after=1.0) as advance:
        for index in range(trace.spec.n_layers):
            layers.append(_layer(trace, index))
            advance(1)
    return layers


def _layer(trace: "Trace", layer: int) -> dict[str, Any]:
    edge = strongest_edge(trace, layer)
    return {
        "layer": layer,
        "attn_out": _mean_norm(trace, layer, "attn.out"),
        "mlp_out": _mean_norm(trace, layer, "mlp.out"),
        "resid_post": _mean_norm(trace, layer, "resid_post"),
        "strongest_edge": None
        if edge is None
        else {
            "head": edge.head,
            "query": _place(trace, edge.query),
            "key": _place(trace, edge.key),
            "weight": edge.weight,
        },
    }


def _mean_norm(trace: "Trace", layer: int, name: str) -> float | None:
    """The mean length of the rows, the first token's left out where there is another.

    Models use the first token as a resting place and let its stream grow a hundredfold; it would hide the rest.
    """
    point = Point(name, layer)
    if point not in trace:
        return None
    lengths = np.linalg.norm(trace[point].astype(np.float64), axis=-1)
    later = trace.rows + trace.past > 0
    return float(lengths[later].mean() if later.any() else lengths.mean())


def _place(trace: "Trace", position: int) -> Mapping[str, Any]:
    """A token by its position; those before the trace's own have no piece at hand."""
    index = position - trace.past
    return {"position": position, "piece": _pieces(trace.prompt)[index] if index >= 0 else None}
