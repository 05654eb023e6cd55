"""From a checkpoint's tensor names to ours, and the changes of layout on the way."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from cutaway.checkpoints.stored import Tensors
from cutaway.engines.weights import Weight
from cutaway.errors import CutawayError


@dataclass(frozen=True)
class Source:
    """Where one of our weights comes from: the tensor's name in the file, and what is done to it.

    With `by_input` the file has one row per input, and the change turns the matrix; else it only chooses rows.
    """

    name: str
    change: Callable[[Weight], Weight] | None = None
    by_input: bool = False


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


def linear(ours: str, theirs: str, *, bias: bool) -> dict[str, Source]:
    """A projection as both sides name it: its weight and, where it has one, its bias."""
    return {f"{ours}.{role}": Source(f"{theirs}.{role}") for role in (("weight", "bias") if bias else ("weight",))}


def layer_norm(ours: str, theirs: str) -> dict[str, Source]:
    """A LayerNorm's scale and shift, which checkpoints call weight and bias."""
    return {f"{ours}.gain": Source(f"{theirs}.weight"), f"{ours}.bias": Source(f"{theirs}.bias")}


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


def transposed_columns(weight: Weight, start: int, stop: int) -> Weight:
    """Columns `start:stop` of a matrix that was stored one row per input, turned into one row per output."""
    return _turned(weight, start, stop)


def heads_turned(stack: Weight) -> Weight:
    """One matrix per head stored one row per input, `[H, d_in, d_out]`, as `[H · d_out, d_in]`: a copy.

    Quantised blocks run along the rows that go, so their numbers are kept in single precision, which holds them all.
    """
    if len(stack.shape) != 3:
        raise CutawayError(f"A stack of matrices was expected where the checkpoint has shape {list(stack.shape)}.")
    heads, d_in, d_out = stack.shape
    if stack.kind in ("F16", "BF16"):  # numbers as their bits
        turned = stack.rows.view(np.uint16).reshape(stack.shape).swapaxes(1, 2).reshape(heads * d_out, d_in)
        return Weight(stack.kind, turned.shape, np.ascontiguousarray(turned).view(np.uint8))
    numbers = stack.dequantise(np.float64 if stack.kind == "F64" else np.float32)
    return Weight.of(numbers.swapaxes(1, 2).reshape(heads * d_out, d_in))


def as_matrix(stack: Weight) -> Weight:
    """Matrices `[H, d_out, d_in]` one under another as a single one, on the same bytes."""
    return replace(stack, shape=(prod(stack.shape[:-1]), stack.shape[-1]))


def third(index: int) -> Callable[[Weight], Weight]:
    """Part 0, 1 or 2 of q, k and v stored one under another: of the rows of a matrix, or the numbers of a bias."""

    return lambda weight: weight.row_slice(*_third_of(weight.shape[0], index))


def _third_of(size: int, index: int) -> tuple[int, int]:
    if size % 3:
        raise CutawayError(f"q, k and v are stored as one tensor of {size} outputs, which is not three times anything.")
    return index * size // 3, (index + 1) * size // 3


def same_bytes(one: Weight, other: Weight) -> bool:
    """Whether two weights are stored alike to the byte."""
    return one.kind == other.kind and one.shape == other.shape and np.array_equal(one.rows, other.rows)
