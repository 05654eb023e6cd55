"""A trace as a file that other programs read."""

import json
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cutaway.errors import CutawayError
from cutaway.progress import progress
from cutaway.spec.plain import spec_to_json

if TYPE_CHECKING:
    from cutaway.trace.trace import Trace

FORMAT = "cutaway trace 1"
LAST_LOGITS = "last_logits"  # the tensor beside the points: of the last position, which no point may hold


def save_trace(trace: "Trace", path: Path) -> Path:
    """Write every captured point as one tensor of a safetensors file; the metadata holds spec, prompt and ids.

    Beside them stand the `last_logits`. `open_trace` reads it back.

    The file appears whole or not at all. Raises CutawayError where it cannot be written.
    """
    from safetensors.numpy import save

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


def metadata_of(trace: "Trace") -> dict[str, str]:
    """What stands in a saved trace beside its tensors."""
    prompt = {"ids": trace.prompt.ids, "pieces": trace.prompt.pieces, "text": trace.prompt.text}
    rest = {
        "added": trace.prompt.added,
        "past": trace.past,
        "rows": trace.rows.tolist(),
        "tokens": trace.past + len(trace.prompt.ids),
        "heads": trace.heads,
        "predicts": trace.predicts,
        "fused": sorted(trace.fused_layers),
        "edits": [str(report) for report in trace.edits],
        "next": [(token.id, token.text) for token in trace.likeliest(200)],
    }
    return {
        "format": FORMAT,
        "model": trace.spec.name,
        "engine": trace.engine,
        "dtype": trace.dtype,
        "prompt": json.dumps(prompt),
        "spec": json.dumps(spec_to_json(trace.spec)),
        "run": json.dumps(rest),
    }
