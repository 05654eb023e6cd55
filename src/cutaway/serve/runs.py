"""Passes that pages look at: held by an id, the least recently used let go of past a number of bytes."""

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from cutaway.points import Point, layer_names
from cutaway.serve.edited_passes import EditedStrand
from cutaway.serve.joined import Part, row_lengths
from cutaway.serve.look import Look
from cutaway.serve.passes import (
    MADE,
    Strand,
    Text,
    captured_of,
    layer_rows,
    layer_trace,
    points_kept,
    readable,
    runs_layers,
    stored_in,
    whole_trace,
)
from cutaway.spec import ModelSpec
from cutaway.trace.capture.bill import activation_bytes
from cutaway.trace.capture.plan import made_from
from cutaway.trace.edits import Edit

if TYPE_CHECKING:
    from cutaway.model import Model
    from cutaway.trace import Prompt, Trace

MOST_BYTES = 1_200_000_000  # of all runs together; the latest stays whatever it weighs
MOST_RUNS = 64
_SQUARES = 6  # heads' squares of long prompts that a run holds on to
_MASKS = 2  # and what its masks forbid
_LAYERS = 2  # layers run again that a run holds on to


class Run:
    """One pass and what has been looked at of it.

    Where `former` is a run of the same model with the same edits, only the tokens are run that follow what the two
    share: the earlier rows are those of the former run. With edits that takes some that act row by row, and a text
    that goes on from the whole of the former one; see `EditedStrand`.
    """

    def __init__(
        self, model: "Model", prompt: "Prompt", edits: Sequence[Edit] = (), former: "Run | None" = None
    ) -> None:
        self.id = secrets.token_urlsafe(9)
        self.model = model
        self.edits = tuple(edits)
        self.prompt = prompt
        self.captured = captured_of(model, len(prompt.ids))
        self.strand: Strand | EditedStrand | None = None
        self.text: Text | None = None
        follows = former if former is not None and former.model is model and former.edits == self.edits else None
        if not self.edits and Strand.serves(model):
            strand = follows.strand if follows is not None and isinstance(follows.strand, Strand) else Strand(model)
            self.strand, self.text = strand, strand.run(prompt, follows.text if follows is not None else None)
            self.trace: Trace = whole_trace(model, self.text)
        elif self.edits and EditedStrand.serves(model, self.edits, len(prompt.ids)):
            self.strand, self.text, self.trace = self._edited(follows)
        else:
            self.trace = self._traced(prompt.ids, readable(model.spec, self.captured))
        self._more: list[tuple[Trace, int]] = []  # each with its bytes
        for rows in self.text.layers if self.text is not None else ():
            self._hold(layer_trace(model, prompt, rows), 0)  # weighed with the text's parts
        self.squares, self.hidden = Latest(_SQUARES), Latest(_MASKS)
        self.edited_points = {place for report in self.trace.edits for place in report.fired} if self.edits else set()

    @property
    def length(self) -> int:
        return len(self.trace.prompt.ids)

    def same(self, prompt: "Prompt") -> bool:
        """Whether this is the unedited run of that very prompt."""
        return not self.edits and self.prompt == prompt

    def missing(self, points: Iterable[Point]) -> list[Point]:
        """Those of `points` that no pass has kept so far."""
        return self.look().missing(points)

    def look(self, points: Sequence[Point] = ()) -> Look:
        """The run with these points. What no pass has kept is computed now: their layers run again, or with edits the
        pass; it gives the same numbers, bit for bit. Only the owner thread may ask for what is `missing`.
        """
        held = [self.trace, *(trace for trace, _ in self._more)]
        return Look(self, [*held, *self._captured(Look(self, held).missing(points))])

    def _captured(self, wanted: Sequence[Point]) -> "list[Trace]":
        if not wanted:
            return []
        if self.edits or not runs_layers(self.model) or any(point.layer is None for point in wanted):
            sources = {source for point in wanted for source in made_from(self.model.spec, point)}
            trace = self._traced(self.trace.prompt.ids, [*wanted, *sources])
            self._hold(trace, self._bytes([point for point in sources if point.name not in MADE]))
            return [trace]
        made = []
        for layer in sorted({point.layer for point in wanted if point.layer is not None}):
            rows = layer_rows(self.model, self.trace, layer)
            held = 0 if self.text is not None else self._bytes(stored_in(self.model.spec, layer))
            made.append(layer_trace(self.model, self.prompt, rows))
            self._hold(made[-1], held)
            if self.text is not None:  # weighed with its parts
                self.text = replace(self.text, layers=(*self.text.layers[1 - _LAYERS :], rows))
        return made

    def layer_points(self, layer: int) -> list[Point]:
        """All that stands in a layer, and the stream before it."""
        before = Point("resid_post", layer - 1) if layer > 0 else Point("embed.out")
        return [before, *(Point(name, layer) for name in layer_names(self.model.spec, layer))]

    def norms(self) -> np.ndarray:
        """Lengths of the rows at the points of `lengths_of`, one after another, `[points, T]` float32."""
        points = lengths_of(self.model.spec)
        if self.text is None:
            return np.stack([row_lengths(self.trace[point]) for point in points])
        return np.concatenate([part.lengths(points)[:, :rows] for part, rows in self.text.parts], axis=1)

    def weighs(self) -> dict[int, int]:
        """Bytes of what this run holds, by the identity of each thing; several runs may hold one thing."""
        own = {id(self): sum(nbytes for _, nbytes in self._more) + self.squares.nbytes + self.hidden.nbytes}
        if self.text is None or self.strand is None:
            return own | {id(self.trace): self._bytes(points_kept(self.model.spec, self.captured))}
        return own | {id(self.strand): self.strand.nbytes} | {id(part): part.nbytes for part in self._parts}

    @property
    def _parts(self) -> list[Part]:
        if self.text is None:
            return []
        return [part for parts in (self.text.parts, *(rows.parts for rows in self.text.layers)) for part, _ in parts]

    def _edited(self, follows: "Run | None") -> "tuple[EditedStrand, Text, Trace]":
        """The edited pass over the prompt, after the one that it goes on from where there is one."""
        if follows is not None and isinstance(follows.strand, EditedStrand) and follows.text is not None:
            return follows.strand, *follows.strand.run(self.prompt, (follows.text, follows.trace))
        strand = EditedStrand(self.model, self.edits)
        return strand, *strand.run(self.prompt)

    def _traced(self, ids: Sequence[int], points: Sequence[Point | str]) -> "Trace":
        return self.model.trace(list(ids), points=list(dict.fromkeys(points)), edits=self.edits)

    def _hold(self, trace: "Trace", nbytes: int) -> None:
        self._more = [*self._more[1 - _LAYERS :], (trace, nbytes)]

    def _bytes(self, points: Sequence[Point]) -> int:
        return activation_bytes(self.model.spec, self.length, points, self.model.engine.dtype.itemsize)


class Latest:
    """The arrays of some kind that were worked out last, at most so many."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._made: OrderedDict[Hashable, np.ndarray] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], np.ndarray]) -> np.ndarray:
        """The array of this key, made where it is not there (any more)."""
        with self._lock:
            if key in self._made:
                self._made.move_to_end(key)
                return self._made[key]
        made = make()
        with self._lock:
            self._made[key] = made
            while len(self._made) > self._most:
                self._made.popitem(last=False)
        return made

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(made.nbytes for made in self._made.values())


def lengths_of(spec: ModelSpec) -> list[Point]:
    """The points whose rows' lengths are drawn, `4 N + 1`: the stream before the layers and after each; what attention
    adds; what the feed-forward adds; the stream between the two (before the layer, where both read that).
    """
    layers = range(spec.n_layers)
    points = [Point("embed.out"), *(Point("resid_post", i) for i in layers)]
    points += [Point(name, i) for name in ("attn.out", "mlp.out") for i in layers]
    return points + [Point("resid_pre" if spec.layers[i].parallel else "resid_mid", i) for i in layers]


class Runs:
    """The runs that are held, by id."""

    def __init__(self, most_bytes: int = MOST_BYTES, most: int = MOST_RUNS) -> None:
        self._held: OrderedDict[str, Run] = OrderedDict()
        self._most_bytes, self._most = most_bytes, most
        self._lock = threading.Lock()

    def add(self, run: Run) -> None:
        """Hold a run; the least recently used go where they are too many, or all together weigh too much."""
        with self._lock:
            self._held[run.id] = run
            self._held.move_to_end(run.id)
            while len(self._held) > 1 and (len(self._held) > self._most or self._weight() > self._most_bytes):
                self._held.popitem(last=False)

    def get(self, name: str) -> Run:
        """The run of this id. Raises KeyError where it is not held (any more)."""
        with self._lock:
            self._held.move_to_end(name)
            return self._held[name]

    def find(self, name: str | None) -> Run | None:
        """The run of this id; None where it is not held (any more)."""
        with self._lock:
            return self._held.get(name) if name is not None else None

    def leave(self, name: str) -> None:
        """Let go of a run, and of those that share its keys and values; what is not held is let go already."""
        with self._lock:
            left = self._held.get(name)
            for held in list(self._held.values()):
                if held is left or (left is not None and left.strand is not None and held.strand is left.strand):
                    del self._held[held.id]

    def __len__(self) -> int:
        return len(self._held)

    @property
    def nbytes(self) -> int:
        """Bytes of all that is held, what several runs share counted once."""
        with self._lock:
            return self._weight()

    def _weight(self) -> int:
        things: dict[int, int] = {}
        for run in self._held.values():
            things |= run.weighs()
        return sum(things.values())
