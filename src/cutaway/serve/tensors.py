"""Slices of a run's tensors as bytes."""

from collections.abc import Sequence

import numpy as np

from cutaway.errors import CutawayError
from cutaway.points import Point
from cutaway.serve.cards import kind_of
from cutaway.serve.look import Look
from cutaway.serve.protocol import Manifest, TensorHeader
from cutaway.serve.requests import MOST_CELLS, Slice, shape3
from cutaway.serve.runs import Run
from cutaway.serve.slices import envelope, framed


def tensor_bytes(run: Look, asked: Slice) -> bytes:
    """One slice, cut, pooled and coded. Raises CutawayError where it would be too large."""
    heads = shape3(asked.point, run)[0] if asked.head is None else 1
    height, width = asked.rows[1] - asked.rows[0], asked.columns[1] - asked.columns[0]
    if heads * min(height, asked.most_rows) * min(width, asked.most_columns) > MOST_CELLS:
        raise CutawayError(f"{asked.point} in full is more than {MOST_CELLS:,} numbers; ask for a part, or pooled.")
    values = _cut(run, asked)
    start = (asked.head or 0, asked.rows[0], asked.columns[0])
    kind = kind_of(asked.point)
    hidden = None
    if asked.point.name in ("attn.masked", "attn.pattern") and asked.point.layer is not None:
        hidden = run.hidden(asked.point.layer)[slice(*asked.rows), slice(*asked.columns)]
    return envelope(str(asked.point), values, kind, asked.format, start, asked.most_rows, asked.most_columns, hidden)


def first_bytes(run: Run, look: Look, manifest: Manifest, slices: Sequence[Slice]) -> bytes:
    """All that is drawn first of a run: its manifest, the lengths of its rows, the last logits, and some slices."""
    lengths = run.norms()
    parts = [framed(manifest), _lengths_bytes("norms", lengths), _lengths_bytes("medians", medians(lengths)[:, None])]
    if run.trace.has_logits:
        last = run.trace.last_logits[None, None]
        parts.append(envelope("logits", last, "signed", "f32", (0, run.length - 1, 0), 1, last.shape[2]))
    return b"".join([*parts, *(tensor_bytes(look, one) for one in slices)])


def medians(lengths: np.ndarray) -> np.ndarray:
    """Of each row of `[points, T]` the length that has half of the others below it, `[points]`.

    Sorting them all is left to no page: a browser would take longer over it than over all else that it draws.
    """
    half = lengths.shape[1] // 2
    middle: np.ndarray = np.partition(lengths, half, axis=1)[:, half]
    return middle


def _lengths_bytes(name: str, lengths: np.ndarray) -> bytes:
    largest = float(np.where(np.isfinite(lengths), lengths, 0.0).max())
    shape = [1, *lengths.shape]
    return framed(TensorHeader(name, shape, shape, [0, 0, 0], "f32", "signed", 1.0, largest, 0), lengths)


def head_row(run: Look, layer: int, head: int, position: int) -> np.ndarray:
    """What token `position` gives and gets in a head's pattern: `[2, T]`, its row and its column."""
    pattern = run.one_head(Point("attn.pattern", layer), head)
    return np.stack([pattern[position], pattern[:, position]])


def _cut(run: Look, asked: Slice) -> np.ndarray:
    """`[heads, rows, columns]`."""
    point, (first, stop), (left, right) = asked.point, asked.rows, asked.columns
    here = (slice(first, stop), slice(left, right))
    if point.info.shape[-1] == "S" or (point.name == "attn.head_out" and asked.head is not None):
        heads = range(shape3(point, run)[0]) if asked.head is None else (asked.head,)
        squares = [run.one_head(point, head)[here] for head in heads]
        return squares[0][None] if len(squares) == 1 else np.stack(squares)
    if point.name == "logits" and (first, stop) == (run.length - 1, run.length):
        return run.trace.last_logits[None, None, left:right]
    value = run.value(point)
    if value.ndim == 1:
        return value[None, here[0], None]
    if value.ndim == 2:
        return value[None][(slice(None), *here)]
    if point.name == "moe.expert_out":
        value = value.swapaxes(0, 1)
    which = slice(None) if asked.head is None else slice(asked.head, asked.head + 1)
    return value[(which, *here)]
