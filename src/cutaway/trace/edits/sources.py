"""Where the values of an edit come from: another trace, several, the file of one, or an array."""

import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from cutaway.errors import CutawayError
from cutaway.points import Point, parse_point, shape_of
from cutaway.spec import ModelSpec
from cutaway.trace.edits.selection import Place, resolved_positions
from cutaway.trace.saved import open_trace
from cutaway.trace.trace import Trace


def source_traces(source: Any) -> list[Trace]:
    """The traces that a source is, one or several; none where it is an array. Raises CutawayError for neither."""
    if isinstance(source, Trace):
        return [source]
    if isinstance(source, str | Path):
        return [_opened(str(source), file_stamp(source))]
    if isinstance(source, Sequence) and source and all(isinstance(one, Trace) for one in source):
        return list(source)
    if isinstance(source, np.ndarray) or (isinstance(source, Sequence) and source):
        return []
    raise CutawayError(f"A source is a trace, several traces, the file of one, or an array; not {source!r}.")


def source_array(source: Any) -> np.ndarray:
    """A source that is no trace, as numbers."""
    try:
        values = np.asarray(source)
    except ValueError:
        values = np.asarray(None)
    if values.dtype.kind not in "iuf":
        raise CutawayError(f"A source is a trace, several traces, the file of one, or an array; not {source!r}.")
    return values


def check_source(source: Any, point: Point, spec: ModelSpec) -> None:
    """Refuse, before the run, a source that has no such point or one of another shape."""
    for trace in source_traces(source):
        if str(point) not in trace:
            raise CutawayError(
                f"The source, a trace of {trace.spec.name}, holds no {point}; "
                f"capture it there with points=[{str(point)!r}]."
            )
        ours, theirs = (shape_of(point, which, 1) for which in (spec, trace.spec))
        if ours != theirs:
            raise CutawayError(
                f"{point} is {list(theirs)} per token in the source, a trace of {trace.spec.name}, and {list(ours)} "
                f"in {spec.name}; values can only be put where they fit."
            )


def source_block(
    source: Any, chosen: Any, source_positions: Sequence[int] | None, block: np.ndarray, place: Place
) -> np.ndarray:
    """The source's values for the cells of a block, row by row of the same position (or of `source_positions`)."""
    traces = source_traces(source)
    if len(traces) > 1:
        raise CutawayError(f"{len(traces)} traces were given as one source; a patch comes from one.")
    wanted = place.positions
    if not traces:
        return _from_array(source_array(source), block, place)
    trace = traces[0]
    held = trace.rows + trace.past
    if source_positions is not None:
        length = trace.past + len(trace.prompt.ids)
        froms = dict(
            zip(
                resolved_positions(chosen, place.prompt_length),
                resolved_positions(source_positions, length),
                strict=True,
            )
        )
        wanted = np.array([froms[int(position)] for position in wanted])
    missing = np.setdiff1d(wanted, held)
    if len(missing):
        raise CutawayError(
            f"The source holds no position {missing[0]} of {place.point} (it has {_span(held)}); restrict the edit "
            "with positions=, or say with source_positions= which rows are meant."
        )
    values = trace[place.point]
    indices = [*place.indices]
    rows = place.axis("T")
    if rows is not None:
        indices[rows] = np.searchsorted(held, wanted)
    heads = place.axis("H", "H_kv")
    if heads is not None:
        indices[heads] = trace.head_indices(place.point, indices[heads])
    if place.symbols[-1] == "S":
        return _by_key(values, indices, block, place)
    return values[np.ix_(*indices)]


def mean_of(source: Any, block: np.ndarray, place: Place) -> np.ndarray:
    """The mean over all rows of the source's traces, or of the value itself; an array is the mean already."""
    rows = place.axis("T")
    if rows is None:
        raise CutawayError(f"{place.point} has one row only; there is nothing to take the mean of.")
    if source is None:
        means = place.whole.mean(axis=rows, keepdims=True, dtype=np.float64)
    else:
        traces = source_traces(source)
        if not traces:
            return _from_array(source_array(source), block, place)
        means = np.concatenate([trace[place.point] for trace in traces], axis=rows)
        means = means.mean(axis=rows, keepdims=True, dtype=np.float64)
    return means[np.ix_(*[np.arange(1) if axis == rows else index for axis, index in enumerate(place.indices)])]


def resampled(source: Any, seed: int, block: np.ndarray, place: Place) -> np.ndarray:
    """For each row one of the source's, drawn by seed and position."""
    traces, rows = source_traces(source), place.axis("T")
    if rows is None:
        raise CutawayError(f"{place.point} has one row only; there is none to draw in its place.")
    values = np.concatenate([trace[place.point] for trace in traces], axis=rows) if traces else source_array(source)
    if values.ndim != block.ndim:
        raise CutawayError(f"The source has shape {list(values.shape)}; {place.point} needs rows to draw from.")
    drawn = [int(np.random.default_rng([seed, int(p)]).integers(values.shape[rows])) for p in place.positions]
    return values[np.ix_(*[np.array(drawn) if axis == rows else index for axis, index in enumerate(place.indices)])]


def difference_of_means(one: Any, other: Any, point: str | Point, positions: Sequence[int] | None = None) -> np.ndarray:
    """A direction to steer in: the mean row of some traces minus that of others at `point`, float64.

    `one` and `other` are traces, or several each; `positions` takes only these rows of each trace (-1: its last).
    Raises CutawayError for what is no trace, or has no rows there.
    """
    means = []
    for source in (one, other):
        rows = []
        for trace in source_traces(source):
            value = trace[point]
            at = parse_point(point, trace.spec)
            if "T" not in at.info.shape or at.info.shape[-1] == "S":
                raise CutawayError(f"{at} is [{', '.join(at.info.shape)}]; it has no rows that a mean could be of.")
            axis = at.info.shape.index("T")
            chosen = value if positions is None else np.take(value, list(positions), axis=axis)
            rows.append(np.moveaxis(chosen, axis, 0))
        if not rows:
            raise CutawayError("A difference of means is between traces, one or several on either side.")
        means.append(np.concatenate(rows).mean(axis=0, dtype=np.float64))
    direction: np.ndarray = means[0] - means[1]
    return direction


def _from_array(values: np.ndarray, block: np.ndarray, place: Place) -> np.ndarray:
    """An array of the point's shape, row p for position p; or of that without rows, for every position."""
    rows = place.axis("T")
    if rows is not None and values.ndim == block.ndim - 1:
        values, rows_taken = np.expand_dims(values, rows), np.zeros(len(place.positions), dtype=np.intp)
    else:
        rows_taken = place.positions
    needed = tuple(int(index.max()) + 1 for index in place.indices)
    fits = values.ndim == block.ndim and all(
        (int(rows_taken.max()) < size) if axis == rows else index.max() < size
        for axis, (index, size) in enumerate(zip(place.indices, values.shape, strict=True))
    )
    if not fits:
        raise CutawayError(
            f"The source has shape {list(values.shape)}; {place.point} is [{', '.join(place.symbols)}], and here at "
            f"least {list(needed)} are needed."
        )
    return values[np.ix_(*[rows_taken if axis == rows else index for axis, index in enumerate(place.indices)])]


def _by_key(values: np.ndarray, indices: list[np.ndarray], block: np.ndarray, place: Place) -> np.ndarray:
    """Rows of a T × T point: keys that the source does not reach are not seen there either."""
    keys = place.keys
    there = keys < values.shape[-1]
    if not there.all() and not place.spec.causal:
        raise CutawayError(
            f"The source has {values.shape[-1]} keys and this text {place.prompt_length}; in a model that reads in "
            "both directions only a text of the same length has such rows."
        )
    taken = block.copy()
    taken[..., there] = values[np.ix_(*indices[:-1], keys[there])]
    if place.point.name in ("attn.pattern", "attn.masked"):
        taken[..., ~there] = 0 if place.point.name == "attn.pattern" else -np.inf
    return taken


def _span(positions: np.ndarray) -> str:
    if len(positions) > 1 and np.array_equal(positions, np.arange(positions[0], positions[-1] + 1)):
        return f"{positions[0]} to {positions[-1]}"
    return ", ".join(map(str, positions[:8])) + (" …" if len(positions) > 8 else "")


def file_stamp(path: str | Path) -> tuple[int, int]:
    """What tells a file from the one that was there before: its time and size."""
    try:
        told = os.stat(path)
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL in it
        why = getattr(error, "strerror", None) or error
        raise CutawayError(f"The source {str(path)!r} cannot be read: {why}.") from None
    return told.st_mtime_ns, told.st_size


@lru_cache(maxsize=8)
def _opened(path: str, stamp: tuple[int, int]) -> Trace:
    return open_trace(path)
