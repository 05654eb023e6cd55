"""Parts of tensors as the page draws them: cut out, pooled to as many cells as it has room for, coded in 8 bits."""

import json

import numpy as np

from cutaway.serve.protocol import MIDDLE, STEPS, WEIGHT_STEPS, AtlasHeader, Format, Kind, Manifest, TensorHeader

_ROUNDS = 6
_TRIMMED_AT = 3.0  # standard deviations: what lies further out takes the last colour and is marked


def pooled(values: np.ndarray, rows: int, columns: int, hidden: np.ndarray | None = None) -> np.ndarray:
    """`[H, R, C]` → at most `[H, rows, columns]`: of each tile the value furthest from zero, sign kept.

    Cells that `hidden` `[R, C]` names, or that are NaN, are passed over; a tile is NaN where all of it is.
    """
    if hidden is not None:
        values = np.where(hidden, 0, values)  # never the furthest from zero
    if values.shape[1] > rows or values.shape[2] > columns:
        finite = bool(np.isfinite(values).all())  # then a plain maximum does, which is several times as fast
        highest, lowest = (np.maximum, np.minimum) if finite else (np.fmax, np.fmin)
        for axis, most in ((1, rows), (2, columns)):
            if values.shape[axis] > most:
                high, low = (_tiles(pick, values, axis, most) for pick in (highest, lowest))
                values = np.where(-low > high, low, high)
    if hidden is not None:
        for axis, most in ((0, rows), (1, columns)):
            if hidden.shape[axis] > most:
                hidden = _tiles(np.logical_and, hidden, axis, most)
        values = np.where(hidden, np.nan, values)
    return values


def _tiles(pick: np.ufunc, values: np.ndarray, axis: int, most: int) -> np.ndarray:
    """What `pick` leaves of each of `most` tiles along an axis."""
    length = values.shape[axis]
    starts = [tile * length // most for tile in range(most)]
    if axis == values.ndim - 1:
        made: np.ndarray = pick.reduceat(values, starts, axis=axis)
        return made
    # Tile by tile: row is laid on row, which is twenty times as fast as reduceat along such an axis.
    lines = np.moveaxis(values, axis, 0)
    parts = (lines[start:stop] for start, stop in zip(starts, [*starts[1:], length], strict=True))
    return np.stack([pick.reduce(part, axis=0) for part in parts], axis=axis)


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
    point: str,
    values: np.ndarray,
    kind: Kind,
    format: Format,
    start: tuple[int, int, int],
    rows: int,
    columns: int,
    hidden: np.ndarray | None = None,
) -> bytes:
    """One tensor `[H, R, C]` on the wire, pooled to at most `rows` and `columns`; `hidden` `[R, C]` may not be seen."""
    drawn = np.asarray(pooled(values, rows, columns, hidden), dtype=np.float64)
    codes, scale, largest, beyond = coded(drawn, kind)
    numbers = codes if format == "u8" else np.ascontiguousarray(drawn, dtype="<f4")
    header = TensorHeader(
        point, list(drawn.shape), list(values.shape), list(start), format, kind, scale, largest, beyond
    )
    return framed(header, numbers)


def framed(header: TensorHeader | AtlasHeader | Manifest, numbers: np.ndarray | None = None) -> bytes:
    """Header and numbers, both padded to multiples of 8."""
    told = json.dumps(header, default=vars, separators=(",", ":"), allow_nan=False).encode()
    told += b" " * (-(len(told) + 4) % 8)
    body = b"" if numbers is None else np.ascontiguousarray(numbers).tobytes()
    return len(told).to_bytes(4, "little") + told + body + b"\0" * (-len(body) % 8)
