"""One edit meets one value: which cells are meant, what stands there afterwards, how many became another number."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from cutaway.engines.layout import Segment
from cutaway.errors import CutawayError
from cutaway.forward.attention import visible
from cutaway.points import Point
from cutaway.spec import ExpertsSpec, ModelSpec
from cutaway.trace.edits.kinds import Keep, PointEdit
from cutaway.trace.edits.selection import AXES, SELECTIONS, Place, rows_chosen


@dataclass(frozen=True, eq=False)
class Here:
    """What an edit is told of the value that it meets: the point, its rows' positions, and what was seen before.

    `visible` `[R, S]` says which keys the rows of a T × T point may see.
    """

    point: Point
    spec: ModelSpec
    positions: np.ndarray
    prompt_length: int
    known: dict[Point, np.ndarray]
    visible: np.ndarray | None = None


def seen_keys(spec: ModelSpec, layer: int, segment: Segment, start: int, shape: tuple[int, ...]) -> np.ndarray:
    """`[R, S]`: which keys each row of a block `[H, R, S]` may see, the first being row `start` of its segment."""
    first, last = visible(spec.layers[layer].attention, segment, slice(start, start + shape[1]))
    keys = np.arange(shape[2])
    return (keys >= first[:, None]) & (keys < last[:, None])


@dataclass(frozen=True, eq=False)
class Met:
    """The part of a value that an edit means: where its block of numbers stands, and which of its cells are meant."""

    place: Place
    mesh: tuple[np.ndarray, ...]
    block: np.ndarray
    meant: np.ndarray | None  # bools that broadcast to the block; None means all of it

    @property
    def elements(self) -> int:
        """How many cells are meant."""
        if self.meant is None:
            return self.block.size
        return int(np.count_nonzero(np.broadcast_to(self.meant, self.block.shape)))

    def changed(self, new: np.ndarray) -> int:
        """How many numbers of the block are others in `new`; a NaN is no other than a NaN."""
        different = new != self.block
        if self.block.dtype.kind == "f":
            different &= ~(np.isnan(new) & np.isnan(self.block))
        return int(np.count_nonzero(different))


def meets(edit: PointEdit, value: np.ndarray, here: Here) -> Met | None:
    """What of `value` an edit means; None where that is nothing."""
    indices = _indices(edit, value, here)
    if any(len(index) == 0 for index in indices):
        return None
    rows = here.point.info.shape.index("T") if "T" in here.point.info.shape else None
    positions = here.positions if rows is None else here.positions[indices[rows]]
    place = Place(here.point, here.spec, positions, indices, here.prompt_length, value, here.known)
    mesh = np.ix_(*indices)
    return Met(place, mesh, value[mesh], _meant(edit, place, here, indices))


def apply_edit(edit: PointEdit, value: np.ndarray, here: Here, *, in_place: bool) -> tuple[np.ndarray, int, int]:
    """The value to go on with, how many elements the edit acted on, and how many of them are another number now.

    `value` itself is written into only with `in_place`, and handed back untouched where no number changed.
    """
    met = meets(edit, value, here)
    if met is None:
        return value, 0, 0
    new = fitting(edit, edit.new(met.block, met.place), met.block, met.place)
    if met.meant is not None:
        new = np.where(met.meant, new, met.block)
    changed = met.changed(new)
    if changed == 0:
        return value, met.elements, 0
    out = value if in_place else value.copy()
    out[met.mesh] = new
    refuse_blind_queries(edit, out, here)
    return out, met.elements, changed


def _indices(edit: PointEdit, value: np.ndarray, here: Here) -> tuple[np.ndarray, ...]:
    """The indices of every axis that are meant; for `Keep` those that are left out."""
    keeps = isinstance(edit, Keep)
    inner = any(getattr(edit, name) is not None for name in SELECTIONS if name != "positions")
    indices = []
    for symbol, size in zip(here.point.info.shape, value.shape, strict=True):
        every = np.arange(size)
        if symbol == "T":
            rows = rows_chosen(edit.positions, here.positions, here.prompt_length)
            indices.append(np.setdiff1d(every, rows) if keeps and not inner else rows)
            continue
        chosen = getattr(edit, AXES[symbol]) if symbol in AXES else None
        if chosen is None:
            indices.append(every)
        else:
            found = np.array([one for one in chosen if one < size], dtype=np.intp)
            indices.append(np.setdiff1d(every, found) if keeps else found)
    return tuple(indices)


def _meant(edit: PointEdit, place: Place, here: Here, indices: tuple[np.ndarray, ...]) -> np.ndarray | None:
    """Bools that broadcast to the block, where not all of its cells are meant."""
    meant = edit.within(place)
    if here.visible is not None:
        seen = here.visible[np.ix_(indices[-2], indices[-1])]
        meant = seen if meant is None else meant & seen
    symbols = place.symbols
    if edit.experts is not None and "k" in symbols and place.point.name != "moe.chosen":
        chosen = here.known[Point("moe.chosen", place.point.layer)][np.ix_(indices[0], indices[1])]
        sent = np.isin(chosen, edit.experts, invert=isinstance(edit, Keep))
        meant = sent if len(symbols) == 2 else sent[:, :, None]
    return meant


def fitting(edit: PointEdit, new: Any, block: np.ndarray, place: Place) -> np.ndarray:
    """What an edit gave, brought to the shape and type of what it stands for. Raises CutawayError where it cannot."""
    try:
        given = np.asarray(new)
    except ValueError:
        given = np.asarray(None)
    if given.dtype.kind not in "iufb":
        raise CutawayError(f"{edit} gave {type(new).__name__} instead of numbers.")
    try:
        fitting = np.broadcast_to(given, block.shape)
    except ValueError:
        raise CutawayError(
            f"{edit} gives shape {list(given.shape)} where {list(block.shape)} stands ([{', '.join(place.symbols)}])."
        ) from None
    if place.point.name == "moe.chosen":
        feed_forward = place.spec.layers[place.point.layer or 0].feed_forward
        experts = feed_forward.n_experts if isinstance(feed_forward, ExpertsSpec) else 0
        if given.dtype.kind not in "iu" or fitting.min() < 0 or fitting.max() >= experts:
            raise CutawayError(f"{edit} must give numbers of experts, whole numbers from 0 to {experts - 1}.")
    return fitting.astype(block.dtype)


def refuse_blind_queries(edit: PointEdit, value: np.ndarray, here: Here) -> None:
    """A query that may see no key at all has no pattern: 0 divided by 0."""
    if here.visible is None or here.point.name not in ("attn.scores", "attn.masked"):
        return
    blind = (np.isneginf(value) | ~here.visible).all(axis=-1)
    if blind.any():
        head, row = np.argwhere(blind)[0]
        raise CutawayError(
            f"{edit} leaves query {here.positions[row]} of head {head} no key to listen to; leave it at least one."
        )
