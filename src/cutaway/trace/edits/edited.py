"""What edits did in a pass: where each of them fired, on how many elements, and how far the logits moved."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cutaway.errors import CutawayError
from cutaway.spec import ModelSpec
from cutaway.trace.difference import Moved
from cutaway.trace.edits.edit import Edit
from cutaway.trace.edits.editing import Done

Rerun = Callable[[Sequence[Edit]], np.ndarray | None]


@dataclass(frozen=True, eq=False)
class EditReport:
    """One edit in one pass: `fired` counts the elements that it acted on, `changed` those that became others.

    `moved` says how far this edit alone moves the last logits. That takes a pass without any edit and, where there
    are several, one with this edit only: they run when `moved` is first read.
    """

    edit: Edit
    fired: dict[str, int]
    changed: int
    _measure: Callable[[Edit], Moved] = field(repr=False)

    @property
    def elements(self) -> int:
        return sum(self.fired.values())

    @property
    def moved(self) -> Moved:
        return self._measure(self.edit)

    def __repr__(self) -> str:
        return f"<{self}>"

    def __str__(self) -> str:
        places = list(self.fired)
        where = ", ".join(places[:3]) + (f" and {len(places) - 3} more" if len(places) > 3 else "")
        return f"{self.edit}: fired at {where or 'nothing yet'}; {self.changed:,} of {self.elements:,} elements changed"


def summed(earlier: Sequence[EditReport], later: Sequence[EditReport]) -> tuple[EditReport, ...]:
    """The same edits in earlier passes and in a later one, together; `moved` is that of the later one."""
    if not earlier:
        return tuple(later)
    made = []
    for before, after in zip(earlier, later, strict=True):
        fired = {
            point: before.fired.get(point, 0) + after.fired.get(point, 0) for point in {**before.fired, **after.fired}
        }
        made.append(replace(after, fired=fired, changed=before.changed + after.changed))
    return tuple(made)


class Edited:
    """All edits of one pass. `spec` is the model's own, which a run may be without parts of."""

    def __init__(self, spec: ModelSpec, done: Sequence[Done], last_logits: np.ndarray | None, rerun: Rerun) -> None:
        self.spec = spec
        self._last_logits, self._rerun = last_logits, rerun
        self._lock = threading.Lock()
        self._runs: dict[tuple[Edit, ...], np.ndarray] = {}
        self.reports = tuple(EditReport(one.edit, dict(one.fired), one.changed, self._alone) for one in done)

    @property
    def unedited_logits(self) -> np.ndarray:
        """The last logits `[V]` of the same pass without any edit; it runs when first asked for."""
        return self._logits(())

    @property
    def moved(self) -> Moved:
        """How far all edits together move the last logits."""
        return Moved.between(self.unedited_logits, self._logits(tuple(report.edit for report in self.reports)))

    def _alone(self, edit: Edit) -> Moved:
        return Moved.between(self.unedited_logits, self._logits((edit,)))

    def _logits(self, edits: tuple[Edit, ...]) -> np.ndarray:
        if self._last_logits is None:
            raise CutawayError(f"{self.spec.name} is an encoder without a head: it has no logits that could move.")
        if len(edits) == len(self.reports):
            return self._last_logits
        with self._lock:
            if edits not in self._runs:
                found = self._rerun(edits)
                self._runs[edits] = found if found is not None else self._last_logits
            return self._runs[edits]
