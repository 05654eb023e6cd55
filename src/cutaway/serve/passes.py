"""The passes behind a page's runs: whole, from the rows on that no former pass has computed, or of one layer again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from cutaway.engines.layout import CHUNK, Layout
from cutaway.forward.block import block
from cutaway.forward.cache import GROWTH, KVCache
from cutaway.forward.context import warn_beyond_context
from cutaway.forward.run import Run as Pass
from cutaway.generate.passes import reuse, shared_prefix
from cutaway.points import ROW_BLOCKS, Point, dot_inputs, layer_names, points_of
from cutaway.serve.joined import Joined, Part, Used, lengthened, shortened
from cutaway.spec import ModelSpec
from cutaway.trace import Prompt, Trace
from cutaway.trace.capture.bill import activation_bytes
from cutaway.trace.capture.plan import OVERVIEW, Plan, make_plan
from cutaway.trace.capture.recorder import Cut, Recorder
from cutaway.trace.running import Machine, Watching, traced

if TYPE_CHECKING:
    from cutaway.model import Model

Captured = Literal["all", "overview"]
ALL_AT_ONCE = 96_000_000  # bytes up to which a pass keeps everything
MADE = (*ROW_BLOCKS, "attn.head_out", "logits")  # worked out when they are read


@dataclass(frozen=True, eq=False)
class LayerRows:
    """All that is stored of one layer of a text."""

    layer: int
    parts: tuple[Used, ...]


@dataclass(frozen=True, eq=False)
class Text:
    """What passes have left of one text: its rows, the logits after the last, and layers of which all was kept."""

    prompt: Prompt
    captured: Captured
    parts: tuple[Used, ...]
    last_logits: np.ndarray | None
    layers: tuple[LayerRows, ...] = ()


class Strand:
    """The keys and values behind the texts that a page runs one after another: those of the latest of them.

    A text goes on from what it shares with the latest (the cache) and with the one it is said to follow (whose rows it
    refers to), which need not be the same; where they share nothing everything is computed. On the cpu engine a row has
    the same bits in whatever pass it is computed, so any prefix is reused; on the numpy engine rows are multiplied in
    chunks, and a reused prefix ends where a chunk does. Only the owner thread runs passes.
    """

    def __init__(self, model: "Model") -> None:
        self._model = model
        self._cache = KVCache(model.spec, model.engine)

    @staticmethod
    def serves(model: "Model") -> bool:
        """Whether a model's passes may go on from a cache with the very bits of a whole pass."""
        return model.spec.causal and not model.spec.pooler and runs_layers(model)

    @property
    def nbytes(self) -> int:
        """Bytes that the keys and values may take, what they have grown by included."""
        return self._cache.row_bytes * max(GROWTH, 2 * self._cache.length)

    def run(self, prompt: Prompt, former: Text | None = None) -> Text:
        """The pass over `prompt`. Raises CutawayError as `Model.trace` does."""
        model, cache, ids = self._model, self._cache, prompt.ids
        captured = captured_of(model, len(ids))
        start = 0
        if former is not None and (captured == "overview" or former.captured == "all"):
            start = shared_prefix(former.prompt.ids, ids)
        start = min(start, reuse(cache, ids))
        if model.engine.name != "cpu":
            start = start // CHUNK * CHUNK
        cache.truncate(start)
        due = cache.due(ids[cache.length :])
        start = len(ids) - len(due)
        layers = former.layers if former is not None and start > 0 and captured == "overview" else ()
        more = {point: None for rows in layers for point in stored_in(model.spec, rows.layer)}
        points = tuple({**dict.fromkeys(points_kept(model.spec, captured)), **more})
        warn_beyond_context(model.spec, start, len(ids))
        rest = Prompt(tuple(due.tolist()), prompt.pieces[start:], "", prompt.text if start == 0 else None)
        kept = Plan(points, frozenset(points), True)
        machine = Machine(model.engine, model.spec, model.parameters, model.piece)
        ran = traced(machine, rest, Watching(points), cache=cache, prepared=(kept, Cut()), shown=start == 0)
        part = Part({point: ran[point] for point in points}, len(due))
        last = ran.last_logits if ran.has_logits else None
        longer = tuple(LayerRows(rows.layer, _longer(rows.parts, start, part)) for rows in layers)
        before = former.parts if former is not None else ()
        return Text(prompt, captured, _longer(before, start, part), last, longer)


def _longer(parts: Sequence[Used], start: int, part: Part) -> tuple[Used, ...]:
    return tuple(lengthened(shortened(parts, start), part))


def captured_of(model: "Model", length: int) -> Captured:
    """Whether a pass over so many tokens keeps everything, or what the overviews read."""
    return "all" if length * _token_bytes(model.spec, model.engine.dtype.itemsize) <= ALL_AT_ONCE else "overview"


@lru_cache(maxsize=16)
def _token_bytes(spec: ModelSpec, itemsize: int) -> int:
    return activation_bytes(spec, 1, points_kept(spec, "all"), itemsize)


@lru_cache(maxsize=16)
def points_kept(spec: ModelSpec, captured: Captured) -> tuple[Point, ...]:
    """The points that a pass stores; the others are worked out of them."""
    kept = _readable(spec, captured).kept
    return tuple(point for point in points_of(spec) if point in kept)


@lru_cache(maxsize=16)
def _readable(spec: ModelSpec, captured: Captured) -> Plan:
    return make_plan(spec, readable(spec, captured))


def readable(spec: ModelSpec, captured: Captured) -> list[str]:
    """What can be read of a text, as patterns: points one by one would each be looked for among hundreds."""
    if captured == "all":
        return ["*"]
    names = {*OVERVIEW, "resid_mid", *(name for layer in spec.layers for name in dot_inputs(layer.attention))}
    if any(layer.parallel for layer in spec.layers):
        names.add("resid_pre")
    inside = (point.name for point in points_of(spec) if point.layer is not None)
    outside = (point.name for point in points_of(spec) if point.layer is None)
    return [*outside, *dict.fromkeys(f"layers.*.{name}" for name in inside if name in names)]


def whole_trace(model: "Model", text: Text) -> Trace:
    """A text's values as the trace of one pass would hold them."""
    values = Joined(text.parts, points_kept(model.spec, text.captured))
    return _trace(model, text.prompt, _readable(model.spec, text.captured), values, text.last_logits)


def runs_layers(model: "Model") -> bool:
    """Whether one layer run by itself gives the very bits of the pass."""
    return getattr(model.engine, "bitwise", True)


def layer_rows(model: "Model", trace: Trace, layer: int) -> LayerRows:
    """All of one layer, from that layer alone, run again on the stream that entered it: the same bits."""
    spec, engine = model.spec, model.engine
    length = len(trace.prompt.ids)
    layout = Layout.of([length])
    recorder = Recorder(engine, layout, stored_in(spec, layer), spec=spec)
    entered = trace[Point("resid_post", layer - 1) if layer > 0 else Point("embed.out")]
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        x = engine.array(np.ascontiguousarray(entered))
        ran = Pass.of(engine, spec, layout)
        block(ran, spec.layers[layer], model.parameters.layers[layer], x, layer, recorder.at(layer))
    values = {point: recorder.kept[point] for point in stored_in(spec, layer)}
    return LayerRows(layer, ((Part(values, length), length),))


def layer_trace(model: "Model", prompt: Prompt, rows: LayerRows) -> Trace:
    """One layer's values as the trace of a pass would hold them."""
    values = Joined(rows.parts, stored_in(model.spec, rows.layer))
    return _trace(model, prompt, _in_layer(model.spec, rows.layer), values, None)


@lru_cache(maxsize=256)
def stored_in(spec: ModelSpec, layer: int) -> tuple[Point, ...]:
    """The points of a layer that are stored; the others are worked out of them."""
    return tuple(Point(name, layer) for name in layer_names(spec, layer) if name not in MADE)


@lru_cache(maxsize=256)
def _in_layer(spec: ModelSpec, layer: int) -> Plan:
    return make_plan(spec, [f"layers.{layer}.*"])


def _trace(model: "Model", prompt: Prompt, plan: Plan, values: Mapping[Any, Any], last: np.ndarray | None) -> Trace:
    layout = Layout.of([len(prompt.ids)])
    return Trace(
        model.engine,
        model.spec,
        model.parameters,
        prompt,
        plan,
        layout,
        values,
        last,
        piece=model.piece,
        cut=Cut(),
    )
