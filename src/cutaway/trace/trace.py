"""What a pass computed, by address: `trace["layers.3.attn.pattern"]`; `dict(trace)` is all of it."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cutaway.engines.layout import Layout
from cutaway.engines.protocol import Engine
from cutaway.errors import CutawayError, UnknownPoint
from cutaway.forward.parameters import Parameters
from cutaway.points import Point, parse_point
from cutaway.spec import ModelSpec
from cutaway.spec.check import is_whole
from cutaway.trace.capture.plan import Plan, split_address
from cutaway.trace.capture.recorder import Cut
from cutaway.trace.capture.reductions import Reduced, parse_reduction
from cutaway.trace.connected import Connected
from cutaway.trace.difference import Difference
from cutaway.trace.export import save_trace
from cutaway.trace.next_tokens import NextToken, softmax
from cutaway.trace.prompt import Prompt
from cutaway.trace.values import Values

if TYPE_CHECKING:
    from cutaway.trace.edits.edited import Edited, EditReport

REMEMBERED = 4  # worked-out values that a trace holds on to, so that one may be read head by head


class Trace(Connected):
    """The values of one pass over one sequence; read-only NumPy arrays in the engine's precision.

    `positions` are the rows that it holds (None: all), in every `[T, …]` point and among the query rows of
    the T × T points; `heads` the heads (None: all). `fused_layers` are those that the engine ran in one operation;
    the stages ran all others. Safe to read from several threads at once.
    """

    def __init__(
        self,
        engine: Engine,
        spec: ModelSpec,
        parameters: Parameters,
        prompt: Prompt,
        plan: Plan,
        layout: Layout,
        values: Mapping[Any, Any],
        last_logits: np.ndarray | None,
        positions: Sequence[int] | None = None,
        piece: Callable[[int], str] | None = None,
        *,
        heads: Sequence[int] | None = None,
        cut: Cut | None = None,
        edited: "Edited | None" = None,
        fused_layers: Iterable[int] = (),
    ) -> None:
        self.spec = spec
        self.prompt = prompt
        self.engine = engine.name
        self.dtype = engine.dtype.name
        self.past = layout.segments[0].position
        self.heads = heads if heads is None else tuple(heads)
        self.fused_layers = frozenset(fused_layers)
        self._engine, self._plan, self._layout = engine, plan, layout
        self._rows = None if positions is None else rows_asked(positions, layout.rows)
        kept = cut if cut is not None else Cut(self._rows, self.heads)
        self._stored = Values(engine, spec, parameters, plan, layout, values, kept, already=cut is not None)
        self._last_logits = last_logits  # [V], of the last position; None without a head
        self._addresses = plan.addresses
        self._after: dict[Point, np.ndarray] = {}  # what came after the pass: the choice of a token
        self._made: dict[Point | Reduced, np.ndarray] = {}
        self._lock = threading.Lock()  # of `_made`
        self._piece = piece
        self._edited = edited
        # A run without its mask reads ahead, but the model was made to tell what comes next.
        self.predicts = self.has_logits and (spec if edited is None else edited.spec).causal

    @property
    def points(self) -> list[str]:
        """The addresses that can be read, in the order of the pass."""
        return list(self._addresses)

    def __repr__(self) -> str:
        told = f" {shortened(self.prompt.text)}" if self.prompt.text is not None else ""
        edited = f", {_counted(len(self.edits), 'edit')}" if self.edits else ""
        return (
            f"<Trace of {self.spec.name}: {_counted(len(self.prompt.ids), 'token')}{told}, "
            f"{_counted(len(self), 'point')}{edited}, {self.dtype}>"
        )

    def keys(self) -> list[str]:
        """The same as `points`: a trace reads like a dict from addresses to arrays."""
        return self.points

    def __iter__(self) -> Iterator[str]:
        return iter(self.points)

    def __len__(self) -> int:
        return len(self._addresses)

    def __bool__(self) -> bool:
        return True  # also one that kept no point: it knows what comes next

    def __contains__(self, point: object) -> bool:
        return isinstance(point, str | Point) and str(point) in self._addresses

    def __getitem__(self, point: str | Point) -> np.ndarray:
        """The value at an address. Raises UnknownPoint if the model has no such point or the trace did not keep it."""
        at = self._addresses.get(str(point)) or self._named(point)
        if str(at) not in self._addresses:
            stage = str(at).startswith("sample.") and str(at) not in ("sample.draw", "sample.token")
            unset = " A stage of the choice that is not set leaves nothing." if stage else ""
            raise UnknownPoint(f"{at} was not captured in this trace; ask for it: points=[…, {str(at)!r}].{unset}")
        if at in self._after:
            return self._after[at]
        if self._stored.stored(at):
            return _read_only(self._stored.read(at))
        with self._lock:
            before = dict(self._made)
        made = before.get(at)
        if made is None:
            made = _read_only(self._stored.read(at, before))
            with self._lock:
                self._made[at] = made
                while len(self._made) > REMEMBERED:  # all patterns of a model are far more than its streams
                    del self._made[next(iter(self._made))]  # the oldest goes
        return made

    def add(self, values: Mapping[Point, np.ndarray]) -> None:
        """Values of what came after the pass, the choice of a token, to be read by their addresses like all others."""
        self._after |= {point: _read_only(value) for point, value in values.items()}
        self._addresses = {**self._addresses, **{str(point): point for point in values}}

    @property
    def rows(self) -> np.ndarray:
        """Which tokens of the prompt the rows of a `[T, …]` point belong to, `int [rows held]`."""
        return np.arange(self._layout.rows) if self._rows is None else self._rows

    def pattern_rows(self, layer: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The pattern of a layer in blocks of query rows: their positions, and their weights `[H, R, S]`.

        S reaches to the last key that the block may see. Where the pattern is worked out, no T × T array exists.
        Raises CutawayError where the trace did not keep it.
        """
        blocks = self._stored.pattern_rows(layer)
        if blocks is None:
            yield self.rows + self.past, self[Point("attn.pattern", layer)]
        else:
            yield from blocks

    def head_indices(self, point: Point, heads: np.ndarray) -> np.ndarray:
        """Where these heads (of keys and values: theirs) stand in what the trace holds of a point.

        Raises CutawayError for one that it does not hold.
        """
        held = Cut(None, self.heads).heads_of(point, self.spec)
        if held is None:
            return heads
        where = {int(head): index for index, head in enumerate(held)}
        for head in heads:
            if int(head) not in where:
                raise CutawayError(f"Head {head} of {point} was not captured in this trace, which holds {list(where)}.")
        return np.array([where[int(head)] for head in heads], dtype=np.intp)

    @property
    def logits(self) -> np.ndarray:
        """`[T, V]`: the scores of the next token after each position."""
        return self[Point("logits")]

    @property
    def last_logits(self) -> np.ndarray:
        """`[V]`: the scores of the next token after the whole prompt; CutawayError for an encoder without a head."""
        return self._require_logits()

    def _require_logits(self) -> np.ndarray:
        if self._last_logits is None:
            raise CutawayError(f"{self.spec.name} is an encoder without a head: it gives vectors, not logits.")
        return self._last_logits

    @property
    def probabilities(self) -> np.ndarray:
        """softmax of `last_logits`, `[V]` float64."""
        return softmax(self.last_logits)

    def next_tokens(self, count: int = 10) -> list[NextToken]:
        """The likeliest next tokens, likeliest first; ties go to the lowest id."""
        if not is_whole(count):
            raise CutawayError(f"{count!r} next tokens were asked for; that must be a whole number, at least 1.")
        if count < 1:
            raise CutawayError(f"{count} next tokens were asked for; ask for at least 1.")
        self._require_logits()
        if not self.predicts:
            raise CutawayError(
                f"{self.spec.name} reads in both directions: each row of its logits says what stands at that position, "
                "and none says what comes next. Read `logits`."
            )
        return self.likeliest(count)

    def likeliest(self, count: int) -> list[NextToken]:
        """The highest of `last_logits`, whatever they say in this model; none where it has no head."""
        if not self.has_logits:
            return []
        p, logits = self.probabilities, self.last_logits
        best = np.argsort(-p, kind="stable")[:count]
        return [NextToken(int(i), self.piece(int(i)), float(logits[i]), float(p[i])) for i in best]

    def piece(self, token: int) -> str:
        """How a token reads; "" where nothing is known of it."""
        return self._piece(token) if self._piece else ""

    @property
    def has_logits(self) -> bool:
        """Whether this run gave logits; an encoder without a head gives vectors."""
        return self._last_logits is not None

    @property
    def edits(self) -> "tuple[EditReport, ...]":
        """What each edit of this run did: where it fired, how many numbers it changed, how far it moved the logits."""
        return self._edited.reports if self._edited is not None else ()

    @property
    def edited(self) -> "Edited":
        """All edits of this run together, and the unedited run. Raises CutawayError for a run without edits."""
        if self._edited is None:
            raise CutawayError("This run had no edits; model.trace(prompt, edits=[…]) makes one that has.")
        return self._edited

    def diff(self, other: "Trace") -> Difference:
        """This run against another, address by address. Raises CutawayError for runs of unequal length."""
        return Difference(self, other)

    def save(self, path: str | Path) -> Path:
        """Write every captured point to a safetensors file, with the prompt in its metadata. Returns the path."""
        if not isinstance(path, str | Path):
            raise CutawayError(f"A trace is saved to a path, not to {type(path).__name__}: {path!r}.")
        return save_trace(self, Path(path))

    def show(self, layer: int = 0) -> None:
        """Print the pass, stage by stage, with the stages of one layer in full."""
        from cutaway.trace.drawing.overview import draw_trace

        draw_trace(self, layer=layer)

    def _named(self, point: object) -> Point | Reduced:
        """What an address, in whatever way it is written, means in this model."""
        address, how = split_address(point) if isinstance(point, str) else (point, None)
        at = parse_point(address, self.spec)  # type: ignore[arg-type]
        return at if how is None else Reduced(at, parse_reduction(how))


def _read_only(value: np.ndarray) -> np.ndarray:
    view = np.asarray(value).view()
    view.flags.writeable = False
    return view


def shortened(text: str, most: int = 40) -> str:
    """A text as a repr shows it: in quotation marks, its end cut off where it is long."""
    return repr(text if len(text) <= most else text[: most - 1] + "…")


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' if count != 1 else ''}"


def rows_asked(positions: Sequence[int], length: int) -> np.ndarray:
    if isinstance(positions, str) or not isinstance(positions, Sequence | np.ndarray):
        raise CutawayError(f"positions is {positions!r}; it must be a list of positions, as in [0, -1].")
    if len(positions) == 0:
        raise CutawayError("No position was asked for; name at least one, or leave positions out to keep all.")
    for position in positions:
        whole = is_whole(position)
        if not whole or not -length <= position < length:
            shown = int(position) if whole else repr(position)
            raise CutawayError(f"Position {shown} was asked for; the prompt has positions 0 to {length - 1}.")
    return np.array([position % length for position in positions], dtype=np.intp)
