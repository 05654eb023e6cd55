"""From a checkpoint's tensor names to ours, and the changes of layout on the way."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from cutaway.checkpoints.stored import Tensors
from cutaway.engines.weights import Weight
from cutaway.errors import CutawayError


@dataclass(frozen=True)
class Source:
    """Where one of our weights comes from: the tensor's name in the file, and what is done to it."""

    name: str
    change: Callable[[Weight], Weight] | None = None


def collect(
    tensors: Tensors,
    sources: Mapping[str, Source],
    shapes: Mapping[str, tuple[int, ...]],
    ignored: Iterable[str] = (),
) -> dict[str, Weight]:
    """Our name → weight for every source.

    `shapes` are those that the spec implies, by our names; `ignored` patterns (whole names) of tensors that take
    no part in the pass. Raises CutawayError for a tensor that is missing, left over, or of another shape.
    """
    missing = [source.name for source in sources.values() if source.name not in tensors]
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise CutawayError(
            f"{tensors.source} lacks {shown}: the file is incomplete, or not of the architecture that it names."
        )
    used = {source.name for source in sources.values()}
    pattern = re.compile("|".join(ignored) or r"(?!)")
    extra = [n for n in tensors.names if n not in used and not pattern.fullmatch(n)]
    if extra:
        shown = ", ".join(extra[:3]) + (f" and {len(extra) - 3} more" if len(extra) > 3 else "")
        raise CutawayError(
            f"{tensors.source} holds {shown}, which the architecture it names has no place for; "
            "it is refused rather than left out of the pass."
        )
    weights = {}
    for ours, source in sources.items():
        weight = tensors[source.name]
        try:
            weights[ours] = weight if source.change is None else source.change(weight)
        except CutawayError as error:
            raise CutawayError(f"{tensors.source}, {source.name}: {error}") from None
        found, expected = weights[ours].shape, shapes.get(ours)
        if expected is not None and found != expected:
            raise CutawayError(
                f"{tensors.source}, {source.name}: taken as {ours} its shape is {list(found)}, but the "
                f"configuration needs {list(expected)}."
            )
    return weights


def transposed(weight: Weight) -> Weight:
    """A matrix that was stored one row per input: turned once, at loading, into one row per output."""
    return _turned(weight, 0, weight.shape[-1])


def transposed_third(index: int) -> Callable[[Weight], Weight]:
    """Part 0, 1 or 2 of q, k and v stored side by side, one row per input: turned into one row per output."""
    return lambda weight: _turned(weight, *_third_of(weight.shape[-1], index))


def _turned(weight: Weight, start: int, stop: int) -> Weight:
    """Columns `start:stop` as rows."""
    if len(weight.shape) != 2:
        raise CutawayError(f"A matrix was expected where the checkpoint has shape {list(weight.shape)}.")
    stored = {"F64": np.uint64, "F32": np.uint32, "F16": np.uint16, "BF16": np.uint16}  # numbers as their bits
    if weight.kind not in stored:
        raise CutawayError(f"A {weight.kind} matrix stored one row per input cannot be turned; save it unquantised.")
    bits = weight.rows.view(stored[weight.kind]).reshape(weight.shape)
    turned = np.ascontiguousarray(bits[:, start:stop].T)
    return Weight(weight.kind, turned.shape, turned.view(np.uint8))


def third(index: int) -> Callable[[Weight], Weight]:
    """Part 0, 1 or 2 of q, k and v stored one under another: of the rows of a matrix, or the numbers of a bias."""

    return lambda weight: weight.row_slice(*_third_of(weight.shape[0], index))


def _third_of(size: int, index: int) -> tuple[int, int]:
    if size % 3:
        raise CutawayError(f"q, k and v are stored as one tensor of {size} outputs, which is not three times anything.")
    return index * size // 3, (index + 1) * size // 3


def reordered(order: np.ndarray) -> Callable[[Weight], Weight]:
    """Entry r of the result is entry `order[r]` of what is stored, along the first axis."""

    def change(weight: Weight) -> Weight:
        if weight.shape[0] != len(order):
            raise CutawayError(f"A tensor has {weight.shape[0]} rows where {len(order)} were expected.")
        return weight.reorder(order)

    return change


def same_bytes(one: Weight, other: Weight) -> bool:
    """Whether two weights are stored alike to the byte."""
    return one.kind == other.kind and one.shape == other.shape and np.array_equal(one.rows, other.rows)
