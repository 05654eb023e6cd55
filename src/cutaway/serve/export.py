"""A tensor of a run as a file: CSV for tables, safetensors for programs."""

import csv
import io
import json

import numpy as np

from cutaway.errors import CutawayError
from cutaway.points import Point
from cutaway.serve.look import Look

EXPORTS = {"csv": "text/csv; charset=utf-8", "safetensors": "application/octet-stream"}
MOST_NUMBERS = 4_000_000  # of a CSV


def exported(run: Look, point: Point, form: str) -> bytes:
    """The whole tensor at `point`. Raises CutawayError for a CSV that no program would open."""
    value = run.value(point)
    prompt = run.trace.prompt
    if form == "safetensors":
        from safetensors.numpy import save

        told = {
            "model": run.model.spec.name,
            "prompt": json.dumps({"ids": prompt.ids, "pieces": prompt.pieces}),
        }
        return save({str(point): np.ascontiguousarray(value)}, told)
    if value.size > MOST_NUMBERS:
        raise CutawayError(f"{point} has {value.size:,} numbers, too many for a CSV; take safetensors.")
    axes = [axis for axis, symbol in enumerate(point.info.shape) if symbol != "T"]
    table = value.reshape(value.shape[0], -1) if value.ndim < 3 else value
    out = io.StringIO()
    write = csv.writer(out)
    if value.ndim < 3:
        write.writerow(["position", "token", *range(table.shape[1])])
        for position, (piece, row) in enumerate(zip(prompt.pieces, table, strict=False)):
            write.writerow([position, piece, *(repr(float(number)) for number in row)])
        return out.getvalue().encode("utf-8", "backslashreplace")
    first = axes[0]
    moved = np.moveaxis(value, first, 0)
    write.writerow([point.info.shape[first], "position", "token", *range(moved.shape[2])])
    for index, matrix in enumerate(moved):
        for position, (piece, row) in enumerate(zip(prompt.pieces, matrix, strict=True)):
            write.writerow([index, position, piece, *(repr(float(number)) for number in row)])
    return out.getvalue().encode("utf-8", "backslashreplace")
