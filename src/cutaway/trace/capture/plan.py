"""Which values a trace keeps, and which it can work out later from those."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from cutaway.errors import CutawayError
from cutaway.points import ROW_BLOCKS, Pattern, Point, dot_inputs, find_points, points_of
from cutaway.spec import ModelSpec
from cutaway.trace.capture.reductions import Reduced, parse_reduction

# What a trace keeps when nobody says: every stream and what is added to it, and the queries, keys and head
# mixes that the attention patterns and each head's part of the output follow from.
SUMMARY = (
    "tokens",
    "embed.tokens",
    "embed.types",
    "embed.positions",
    "embed.norm",
    "embed.out",
    "resid_pre",
    "attn.q",
    "attn.k",
    "attn.v",
    "attn.q_normed",
    "attn.k_normed",
    "attn.q_rot",
    "attn.k_rot",
    "attn.z",
    "attn.out",
    "resid_mid",
    "moe.chosen",
    "moe.gates",
    "mlp.out",
    "resid_post",
    "final.norm",
    "pooler.out",
)

# What the overview of a pass reads of every layer: what is added to the stream, the stream, who listens to whom.
OVERVIEW = ("attn.out", "mlp.out", "resid_post", "attn.pattern")


@dataclass(frozen=True)
class Plan:
    """`points` may be read from the trace, `reduced` in reduced form; `kept` are those stored while the pass runs.

    Of T × T arrays only what they are made from is stored (queries and keys), of `attn.head_out` the heads'
    mixes, of `logits` the stream that the head reads: the same functions make them on access, bit for bit.
    With `stored` set they are kept as the pass makes them (a pass that goes on from a cache, whose earlier
    keys the trace does not hold). So is whatever an edit reaches on its way (`altered`): it follows from nothing else.
    With `some_rows` the trace holds chosen positions only, and patterns of these are kept row by row.
    """

    points: tuple[Point, ...]
    kept: frozenset[Point]
    stored: bool
    reduced: tuple[Reduced, ...] = ()
    altered: frozenset[Point] = frozenset()
    some_rows: bool = False

    def sources(self, spec: ModelSpec, point: Point) -> list[Point]:
        """The stored points that the value at `point` comes from; the point itself where it is stored."""
        if self.stored and point.name in ROW_BLOCKS:
            return [point]
        if self.some_rows and point.name in ("attn.masked", "attn.pattern"):
            return [point]
        if self.altered and any(earlier in self.altered for earlier in _on_the_way(point)):
            return [point]
        return made_from(spec, point)

    @cached_property
    def addresses(self) -> dict[str, Point | Reduced]:
        """What may be read, by its address, in the order of the pass: one dict for all traces of a generation."""
        readable: list[Point | Reduced] = [*self.points, *self.reduced]
        return {str(at): at for at in readable}

    def whole(self, spec: ModelSpec) -> frozenset[Point]:
        """The stored points that are kept with all rows and heads, because others are made from them."""
        made = [p for p in self.points if p.name in ROW_BLOCKS and self.sources(spec, p) != [p]]
        return frozenset(source for point in made for source in self.sources(spec, point))

    def taken(self, spec: ModelSpec) -> tuple[Reduced, ...]:
        """What is reduced while the pass runs; the rest (head_out, logits) is worked out from what is stored."""
        return tuple(one for one in self.reduced if one.point.name in ROW_BLOCKS or self._is_shown(spec, one.point))

    def _is_shown(self, spec: ModelSpec, point: Point) -> bool:
        return self.sources(spec, point) == [point]


def make_plan(
    spec: ModelSpec,
    points: Pattern | Iterable[Pattern] | None,
    *,
    stored: bool = False,
    altered: frozenset[Point] = frozenset(),
    some_rows: bool = False,
    tokens: bool = True,
) -> Plan:
    """Plan the capture of `points` (patterns as in `find_points`), or of the summary where None.

    A pattern may end in a reduction (`layers.*.attn.pattern | top(5)`). Without `tokens` the pass starts from
    vectors, and there are none to read.
    """
    chosen: list[Point] = []
    some: list[Reduced] = []
    if points is None:
        made = ROW_BLOCKS if not stored else ()
        names = {*SUMMARY, *made, "attn.head_out", "logits"}
        chosen = [point for point in points_of(spec) if point.name in names]
    else:
        plain, reducing = _parted(points)
        chosen = find_points(plain, spec)
        some = _reductions(reducing, spec)
    if not tokens:
        if points is not None and any(str(pattern) == "tokens" for pattern in listed(points)):
            raise CutawayError("The prompt was given as vectors: there are no tokens to capture.")
        chosen = [point for point in chosen if point.name != "tokens"]
    plan = Plan(tuple(chosen), frozenset(), stored, tuple(some), altered, some_rows)
    kept = {source for point in chosen for source in plan.sources(spec, point)}
    shown = plan.taken(spec)
    kept |= {source for one in some if one not in shown for source in plan.sources(spec, one.point)}
    return Plan(plan.points, frozenset(kept), stored, plan.reduced, altered, some_rows)


def overview_points(spec: ModelSpec, layer: int) -> list[Point]:
    """What a drawing of the pass reads: all of one layer, the overview of the others, all outside the layers."""
    return [point for point in points_of(spec) if point.layer in (None, layer) or point.name in OVERVIEW]


def made_from(spec: ModelSpec, point: Point) -> list[Point]:
    """The points that the value at `point` is worked out from; the point itself where it is simply stored."""
    if point.name in ROW_BLOCKS and point.layer is not None:
        return [Point(name, point.layer) for name in dot_inputs(spec.layers[point.layer].attention)]
    if point.name == "attn.head_out":
        return [Point("attn.z", point.layer)]
    if point.name == "logits":
        return [head_input(spec)]
    return [point]


def head_input(spec: ModelSpec) -> Point:
    """What the head reads: the final norm, or the last stream of a model without one."""
    return Point("final.norm") if spec.final_norm is not None else Point("resid_post", spec.n_layers - 1)


def _on_the_way(point: Point) -> list[Point]:
    """The points at which an edit changes what is worked out for `point` from its sources."""
    if point.name in ROW_BLOCKS:
        return [Point(name, point.layer) for name in ROW_BLOCKS[: ROW_BLOCKS.index(point.name) + 1]]
    return [point] if point.name in ("attn.head_out", "logits") else []


def listed(points: Pattern | Iterable[Pattern]) -> list[Pattern]:
    """One pattern or several, as a list. Raises CutawayError for anything else."""
    if isinstance(points, str | Point) or callable(points):
        return [points]
    if not isinstance(points, Iterable):
        raise CutawayError(f"points is {points!r}; it must be a list of addresses, as in ['layers.3.attn.pattern'].")
    return list(points)


def _parted(points: Pattern | Iterable[Pattern]) -> tuple[list[Pattern], list[tuple[str, str]]]:
    """The patterns that name whole values, and those with a reduction."""
    plain: list[Pattern] = []
    reducing: list[tuple[str, str]] = []
    for pattern in listed(points):
        if isinstance(pattern, str) and "|" in pattern:
            address, _, how = pattern.partition("|")
            reducing.append((address.strip(), how))
        else:
            plain.append(pattern)
    return plain, reducing


def _reductions(patterns: list[tuple[str, str]], spec: ModelSpec) -> list[Reduced]:
    found: dict[Reduced, None] = {}
    for address, how in patterns:
        reduction = parse_reduction(how)
        for point in find_points([address], spec):
            reduction.check(point)
            found[Reduced(point, reduction)] = None
    return list(found)


def split_address(address: str) -> tuple[str, str | None]:
    """The point's address and its reduction, where one is written after it."""
    point, bar, how = address.partition("|")
    return (point.strip(), how.strip()) if bar else (address, None)
