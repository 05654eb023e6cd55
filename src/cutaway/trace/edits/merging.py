"""Adapters merged into a model's weights: each changed matrix anew in memory, all others as they lie in the file."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from cutaway.checkpoints.load import Checkpoint
from cutaway.engines.protocol import Engine, LowRank
from cutaway.engines.weights import Weight
from cutaway.errors import CutawayError
from cutaway.forward.parameters import Parameters
from cutaway.progress import progress
from cutaway.trace.capture.bill import free_memory
from cutaway.trace.edits.adapting import Adapter, ReadAdapter, read_adapters
from cutaway.trace.edits.edit import Edit

AT_ONCE = 1 << 22  # numbers that are worked out at a time: what stands in memory beside the finished matrix


def merged_checkpoint(
    checkpoint: Checkpoint, parameters: Parameters, engine: Engine, edits: Sequence[Edit]
) -> Checkpoint:
    """The checkpoint with W + Σ scale · up · down in the place of each matrix that the adapters change.

    In float32, worked out in float64 and rounded once; a matrix stored in float64 stays so. Its origin says what was
    merged and the bytes of the new matrices. Raises CutawayError as `read_adapter` does, for an edit that is no
    adapter, where the new matrices are more than the free memory, and where one would not be finite.
    """
    if not edits or not all(isinstance(edit, Adapter) for edit in edits):
        raise CutawayError(
            "merged takes adapters: a folder, its file, or edits.Adapter; other edits have no weights to stay in."
        )
    checkpoint = as_computed(checkpoint, parameters, engine)
    added: dict[str, list[LowRank]] = {}
    for edit in read_adapters(edits, checkpoint):
        for name, part in edit.parts.items() if isinstance(edit, ReadAdapter) else ():
            added.setdefault(f"{name}.weight", []).append(part)
    stored = checkpoint.weights
    size = sum(int(np.prod(stored[name].shape)) * _type_of(stored[name]).itemsize for name in added)
    free = free_memory()
    if free is not None and size > free:
        raise CutawayError(
            f"Merging makes {size:,} bytes of matrices, and {free:,} are free; as an edit of a run "
            "(edits=[edits.Adapter(…)]) the adapter costs no such copy."
        )
    made = _with_added(stored, added)
    names = tuple(str(edit) for edit in edits)
    told = f"{', '.join(names)} merged into {len(added)} matrices ({size / 1e6:,.1f} MB in memory)"
    location = replace(checkpoint.location, origin=f"{checkpoint.location.origin}; {told}")
    return replace(checkpoint, weights=made, location=location, merged=(*checkpoint.merged, *names))


def _with_added(stored: Mapping[str, Weight], added: Mapping[str, Sequence[LowRank]]) -> dict[str, Weight]:
    weights = dict(stored)
    with progress("Merging", len(added), "matrices", after=1.0) as advance:
        for name, parts in added.items():
            weights[name] = _sum(name, stored[name], parts)
            advance(1)
    return weights


def _sum(name: str, weight: Weight, parts: Sequence[LowRank]) -> Weight:
    d_out, d_in = weight.shape
    total = np.empty((d_out, d_in), _type_of(weight))
    downs = [part.down.dequantise(np.float64) for part in parts]
    step = max(1, AT_ONCE // d_in)
    for start in range(0, d_out, step):
        stop = min(start + step, d_out)
        own = rows = weight.dequantise(np.float64, start, stop)
        for part, down in zip(parts, downs, strict=True):
            more = part.scale * (part.up.dequantise(np.float64, start, stop) @ down)
            if part.gain is not None:
                more = (own + more) * part.gain[start:stop, None] - own
            rows = rows + more
        with np.errstate(over="ignore"):
            total[start:stop] = rows
        if not np.isfinite(total[start:stop]).all():
            raise CutawayError(f"With the adapter {name} would hold numbers that {total.dtype} cannot; scale it down.")
    return Weight.of(total)


def _type_of(weight: Weight) -> np.dtype:
    return np.dtype(np.float64 if weight.kind == "F64" else np.float32)


def as_computed(checkpoint: Checkpoint, parameters: Parameters, engine: Engine) -> Checkpoint:
    """The checkpoint with the weights that are computed with: an engine that holds its own may have trained them."""
    if not hasattr(engine, "hold"):
        return checkpoint
    return replace(checkpoint, weights=_Held(parameters, engine))


class _Held(Mapping[str, Weight]):
    """What an engine holds, each brought back when it is asked for."""

    def __init__(self, parameters: Parameters, engine: Engine) -> None:
        self._parameters, self._engine = parameters, engine

    def __getitem__(self, name: str) -> Weight:
        if name not in self._parameters.stored:
            raise KeyError(name)
        return Weight.of(self._engine.numpy(self._parameters.held[name]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters.stored)

    def __len__(self) -> int:
        return len(self._parameters.stored)
