"""Edits in a pass: which act where, the tap through which they act, and what each of them did."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cutaway.engines.layout import Layout
from cutaway.engines.protocol import Array, Engine
from cutaway.errors import CutawayError
from cutaway.points import Point, Tap, find_points
from cutaway.spec import ModelSpec
from cutaway.trace.edits.adapting import Adapter, ReadAdapter, felt_at
from cutaway.trace.edits.applying import Here, apply_edit, seen_keys
from cutaway.trace.edits.edit import Edit
from cutaway.trace.edits.kinds import Function, Knockout, PointEdit, Replace, Resample
from cutaway.trace.edits.selection import check_selection, first_position, rows_chosen
from cutaway.trace.edits.sources import check_source
from cutaway.trace.edits.without import Without, put

if TYPE_CHECKING:
    from cutaway.trace.trace import Trace

UNEDITABLE = {"tokens": "give another prompt", "pooler.out": "nothing reads it; change it in the result"}


@dataclass
class Done:
    """What one edit did in one pass: elements that it acted on, by address, and how many are another number now."""

    edit: Edit
    fired: dict[str, int] = field(default_factory=dict)
    changed: int = 0

    @property
    def elements(self) -> int:
        return sum(self.fired.values())

    def count(self, point: Point, elements: int, changed: int) -> None:
        if elements:
            self.fired[str(point)] = self.fired.get(str(point), 0) + elements
            self.changed += changed


class Editing:
    """The edits of one run, checked against its spec, ready for its passes.

    `spec` is that of the run, `altered` the points at which an edit may act. `length` is that of the prompt; with
    `grows` later tokens follow, pass by pass, from a cache. `unedited` gives a trace of the same prompt without any
    edit. Raises CutawayError for an edit that can never act, or only on what would be lost.
    """

    def __init__(
        self,
        edits: Sequence[Edit],
        spec: ModelSpec,
        length: int,
        *,
        grows: bool = False,
        unedited: Callable[[list[Point]], "Trace | None"] | None = None,
    ) -> None:
        self.edits, self.unchanged_spec, self.length, self.grows = tuple(edits), spec, length, grows
        self.spec = spec
        for edit in edits:
            if isinstance(edit, Without):
                edit.witness(self.spec)  # a part that is not there is told before it is taken away
                self.spec = edit.changed(self.spec)
        if grows and not self.spec.causal:
            raise CutawayError("Without the mask every new token changes all earlier rows: trace it, do not generate.")
        self.acting: dict[Point, list[tuple[int, Edit]]] = {}
        self.instead: dict[tuple[int, Point], tuple[Point, ...]] = {}
        self.reads: set[Point] = set()
        for index, edit in enumerate(edits):
            if isinstance(edit, Without):
                self._add_without(index, edit)
            elif isinstance(edit, Adapter) and not isinstance(edit, ReadAdapter):
                raise CutawayError(f"{edit} was not read for a model: give it to a model's own trace or generate.")
            elif isinstance(edit, PointEdit):
                self._add(index, edit, unedited)
        self.altered = frozenset(self.acting)
        self.reached = [False] * len(self.edits)

    def tap(self, engine: Engine, layout: Layout, inner: Tap, logit_rows: Sequence[int]) -> "EditedPass":
        """The tap of one pass: values go through the edits and then to `inner`, which sees what they became."""
        return EditedPass(self, engine, layout, inner, logit_rows)

    def logit_rows(self, layout: Layout, *, all_rows: bool, last: bool = True) -> list[int] | None:
        """The rows whose logits a pass works out: those that an edit touches, and the last; None where no edit does.

        With `all_rows` somebody wants to read them all; without `last` the last one is of no use by itself.
        """
        acting = self.acting.get(Point("logits"), [])
        if not acting:
            return None
        rows = set(layout.last_rows if last else ())
        for _, edit in acting:
            if all_rows or (isinstance(edit, PointEdit) and edit.whole_text):
                return list(range(layout.rows))
            if isinstance(edit, PointEdit) and edit.positions is not None:
                rows.update(rows_chosen(edit.positions, layout.positions, self.length).tolist())
        return sorted(rows)

    def finish(self, done: Sequence[Done], end: int) -> None:
        """After a pass that reached position `end`: refuse an edit that fired nowhere, warn of one without effect."""
        for index, one in enumerate(done):
            if one.elements:
                if not self.reached[index] and one.changed == 0:
                    warnings.warn(
                        f"{one.edit} changed nothing: all {one.elements:,} numbers that it acted on were already so.",
                        stacklevel=2,
                    )
                self.reached[index] = True
            elif not self.reached[index] and not (self.grows and self._still_to_come(one.edit, end)):
                raise CutawayError(f"{one.edit} fired nowhere: {self._why_nowhere(one.edit)}.")

    def warn_unreached(self) -> None:
        """After a generation: tell which edits waited for a position, or an expert, that it did not come to."""
        for edit, reached in zip(self.edits, self.reached, strict=True):
            if not reached:
                warnings.warn(f"{edit} never acted in this generation.", stacklevel=2)

    def _add(self, index: int, edit: PointEdit, unedited: "Callable[[list[Point]], Trace | None] | None") -> None:
        points = find_points(edit.at, self.spec)
        for point in points:
            if point.name in UNEDITABLE:
                raise CutawayError(f"{point} cannot be edited: {UNEDITABLE[point.name]}.")
            if point.name == "moe.chosen" and not isinstance(edit, Function | Replace | Resample):
                raise CutawayError(f"{point} holds numbers of experts; {edit.kind} means nothing there.")
            check_selection(edit, point, self.spec, self.length, grows=self.grows)
            edit.check(point, self.spec)
            self._refuse_what_a_cache_would_lose(edit, point)
        if edit.same_run or (self.grows and edit.whole_text):
            if unedited is None:
                raise CutawayError(
                    f"{edit} takes its values from the whole text, which is not there yet while it is generated; "
                    "give it a source."
                )
            if edit.same_run:
                edit = replace(edit, source=unedited(points))  # type: ignore[call-arg]
        source = getattr(edit, "source", None)
        for point in points:
            if source is not None:
                check_source(source, point, self.spec)
            if edit.experts is not None and "k" in point.info.shape:
                self.reads.add(Point("moe.chosen", point.layer))
            self.acting.setdefault(point, []).append((index, edit))

    def _add_without(self, index: int, edit: Without) -> None:
        for point in edit.witness(self.unchanged_spec):
            self.acting.setdefault(point, []).append((index, edit))
        for point, sources in edit.instead(self.spec).items():
            self._refuse_what_a_cache_would_lose(edit, point)
            self.instead[index, point] = sources
            self.reads.update(sources)
            self.acting.setdefault(point, []).append((index, edit))

    def _refuse_what_a_cache_would_lose(self, edit: Edit, point: Point) -> None:
        if not self.grows or point.layer is None or point.name not in ("attn.k", "attn.k_rot", "attn.v"):
            return
        if self.spec.layers[point.layer].attention.latent is not None:
            raise CutawayError(
                f"{edit}: the cache of layer {point.layer} keeps latents, from which {point.name} would be made again "
                "without the edit for the next token. Edit attn.kv_latent or attn.k_shared, or trace."
            )

    def _still_to_come(self, edit: Edit, end: int) -> bool:
        if not isinstance(edit, PointEdit):
            return isinstance(edit, ReadAdapter)  # on experts that no token was sent to yet
        waits = isinstance(edit, Knockout) and max(query for query, _ in edit.edges) >= end
        waits |= edit.keys is not None and max(edit.keys) >= end
        return waits or edit.experts is not None or first_position(edit.positions, self.length, last=True) >= end

    def _why_nowhere(self, edit: Edit) -> str:
        if isinstance(edit, Without):
            return "one token has no other that a mask could hide" if edit.part == "mask" else "nothing was there"
        if isinstance(edit, Adapter):
            return "none of the matrices that it changes took part in this pass"
        if isinstance(edit, Knockout):
            return "none of these queries may see that key in the first place"
        if isinstance(edit, PointEdit) and edit.experts is not None:
            return f"no token was sent to {'expert' if len(edit.experts) == 1 else 'any of the experts'} " + ", ".join(
                map(str, edit.experts)
            )
        return "nothing of what it selects was computed in this pass"


class EditedPass:
    """The tap of one pass with edits; `done` counts what each of them does in it."""

    def __init__(self, editing: Editing, engine: Engine, layout: Layout, inner: Tap, logit_rows: Sequence[int]) -> None:
        self.editing, self.engine, self.layout, self.inner = editing, engine, layout, inner
        self.done = [Done(edit) for edit in editing.edits]
        self.known: dict[Point, Any] = {}
        self.logit_positions = layout.positions[list(logit_rows)]
        self._here = _EditedLayer(self, inner, None)
        self.shown, self.altered = self._here.shown, self._here.altered

    def count(self, index: int, projection: str, changed: np.ndarray, width: int) -> None:
        """What an adapter, edit number `index`, changed in the rows of one product."""
        self.done[index].count(felt_at(projection), changed.size * width, int(changed.sum()))

    def __call__(self, name: str, value: Array) -> Array:
        return self._here(name, value)

    def rows(self, name: str, value: Array, segment: int, start: int) -> Array:
        return self._here.rows(name, value, segment, start)

    def at(self, layer: int) -> "_EditedLayer":
        self.known.clear()  # what an edit reads stands in its own layer, or (the last stream) right before the head
        return _EditedLayer(self, self.inner.at(layer), layer)

    def changed(self, edit: PointEdit, value: Array, here: Here, *, in_place: bool) -> tuple[Array, int, int]:
        """The value after an edit, how many elements it acted on, and how many are another number now."""
        before = self.engine.numpy(value)
        after, elements, changed = apply_edit(edit, before, here, in_place=in_place)
        if changed and not (in_place and after is value):  # an engine with arrays of its own gets one
            value = self.engine.array(after) if in_place else as_shown(self.engine, value, after)
        return value, elements, changed

    def instead(self, sources: list[Array], value: Array) -> tuple[Array, int, int]:
        """The sum of the sources in the place of a value, how many elements that is, and how many are others now."""
        before = self.engine.numpy(value)
        after = put([self.engine.numpy(source) for source in sources], before)
        changed = int(np.count_nonzero(after != before))
        return as_shown(self.engine, value, after) if changed else value, before.size, changed


class _EditedLayer:
    def __init__(self, edited: EditedPass, inner: Tap, layer: int | None) -> None:
        self._pass, self._inner, self._layer = edited, inner, layer
        editing = edited.editing
        self._reads = {point.name for point in editing.reads if point.layer == layer}
        self._acts = {point.name for point in editing.acting if point.layer == layer}
        self.shown = inner.shown | self._reads
        self.altered = inner.altered | self._acts

    def __call__(self, name: str, value: Array) -> Array:
        if name in self._acts:
            value = self._edited(Point(name, self._layer), value)
        if name in self._reads:
            self._pass.known[Point(name, self._layer)] = value
        return self._inner(name, value)

    def rows(self, name: str, value: Array, segment: int, start: int) -> Array:
        if name in self._acts:
            value = self._edited_rows(Point(name, self._layer), value, segment, start)
        return self._inner.rows(name, value, segment, start)

    def at(self, layer: int) -> "_EditedLayer":
        return self._pass.at(layer)

    def _edited(self, point: Point, value: Array) -> Array:
        editing, known = self._pass.editing, self._pass.known
        positions = self._pass.logit_positions if point.name == "logits" else self._pass.layout.positions
        here = Here(point, editing.spec, positions, editing.length, known)
        for index, edit in editing.acting[point]:
            if isinstance(edit, PointEdit):
                value, elements, changed = self._pass.changed(edit, value, here, in_place=False)
            else:
                sources = [known[source] for source in editing.instead[index, point]]
                value, elements, changed = self._pass.instead(sources, value)
            self._pass.done[index].count(point, elements, changed)
        return value

    def _edited_rows(self, point: Point, value: Array, segment: int, start: int) -> Array:
        editing, place = self._pass.editing, self._pass.layout.segments[segment]
        positions = np.arange(place.position + start, place.position + start + value.shape[1])
        layer = point.layer or 0
        seen = seen_keys(editing.spec, layer, place, start, value.shape)
        here = Here(point, editing.spec, positions, editing.length, self._pass.known, seen)
        for index, edit in editing.acting[point]:
            if isinstance(edit, PointEdit):
                value, elements, changed = self._pass.changed(edit, value, here, in_place=True)
            else:  # a part of the spec is missing: these cells are other than they would be
                if isinstance(edit, Without) and edit.part == "mask":
                    seen = seen & ~seen_keys(editing.unchanged_spec, layer, place, start, value.shape)
                elements = changed = int(np.count_nonzero(seen)) * value.shape[0]
            self._pass.done[index].count(point, elements, changed)
        return value


def as_shown(engine: Engine, value: Array, after: np.ndarray) -> Array:
    """`after` in the place of `value`, its numbers lying in memory as those of `value` do.

    Products of arrays that lie otherwise may round otherwise; what an edit leaves alone must keep its bits.
    """
    if not isinstance(value, np.ndarray):  # an engine with arrays of its own
        return engine.array(after) if after.dtype.kind == "f" else after
    laid = np.empty_like(value)
    laid[...] = after
    return laid
