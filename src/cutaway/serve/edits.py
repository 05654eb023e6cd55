"""Interventions that a page asks for, from their JSON form."""

from cutaway.errors import CutawayError
from cutaway.serve.protocol import EditCard
from cutaway.spec import ModelSpec
from cutaway.trace import Trace
from cutaway.trace.edits import Edit
from cutaway.trace.edits.plain import edit_from_json
from cutaway.trace.edits.without import PARTS, Without

MOST_EDITS = 32


def edits_of(body: object) -> tuple[Edit, ...]:
    """The edits of a request. Raises CutawayError for what is none.

    A `source` may name a file, which a page must not reach: edits that take values from elsewhere are refused.
    """
    if not isinstance(body, list) or len(body) > MOST_EDITS:
        raise CutawayError(f"edits must be a list of at most {MOST_EDITS}.")
    for data in body:
        if not isinstance(data, dict):
            raise CutawayError(f"An edit is a JSON object, not {str(data)[:40]!r}.")
        if data.get("source") is not None or "resample" in data or "adapter" in data:
            raise CutawayError("The page makes no edits that take values from another run or a file; Python does.")
    return tuple(edit_from_json(data) for data in body)


def told(trace: Trace) -> list[EditCard]:
    """What each edit of a run did."""
    reports = getattr(trace, "edits", ())
    return [
        EditCard(report.edit.to_json(), str(report.edit), sorted(report.fired), report.elements, report.changed)
        for report in reports
    ]


def parts_of(spec: ModelSpec) -> list[str]:
    """The parts that a run of this model can be without."""
    found = []
    for part in PARTS:
        without = Without(part)
        try:
            if without.instead(spec) or without.witness(spec):
                found.append(part)
        except CutawayError:
            continue
    return found
