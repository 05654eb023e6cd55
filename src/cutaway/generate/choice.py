"""The choice of a token as points of the trace: `sample.top_k` is read like `layers.3.attn.pattern`."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from cutaway.errors import UnknownPoint
from cutaway.generate.record import StepRecord
from cutaway.generate.response import Request
from cutaway.generate.sampling import Sampling
from cutaway.points import Point, choice_points, find_points, points_of
from cutaway.spec import ModelSpec
from cutaway.trace.capture.plan import listed, split_address
from cutaway.trace.running import Points

ALWAYS = ("sample.draw", "sample.token")


def parted(points: Points, request: Request, spec: ModelSpec) -> tuple[Points, Request]:
    """What of `points` a pass shows, and the request that keeps the rest: the points of its choices.

    Raises UnknownPoint for a pattern that names neither, and for a stage that these settings leave out.
    """
    there = available(spec, request.sampling)
    everything = points_of(spec) + there
    of_pass, chosen = [], set()
    for pattern in listed(points or ()):
        address, how = split_address(pattern) if isinstance(pattern, str) else (pattern, None)
        _refuse_unused(address, spec, there)
        found = find_points([address], spec, everything)
        own = {point for point in found if point in there}
        if own and how is not None and len(own) == len(found):
            raise UnknownPoint(f"{pattern!r}: {found[0]} has no rows to reduce; ask for {found[0]} as it is.")
        chosen |= own if how is None else set()
        of_pass += [pattern] if len(own) < len(found) else []
    return of_pass, replace(request, points=tuple(point for point in there if point in chosen))


def available(spec: ModelSpec, sampling: Sampling) -> list[Point]:
    """The points that each choice with these settings has, in the order of its stages."""
    there = {point.name: point for point in choice_points(spec)}
    names = [f"sample.{stage.name}" for stage in sampling.stages]
    return [there[name] for name in (*names, *ALWAYS) if name in there]


def _refuse_unused(address: object, spec: ModelSpec, there: list[Point]) -> None:
    unused = {str(point): point for point in choice_points(spec) if point not in there}
    if str(address) in unused:
        stage = str(address).removeprefix("sample.")
        used = ", ".join(map(str, there))
        raise UnknownPoint(f"{address} is a stage that is not in use: set {stage}, or ask for one of {used}.")


def values_of(record: StepRecord, points: tuple[Point, ...]) -> Mapping[Point, np.ndarray]:
    """What stands at these points of one choice, of which whole distributions were recorded."""
    interval = (np.nan, np.nan) if record.interval is None else record.interval
    told: dict[str, np.ndarray] = {f"sample.{stage.name}": stage.probabilities for stage in record.stages[1:]}
    told["sample.draw"] = np.array([record.number, *interval])
    told["sample.token"] = np.array([record.token])
    return {point: told[point.name] for point in points}
