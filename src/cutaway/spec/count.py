"""How many parameters, derived from the spec alone (chapters 11.2, 12.6, 13.3)."""

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cutaway.spec.model import ModelSpec


@dataclass(frozen=True)
class Count:
    """Counts of a spec. All are numbers of parameters unless their name says bytes."""

    spec: "ModelSpec"

    @cached_property
    def parts(self) -> dict[str, int]:
        """Parameters by part of the model: embedding, positions, attention, feed_forward, norms, head."""
        from cutaway.spec.parameters import parameter_shapes

        parts = dict.fromkeys(("embedding", "positions", "attention", "feed_forward", "norms", "head"), 0)
        for name, shape in parameter_shapes(self.spec).items():
            parts[_part(name)] += prod(shape)
        return parts

    @property
    def total(self) -> int:
        """All parameters; a tied head is counted once, with the embedding."""
        return sum(self.parts.values())

    def kv_bytes(self, tokens: int, bytes_per_value: int = 4) -> int:
        """Bytes of the keys and values that `tokens` tokens leave in the cache, over all layers (chapter 15.3)."""
        return sum(layer.attention.cached_values for layer in self.spec.layers) * tokens * bytes_per_value


def _part(name: str) -> str:
    if name.rpartition(".")[0].endswith("norm"):
        return "norms"
    for marker, part in (
        (".attn.", "attention"),
        (".mlp.", "feed_forward"),
        (".moe.", "feed_forward"),
        ("embed.positions", "positions"),
        ("embed.types", "positions"),
    ):
        if marker in name:
            return part
    return "head" if name.startswith("head.") else "embedding"
