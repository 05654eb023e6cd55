"""The passes behind a page's edited runs: whole, or only the tokens that follow the same run of a shorter text.

A text that goes on may go on from its edited keys and values where its edits do to every earlier row what they did
before. That holds of an edit that takes nothing from other rows or runs, under a mask, and that counts no position from
the end. It does not hold without the mask (a new token changes all earlier rows), for a mean over the text, for values
of the unedited run (they would have to be run as well), nor where what an edit touches is not what the cache keeps
(latents). Edits of attention by token and key would hold, but their arrays `[T, S]` are kept, since nothing else tells
what became of them, and grow along both axes: what one pass keeps cannot be joined to what a later one does. Such runs
are computed anew.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from cutaway.engines.layout import Layout
from cutaway.forward.cache import GROWTH, KVCache
from cutaway.forward.context import warn_beyond_context
from cutaway.generate.passes import shared_prefix
from cutaway.points import Point
from cutaway.serve.joined import Joined, Part, lengthened
from cutaway.serve.passes import Strand, Text, captured_of, readable
from cutaway.trace import Prompt, Trace
from cutaway.trace.capture.plan import Plan, make_plan
from cutaway.trace.capture.recorder import Cut
from cutaway.trace.edits.edit import Edit
from cutaway.trace.edits.edited import Edited
from cutaway.trace.edits.editing import Done, Editing
from cutaway.trace.edits.kinds import Drop, Knockout, PointEdit, Scale, Zero
from cutaway.trace.edits.without import Without
from cutaway.trace.running import Machine, Watching, rerun, traced

if TYPE_CHECKING:
    from cutaway.model import Model

_BY_ROW = (Zero, Scale, Drop, Knockout)


class EditedStrand:
    """The keys and values behind an edited text that grows token by token, and what its edits did so far."""

    def __init__(self, model: "Model", edits: Sequence[Edit]) -> None:
        self._model, self._edits = model, tuple(edits)
        spec = model.spec
        for edit in self._edits:
            if isinstance(edit, Without):
                spec = edit.changed(spec)
        self._cache = KVCache(spec, model.engine)

    @staticmethod
    def serves(model: "Model", edits: Sequence[Edit], length: int) -> bool:
        """Whether a run with these edits may go on from a cache with the very bits of a whole edited pass.

        On the cpu engine alone: elsewhere rows are multiplied in chunks, of which the last would be run, and its edits
        counted, twice. Raises CutawayError for edits that no run of this model can have.
        """
        if model.engine.name != "cpu" or not Strand.serves(model) or not all(map(_acts_by_row, edits)):
            return False
        if any(layer.attention.latent is not None for layer in model.spec.layers):
            return False
        editing = Editing(edits, model.spec, length)
        plan = make_plan(editing.spec, readable(model.spec, captured_of(model, length)), altered=editing.altered)
        return Point("logits") not in editing.altered and not any("S" in point.info.shape for point in plan.kept)

    @property
    def nbytes(self) -> int:
        """Bytes that the keys and values may take, what they have grown by included."""
        return self._cache.row_bytes * max(GROWTH, 2 * self._cache.length)

    def run(self, prompt: Prompt, former: tuple[Text, Trace] | None = None) -> tuple[Text, Trace]:
        """The pass over `prompt`, which may continue the latest of this strand. Raises CutawayError as a trace does."""
        model, cache, edits, ids = self._model, self._cache, self._edits, prompt.ids
        captured = captured_of(model, len(ids))
        earlier = former if former is not None and self._continues(former[0], ids, captured) else None
        if earlier is None:
            cache.truncate(0)
        due = cache.due(ids[cache.length :])
        start = len(ids) - len(due)
        if start == 0:
            earlier = None
        editing = Editing(edits, model.spec, len(ids))
        before = [Done(edit) for edit in edits]
        if earlier is not None:
            before = [Done(one.edit, dict(one.fired), one.changed) for one in earlier[1].edits]
            editing.reached = [one.elements > 0 for one in before]  # whoever acted before need not act again
        plan = make_plan(editing.spec, readable(model.spec, captured), altered=editing.altered)
        warn_beyond_context(model.spec, start, len(ids))
        machine = Machine(model.engine, model.spec, model.parameters, model.piece)
        rest = Prompt(tuple(due.tolist()), prompt.pieces[start:], "", prompt.text if start == 0 else None)
        points = tuple(plan.kept)
        asked = Watching(points, edits=edits)
        kept = Plan(points, plan.kept, True)
        ran = traced(machine, rest, asked, cache=cache, editing=editing, prepared=(kept, Cut()), shown=start == 0)
        part = Part({point: ran[point] for point in points}, len(due))
        for one, report in zip(before, ran.edits, strict=True):
            one.changed += report.changed
            for at, elements in report.fired.items():
                one.fired[at] = one.fired.get(at, 0) + elements
        last = ran.last_logits if ran.has_logits else None
        parts = tuple(lengthened(earlier[0].parts if earlier is not None else (), part))
        again = rerun(machine, prompt, asked, np.asarray(ids), editing)
        trace = Trace(
            model.engine,
            editing.spec,
            model.parameters,
            prompt,
            plan,
            Layout.of([len(ids)]),
            Joined(parts, points),
            last,
            piece=model.piece,
            cut=Cut(),
            edited=Edited(model.spec, before, last, again),
        )
        return Text(prompt, captured, parts, last), trace

    def _continues(self, former: Text, ids: Sequence[int], captured: str) -> bool:
        """Whether the cache holds the former text, of which this one is more."""
        length = len(former.prompt.ids)
        return (
            former.captured == captured
            and len(self._cache.ids) == length < len(ids)
            and shared_prefix(self._cache.ids, former.prompt.ids) == shared_prefix(former.prompt.ids, ids) == length
        )


def _acts_by_row(edit: Edit) -> bool:
    """Whether what an edit does to a row hangs on no later row, and on no other run."""
    if isinstance(edit, Without):
        return edit.part != "mask"
    if not isinstance(edit, PointEdit) or not isinstance(edit, _BY_ROW):
        return False
    if edit.positions is None:
        return True
    return "-" not in edit.positions if isinstance(edit.positions, str) else min(edit.positions) >= 0
