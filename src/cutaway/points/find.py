"""From a pattern to the points that it names; what names nothing is refused with what would be right."""

import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase

from cutaway.errors import CutawayError, UnknownPoint
from cutaway.points.foreign import our_pattern
from cutaway.points.present import all_points, choice_points, layer_names, points_of
from cutaway.points.table import IN_LAYER, OF_CHOICE, POINTS, Point
from cutaway.spec import ExpertsSpec, ModelSpec

_LAYERED = re.compile(r"layers\.(-?\d*:-?\d*|-?\d+|\*)\.(.+)")
_WILD = re.compile(r"[*?[]")  # what else than a plain name `fnmatchcase` knows


Pattern = str | Point | Callable[[Point], bool]


def find_points(
    patterns: Pattern | Iterable[Pattern], spec: ModelSpec, among: list[Point] | None = None
) -> list[Point]:
    """The points that the patterns name, in the order of the pass, each once; `among` others than those of a pass.

    A pattern is an address (`layers.3.attn.pattern`; `layers.-1.…` counts from the end), may hold `*`
    (`layers.*.attn.out`) and half-open ranges of layers (`layers.5:8.resid_post`); a function of a point chooses
    those for which it is true. Names of other tools stand for ours where their axes are the same (`points.foreign`).
    Raises UnknownPoint for a pattern that names nothing, with the closest points and, where the spec is why, the
    reason; CutawayError for what is no pattern.
    """
    if isinstance(patterns, str | Point) or callable(patterns):
        patterns = [patterns]
    if not isinstance(patterns, Iterable):
        raise CutawayError(f"points is {patterns!r}; it must be a list of addresses, as in ['layers.3.attn.pattern'].")
    available = points_of(spec) if among is None else among
    chosen: set[Point] = set()
    for pattern in patterns:
        if callable(pattern):
            named = [point for point in available if pattern(point)]
            if not named:
                raise UnknownPoint(
                    f"The function {pattern!r} chooses none of the {len(available)} points of {spec.name}."
                )
            chosen.update(named)
            continue
        if not isinstance(pattern, str | Point):
            raise UnknownPoint(f"A point is {pattern!r}; it must be an address such as 'layers.3.attn.pattern'.")
        address = our_pattern(str(pattern), spec)
        found = _matches(address, available, spec.n_layers)
        if not found:
            raise UnknownPoint(_nothing_matches(address, available, spec))
        chosen.update(found)
    return [point for point in available if point in chosen]


def parse_point(text: str | Point, spec: ModelSpec) -> Point:
    """The one point at this address. Raises as `find_points` does, and UnknownPoint where several match."""
    found = find_points([text], spec, all_points(spec))
    if len(found) > 1:
        raise UnknownPoint(f"{str(text)!r} names {len(found)} points ({found[0]}, {found[1]}, …); name one of them.")
    return found[0]


def _matches(pattern: str, available: list[Point], n_layers: int) -> list[Point]:
    layered = _LAYERED.fullmatch(pattern)
    if layered is None and _WILD.search(pattern) is None:
        return [point for point in available if point.name == pattern and point.layer is None]
    if layered is None:
        return [point for point in available if fnmatchcase(str(point), pattern)]
    which, name = layered.groups()
    layers = layer_range(which, n_layers)
    names = {known for known in {point.name for point in available} if fnmatchcase(known, name)}  # of all layers once
    return [p for p in available if p.name in names and p.layer is not None and p.layer in layers]


def layer_range(which: str, n_layers: int) -> range:
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
    layers = layer_range(which, spec.n_layers)
    if not layers:
        return f"No point {pattern!r}: {spec.name} has layers 0 to {spec.n_layers - 1}."
    if name in POINTS:
        if name in IN_LAYER and name == pattern:
            return f"{name!r} stands in every layer: say which, as in 'layers.0.{name}' or 'layers.*.{name}'."
        reason = None
        if (name in IN_LAYER) == (layered is not None) and (name not in OF_CHOICE or not choice_points(spec)):
            reason = _why_absent(name, spec, layers)
        if reason:
            return f"No point {pattern!r}: {reason}."
    if not set(available) & set(choice_points(spec)) and _matches(pattern, choice_points(spec), spec.n_layers):
        return f"{pattern} is no part of a pass but of the choice that follows it: ask for it in generate or stream."
    names = {str(point): None for point in (*available, *choice_points(spec))}
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
        **dict.fromkeys(OF_CHOICE, f"{spec.name} is an encoder: nothing is drawn from what it gives"),
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
