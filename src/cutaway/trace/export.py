"""A trace as a file that other programs read."""

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cutaway.errors import CutawayError
from cutaway.progress import progress

if TYPE_CHECKING:
    from cutaway.trace.trace import Trace


def save_trace(trace: "Trace", path: Path) -> Path:
    """Write every captured point as one tensor of a safetensors file; the metadata holds spec, prompt and ids.

    Beside them stand the `last_logits`. `open_trace` reads it back.

    The file appears whole or not at all. Raises CutawayError where it cannot be written.
    """
    from safetensors.numpy import save

    from cutaway.trace.saved import LAST_LOGITS, metadata_of

    if not path.name:
        raise CutawayError(f"The trace cannot be written to {str(path)!r}: that names no file.")
    tensors = {}
    with progress("Reading every point", len(trace), "points", after=1.0) as advance:
        for name in trace.points:
            tensors[name] = np.ascontiguousarray(trace[name])
            advance(1)
    if trace.has_logits:
        tensors[LAST_LOGITS] = np.ascontiguousarray(trace.last_logits)
    data = save(tensors, metadata_of(trace))
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        try:
            with part.open("xb") as file:
                file.write(data)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL in it
        why = getattr(error, "strerror", None) or error
        raise CutawayError(f"The trace could not be written to {path}: {why}.") from None
    return path
