"""The model as generation sees it: sequences of ids go in where their caches end, rows of logits come out."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from cutaway.engines.layout import CHUNK, Layout
from cutaway.engines.protocol import Engine
from cutaway.errors import CutawayError
from cutaway.forward.cache import KVCache
from cutaway.forward.layers_shown import layers_shown
from cutaway.forward.parameters import Parameters
from cutaway.forward.positions import settled
from cutaway.forward.transformer import Pass, transformer
from cutaway.generate.edited import EditedSequence, Guarded, InSequence, Kind, Kinds
from cutaway.generate.response import Request
from cutaway.points import Unwatched
from cutaway.spec import DynamicScaling, ModelSpec
from cutaway.trace.edits.adapting import apart
from cutaway.trace.edits.editing import EditedPass
from cutaway.trace.finite import first_nonfinite
from cutaway.trace.running import Machine
from cutaway.trace.sweep.packed_pass import Apart


@dataclass(frozen=True, eq=False)
class Work:
    """One sequence's part of a pass: `ids` follow what its cache holds; the logits of the last `rows` are wanted.

    `edited` are its edits, where it has any.
    """

    cache: KVCache
    ids: Sequence[int]
    rows: int
    edited: EditedSequence | None = None


class Passes:
    """A model's forward passes over packed sequences, each with its cache."""

    def __init__(self, engine: Engine, spec: ModelSpec, parameters: Parameters) -> None:
        self.spec = spec
        self._engine = engine
        self._parameters = parameters
        self._machine = Machine(engine, spec, parameters)
        self._plain, self._kinds = Kind(spec), Kinds()
        self._rotaries = spec.rotaries

    @property
    def dtype(self) -> str:
        """The type of the numbers that caches hold."""
        return self._engine.dtype.name

    def cache(self) -> KVCache:
        """A new, empty cache. Raises CutawayError for a model that cannot have one."""
        return KVCache(self.spec, self._engine)

    def refuse_foreign(self, cache: KVCache) -> None:
        """Raise CutawayError for a cache that another model filled, or that was made for one."""
        cache.refuse_foreign(self._parameters, self.spec, self._engine)

    def claim(self, cache: KVCache, user: object) -> None:
        """From now on this model fills the cache, for `user` alone."""
        cache.claim(self._parameters, user)

    def edited(self, request: Request) -> EditedSequence | None:
        """The edits of a request, for the passes over its sequence; None where it has none."""
        return EditedSequence(request.edits, self._machine, len(request.ids), self._kinds) if request.edits else None

    def run(self, work: Sequence[Work], *, shown: bool = False) -> list[np.ndarray | Exception]:
        """One pass for all of them; for each its rows of logits, `[rows, V]`. `shown` draws a bar over the layers.

        Every sequence gets what it would get alone, bit for bit; one that goes wrong (an edit that cannot act, logits
        that are no numbers) gets the error in the place of its rows, and the others are run without it. Sequences whose
        edits leave out a part of the spec, or add adapters, share passes with their like.
        """
        found: dict[int, np.ndarray | Exception] = {}
        kinds = {id(kind): kind for kind in map(self._kind, work)}
        for kind in kinds.values():
            places = [place for place, part in enumerate(work) if self._kind(part) is kind]
            parts = [(work[place], work[place].cache.due(work[place].ids)) for place in places]
            while parts:
                try:
                    rows = self._run(kind, parts, shown)
                except InSequence as error:  # a pass that fails leaves caches as they were
                    found[places.pop(error.place)] = error.error
                    del parts[error.place]
                else:
                    found.update(zip(places, rows, strict=True))
                    break
        return [found[place] for place in range(len(work))]

    def _kind(self, part: Work) -> Kind:
        return self._plain if part.edited is None else part.edited.kind

    def _run(self, kind: Kind, parts: Sequence[tuple[Work, np.ndarray]], shown: bool) -> list[np.ndarray | Exception]:
        """One pass over sequences of one kind, each with the ids that are due."""
        layouts = [Layout.of([len(ids)], [part.cache.length]) for part, ids in parts]
        rows = [_logit_rows(part, layout) for (part, _), layout in zip(parts, layouts, strict=True)]
        ends = list(accumulate(layout.rows for layout in layouts))
        asked = [end - layout.rows + row for own, layout, end in zip(rows, layouts, ends, strict=True) for row in own]
        taps = [
            None if part.edited is None else part.edited.tap(layout, own)
            for (part, _), layout, own in zip(parts, layouts, rows, strict=True)
        ]
        parameters, tap = self._parameters, None
        if any(taps):
            whole = Layout.of([layout.rows for layout in layouts])
            guarded = [Guarded(own, place) if own else Unwatched() for place, own in enumerate(taps)]
            tap = Apart(self._engine, whole, guarded, [len(own) for own in rows])
            counts = [
                part.edited.count(own) if part.edited is not None and own is not None else _uncounted
                for (part, _), own in zip(parts, taps, strict=True)
            ]
            counted = apart(counts, [layout.rows for layout in layouts], [len(own) for own in rows])
            parameters = kind.parameters(parameters, counted)
        due, caches = [ids for _, ids in parts], [part.cache for part, _ in parts]
        with layers_shown(kind.spec, tap) if shown else nullcontext(tap) as watching:
            ran = transformer(self._engine, kind.spec, parameters, due, caches=caches, tap=watching, rows=asked)
        found: list[np.ndarray | Exception] = []
        logits, start = self._engine.numpy(ran.logits), 0
        for (part, _), own, own_tap, layout, end in zip(parts, rows, taps, layouts, ends, strict=True):
            mine = Pass(layout, ran.final[end - layout.rows : end], logits[start : start + len(own)], ran.fused)
            start += len(own)
            found.append(self._checked(part, mine, own_tap))
        return found

    def _checked(self, part: Work, ran: Pass, tap: EditedPass | None) -> np.ndarray | Exception:
        """The rows of logits that were wanted of a sequence's part of a pass, or what is wrong with it."""
        logits = np.asarray(ran.logits)
        try:
            if part.edited is not None and tap is not None:
                part.edited.took(tap, ran, part.cache.ids)
            elif not np.isfinite(logits).all():
                where = first_nonfinite(self._engine, self.spec, self._parameters, part.cache.ids, None)
                raise CutawayError(f"{self.spec.name} computes no usable numbers: {where}")
        except Exception as error:
            return error
        return logits[len(logits) - part.rows :]

    @property
    def may_shorten(self) -> bool:
        """Whether a sequence may be made shorter again: not where the angles of all rows hang on its length."""
        return not any(isinstance(rotary.scaling, DynamicScaling) for rotary in self._rotaries)

    def chunk(self, position: int, length: int, most: int) -> int:
        """How many of `length` ids that follow `position` to run at once, at most `most` where that can be.

        Chunks end at absolute multiples of CHUNK, so that rows are multiplied in the same company as in one pass; 0
        where `most` reaches to none. A sequence whose angles hang on its length is run whole.
        """
        if length <= most:
            return length
        taken = (position + most) // CHUNK * CHUNK - position
        whole = position + length
        if any(not settled(rotary, position + taken, whole) for rotary in self._rotaries):
            return length
        return max(0, taken)


def _logit_rows(part: Work, layout: Layout) -> list[int]:
    """Which of a sequence's rows go through the head."""
    if part.edited is not None:
        return part.edited.logit_rows(layout, part.rows)
    return list(range(layout.rows - part.rows, layout.rows))


def _uncounted(index: int, projection: str, changed: np.ndarray, width: int) -> None:
    """A sequence without edits changes nothing."""


def reuse(cache: KVCache, ids: Sequence[int]) -> int:
    """Shorten `cache` to what it shares with `ids`, so that only the rest has to run; returns the length that stays.

    At least the last of `ids` is left to run, since its row has to be computed for the next token.
    """
    shared = shared_prefix(cache.ids, ids[:-1])
    if shared < cache.length:
        cache.truncate(shared)
    return cache.length


def shared_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many of the first tokens are the same in both."""
    most = min(len(one), len(other))
    differing = np.flatnonzero(np.asarray(one[:most]) != np.asarray(other[:most]))
    return int(differing[0]) if len(differing) else most
