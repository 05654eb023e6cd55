"""The address of every intermediate of the forward pass, and the tap through which a stage shows it.

A point has a name, a shape in symbols, a meaning and a reason; `layers.3.attn.pattern` is the pattern of
layer 3. Symbols: V vocabulary, d model width, H query heads, H_kv key/value heads, T tokens, S keys seen
(T, where nothing is cached).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, Protocol

from cutaway.errors import CutawayError, UnknownPoint
from cutaway.spec import AttentionSpec, ExpertsSpec, FeedForwardSpec, ModelSpec

Array = Any


LECTURE = "Inside the Transformer: The Complete Forward Pass"  # whose chapters are meant wherever one is named


@dataclass(frozen=True)
class PointInfo:
    """What stands at a point: symbolic shape, what it is, why it is there, and LECTURE's chapter that explains it."""

    shape: tuple[str, ...]
    meaning: str
    reason: str
    chapter: str


_STREAM = ("T", "d")
_SCORES = ("H", "T", "S")

POINTS: dict[str, PointInfo] = {
    "tokens": PointInfo(("T",), "the ids of the tokens", "a token id is a name, a row number of the embedding", "2"),
    "embed.tokens": PointInfo(
        _STREAM,
        "one row of the embedding matrix per token",
        "turns a name into numbers that can be computed with",
        "4",
    ),
    "embed.positions": PointInfo(
        _STREAM,
        "the position vector of each token",
        "attention alone cannot tell one order from another",
        "10.4",
    ),
    "embed.types": PointInfo(
        _STREAM, "the vector of each token's sentence kind", "tells the sentences of a pair apart", "4"
    ),
    "embed.norm": PointInfo(
        _STREAM,
        "token and position vectors together, normed",
        "gives the first layer rows of a standard size",
        "12.2",
    ),
    "embed.out": PointInfo(_STREAM, "the first residual stream", "what the layers read and add to", "4"),
    "resid_pre": PointInfo(_STREAM, "the residual stream that enters the layer", "carries all layers so far", "12.1"),
    "attn.norm": PointInfo(
        _STREAM, "the stream, normed, as attention reads it", "keeps every depth on one scale", "12.2"
    ),
    "attn.q_latent": PointInfo(
        ("T", "q_rank"), "queries squeezed into a latent, normed", "fewer weights for the same heads", "13.5"
    ),
    "attn.q": PointInfo(("H", "T", "d_head"), "queries: what each token looks for", "one side of the match", "7.2"),
    "attn.kv_latent": PointInfo(
        ("T", "kv_rank"), "keys and values squeezed into a latent, normed", "all that the cache keeps of them", "15.3"
    ),
    "attn.k_shared": PointInfo(
        ("T", "d_rope"), "the part of the key that all heads share, before it turns", "carries the position", "10.4"
    ),
    "attn.k": PointInfo(("H_kv", "T", "d_head"), "keys: what each token offers", "the other side of the match", "7.2"),
    "attn.v": PointInfo(
        ("H_kv", "T", "d_head"), "values: what each token passes on", "the payload of attention", "7.2"
    ),
    "attn.q_normed": PointInfo(
        ("H", "T", "d_head"), "queries, each head's brought to a standard size", "keeps the scores in bounds", "12.2"
    ),
    "attn.k_normed": PointInfo(
        ("H_kv", "T", "d_head"), "keys, each head's brought to a standard size", "keeps the scores in bounds", "12.2"
    ),
    "attn.q_rot": PointInfo(
        ("H", "T", "d_head"),
        "queries turned by their position",
        "makes q·k depend on the distance t − s",
        "10.4",
    ),
    "attn.k_rot": PointInfo(
        ("H_kv", "T", "d_head"),
        "keys turned by their position",
        "makes q·k depend on the distance t − s",
        "10.4",
    ),
    "attn.dots": PointInfo(_SCORES, "QKᵀ: every query against every key", "how well each pair matches", "7.3"),
    "attn.scores": PointInfo(_SCORES, "the dot products times 1/√d_head", "keeps the softmax from saturating", "7.4"),
    "attn.masked": PointInfo(_SCORES, "the scores with −∞ on what may not be seen", "no token reads its future", "8.2"),
    "attn.pattern": PointInfo(_SCORES, "softmax of each row: who listens to whom", "weights that sum to 1", "7.3"),
    "attn.z": PointInfo(
        ("H", "T", "d_head"), "each head's mix of values", "what the head carries to each token", "7.3"
    ),
    "attn.head_out": PointInfo(
        ("H", "T", "d"),
        "each head's part of the output, through its slice of W_O",
        "tells the heads apart",
        "9.1",
    ),
    "attn.raw": PointInfo(_STREAM, "the heads joined by W_O", "mixes what the heads found", "9.1"),
    "attn.out": PointInfo(_STREAM, "what attention adds to the stream", "attention gathers", "12.1"),
    "attn.sum": PointInfo(_STREAM, "stream plus attention, before the norm", "post-norm models norm the sum", "12.2"),
    "resid_mid": PointInfo(_STREAM, "the stream between attention and feed-forward", "what the FFN reads", "12.3"),
    "mlp.norm": PointInfo(_STREAM, "the stream, normed, as the FFN reads it", "keeps every depth on one scale", "12.2"),
    "mlp.gate": PointInfo(("T", "d_ff"), "the gate's projection", "decides how much of each neuron passes", "13.5"),
    "mlp.up": PointInfo(("T", "d_ff"), "the projection up to the wide layer", "the keys of a per-token memory", "11.3"),
    "mlp.act": PointInfo(
        ("T", "d_ff"), "the neurons, as the down projection reads them", "which memories fire", "11.3"
    ),
    "moe.router_logits": PointInfo(("T", "E"), "the router's score of every expert", "who should work on this", "13.5"),
    "moe.scores": PointInfo(("T", "E"), "softmax or sigmoid of the router's logits", "comparable weights", "13.5"),
    "moe.chosen": PointInfo(("T", "k"), "the experts that each token is sent to", "only these are computed", "13.5"),
    "moe.gates": PointInfo(("T", "k"), "how much each chosen expert counts", "blends them by their scores", "13.5"),
    "moe.expert_out": PointInfo(("T", "k", "d"), "what each chosen expert gives", "before it is weighed", "13.5"),
    "moe.shared_out": PointInfo(_STREAM, "what the shared expert gives", "knowledge that every token needs", "13.5"),
    "mlp.raw": PointInfo(
        _STREAM, "the projection back down, or the blend of the experts", "what the neurons stand for", "11.3"
    ),
    "mlp.out": PointInfo(_STREAM, "what the feed-forward adds to the stream", "the feed-forward processes", "12.1"),
    "mlp.sum": PointInfo(_STREAM, "stream plus feed-forward, before the norm", "post-norm models norm the sum", "12.2"),
    "resid_post": PointInfo(_STREAM, "the residual stream that leaves the layer", "the next layer reads it", "12.3"),
    "final.norm": PointInfo(_STREAM, "the last stream, normed", "what the head reads", "13.1"),
    "pooler.out": PointInfo(("1", "d"), "a tanh layer on the first token", "one vector for the whole text", "13"),
    "logits": PointInfo(("T", "V"), "one score per vocabulary entry", "the next token's odds, before softmax", "13.1"),
}

GLOBAL_FIRST = ("tokens", "embed.tokens", "embed.types", "embed.positions", "embed.norm", "embed.out")
GLOBAL_LAST = ("final.norm", "pooler.out", "logits")
IN_LAYER = tuple(name for name in POINTS if name not in GLOBAL_FIRST + GLOBAL_LAST)


_LAYERED = re.compile(r"layers\.(-?\d*:-?\d*|-?\d+|\*)\.(.+)")


@dataclass(frozen=True)
class Point:
    """One address: a name and, for what stands in a layer, its layer. `str(point)` is `layers.3.attn.pattern`."""

    name: str
    layer: int | None = None

    def __str__(self) -> str:
        return self.name if self.layer is None else f"layers.{self.layer}.{self.name}"

    @property
    def info(self) -> PointInfo:
        return POINTS[self.name]


class Tap(Protocol):
    """How a stage shows a value, and may be handed another to go on with.

    `tap(name, value)` returns what the stage continues with: the value itself, unless someone edits it.
    `tap.rows(name, value, segment, start)` does the same for a block of query rows of a `[H, R, S]` point,
    whose first row is row `start` of its segment. `tap.at(i)` is the tap of layer i.

    `shown` names the points of this layer (outside the layers: of the rest) that somebody wants to see, `altered`
    those at which a value may come back changed. What is in neither may be worked out in any way that gives the
    same result, and need not be shown.
    """

    @property
    def shown(self) -> frozenset[str]: ...

    @property
    def altered(self) -> frozenset[str]: ...

    def __call__(self, name: str, value: Array) -> Array: ...

    def rows(self, name: str, value: Array, segment: int, start: int) -> Array: ...

    def at(self, layer: int) -> "Tap": ...


class Unwatched:
    """The tap of a pass that nobody looks at."""

    shown: frozenset[str] = frozenset()
    altered: frozenset[str] = frozenset()

    def __call__(self, name: str, value: Array) -> Array:
        return value

    def rows(self, name: str, value: Array, segment: int, start: int) -> Array:
        return value

    def at(self, layer: int) -> "Unwatched":
        return self


def layer_names(spec: ModelSpec, layer: int) -> list[str]:
    """The points that layer `layer` of this spec has, in the order of the pass."""
    what = spec.layers[layer]
    attention, latent = what.attention, what.attention.latent
    experts = isinstance(what.feed_forward, ExpertsSpec)
    before = what.norm is not None and what.placement == "pre"
    after = what.norm is not None and what.placement == "post"
    present = {
        "attn.norm": before,
        "attn.q_latent": latent is not None and latent.q_rank is not None,
        "attn.kv_latent": latent is not None,
        "attn.k_shared": latent is not None,
        "attn.q_normed": attention.qk_norm is not None,
        "attn.k_normed": attention.qk_norm is not None,
        "attn.q_rot": attention.rotary is not None,
        "attn.k_rot": attention.rotary is not None,
        "attn.sum": after,
        "resid_mid": not what.parallel,
        "mlp.norm": before and not what.shared_norm,
        "mlp.gate": isinstance(what.feed_forward, FeedForwardSpec) and what.feed_forward.gated,
        "mlp.up": not experts,
        "mlp.act": not experts,
        "moe.shared_out": isinstance(what.feed_forward, ExpertsSpec) and what.feed_forward.shared is not None,
        "mlp.sum": after,
    }
    names = [name for name in IN_LAYER if present.get(name, experts or not name.startswith("moe."))]
    if attention.norm_after_rotary:  # the two pairs stand in the other order
        turned = [name for name in names if name.endswith("_rot")]
        at = names.index("attn.q_normed") if "attn.q_normed" in names else 0
        names = [name for name in names if name not in turned]
        names[at:at] = turned
    return names


def dot_inputs(attention: AttentionSpec) -> tuple[str, str]:
    """The points at which queries and keys stand as they enter the dot product."""
    if attention.qk_norm is not None and (attention.norm_after_rotary or attention.rotary is None):
        return "attn.q_normed", "attn.k_normed"
    return ("attn.q_rot", "attn.k_rot") if attention.rotary is not None else ("attn.q", "attn.k")


def shape_symbols(point: Point, spec: ModelSpec) -> tuple[str, ...]:
    """The shape of a point in symbols, in this model: where values have a width of their own it says so."""
    shape = point.info.shape
    if point.name not in ("attn.v", "attn.z") or point.layer is None:
        return shape
    attention = spec.layers[point.layer].attention
    return shape if attention.value_width == attention.d_head else (*shape[:-1], "d_value")


def shape_of(point: Point, spec: ModelSpec, tokens: int) -> tuple[int, ...]:
    """The shape of a point in numbers, in a pass over `tokens` tokens with nothing cached."""
    layer = spec.layers[point.layer or 0]
    attention, latent, experts = layer.attention, layer.attention.latent, layer.feed_forward
    sizes: dict[str, int | None] = {
        "1": 1,
        "T": tokens,
        "S": tokens,
        "d": spec.d_model,
        "V": spec.vocab_size,
        "H": attention.n_heads,
        "H_kv": attention.n_kv_heads,
        "d_head": attention.d_head,
        "d_value": attention.value_width,
        "d_ff": experts.d_ff if isinstance(experts, FeedForwardSpec) else None,
        "E": experts.n_experts if isinstance(experts, ExpertsSpec) else None,
        "k": experts.router.n_active if isinstance(experts, ExpertsSpec) else None,
        "q_rank": latent.q_rank if latent is not None else None,
        "kv_rank": latent.kv_rank if latent is not None else None,
        "d_rope": latent.d_rope if latent is not None else None,
    }
    shape = [sizes[symbol] for symbol in shape_symbols(point, spec)]
    return tuple(size for size in shape if size is not None)


def points_of(spec: ModelSpec) -> list[Point]:
    """Every point that a model of this spec has, in the order of the pass."""
    absent = {
        "embed.positions": spec.positions is None,
        "embed.types": spec.token_types is None,
        "embed.norm": spec.embed_norm is None,
        "final.norm": spec.final_norm is None,
        "pooler.out": not spec.pooler,
        "logits": spec.headless,
    }
    first = [Point(name) for name in GLOBAL_FIRST if not absent.get(name, False)]
    inside = [Point(name, i) for i in range(spec.n_layers) for name in layer_names(spec, i)]
    return first + inside + [Point(name) for name in GLOBAL_LAST if not absent.get(name, False)]


def find_points(patterns: Iterable[str | Point], spec: ModelSpec) -> list[Point]:
    """The points that the patterns name, in the order of the pass, each once.

    A pattern is an address (`layers.3.attn.pattern`; `layers.-1.…` counts from the end), may hold `*`
    (`layers.*.attn.out`) and half-open ranges of layers (`layers.5:8.resid_post`). Raises UnknownPoint for a
    pattern that names nothing, with the closest points and, where the spec is why, the reason; CutawayError for
    what is no pattern.
    """
    if isinstance(patterns, str | Point):
        patterns = [patterns]
    if not isinstance(patterns, Iterable):
        raise CutawayError(f"points is {patterns!r}; it must be a list of addresses, as in ['layers.3.attn.pattern'].")
    available = points_of(spec)
    chosen: set[Point] = set()
    for pattern in patterns:
        if not isinstance(pattern, str | Point):
            raise UnknownPoint(f"A point is {pattern!r}; it must be an address such as 'layers.3.attn.pattern'.")
        found = _matches(str(pattern), available, spec.n_layers)
        if not found:
            raise UnknownPoint(_nothing_matches(str(pattern), available, spec))
        chosen.update(found)
    return [point for point in available if point in chosen]


def parse_point(text: str | Point, spec: ModelSpec) -> Point:
    """The one point at this address. Raises as `find_points` does, and UnknownPoint where several match."""
    found = find_points([text], spec)
    if len(found) > 1:
        raise UnknownPoint(f"{str(text)!r} names {len(found)} points ({found[0]}, {found[1]}, …); name one of them.")
    return found[0]


def _matches(pattern: str, available: list[Point], n_layers: int) -> list[Point]:
    layered = _LAYERED.fullmatch(pattern)
    if layered is None:
        return [point for point in available if fnmatchcase(str(point), pattern)]
    which, name = layered.groups()
    layers = _layers(which, n_layers)
    return [p for p in available if p.layer is not None and p.layer in layers and fnmatchcase(p.name, name)]


def _layers(which: str, n_layers: int) -> range:
    """The layers that "3", "-1", "5:8" or "*" name; none where there are no such layers."""
    if which == "*":
        return range(n_layers)
    if ":" in which:
        start, stop = (int(end) if end else None for end in which.split(":"))
        return range(n_layers)[start:stop]
    index = int(which)
    return range(n_layers)[index:][:1] if -n_layers <= index < n_layers else range(0)


def _nothing_matches(pattern: str, available: list[Point], spec: ModelSpec) -> str:
    layered = _LAYERED.fullmatch(pattern)
    which, name = layered.groups() if layered else ("*", pattern)
    layers = _layers(which, spec.n_layers)
    if not layers:
        return f"No point {pattern!r}: {spec.name} has layers 0 to {spec.n_layers - 1}."
    if name in POINTS:
        if name in IN_LAYER and name == pattern:
            return f"{name!r} stands in every layer: say which, as in 'layers.0.{name}' or 'layers.*.{name}'."
        reason = _why_absent(name, spec, layers) if (name in IN_LAYER) == (layered is not None) else None
        if reason:
            return f"No point {pattern!r}: {reason}."
    names = {str(point): None for point in available}
    close = get_close_matches(pattern, names, n=3, cutoff=0.4) or list(names)[:3]
    return f"No point {pattern!r} in {spec.name}; the closest are {', '.join(close)}."


def _why_absent(name: str, spec: ModelSpec, layers: range) -> str | None:
    """Why these layers, or the whole model, lack a point; a layer is named where the others are not like it."""
    who, kind = spec.name, "models"
    if any(name in layer_names(spec, i) for i in range(spec.n_layers)):
        who, kind = f"layer {layers[0]} of {spec.name}", "layers"
    positions = f"{spec.positions.kind} positions" if spec.positions is not None else "no positions in its attention"
    what = spec.layers[layers[0]]
    experts = isinstance(what.feed_forward, ExpertsSpec)
    no_norm_before = "has no norms in its layers" if what.norm is None else "has its norms after the sum"
    if what.shared_norm and name == "mlp.norm":
        no_norm_before = "reads the same norm as its attention"
    if name.startswith("moe.") and not experts:
        return f"the feed-forward of {who} has no experts"
    reasons = {
        "attn.q_rot": f"{who} has {positions}, nothing turns its queries",
        "attn.k_rot": f"{who} has {positions}, nothing turns its keys",
        "embed.positions": f"{spec.name} adds no positions to its embedding",
        "embed.norm": f"{spec.name} has no norm after its embedding",
        "final.norm": f"{spec.name} has no final norm; its head reads layers.{spec.n_layers - 1}.resid_post",
        "embed.types": f"{spec.name} knows no kinds of sentences",
        "pooler.out": f"{spec.name} has no pooler",
        "logits": f"{spec.name} is an encoder without a head",
        "attn.q_latent": f"the queries of {who} go through no latent",
        "attn.kv_latent": f"the keys and values of {who} go through no latent",
        "attn.k_shared": f"the keys and values of {who} go through no latent",
        "attn.q_normed": f"{who} does not norm its queries",
        "attn.k_normed": f"{who} does not norm its keys",
        "resid_mid": f"{who} adds attention and feed-forward at once",
        "mlp.gate": f"the feed-forward of {who} " + ("is made of experts" if experts else "has no gate"),
        "mlp.up": f"the feed-forward of {who} is made of experts",
        "mlp.act": f"the feed-forward of {who} is made of experts",
        "moe.shared_out": f"{who} has no shared expert",
        "attn.norm": f"{who} {no_norm_before}",
        "mlp.norm": f"{who} {no_norm_before}",
        "attn.sum": f"only post-norm {kind} have it, and {who} is none",
        "mlp.sum": f"only post-norm {kind} have it, and {who} is none",
    }
    return reasons.get(name)
