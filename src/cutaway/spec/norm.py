"""Norms: how a row is brought back to a standard size (chapter 12.2)."""

from dataclasses import dataclass
from math import isfinite
from typing import Literal

from cutaway.spec.check import require


@dataclass(frozen=True)
class NormSpec:
    """LayerNorm subtracts the mean and divides by the deviation, RMSNorm only divides by the root mean square.

    `gain` says whether a learned scale follows, `bias` whether a learned shift does.
    """

    kind: Literal["layer", "rms"]
    eps: float
    bias: bool = False
    gain: bool = True

    def __post_init__(self) -> None:
        require(self.kind in ("layer", "rms"), "kind of norm", self.kind, "'layer' or 'rms'")
        require(isfinite(self.eps) and self.eps >= 0, "eps of a norm", self.eps, "a small number, 0 or more")
        require(self.gain or not self.bias, "bias of a norm", self.bias, "left out where there is no gain")
