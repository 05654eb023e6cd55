"""One result of a verification, and the float64 arithmetic that results are compared with.

None of it is an engine's: what is checked and what it is checked against share no code.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from cutaway.engines.protocol import Gain, Linear
from cutaway.spec import LayerSpec, NormSpec
from cutaway.trace.trace import Trace


@dataclass(frozen=True)
class Check:
    """One identity: what holds, how far it is off at most, where that is, and how far it may be off."""

    name: str
    deviation: float
    tolerance: float
    where: str = ""

    @property
    def holds(self) -> bool:
        return bool(self.deviation <= self.tolerance)  # a NaN deviation does not hold


@dataclass(frozen=True, eq=False)
class Inside:
    """What one layer of a trace holds, in float64, with its description and its weights."""

    trace: Trace
    index: int
    spec: LayerSpec
    weights: Mapping

    def __getitem__(self, name: str) -> np.ndarray:
        return self.trace[f"layers.{self.index}.{name}"].astype(np.float64)

    def read_by(self, part: str) -> np.ndarray:
        """What attention ("attn") or the feed-forward ("mlp") reads: a norm, or the stream itself."""
        if self.spec.norm is None or self.spec.placement == "post":
            return self[self.stream_before(part)]
        return self["attn.norm" if self.spec.shared_norm else f"{part}.norm"]

    def stream_before(self, part: str) -> str:
        return "resid_pre" if part == "attn" or self.spec.parallel else "resid_mid"


def deviation(found: np.ndarray, expected: np.ndarray) -> float:
    """max |found − expected| / max |expected|"""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    return float(np.abs(found - expected).max() / max(np.abs(expected).max(), np.finfo(np.float32).tiny))


def largest(*values: float) -> float:
    """The largest, NaN above all: what is no number must not pass for a small one."""
    return float(np.max(values))


def normed(spec: NormSpec, gain: Gain | None, x: np.ndarray) -> np.ndarray:
    """LayerNorm or RMSNorm of each row, in float64."""
    x = x.astype(np.float64)
    if spec.kind == "layer":
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + spec.eps)
    if gain is None:
        return x
    x = x * np.asarray(gain.gain, np.float64)
    return x if gain.bias is None else x + np.asarray(gain.bias, np.float64)


def product(x: np.ndarray, linear: Linear) -> np.ndarray:
    """x Wᵀ + b in float64, some rows of W at a time."""
    d_out = linear.weight.shape[0]
    parts = [
        x @ linear.weight.dequantise(np.float64, start, min(start + 4096, d_out)).T for start in range(0, d_out, 4096)
    ]
    y = np.concatenate(parts, axis=-1)
    return y if linear.bias is None else y + linear.bias


def softmax(scores: np.ndarray) -> np.ndarray:
    """e^x / Σ e^x of each row, in float64; −∞ becomes 0."""
    shares = np.exp(scores.astype(np.float64) - np.max(scores, axis=-1, keepdims=True))
    return shares / np.sum(shares, axis=-1, keepdims=True)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + e^−x), as e^−ln(1 + e^−x): exact however far from 0."""
    return np.exp(-np.logaddexp(0.0, -x))


def _erf(x: np.ndarray) -> np.ndarray:
    return np.vectorize(math.erf, otypes=[np.float64])(x)


ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "relu": lambda x: np.where(x > 0, x, 0 * x),  # so that a NaN stays one
    "silu": lambda x: x * sigmoid(x),
    "gelu": lambda x: x * (1 + _erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
}
