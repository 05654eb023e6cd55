"""DoRA: the rows of a matrix that an adapter changes have lengths that it says (Liu et al. 2024, equation 5)."""

import hashlib
import threading
from collections import OrderedDict
from dataclasses import replace
from weakref import WeakKeyDictionary

import numpy as np

from cutaway.checkpoints.load import Checkpoint
from cutaway.engines.protocol import LowRank
from cutaway.engines.weights import Weight
from cutaway.errors import CutawayError

AT_ONCE = 1 << 18  # numbers of a matrix that are worked out at a time: they stay in the processor's cache
MOST_KNOWN = 4096  # gains of one model that are remembered: seconds of work, for some kilobytes each

_known: WeakKeyDictionary[Checkpoint, OrderedDict[bytes, np.ndarray]] = WeakKeyDictionary()
_lock = threading.Lock()


def with_lengths(part: LowRank, lengths: Weight, base: Checkpoint, name: str) -> LowRank:
    """The same, with the gain that gives each row of W + scale · up · down its length, of `[d_out, 1]`.

    W is the base model's own matrix of this name. Raises CutawayError where a row has no length to begin with.
    """
    key = _key(part, lengths, name)
    with _lock:
        known = _known.setdefault(base, OrderedDict())
        gain = known.get(key)
    if gain is None:
        gain = lengths.dequantise(np.float64)[:, 0] / _lengths_of(part, base.weights[f"{name}.weight"], name)
        gain.flags.writeable = False
    with _lock:
        known[key] = gain
        known.move_to_end(key)
        if len(known) > MOST_KNOWN:
            known.popitem(last=False)
    return replace(part, gain=gain)


def _lengths_of(part: LowRank, weight: Weight, name: str) -> np.ndarray:
    """How long the rows of weight + scale · up · down are, `[d_out]`."""
    d_out, d_in = weight.shape
    lengths, down = np.empty(d_out), part.down.dequantise(np.float64)
    step = max(1, AT_ONCE // d_in)
    for start in range(0, d_out, step):
        stop = min(start + step, d_out)
        with np.errstate(over="ignore", invalid="ignore"):
            rows = part.scale * (part.up.dequantise(np.float64, start, stop) @ down)
            rows += weight.dequantise(np.float64, start, stop)
            lengths[start:stop] = _row_lengths(rows)
    if not (fine := np.isfinite(lengths) & (lengths > 0)).all():
        row = int(np.argmin(fine))
        what = "is all zeros" if lengths[row] == 0 else "holds numbers that are not finite"
        raise CutawayError(f"Row {row} of {name} {what} with the adapter: it has no length.")
    return lengths


def _row_lengths(rows: np.ndarray) -> np.ndarray:
    """The length of each row, also of rows whose squares no number can hold, or are all 0."""
    lengths = np.sqrt(np.einsum("ij,ij->i", rows, rows))
    far = ~((lengths > 1e-150) & (lengths < 1e150))
    if far.any():
        largest = np.abs(rows[far]).max(axis=1, keepdims=True)
        largest[largest == 0] = 1.0
        lengths[far] = largest[:, 0] * np.linalg.norm(rows[far] / largest, axis=1)
    return lengths


def _key(part: LowRank, lengths: Weight, name: str) -> bytes:
    """What tells a part from others, by its numbers: its file may be another by now."""
    digest = hashlib.sha256(f"{name} {part.scale!r}".encode())
    for weight in (part.down, part.up, lengths):
        digest.update(f" {weight.kind} {weight.shape} ".encode())
        digest.update(np.ascontiguousarray(weight.rows).data)
    return digest.digest()
