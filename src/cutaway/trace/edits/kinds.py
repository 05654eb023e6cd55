"""What may be changed in a pass: one small record for each kind of edit, addressed by the points that captures use.

An edit says where it acts (`at`, a pattern as in `find_points`), on which part of the value there (`positions`,
`heads`, `neurons`, `experts`, `keys`, `tokens`, as the point has such axes), and what stands there afterwards. It
holds no state: what it did is told by the trace (`trace.edits`). Of T × T points an edit reaches only the cells that
a query may see; to let it see more, leave out the mask (`Without("mask")`).
"""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar

import numpy as np

from cutaway.errors import CutawayError
from cutaway.points import POINTS, Point
from cutaway.spec import ExpertsSpec, ModelSpec
from cutaway.spec.check import is_whole
from cutaway.trace.edits.edit import Edit
from cutaway.trace.edits.selection import SELECTIONS, Place, in_words, selection
from cutaway.trace.edits.sources import mean_of, resampled, source_block

# Where being left out of what follows is −∞ and not 0: what a softmax, or the choice of experts, reads.
COMPETING = ("attn.scores", "attn.masked", "moe.router_logits", "moe.scores")


@dataclass(frozen=True, eq=False)
class PointEdit(Edit):
    """An edit of the value at some points. A pass hands it the part that it selects, `new` says what stands there."""

    at: str | Point | Sequence[str | Point]
    _: KW_ONLY
    positions: Any = None  # whole numbers (negative ones count from the end of the prompt), or a range "5:"
    heads: Sequence[int] | None = None
    neurons: Sequence[int] | None = None
    experts: Sequence[int] | None = None
    keys: Sequence[int] | None = None
    tokens: Sequence[int] | None = None

    same_run: ClassVar[bool] = False  # whether it takes its values from the unedited run of the same prompt
    whole_text: ClassVar[bool] = False  # whether it needs all rows at once

    def __post_init__(self) -> None:
        at = (self.at,) if isinstance(self.at, str | Point) else self.at
        if not isinstance(at, Sequence) or not at or not all(isinstance(pattern, str | Point) for pattern in at):
            raise CutawayError(f"An edit is addressed by a point or a pattern, not by {self.at!r}.")
        object.__setattr__(self, "at", tuple(map(str, at)))
        for name in SELECTIONS:
            object.__setattr__(self, name, selection(name, getattr(self, name)))

    def check(self, point: Point, spec: ModelSpec) -> None:
        """Raise CutawayError where this edit has no meaning at this point."""

    def new(self, block: np.ndarray, place: Place) -> Any:
        """What stands in the place of `block` afterwards; numbers or an array that broadcasts to it."""
        raise NotImplementedError

    def within(self, place: Place) -> np.ndarray | None:
        """Which cells of the block are meant, where not all: bools that broadcast to it."""
        return None

    def __str__(self) -> str:
        return f"{self.kind} at {in_words(self)}"


@dataclass(frozen=True, eq=False)
class Zero(PointEdit):
    """Zero ablation: 0 in the place of what was there."""

    kind = "zero"

    def new(self, block: np.ndarray, place: Place) -> Any:
        return 0


@dataclass(frozen=True, eq=False)
class Mean(PointEdit):
    """Mean ablation: each row becomes the mean over the rows of `source`, or of this pass where none is given.

    `source` is a trace, several, the file of one, or the mean itself as an array. Without one the whole text has to
    be there at once: no generation.
    """

    kind = "mean"
    source: Any = None

    @property
    def whole_text(self) -> bool:  # type: ignore[override]
        return self.source is None

    def check(self, point: Point, spec: ModelSpec) -> None:
        _refuse_by_key(self, point, "have no mean: each row sees other keys")

    def new(self, block: np.ndarray, place: Place) -> Any:
        return mean_of(self.source, block, place)


@dataclass(frozen=True, eq=False)
class Resample(PointEdit):
    """Resample ablation: each row becomes one of the rows of `source` (a trace, or several), drawn by `seed`.

    The draw for a position depends on the seed and that position alone, so a text decoded token by token gets the
    same rows as in one pass, and all points of a position get them from one place.
    """

    kind = "resample"
    source: Any
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_whole(self.seed) or self.seed < 0:
            raise CutawayError(f"The seed is {self.seed!r}; it must be 0 or a positive whole number.")
        object.__setattr__(self, "seed", int(self.seed))

    def check(self, point: Point, spec: ModelSpec) -> None:
        _refuse_by_key(self, point, "cannot take another position's row: it would see other keys")

    def new(self, block: np.ndarray, place: Place) -> Any:
        return resampled(self.source, self.seed, block, place)


@dataclass(frozen=True, eq=False)
class Replace(PointEdit):
    """Patch: the value of another trace at the same position, or an array, in the place of what was there.

    `source` is a trace, the file of one, or an array of the point's shape (one row less of axes: the same for every
    position). None takes the value that the unedited run of the same prompt has there. `source_positions`, one for
    each of `positions`, take the rows from elsewhere in the source.
    """

    kind = "replace"
    source: Any = None
    source_positions: Sequence[int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "source_positions", selection("source_positions", self.source_positions))
        wanted = len(self.positions) if isinstance(self.positions, tuple) else None
        if self.source_positions is not None and len(self.source_positions) != wanted:
            raise CutawayError(
                f"There are {len(self.source_positions)} source_positions; there must be one for each of `positions`, "
                f"which are {'not listed' if wanted is None else wanted}."
            )

    @property
    def same_run(self) -> bool:  # type: ignore[override]
        return self.source is None

    def check(self, point: Point, spec: ModelSpec) -> None:
        if self.source_positions is not None:
            _refuse_by_key(self, point, "cannot take another position's row: it would see other keys")

    def new(self, block: np.ndarray, place: Place) -> Any:
        return source_block(self.source, self.positions, self.source_positions, block, place)


@dataclass(frozen=True, eq=False)
class Freeze(Replace):
    """Freeze an attention pattern: that of `source`, or of the unedited run where None, whatever else is edited."""

    kind = "freeze"

    def check(self, point: Point, spec: ModelSpec) -> None:
        super().check(point, spec)
        if point.name != "attn.pattern":
            raise CutawayError(f"Freeze is for attn.pattern; {point} is another point: use Replace.")


@dataclass(frozen=True, eq=False)
class Add(PointEdit):
    """Steer: add `scale` times a vector, which broadcasts to the value as in NumPy."""

    kind = "add"
    vector: Any
    scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "vector", _numbers("The vector to add", self.vector))
        object.__setattr__(self, "scale", _number("The scale of a vector", self.scale))

    def new(self, block: np.ndarray, place: Place) -> Any:
        try:
            return block + (self.scale * self.vector).astype(block.dtype)
        except ValueError:
            raise CutawayError(
                f"{self}: the vector has shape {list(self.vector.shape)} and what it is added to {list(block.shape)} "
                f"([{', '.join(place.symbols)}]); it must broadcast to that."
            ) from None


@dataclass(frozen=True, eq=False)
class Scale(PointEdit):
    """Multiply by a factor."""

    kind = "scale"
    factor: float

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "factor", _number("The factor of a scale", self.factor))

    def new(self, block: np.ndarray, place: Place) -> Any:
        return block * block.dtype.type(self.factor)


@dataclass(frozen=True, eq=False)
class Knockout(PointEdit):
    """Cut edges of attention: query q no longer listens to key k, for each `[q, k]` of `edges`.

    At attn.scores or attn.masked the edge becomes −∞ and the rest of the row takes its weight; at attn.pattern it
    becomes 0 and its weight is lost.
    """

    kind = "knockout"
    edges: Sequence[Sequence[int]]

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            edges = tuple((int(query), int(key)) for query, key in self.edges)
        except (TypeError, ValueError):
            edges = ()
        if not edges or min(min(edge) for edge in edges) < 0:
            raise CutawayError(f"edges is {self.edges!r}; it must be pairs of positions [query, key], as in [[5, 2]].")
        object.__setattr__(self, "edges", edges)

    def check(self, point: Point, spec: ModelSpec) -> None:
        if point.name not in ("attn.scores", "attn.masked", "attn.pattern"):
            raise CutawayError(f"An edge is cut at attn.masked, attn.scores or attn.pattern, not at {point}.")

    def __str__(self) -> str:
        shown = ", ".join(f"{query} → {key}" for query, key in self.edges[:4]) + (" …" if len(self.edges) > 4 else "")
        return f"{super().__str__()}, {shown}"

    def within(self, place: Place) -> np.ndarray:
        cut = np.zeros((len(place.positions), len(place.keys)), dtype=bool)
        queries, keys = np.array(self.edges).T
        rows, columns = np.searchsorted(place.positions, queries), np.searchsorted(place.keys, keys)
        here = (rows < len(place.positions)) & (columns < len(place.keys))
        rows, columns, queries, keys = (x[here] for x in (rows, columns, queries, keys))
        found = (place.positions[rows] == queries) & (place.keys[columns] == keys)
        cut[rows[found], columns[found]] = True
        return cut

    def new(self, block: np.ndarray, place: Place) -> Any:
        return _silence(place.point)


@dataclass(frozen=True, eq=False)
class Drop(PointEdit):
    """Leave out heads, neurons, positions, experts or keys: 0, or −∞ where a softmax or the choice of experts reads.

    A dropped key (at attn.masked: a position that nobody else listens to) is still seen by its own query.
    """

    kind = "drop"

    def __post_init__(self) -> None:
        super().__post_init__()
        if all(getattr(self, name) is None for name in SELECTIONS):
            raise CutawayError(f"{type(self).__name__} needs what to {self.kind}: positions, heads, neurons, experts …")

    def check(self, point: Point, spec: ModelSpec) -> None:
        if point.name in ("attn.dots", "logits"):
            other = "attn.masked" if point.name == "attn.dots" else "the sampling settings"
            raise CutawayError(f"{self.kind} has no lasting meaning at {point}; use {other}.")
        _check_experts(self, point, spec)

    def within(self, place: Place) -> np.ndarray | None:
        return None if self.keys is None else place.positions[:, None] != place.keys

    def new(self, block: np.ndarray, place: Place) -> Any:
        return _silence(place.point)


@dataclass(frozen=True, eq=False)
class Keep(Drop):
    """Leave out all but these heads, neurons, positions, experts or keys; see `Drop` for how.

    With `positions` beside another choice, all others of that choice are left out at those positions.
    """

    kind = "keep"


@dataclass(frozen=True, eq=False)
class Function(PointEdit):
    """Any Python function: `function(values, place)` gets a copy of what is selected and gives what shall stand there.

    `place` tells the point and the positions of the rows (`Place`). T × T points come block by block of query rows.
    """

    kind = "function"
    function: Callable[[np.ndarray, Place], Any] = field(default=None)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.function):
            raise CutawayError(f"Function needs something to call, not {self.function!r}.")

    def new(self, block: np.ndarray, place: Place) -> Any:
        return self.function(block.copy(), place)


def _silence(point: Point) -> float:
    return -np.inf if point.name in COMPETING else 0.0


def _refuse_by_key(edit: PointEdit, point: Point, why: str) -> None:
    if "S" in POINTS[point.name].shape:
        raise CutawayError(f"{type(edit).__name__} at {point}: the rows of [{', '.join(point.info.shape)}] {why}.")


def _check_experts(edit: Drop, point: Point, spec: ModelSpec) -> None:
    """Leaving out experts must leave enough of them, where it cannot fail to leave them out."""
    feed_forward = spec.layers[point.layer or 0].feed_forward
    if edit.experts is None or point.name not in COMPETING or not isinstance(feed_forward, ExpertsSpec):
        return
    router = feed_forward.router
    if point.name == "moe.router_logits" and (router.scores != "softmax" or router.correction):
        raise CutawayError(
            f"An expert without a score may still be chosen in {spec.name}, by its correction; leave experts out at "
            f"layers.{point.layer}.moe.scores."
        )
    left = len(set(edit.experts)) if isinstance(edit, Keep) else feed_forward.n_experts - len(set(edit.experts))
    if left < router.n_active:
        raise CutawayError(
            f"Layer {point.layer} of {spec.name} sends each token to {router.n_active} experts; {left} would be left."
        )


def _number(what: str, value: Any) -> float:
    if not isinstance(value, int | float | np.number) or isinstance(value, bool):
        raise CutawayError(f"{what} must be a number; it is {value!r}.")
    return float(value)


def _numbers(what: str, values: Any) -> np.ndarray:
    """A read-only copy of an array of floats."""
    try:
        array = np.array(values)
    except ValueError:
        array = np.array(None)
    if array.dtype.kind not in "iuf" or not np.isfinite(array).all():
        raise CutawayError(f"{what} must be finite numbers; it is {values!r}.")
    array = array.astype(array.dtype if array.dtype.kind == "f" else np.float64)
    array.flags.writeable = False
    return array


KINDS: dict[str, type[PointEdit]] = {
    edit.kind: edit for edit in (Zero, Mean, Resample, Replace, Freeze, Add, Scale, Knockout, Drop, Keep, Function)
}
