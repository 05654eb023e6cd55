"""What a pass computed, by address: `trace["layers.3.attn.pattern"]`; `dict(trace)` is all of it."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cutaway.engines.layout import Layout
from cutaway.engines.protocol import Engine
from cutaway.errors import CutawayError, UnknownPoint
from cutaway.forward.parameters import Parameters
from cutaway.points import Point, parse_point
from cutaway.spec import ModelSpec
from cutaway.trace.derive import head_out_point, logits_point, pattern_rows, row_blocks_point
from cutaway.trace.gradients import Connected
from cutaway.trace.plan import Plan, made_from
from cutaway.trace.recorder import ROW_BLOCKS

REMEMBERED = 4  # worked-out values that a trace holds on to, so that one may be read head by head


@dataclass(frozen=True)
class Prompt:
    """What was run: ids, how each token reads, and what tokenizing added, in one sentence."""

    ids: tuple[int, ...]
    pieces: tuple[str, ...]
    added: str
    text: str | None = None


@dataclass(frozen=True)
class NextToken:
    """One candidate for the next token."""

    id: int
    text: str
    logit: float
    probability: float


class Trace(Connected):
    """The values of one pass over one sequence; read-only NumPy arrays in the engine's precision.

    `positions` are the rows that it holds (None: all), in every `[T, …]` point and among the query rows of
    the T × T points. Safe to read from several threads at once.
    """

    def __init__(
        self,
        engine: Engine,
        spec: ModelSpec,
        parameters: Parameters,
        prompt: Prompt,
        plan: Plan,
        layout: Layout,
        values: Mapping[Point, Any],
        last_logits: np.ndarray | None,
        positions: Sequence[int] | None = None,
        piece: Callable[[int], str] | None = None,
    ) -> None:
        self.spec = spec
        self.prompt = prompt
        self.engine = engine.name
        self.dtype = engine.dtype.name
        self.past = layout.segments[0].position
        self._engine, self._parameters, self._plan, self._layout = engine, parameters, plan, layout
        self._rows = None if positions is None else _rows(positions, layout.rows)
        self._values: dict[Point, Any] = dict(values)
        self._last_logits = last_logits  # [V], of the last position; None without a head
        self._addresses = {str(point): point for point in plan.points}
        self._made: dict[Point, np.ndarray] = {}
        self._lock = threading.Lock()  # of `_made`
        self._cut: set[Point] = set()  # points of which only the rows asked for are still stored
        self._piece = piece
        self._drop_unneeded_rows()

    @property
    def points(self) -> list[str]:
        """The addresses that can be read, in the order of the pass."""
        return list(self._addresses)

    def __repr__(self) -> str:
        told = f" {shortened(self.prompt.text)}" if self.prompt.text is not None else ""
        return (
            f"<Trace of {self.spec.name}: {_counted(len(self.prompt.ids), 'token')}{told}, "
            f"{_counted(len(self), 'point')}, {self.dtype}>"
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
        at = self._addresses.get(str(point)) or parse_point(point, self.spec)
        if str(at) not in self._addresses:
            raise UnknownPoint(f"{at} was not captured in this trace; ask for it: points=[…, {str(at)!r}].")
        if at in self._values:
            return _read_only(self._work_out(at))
        with self._lock:
            made = self._made.get(at)
        if made is None:
            made = _read_only(self._work_out(at))
            with self._lock:
                self._made[at] = made
                while len(self._made) > REMEMBERED:  # all patterns of a model are far more than its streams
                    del self._made[next(iter(self._made))]  # the oldest goes
        return made

    @property
    def rows(self) -> np.ndarray:
        """Which tokens of the prompt the rows of a `[T, …]` point belong to, `int [rows held]`."""
        return np.arange(self._layout.rows) if self._rows is None else self._rows

    def pattern_rows(self, layer: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The pattern of a layer in blocks of query rows: their positions, and their weights `[H, R, S]`.

        S reaches to the last key that the block may see. Where the pattern is worked out, no T × T array exists.
        Raises CutawayError where the trace did not keep it.
        """
        at = Point("attn.pattern", layer)
        if self._rows is not None or at in self._values or at not in self._plan.points:
            yield self.rows + self.past, self[at]
            return
        q, k = (self._values[source] for source in made_from(self.spec, at))
        yield from pattern_rows(self._engine, self.spec, layer, q, k)

    @property
    def logits(self) -> np.ndarray:
        """`[T, V]`: the scores of the next token after each position."""
        return self[Point("logits")]

    @property
    def last_logits(self) -> np.ndarray:
        """`[V]`: the scores of the next token after the whole prompt; CutawayError for an encoder without a head."""
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
        p, logits = self.probabilities, self.last_logits
        if not self.spec.causal:
            raise CutawayError(
                f"{self.spec.name} reads in both directions: each row of its logits says what stands at that position, "
                "and none says what comes next. Read `logits`."
            )
        best = np.argsort(-p, kind="stable")[:count]
        return [
            NextToken(int(i), self._piece(int(i)) if self._piece else "", float(logits[i]), float(p[i])) for i in best
        ]

    def save(self, path: str | Path) -> Path:
        """Write every captured point to a safetensors file, with the prompt in its metadata. Returns the path."""
        from cutaway.trace.export import save_trace

        if not isinstance(path, str | Path):
            raise CutawayError(f"A trace is saved to a path, not to {type(path).__name__}: {path!r}.")
        return save_trace(self, Path(path))

    def show(self, layer: int = 0) -> None:
        """Print the pass, stage by stage, with the stages of one layer in full."""
        from cutaway.trace.draw import draw_trace

        draw_trace(self, layer=layer)

    def _work_out(self, point: Point) -> np.ndarray:
        engine = self._engine
        if point in self._values:
            value = self._values[point]
            if isinstance(value, dict):  # a T × T point, kept by segment
                return self._chosen(point, engine.numpy(value[0]))
            return self._chosen(point, value if isinstance(value, np.ndarray) else engine.numpy(value))
        sources = [self._values[source] for source in made_from(self.spec, point)]
        if point.name in ROW_BLOCKS:
            value = row_blocks_point(engine, self.spec, point, *sources)
        elif point.name == "attn.head_out":
            value = head_out_point(engine, self._parameters, point, sources[0], self._layout)
        else:
            value = logits_point(engine, self.spec, self._parameters, sources[0], self._layout)
        return self._chosen(point, engine.numpy(value))

    def _chosen(self, point: Point, value: np.ndarray) -> np.ndarray:
        """Only the rows that the trace was asked for."""
        if self._rows is None or point in self._cut or "T" not in point.info.shape:
            return value
        return np.take(value, self._rows, axis=point.info.shape.index("T"))

    def _drop_unneeded_rows(self) -> None:
        """Where only some positions were asked for, let go of the other rows of all that nothing else is made from."""
        if self._rows is None:
            return
        made = {p for p in self._plan.points if p not in self._plan.kept}
        needed = {source for point in made for source in made_from(self.spec, point)}
        for point in [p for p, value in self._values.items() if p not in needed and not isinstance(value, dict)]:
            value = self._values[point]
            whole = value if isinstance(value, np.ndarray) else self._engine.numpy(value)
            self._values[point] = self._chosen(point, whole)
            self._cut.add(point)


def _read_only(value: np.ndarray) -> np.ndarray:
    view = np.asarray(value).view()
    view.flags.writeable = False
    return view


def softmax(logits: np.ndarray) -> np.ndarray:
    """exp(ℓ − max) / sum over the last axis, in float64 (chapter 14.1)."""
    shifted = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


def is_whole(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def shortened(text: str, most: int = 40) -> str:
    """A text as a repr shows it: in quotation marks, its end cut off where it is long."""
    return repr(text if len(text) <= most else text[: most - 1] + "…")


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' if count != 1 else ''}"


def _rows(positions: Sequence[int], length: int) -> np.ndarray:
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
