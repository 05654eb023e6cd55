"""Parts of tensors as the page draws them: cut out, pooled to as many cells as it has room for, coded in 8 bits."""

import json
from dataclasses import asdict

import numpy as np

from cutaway.serve.protocol import MIDDLE, STEPS, WEIGHT_STEPS, AtlasHeader, Format, Kind, TensorHeader

_ROUNDS = 6
_TRIMMED_AT = 3.0  # standard deviations: what lies further out takes the last colour and is marked


def pooled(values: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """`[H, R, C]` → at most `[H, rows, columns]`: of each tile the value furthest from zero, sign kept.

    NaN stands for cells that are hidden; a tile is NaN where all of it is.
    """
    for axis, most in ((1, rows), (2, columns)):
        length = values.shape[axis]
        if length > most:
            starts = np.arange(most) * length // most
            with np.errstate(invalid="ignore"):
                high = np.fmax.reduceat(values, starts, axis=axis)
                low = np.fmin.reduceat(values, starts, axis=axis)
            values = np.where(-low > high, low, high)
    return values


def coded(values: np.ndarray, kind: Kind) -> tuple[np.ndarray, float, float, int]:
    """8-bit codes of `values`, the end of their scale, the largest size, and how many lie beyond the scale."""
    hidden = ~np.isfinite(values)
    seen = np.where(hidden, 0.0, values)
    largest = float(np.abs(seen).max(initial=0.0))
    if kind == "weights":
        codes = 1 + np.rint(np.clip(seen, 0, 1) * WEIGHT_STEPS)
        return np.where(hidden, 0, codes).astype(np.uint8), 1.0, largest, 0
    scale = _scale(np.abs(values[~hidden]), largest)
    codes = MIDDLE + np.rint(np.clip(seen / scale, -1, 1) * STEPS)
    beyond = int((np.abs(seen) > scale).sum())
    return np.where(hidden, 0, codes).astype(np.uint8), scale, largest, beyond


def _scale(sizes: np.ndarray, largest: float) -> float:
    """The end of the scale: three deviations of the values that lie within it, found in a few rounds."""
    scale = largest
    for _ in range(_ROUNDS):
        within = sizes[sizes <= scale]
        trimmed = _TRIMMED_AT * float(np.sqrt(np.square(within).mean())) if within.size else 0.0
        if not 0 < trimmed < scale:
            break
        scale = trimmed
    return scale or 1.0


def envelope(
    point: str, values: np.ndarray, kind: Kind, format: Format, start: tuple[int, int, int], rows: int, columns: int
) -> bytes:
    """One tensor `[H, R, C]` on the wire, pooled to at most `rows` and `columns`."""
    drawn = pooled(np.asarray(values, dtype=np.float64), rows, columns)
    codes, scale, largest, beyond = coded(drawn, kind)
    numbers = codes if format == "u8" else np.ascontiguousarray(drawn, dtype="<f4")
    header = TensorHeader(
        point, list(drawn.shape), list(values.shape), list(start), format, kind, scale, largest, beyond
    )
    return framed(header, numbers)


def framed(header: TensorHeader | AtlasHeader, numbers: np.ndarray) -> bytes:
    """Header and numbers, both padded to multiples of 8."""
    told = json.dumps(asdict(header), separators=(",", ":"), allow_nan=False).encode()
    told += b" " * (-(len(told) + 4) % 8)
    body = np.ascontiguousarray(numbers).tobytes()
    return len(told).to_bytes(4, "little") + told + body + b"\0" * (-len(body) % 8)
