"""Layers in one operation of the engine, where it has one and nobody needs their stages: the same bits, sooner."""

from collections.abc import Sequence

from cutaway.engines.layout import Segment
from cutaway.engines.protocol import Array, Attended, Ending, Scoring, Stacked
from cutaway.errors import CutawayError
from cutaway.forward.attention import scoring
from cutaway.forward.cache import Room
from cutaway.forward.parameters import Parameters
from cutaway.forward.run import Run
from cutaway.points import Tap
from cutaway.spec import AttentionSpec, ModelSpec


def fused_layers(
    run: Run,
    spec: ModelSpec,
    parameters: Parameters,
    x: Array,
    first: int,
    taps: Sequence[Tap],
    ending: Ending | None,
) -> tuple[int, Stacked]:
    """How many layers from `first` on the engine has run, and what they made of the stream x `[T, d]`.

    After the last layer it has run the ending too, where one is given. 0 and x itself where the engine has no such
    operation or declines: then the stages do it. `taps` are those of all layers.
    """
    engine = run.engine
    ahead = getattr(engine, "stackable", None)
    count = 0
    if ahead is not None:
        # No operation of an engine that takes a whole layer knows of what is added to its projections.
        stop = min((i for i in parameters.adapted_layers if i >= first), default=spec.n_layers)
        count = ahead(spec.layers[first:stop], run.layout, taps[first:stop])
    if count == 0:
        return 0, Stacked(x)
    stop = first + count
    attended = run.remembered("attended", lambda: [_attended(run, spec, part) for part in run.layout.segments])
    stacked: Stacked = engine.stack(  # type: ignore[attr-defined]
        first,
        spec.layers[first:stop],
        parameters.layers[first:stop],
        x,
        run.rotations,
        attended,
        taps[first:stop],
        ending if stop == spec.n_layers else None,
    )
    run.fused.update(range(first, stop))
    return count, stacked


def _attended(run: Run, spec: ModelSpec, segment: Segment) -> Attended:
    if run.caches is not None:
        cache = run.caches[segment.slot]
        if cache.length != segment.position:
            raise CutawayError(
                f"The cache holds {cache.length} tokens, not the {segment.position} before this segment."
            )
        room = cache.make_room(segment.end)
    else:
        room = Room.of(spec, run.engine, segment.length)

    def rule(attention: AttentionSpec) -> Scoring:
        # By the spec's identity: it outlives the run, and to hash it takes longer than a small kernel.
        key = ("rule", id(attention), segment.start)
        return run.remembered(key, lambda: scoring(attention, segment, slice(0, segment.length)))

    return Attended(segment.length, segment.position, room, rule)
