"""Edits in a running batch: each sequence has its own, at its own positions, whoever shares its passes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from cutaway.engines.layout import Layout
from cutaway.errors import CutawayError
from cutaway.forward.parameters import Parameters
from cutaway.forward.transformer import Pass
from cutaway.generate.response import Request, Step
from cutaway.generate.settings import Settings, refuse_shortcuts
from cutaway.points import Tap, Unwatched
from cutaway.spec import ModelSpec
from cutaway.trace.edits.adapting import Count, ReadAdapter, adapted
from cutaway.trace.edits.edit import Edit
from cutaway.trace.edits.edited import Edited
from cutaway.trace.edits.editing import Done, EditedPass, Editing
from cutaway.trace.finite import first_nonfinite
from cutaway.trace.prompt import Prompt
from cutaway.trace.running import Machine, Watching, edits_around, rerun


@dataclass(frozen=True, eq=False)
class Kind:
    """What sequences must have in common to share a pass: the spec of their run, and the adapters on its weights."""

    spec: ModelSpec
    adapters: tuple[ReadAdapter, ...] = ()

    def parameters(self, plain: Parameters, count: Count) -> Parameters:
        """The weights of such a run; `count` hears what the adapters, numbered as they stand here, change."""
        return adapted(plain, self.adapters, count)


@dataclass(eq=False)
class Kinds:
    """The kinds of sequences that are under way, each once."""

    _known: WeakValueDictionary[Any, Kind] = field(default_factory=WeakValueDictionary)

    def of(self, editing: Editing) -> Kind:
        adapters = tuple(edit for edit in editing.edits if isinstance(edit, ReadAdapter))
        if any(edit.on_experts for edit in adapters):  # an expert's rows tell not whose they are: it runs by itself
            return Kind(editing.spec, adapters)
        key = editing.spec, tuple(edit.key for edit in adapters)
        kind = self._known.get(key)
        if kind is None:
            kind = self._known[key] = Kind(editing.spec, adapters)
        return kind


class EditedSequence:
    """The edits of one sequence under way, and what each of them did up to now.

    Raises CutawayError as `Editing` does, before anything runs.
    """

    def __init__(self, edits: Sequence[Edit], machine: Machine, length: int, kinds: Kinds) -> None:
        self.editing = Editing(edits, machine.spec, length, grows=True)
        self.kind = kinds.of(self.editing)
        self._machine = machine
        self._done = [Done(edit) for edit in self.editing.edits]
        self._reading = [Done(edit) for edit in self.editing.edits]  # while the prompt is read, in whatever parts
        self._adapters = [i for i, edit in enumerate(self.editing.edits) if isinstance(edit, ReadAdapter)]

    def logit_rows(self, layout: Layout, wanted: int) -> list[int]:
        """The rows of a pass whose logits are worked out: the last `wanted`, and those that an edit touches."""
        touched = self.editing.logit_rows(layout, all_rows=False, last=False) or ()
        return sorted({*range(layout.rows - wanted, layout.rows), *touched})

    def tap(self, layout: Layout, rows: Sequence[int]) -> EditedPass:
        """The tap of one pass over this sequence's rows."""
        return self.editing.tap(self._machine.engine, layout, Unwatched(), rows)

    def count(self, tap: EditedPass) -> Count:
        """What an adapter of the kind changed, told to the edit that it is here."""

        def count(index: int, projection: str, changed: np.ndarray, width: int) -> None:
            tap.count(self._adapters[index], projection, changed, width)

        return count

    def took(self, tap: EditedPass, ran: Pass, ids: Sequence[int]) -> None:
        """After a pass, by which the sequence is `ids`. Raises CutawayError for results that are none."""
        engine, editing = self._machine.engine, self.editing
        for values in (ran.final, ran.logits):
            if not np.isfinite(engine.numpy(values)).all():
                parameters = adapted(self._machine.parameters, editing.edits)
                around = edits_around(engine, editing, len(ids))
                where = first_nonfinite(engine, editing.spec, parameters, np.asarray(ids), None, around)
                raise CutawayError(f"{editing.spec.name} computes no usable numbers with these edits: {where}")
        tap.known.clear()
        _add(self._done, tap.done)
        _add(self._reading, tap.done)
        if len(ids) >= editing.length:
            editing.finish(self._reading, len(ids))
            self._reading = [Done(edit) for edit in editing.edits]

    def told(self, step: Step, logits: np.ndarray, ids: Sequence[int]) -> Step:
        """A step; the last one with what each edit did in the whole response. `logits` `[V]` are those of the step."""
        if step.finish is None:
            return step
        self.editing.warn_unreached()
        whole = np.array(ids)
        again = rerun(self._machine, Prompt(tuple(ids), (), ""), Watching(()), whole, self.editing)
        return replace(step, edits=Edited(self._machine.spec, self._done, np.array(logits), again).reports)


class Guarded:
    """A tap of one of several sequences: what goes wrong in it is told with the place of its sequence."""

    def __init__(self, tap: Tap, place: int) -> None:
        self._tap, self._place = tap, place
        self.shown, self.altered = tap.shown, tap.altered

    def __call__(self, name: str, value: Any) -> Any:
        try:
            return self._tap(name, value)
        except Exception as error:
            raise InSequence(self._place, error) from error

    def rows(self, name: str, value: Any, segment: int, start: int) -> Any:
        try:
            return self._tap.rows(name, value, segment, start)
        except Exception as error:
            raise InSequence(self._place, error) from error

    def at(self, layer: int) -> "Guarded":
        return Guarded(self._tap.at(layer), self._place)


class InSequence(Exception):
    """What went wrong in one of the sequences of a pass: `place` counts them."""

    def __init__(self, place: int, error: Exception) -> None:
        super().__init__(str(error))
        self.place, self.error = place, error


def with_edits(request: Request, settings: Settings, edits: Sequence[Edit], machine: Machine) -> Request:
    """The request with edits of its run. Raises CutawayError for those that can never act in it."""
    if not edits:
        return request
    refuse_shortcuts(request, settings)
    Editing(edits, machine.spec, len(request.ids), grows=True)
    return replace(request, edits=tuple(edits))


def edits_of(given: Any, count: int, read: Callable[[Any], tuple[Edit, ...]]) -> list[tuple[Edit, ...]]:
    """The edits of each of `count` prompts: the same for all, or of a list of lists one for each (None: no edits).

    Raises CutawayError for what is neither, and naming the prompt for edits that are none.
    """
    listed = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else None
    own = [one for one in listed or () if one is None or isinstance(one, list | tuple)]
    if listed is None or not own:
        return [read(given)] * count
    if len(own) != len(listed) or len(own) != count:
        raise CutawayError(
            f"edits are a list of edits for all prompts, or one list for each of the {count}; these are {len(listed)}, "
            f"of which {len(own)} are lists."
        )
    made = []
    for index, one in enumerate(own):
        try:
            made.append(read(one or ()))
        except CutawayError as error:
            raise CutawayError(f"Prompt {index}: {error}") from None
    return made


def _add(totals: Sequence[Done], more: Sequence[Done]) -> None:
    for total, one in zip(totals, more, strict=True):
        for point, elements in one.fired.items():
            total.fired[point] = total.fired.get(point, 0) + elements
        total.changed += one.changed
