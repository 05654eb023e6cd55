"""Attention: heads, what they see, and how their scores are made (chapters 7 to 9)."""

from dataclasses import dataclass
from math import isfinite

from cutaway.spec.check import require, require_positive
from cutaway.spec.norm import NormSpec
from cutaway.spec.positions import RotarySpec


@dataclass(frozen=True)
class LatentSpec:
    """Keys and values, and where `q_rank` is given queries too, squeezed through a narrow latent (DeepSeek-V2).

    Each key is `d_nope` coordinates from the latent beside `d_rope` rotated ones that all heads share. `norm` is
    applied to the latents. The cache holds the latent and the shared part, not the keys and values.
    """

    kv_rank: int
    q_rank: int | None
    d_nope: int
    d_rope: int
    norm: NormSpec

    def __post_init__(self) -> None:
        require_positive(self, "kv_rank", "d_nope", "d_rope")


@dataclass(frozen=True)
class QueryGrowth:
    """Queries grow slowly with their position: × (1 + strength · ln(1 + ⌊(position + 1) / every⌋)). (Llama 4)"""

    every: int
    strength: float


@dataclass(frozen=True)
class AttentionSpec:
    """Multi-head attention; fewer key/value heads than query heads make it grouped or multi-query.

    `causal` hides the future (chapter 8). `window` lets a query see only the last so many tokens, itself
    included; `chunk` only those of its own stretch of so many. `scale` multiplies q·k; where it is not given it is
    1/√d_head. `cap` bends scores s to cap · tanh(s / cap), before the mask. `qk_norm` norms each head's
    queries and keys, before or after the rotation.
    """

    n_heads: int
    n_kv_heads: int
    d_head: int
    causal: bool = True
    rotary: RotarySpec | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    scale: float | None = None
    window: int | None = None
    chunk: int | None = None
    cap: float | None = None
    qk_norm: NormSpec | None = None
    norm_after_rotary: bool = False
    growth: QueryGrowth | None = None
    latent: LatentSpec | None = None
    d_value: int | None = None

    def __post_init__(self) -> None:
        require_positive(self, "n_heads", "n_kv_heads", "d_head")
        require(
            self.n_heads % self.n_kv_heads == 0,
            "n_kv_heads",
            self.n_kv_heads,
            f"a divisor of n_heads = {self.n_heads}, so that every key head serves as many query heads",
        )
        if self.rotary is not None:
            widest = self.latent.d_rope if self.latent is not None else self.d_head
            require(self.rotary.dims <= widest, "rotary dims", self.rotary.dims, f"at most {widest}")
        for name in ("scale", "cap"):
            value = getattr(self, name)
            require(value is None or (isfinite(value) and value > 0), f"attention {name}", value, "a positive number")
        for name in ("window", "chunk", "d_value"):
            value = getattr(self, name)
            require(value is None or value > 0, f"attention {name}", value, "a positive number")
        require(
            self.window is None or self.causal, "attention window", self.window, "left out in a bidirectional layer"
        )
        if self.latent is not None:
            parts = self.latent.d_nope + self.latent.d_rope
            require(self.d_head == parts, "d_head", self.d_head, f"d_nope + d_rope = {parts} of the latent")
            require(self.n_kv_heads == self.n_heads, "n_kv_heads", self.n_kv_heads, "n_heads, where keys are latent")

    @property
    def score_scale(self) -> float:
        """What q·k is multiplied by."""
        return self.d_head**-0.5 if self.scale is None else self.scale

    @property
    def value_width(self) -> int:
        """The coordinates of a value; d_head but for latent attention."""
        return self.d_head if self.d_value is None else self.d_value

    @property
    def cached_values(self) -> int:
        """How many numbers a token leaves in the cache of a layer (chapter 15.3)."""
        if self.latent is not None:
            return self.latent.kv_rank + self.latent.d_rope
        return self.unfolded_values

    @property
    def unfolded_values(self) -> int:
        """How many numbers a token's keys and values are; latent attention caches fewer."""
        return self.n_kv_heads * (self.d_head + self.value_width)
