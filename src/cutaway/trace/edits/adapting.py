"""A LoRA adapter as an edit: what it adds to the projections of one run, and the count of what that changed."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from cutaway.checkpoints.stored import quoted
from cutaway.engines.protocol import LowRank
from cutaway.errors import CutawayError
from cutaway.forward.parameters import Parameters
from cutaway.points import Point
from cutaway.trace.edits.edit import Edit
from cutaway.trace.edits.sources import file_stamp

if TYPE_CHECKING:
    from cutaway.checkpoints import adapter
    from cutaway.checkpoints.load import Checkpoint

# (edit, projection, numbers changed in each row `int [T]`, d_out): what a pass tells of each product that was adapted
Count = Callable[[int, str, np.ndarray, int], None]

# The point at which the outputs of a projection are first seen, where it is not called as the projection is.
_FELT = {
    "attn.o": "attn.raw",
    "attn.q_down": "attn.q_latent",
    "attn.kv_down": "attn.kv_latent",
    "mlp.down": "mlp.raw",
    "moe.router": "moe.router_logits",
    "head": "logits",
    "head.transform": "logits",
    "pooler": "pooler.out",
}


@dataclass(frozen=True, eq=False)
class Adapter(Edit):
    """A LoRA adapter as PEFT saves it, `scale` times: y + scale · (alpha / r) · (x Aᵀ) Bᵀ at each matrix it names.

    One that gives the changed rows their lengths (DoRA) has no other scale than 1.
    `source` is its folder, or the .safetensors file beside its adapter_config.json.
    """

    source: str | Path
    scale: float = 1.0

    kind: ClassVar[str] = "adapter"

    def __post_init__(self) -> None:
        if not isinstance(self.source, str | Path) or not str(self.source):
            raise CutawayError(f"An adapter is a folder, or a .safetensors file, not {self.source!r}.")
        object.__setattr__(self, "source", str(self.source))
        object.__setattr__(self, "scale", _checked_scale(self.scale))

    def __str__(self) -> str:
        return f"adapter {Path(self.source).name}" + ("" if self.scale == 1.0 else f", {self.scale:g} times")

    @property
    def source_stamp(self) -> list[tuple[int, int]]:
        """What tells its files from those that were there before."""
        from cutaway.checkpoints.adapter import adapter_files

        return [file_stamp(path) for path in adapter_files(self.source)]

    def read_for(self, base: "Checkpoint") -> "ReadAdapter":
        """The same edit with the adapter's matrices. Raises CutawayError as `read_adapter` does."""
        from cutaway.checkpoints.adapter import adapter_files, read_adapter

        stamps = [
            file_stamp(path) for path in adapter_files(self.source) if os.path.isfile(path)
        ]  # of what is read now
        read = read_adapter(self.source, base)
        if self.scale != 1.0 and any(part.gain is not None for part in read.parts.values()):
            raise CutawayError(
                f"The adapter {Path(self.source).name} says how long the rows of each whole matrix are (DoRA), so that "
                f"it cannot be had {self.scale:g} times; its scale must be 1."
            )
        return ReadAdapter(self.source, self.scale, read, stamps)


class ReadAdapter(Adapter):
    """An adapter whose matrices are at hand: what runs take. It is the same edit, with the same name for caches."""

    def __init__(
        self, source: str | Path, scale: float, read: "adapter.Adapter", stamps: Sequence[tuple[int, int]]
    ) -> None:
        super().__init__(source, scale)
        object.__setattr__(self, "read", read)
        object.__setattr__(self, "_stamps", list(stamps))

    read: "adapter.Adapter"
    _stamps: list[tuple[int, int]]

    def __repr__(self) -> str:
        return f"Adapter(source={self.source!r}, scale={self.scale!r})"

    @property
    def source_stamp(self) -> list[tuple[int, int]]:
        """What told its files from others when they were read: what lies there now may be another adapter."""
        return self._stamps

    @property
    def parts(self) -> dict[str, LowRank]:
        """What it adds to each projection, by its name."""
        return {name: replace(part, scale=part.scale * self.scale) for name, part in self.read.parts.items()}

    @property
    def on_experts(self) -> bool:
        """Whether it changes what only some tokens are sent to."""
        return any(".moe.experts." in name for name in self.read.parts)


def read_adapters(edits: Iterable[Edit], base: "Checkpoint") -> tuple[Edit, ...]:
    """The edits, with the adapters among them read for this model."""
    return tuple(
        edit.read_for(base) if isinstance(edit, Adapter) and not isinstance(edit, ReadAdapter) else edit
        for edit in edits
    )


def _checked_scale(scale: Any) -> float:
    if not isinstance(scale, int | float | np.integer | np.floating) or isinstance(scale, bool):
        raise CutawayError(f"The scale of an adapter must be a number; it is {quoted(scale)}.")
    try:
        number = float(scale)
    except OverflowError:  # a whole number that no float can hold
        number = inf
    if not isfinite(number):
        raise CutawayError(f"The scale of an adapter must be finite; it is {quoted(scale)}.")
    return number


def scaled(adapters: Any, scale: float = 1.0) -> tuple[Edit, ...]:
    """One adapter or several, each a path or an edit, all of them `scale` times."""
    listed = [adapters] if isinstance(adapters, str | Path | Edit) else adapters
    if not isinstance(listed, Iterable):
        raise CutawayError(f"Adapters are folders, or edits.Adapter; {adapters!r} is none.")
    edits = [one if isinstance(one, Edit) else Adapter(one) for one in listed]
    scale = _checked_scale(scale)
    return tuple(Adapter(one.source, one.scale * scale) if isinstance(one, Adapter) else one for one in edits)


def adapted(plain: Parameters, edits: Sequence[Edit], count: Count | None = None) -> Parameters:
    """The weights with what the adapters among the edits add; without any, the very same."""
    added: dict[str, list[LowRank]] = {}
    for index, edit in enumerate(edits):
        for name, part in edit.parts.items() if isinstance(edit, ReadAdapter) else ():
            told = None if count is None else partial(count, index, name)
            added.setdefault(name, []).append(replace(part, told=told))
    return plain.adapted(added) if added else plain


def felt_at(projection: str) -> Point:
    """Where the outputs of a projection are first seen: `layers.3.attn.o` at layers.3.attn.raw."""
    if not projection.startswith("layers."):
        return Point(_FELT[projection])
    _, layer, name = projection.split(".", 2)
    if name.startswith("moe.experts."):
        name = "moe.expert_out"
    elif name.startswith("moe.shared."):
        name = "moe.shared_out"
    return Point(_FELT.get(name, name), int(layer))


def apart(counts: Sequence[Count], sizes: Sequence[int], logit_sizes: Sequence[int]) -> Count:
    """One count for packed sequences of these many rows, and these many rows of logits: each hears of its own."""
    others = {"head": logit_sizes, "head.transform": logit_sizes, "pooler": [1] * len(sizes)}

    def count(index: int, projection: str, changed: np.ndarray, width: int) -> None:
        ends = np.cumsum(others.get(projection, sizes))[:-1]
        for own, rows in zip(counts, np.split(changed, ends), strict=True):
            own(index, projection, rows, width)

    return count
