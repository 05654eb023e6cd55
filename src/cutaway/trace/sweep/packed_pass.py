"""One watched pass over several sequences, packed: each gets the trace that it would get alone, bit for bit."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cutaway.engines.layout import Layout
from cutaway.engines.protocol import Array, Engine
from cutaway.errors import CutawayError
from cutaway.forward.transformer import Pass, transformer
from cutaway.points import POINTS, Point, Tap
from cutaway.spec import ModelSpec
from cutaway.trace.capture.bill import Bill, bill
from cutaway.trace.capture.plan import Plan
from cutaway.trace.capture.recorder import Cut, Recorder
from cutaway.trace.edits.adapting import adapted, apart
from cutaway.trace.edits.edited import Edited
from cutaway.trace.edits.editing import EditedPass, Editing, as_shown
from cutaway.trace.prompts import Fed
from cutaway.trace.running import Machine, Watching, finite_results, planned, rerun, unedited_run, value_type
from cutaway.trace.trace import Trace, rows_asked


class Packed:
    """What is asked of every prompt of a sweep: planned once, run for as many prompts at a time as are given.

    On the numpy and cpu engines each trace has the bits of `Model.trace` of its prompt alone.
    """

    def __init__(self, machine: Machine, asked: Watching) -> None:
        self._machine, self._asked = machine, asked
        self._planned: dict[bool, tuple[Plan, Cut, ModelSpec, frozenset[Point]]] = {}
        self._bills: dict[tuple[int, bool], Bill] = {}

    def bytes(self, told: Fed) -> int:
        """What one prompt's capture keeps. Raises CutawayError where it is over the limit, or cannot be planned."""
        length = len(told.prompt.ids)
        kind = length, told.vectors is None
        if kind not in self._bills:
            plan, cut, spec, edited = self._plan(told)
            dtype = value_type(self._machine.engine)
            made = bill(plan, spec, length, self._cut(cut, length), dtype, edited=edited)
            made.refuse_over(self._asked.limit)
            self._bills[kind] = made
        return self._bills[kind].bytes

    def plan(self, told: Fed) -> Plan:
        """What is kept of every prompt of this kind, tokens or vectors; of which one it is asked does not matter."""
        return self._plan(told)[0]

    def run(self, prompts: Sequence[Fed]) -> list[Trace]:
        """One pass over all of them, which are of one kind: tokens, or vectors in their place.

        Raises CutawayError as `Model.trace` does, for the first prompt it concerns.
        """
        machine = self._machine
        engine = machine.engine
        layout = Layout.of(len(told.prompt.ids) for told in prompts)
        parts = [self._part(index, told) for index, told in enumerate(prompts)]
        spec = parts[0].editing.spec
        rows = [segment.start + row for part, segment in zip(parts, layout.segments, strict=True) for row in part.rows]
        tap = Apart(engine, layout, [part.tap for part in parts], [len(part.rows) for part in parts])
        sequences = [told.sequence for told in prompts]
        counts = [part.count for part in parts]
        counted = apart(counts, [segment.length for segment in layout.segments], [len(part.rows) for part in parts])
        parameters = adapted(machine.parameters, parts[0].editing.edits, counted)
        ran = transformer(engine, spec, parameters, sequences, tap=tap, rows=rows, types=_types(prompts))
        given = iter(_parted(ran, layout, [len(part.rows) for part in parts]))
        return [part.trace(next(given)) for part in parts]

    def _plan(self, told: Fed) -> tuple[Plan, Cut, ModelSpec, frozenset[Point]]:
        # Points, edits and heads are those of all prompts; only the rows differ, and the length that edits count from.
        kind, length = told.vectors is None, len(told.prompt.ids)
        if kind not in self._planned:
            editing = Editing(
                self._asked.edits, self._machine.spec, length, unedited=lambda points: None
            )  # nothing runs
            plan, cut = planned(editing.spec, self._of(told), Layout.of([length]), editing)
            self._planned[kind] = plan, cut, editing.spec, editing.altered
        return self._planned[kind]

    def _of(self, told: Fed) -> Watching:
        """What is asked of this prompt."""
        return replace(self._asked, types=told.types, vectors=told.vectors)

    def _cut(self, cut: Cut, length: int) -> Cut:
        asked = self._asked.positions
        return cut if asked is None else replace(cut, rows=rows_asked(asked, length))

    def _part(self, index: int, told: Fed) -> "_Part":
        with naming(index):
            plan, cut, _, _ = self._plan(told)
            asked, length = self._of(told), len(told.prompt.ids)
            unedited = unedited_run(self._machine, told.prompt, asked)
            editing = Editing(asked.edits, self._machine.spec, length, unedited=unedited)
            return _Part(index, self._machine, asked, told, plan, self._cut(cut, length), editing)


class _Part:
    """One sequence of a packed pass: its own edits, its own recorder, and the trace that comes of them."""

    def __init__(
        self, index: int, machine: Machine, asked: Watching, told: Fed, plan: Plan, cut: Cut, editing: Editing
    ) -> None:
        self._index, self._machine, self._asked, self._told = index, machine, asked, told
        self._plan, self._cut, self.editing = plan, cut, editing
        engine, spec = machine.engine, editing.spec
        self._layout = Layout.of([len(told.prompt.ids)])
        self._recorder = Recorder(engine, self._layout, plan.kept, spec=spec, reduced=plan.taken(spec), cut=cut)
        reads = any(point.name == "logits" for point in (*plan.points, *(one.point for one in plan.reduced)))
        edited = editing.logit_rows(self._layout, all_rows=reads) if editing.edits else None
        self.rows = self._layout.last_rows if edited is None else edited
        self._edited: EditedPass | None = None
        self.tap: Tap = self._recorder
        if editing.edits:
            self.tap = self._edited = editing.tap(engine, self._layout, self._recorder, self.rows)

    def count(self, index: int, projection: str, changed: np.ndarray, width: int) -> None:
        """What an adapter among the edits changed in this sequence's rows."""
        if self._edited is not None:
            self._edited.count(index, projection, changed, width)

    def trace(self, ran: Pass) -> Trace:
        """What this sequence's part of the pass left."""
        machine, editing, spec = self._machine, self.editing, self.editing.spec
        prompt, sequence, types = self._told.prompt, self._told.sequence, self._told.types
        parameters = adapted(machine.parameters, editing.edits)
        self._recorder.finish()
        with naming(self._index):
            last = finite_results(machine.engine, spec, parameters, ran, self._recorder, sequence, types, editing)
            if self._edited is not None:
                editing.finish(self._edited.done, len(sequence))
        told = None
        if self._edited is not None:
            again = rerun(machine, prompt, self._asked, sequence, editing)
            told = Edited(machine.spec, self._edited.done, last, again)
        trace = Trace(
            machine.engine,
            spec,
            parameters,
            prompt,
            self._plan,
            self._layout,
            self._recorder.kept,
            last,
            self._asked.positions,
            machine.piece,
            heads=self._cut.heads,
            cut=self._cut,
            edited=told,
            fused_layers=ran.fused,
        )
        # Taps refer to one another in a ring, which is found only now and then: what they hold would pile up.
        self._recorder.kept.clear()
        if self._edited is not None:
            self._edited.known.clear()
        return trace


class InPrompt(CutawayError):
    """What is wrong with one of the prompts of a pass; `index` counts them within it."""

    def __init__(self, index: int, why: str) -> None:
        super().__init__(f"Prompt {index}: {why}")
        self.index, self.why = index, why


class naming:
    """Says which prompt an error is about."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, where: Any) -> None:
        if isinstance(error, CutawayError):
            raise InPrompt(self._index, str(error)) from None


class Apart:
    """A tap that hands each sequence of a packed pass its own rows, through a tap of its own.

    What a sequence gets is a copy: it would else keep the rows of all others alive. An array that is shown twice in
    a row, as most streams are, is copied once. `logits` are the rows of logits that each sequence asked for.
    """

    def __init__(self, engine: Engine, layout: Layout, taps: Sequence[Tap], logits: Sequence[int]) -> None:
        self._engine, self._segments, self._taps, self._logits = engine, layout.segments, taps, logits
        self._before: tuple[Any, int, list[Any]] | None = None
        self.shown, self.altered = _together(taps)

    def __call__(self, name: str, value: Array) -> Array:
        return self.handed(self._taps, self.shown | self.altered, name, value)

    def rows(self, name: str, value: Array, segment: int, start: int) -> Array:
        return self._taps[segment].rows(name, value, 0, start)

    def at(self, layer: int) -> "_ApartLayer":
        return _ApartLayer(self, [tap.at(layer) for tap in self._taps])

    def handed(self, taps: Sequence[Tap], of_use: frozenset[str], name: str, value: Array) -> Array:
        """`value`, or what the sequences' taps made of its parts; only those `of_use` are of use to any."""
        if name not in of_use:
            return value
        axis, parts = self._parts(name, value)
        after = [tap(name, part) for tap, part in zip(taps, parts, strict=True)]
        if all(new is old for new, old in zip(after, parts, strict=True)):
            return value
        self._before = None
        return as_shown(self._engine, value, np.concatenate([self._numpy(part) for part in after], axis=axis))

    def _parts(self, name: str, value: Array) -> tuple[int, list[Any]]:
        axis = 0 if name == "pooler.out" else POINTS[name].shape.index("T")
        if self._before is not None and self._before[0] is value and self._before[1] == axis:
            return axis, self._before[2]
        lead = (slice(None),) * axis
        if name == "logits":
            sizes = list(self._logits)
        elif name == "pooler.out":
            sizes = [1] * len(self._segments)
        else:
            sizes = [segment.length for segment in self._segments]
        ends = np.cumsum(sizes).tolist()
        whole = len(sizes) == 1
        parts = [
            value if whole else _copied(value[(*lead, slice(end - size, end))])
            for size, end in zip(sizes, ends, strict=True)
        ]
        self._before = (value, axis, parts)
        return axis, parts

    def _numpy(self, value: Any) -> np.ndarray:
        return value if isinstance(value, np.ndarray) else self._engine.numpy(value)


class _ApartLayer:
    """The same in one layer."""

    def __init__(self, apart: Apart, taps: Sequence[Tap]) -> None:
        self._apart, self._taps = apart, taps
        self.shown, self.altered = _together(taps)

    def __call__(self, name: str, value: Array) -> Array:
        return self._apart.handed(self._taps, self.shown | self.altered, name, value)

    def rows(self, name: str, value: Array, segment: int, start: int) -> Array:
        return self._taps[segment].rows(name, value, 0, start)

    def at(self, layer: int) -> "_ApartLayer":
        return self._apart.at(layer)


def _together(taps: Sequence[Tap]) -> tuple[frozenset[str], frozenset[str]]:
    """What any of some taps wants to see, and what any may alter."""
    shown, altered = ({frozenset(getattr(tap, what)) for tap in taps} for what in ("shown", "altered"))
    return frozenset().union(*shown), frozenset().union(*altered)


def _copied(part: Any) -> Any:
    """A copy that lies in memory as the same value of a pass over this sequence alone does: products round by that."""
    return part.copy(order="K") if isinstance(part, np.ndarray) else part.clone()  # the torch engine's tensors


def _types(prompts: Sequence[Fed]) -> np.ndarray | None:
    """The kinds of all rows of the pass; 0 where a prompt tells none."""
    if all(told.types is None for told in prompts):
        return None
    kinds = [np.zeros(len(told.prompt.ids), np.intp) if told.types is None else told.types for told in prompts]
    return np.concatenate(kinds)


def _parted(ran: Pass, layout: Layout, asked: Sequence[int]) -> Iterator[Pass]:
    """Each sequence's part of what a packed pass left."""
    ends = np.cumsum(asked).tolist()
    for segment, count, end in zip(layout.segments, asked, ends, strict=True):
        scores = None if ran.logits is None else ran.logits[end - count : end]
        last = None if scores is None else _copied(scores)
        yield Pass(Layout.of([segment.length]), ran.final[segment.start : segment.stop], last, ran.fused)
