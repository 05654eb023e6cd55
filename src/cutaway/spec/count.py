"""How many parameters, how many bytes, derived from the spec alone (chapters 11.2, 12.6, 13.3, 13.5)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

from cutaway.errors import CutawayError
from cutaway.spec.feedforward import ExpertsSpec
from cutaway.spec.parameters import parameter_shapes

if TYPE_CHECKING:
    from cutaway.spec.model import ModelSpec

# Bits that one stored weight takes, scales included, in the formats that checkpoints come in.
BITS_PER_WEIGHT: dict[str, float] = {
    "float32": 32,
    "float16": 16,
    "bfloat16": 16,
    "Q8_0": 8.5,
    "Q6_K": 6.5625,
    "Q5_K": 5.5,
    "Q5_1": 6,
    "Q5_0": 5.5,
    "Q4_K": 4.5,
    "Q4_1": 5,
    "Q4_0": 4.5,
    "Q3_K": 3.4375,
    "Q2_K": 2.625,
}

PARTS = ("embedding", "positions", "attention", "feed_forward", "experts", "router", "norms", "head")


@dataclass(frozen=True)
class Count:
    """Counts of a spec. All are numbers of parameters unless their name says bytes."""

    spec: "ModelSpec"

    @cached_property
    def parts(self) -> dict[str, int]:
        """Parameters by part of the model; experts are those that a router chooses among, a shared one is not."""
        return self._by_part(lambda name: True)

    @property
    def total(self) -> int:
        """All parameters; a tied head is counted once, with the embedding."""
        return sum(self.parts.values())

    @cached_property
    def active_parts(self) -> dict[str, int]:
        """As `parts`, but of the experts only those that one token is sent to (chapter 13.5)."""
        chosen = [
            layer.feed_forward.router.n_active if isinstance(layer.feed_forward, ExpertsSpec) else 0
            for layer in self.spec.layers
        ]

        def works(name: str) -> bool:
            layer, _, rest = name.removeprefix("layers.").partition(".moe.experts.")
            return not rest or int(rest.split(".")[0]) < chosen[int(layer)]  # experts of a layer are all alike

        return self._by_part(works)

    @property
    def active(self) -> int:
        """Parameters that work on one token, the whole input embedding included (of which it reads one row)."""
        return sum(self.active_parts.values())

    @property
    def active_without_embedding(self) -> int:
        """As `active`, without the input embedding; a tied head multiplies by it and so still counts."""
        embedding = 0 if self.spec.tied_head and not self.spec.headless else self.parts["embedding"]
        return self.active - embedding

    @property
    def lecture(self) -> int | None:
        """V·d + n_max·d + N(12d² + 9d), the lecture's own formula (13.3); None where the shape is another.

        It is exact for a GPT without attention biases and final norm, with a tied head and d_ff = 4d; other
        GPTs have 4d more attention biases a layer and 2d for the final norm. Where anything else differs (an
        untied head, a pooler), it is no formula of this model.
        """
        spec, layer = self.spec, self.spec.layers[0]
        if spec.same_in_all_layers("feed_forward") is None or getattr(layer.feed_forward, "gated", True):
            return None
        attention, d = layer.attention, spec.d_model
        whole_heads = attention.n_heads == attention.n_kv_heads and attention.n_heads * attention.d_head == d
        if not whole_heads or getattr(layer.feed_forward, "d_ff", 0) != 4 * d or layer.norm is None:
            return None
        formula = spec.vocab_size * d + (spec.n_max or 0) * d + spec.n_layers * (12 * d * d + 9 * d)
        explained = {biases + final for biases in (0, spec.n_layers * 4 * d) for final in (0, 2 * d)}
        return formula if self.total - formula in explained else None

    def weight_bytes(self, kind: str) -> int:
        """Bytes of all weights stored as `kind`, one of BITS_PER_WEIGHT; real files keep small vectors in float32."""
        if kind not in BITS_PER_WEIGHT:
            raise CutawayError(f"There is no storage kind {kind!r}; the kinds are {', '.join(BITS_PER_WEIGHT)}.")
        return int(self.total * BITS_PER_WEIGHT[kind] / 8)

    def kv_bytes(self, tokens: int, bytes_per_value: int = 4, *, unfolded: bool = False) -> int:
        """Bytes that `tokens` tokens leave in the cache, over all layers (chapter 15.3).

        Latent attention caches latents; `unfolded` counts the keys and values themselves, as if it did not.
        """
        attentions = [layer.attention for layer in self.spec.layers]
        values = sum(a.unfolded_values if unfolded else a.cached_values for a in attentions)
        return values * tokens * bytes_per_value

    def _by_part(self, counted: Callable[[str], bool]) -> dict[str, int]:
        parts = dict.fromkeys(PARTS, 0)
        for name, shape in parameter_shapes(self.spec).items():
            if counted(name):
                parts[part_of(name)] += prod(shape)
        return parts


def part_of(name: str) -> str:
    """Which of PARTS a parameter belongs to."""
    if name.rpartition(".")[0].endswith("norm"):
        return "norms"
    for marker, part in (
        (".attn.", "attention"),
        (".mlp.", "feed_forward"),
        (".moe.shared.", "feed_forward"),
        (".moe.experts.", "experts"),
        (".moe.", "router"),
        ("embed.positions", "positions"),
        ("embed.types", "positions"),
    ):
        if marker in name:
            return part
    return "head" if name.startswith(("head.", "pooler.")) else "embedding"
