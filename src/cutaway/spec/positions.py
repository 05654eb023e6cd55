"""How a model knows where a token stands (chapter 10)."""

from dataclasses import dataclass
from math import isfinite, log
from typing import Literal

from cutaway.spec.check import require


@dataclass(frozen=True)
class PositionsSpec:
    """Positions added to the embedding (chapter 10.4): a learned table of `n_max` rows, or sines and cosines."""

    kind: Literal["learned", "sinusoidal"]
    n_max: int | None = None

    def __post_init__(self) -> None:
        require(self.kind in ("learned", "sinusoidal"), "kind of positions", self.kind, "'learned' or 'sinusoidal'")
        if self.kind == "learned":
            require((self.n_max or 0) > 0, "n_max of learned positions", self.n_max, "a positive number")


def require_amounts(owner: object, *names: str) -> None:
    """Refuse an attribute of a rotary scaling that is not a finite number above 0."""
    for name in names:
        value = getattr(owner, name)
        require(isfinite(value) and value > 0, f"{name} of rotary scaling", value, "a positive number")


@dataclass(frozen=True)
class LinearScaling:
    """Every angle divided by `factor`: positions are squeezed into the range of training. (Chen et al. 2023)"""

    factor: float

    def __post_init__(self) -> None:
        require_amounts(self, "factor")


@dataclass(frozen=True)
class DynamicScaling:
    """Past `original` tokens the base grows with the length of the sequence ("NTK-aware", bloc97 2023)."""

    factor: float
    original: int

    def __post_init__(self) -> None:
        require_amounts(self, "factor", "original")


@dataclass(frozen=True)
class Llama3Scaling:
    """Long wavelengths divided by `factor`, short ones kept, those between blended (Llama 3.1, Dubey et al. 2024)."""

    factor: float
    low: float
    high: float
    original: int

    def __post_init__(self) -> None:
        require_amounts(self, "factor", "low", "high", "original")
        require(self.high >= self.low, "high frequency factor", self.high, f"at least the low one, {self.low}")


@dataclass(frozen=True)
class YarnScaling:
    """Slow pairs divided by `factor`, fast ones kept, a ramp between; cosines and sines grow by `magnitude`.

    (Peng et al. 2023.) `fast` and `slow` are turns within `original` positions at which the ramp ends; `rounded` says
    whether the ends of the ramp are rounded to whole pairs, as the paper's code does.
    """

    factor: float
    original: int
    fast: float = 32.0
    slow: float = 1.0
    magnitude: float = 1.0
    rounded: bool = True

    def __post_init__(self) -> None:
        require_amounts(self, "factor", "original", "fast", "slow", "magnitude")
        require(self.fast >= self.slow, "fast end of the YaRN ramp", self.fast, f"at least the slow one, {self.slow}")

    @staticmethod
    def growth(factor: float, weight: float = 1.0) -> float:
        """0.1 · weight · ln(factor) + 1: how much longer contexts sharpen attention; 1 where nothing is stretched."""
        return 0.1 * weight * log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True)
class FactorScaling:
    """Each pair's angle divided by a number of its own: `short` up to `original` tokens, `long` past them.

    (LongRoPE, Ding et al. 2024; also how GGUF files store Llama 3.1's scaling.) `magnitude` multiplies cosines
    and sines.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original: int
    magnitude: float = 1.0

    def __post_init__(self) -> None:
        require_amounts(self, "original", "magnitude")
        for factor in (*self.short, *self.long):
            require(isfinite(factor) and factor > 0, "factor of a rotary pair", factor, "a positive number")


RotaryScaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | FactorScaling


@dataclass(frozen=True)
class RotarySpec:
    """Rotary positions: pairs of coordinates of q and k turned by position · base^(−2i/dims) (chapter 10.4).

    `dims` of the d_head coordinates turn. `pairing` "halves" pairs coordinate i with i + dims/2 (the layout of most
    Hugging Face checkpoints), "adjacent" pairs 2i with 2i + 1 (the paper's). `scaling` changes the angles.
    """

    base: float
    dims: int
    pairing: Literal["halves", "adjacent"] = "halves"
    scaling: RotaryScaling | None = None

    def __post_init__(self) -> None:
        require(isfinite(self.base) and self.base > 0, "rotary base", self.base, "a positive number")
        require(self.dims > 0 and self.dims % 2 == 0, "rotary dims", self.dims, "a positive even number")
        require(self.pairing in ("halves", "adjacent"), "rotary pairing", self.pairing, "'halves' or 'adjacent'")
        if isinstance(self.scaling, FactorScaling):
            for factors in (self.scaling.short, self.scaling.long):
                require(
                    len(factors) == self.dims // 2,
                    "number of rotary factors",
                    len(factors),
                    f"one per pair, {self.dims // 2}",
                )
