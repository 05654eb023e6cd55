"""A trace as a file that other programs read."""

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cutaway.errors import CutawayError

if TYPE_CHECKING:
    from cutaway.trace.trace import Trace


def save_trace(trace: "Trace", path: Path) -> Path:
    """Write every captured point as one tensor of a safetensors file; the metadata holds model, prompt and ids.

    The file appears whole or not at all. Raises CutawayError where it cannot be written.
    """
    from safetensors.numpy import save

    tensors = {name: np.ascontiguousarray(trace[name]) for name in trace.points}
    prompt = {"ids": trace.prompt.ids, "pieces": trace.prompt.pieces, "text": trace.prompt.text}
    metadata = {"model": trace.spec.name, "engine": trace.engine, "dtype": trace.dtype, "prompt": json.dumps(prompt)}
    data = save(tensors, metadata)
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, suffix=".part", delete=False) as part:
            try:
                part.write(data)
                part.close()
                os.replace(part.name, path)
            except BaseException:
                part.close()
                os.unlink(part.name)
                raise
    except OSError as error:
        raise CutawayError(f"The trace could not be written to {path}: {error.strerror or error}.") from None
    return path
