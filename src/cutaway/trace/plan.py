"""Which values a trace keeps, and which it can work out later from those."""

from collections.abc import Iterable
from dataclasses import dataclass

from cutaway.points import Point, dot_inputs, find_points, points_of
from cutaway.spec import ModelSpec
from cutaway.trace.recorder import ROW_BLOCKS

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
    """`points` may be read from the trace; `kept` are those stored while the pass runs.

    Of T × T arrays only what they are made from is stored (queries and keys), of `attn.head_out` the heads'
    mixes, of `logits` the stream that the head reads: the same functions make them on access, bit for bit.
    With `stored` set they are kept as the pass makes them (a pass that goes on from a cache, whose earlier
    keys the trace does not hold).
    """

    points: tuple[Point, ...]
    kept: frozenset[Point]
    stored: bool


def make_plan(spec: ModelSpec, points: Iterable[str | Point] | None, *, stored: bool = False) -> Plan:
    """Plan the capture of `points` (patterns as in `find_points`), or of the summary where None."""
    if points is None:
        made = ROW_BLOCKS if not stored else ()
        names = {*SUMMARY, *made, "attn.head_out", "logits"}
        chosen = [point for point in points_of(spec) if point.name in names]
    else:
        chosen = find_points(points, spec)
    kept: set[Point] = set()
    for point in chosen:
        kept.update([point] if stored and point.name in ROW_BLOCKS else made_from(spec, point))
    return Plan(tuple(chosen), frozenset(kept), stored)


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
