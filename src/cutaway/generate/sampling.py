"""From logits to one token, in named stages (chapter 14).

The order is fixed and told: temperature → top-k → top-p → min-p → renormalise → draw. Nothing is filtered
unless asked: the defaults draw from the model's own distribution.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from numbers import Real

import numpy as np

from cutaway.errors import CutawayError
from cutaway.trace import softmax


@dataclass(frozen=True)
class Sampling:
    """How to pick. `temperature` 0 is greedy: the likeliest token, the lowest id among equals.

    `top_k` keeps exactly k tokens. `top_p` keeps the smallest set whose probabilities sum to p or more, the
    token that crosses included. `min_p` keeps what has at least min_p times the likeliest's probability.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("temperature", self.temperature), ("top_p", self.top_p), ("min_p", self.min_p)):
            left_out = value is None and name != "temperature"
            if not left_out and (not isinstance(value, Real) or isinstance(value, bool)):
                raise CutawayError(f"{name} is {value!r}; it must be a number.")
        if not isfinite(self.temperature) or self.temperature < 0:
            raise CutawayError(f"The temperature is {self.temperature}; it must be 0 (greedy) or a positive number.")
        if self.top_k is not None and (not isinstance(self.top_k, int | np.integer) or isinstance(self.top_k, bool)):
            raise CutawayError(f"top_k is {self.top_k!r}; it must be a whole number, or left out to keep every token.")
        if self.top_k is not None and self.top_k < 1:
            raise CutawayError(f"top_k is {self.top_k}; it must be at least 1, or left out to keep every token.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise CutawayError(f"top_p is {self.top_p}; it must be above 0 and at most 1, or left out.")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise CutawayError(f"min_p is {self.min_p}; it must lie between 0 and 1, or be left out.")


@dataclass(frozen=True, eq=False)
class Stage:
    """What one stage left: probabilities `[V]` float64 that sum to 1, 0 for what is removed, and how many are kept."""

    name: str
    probabilities: np.ndarray
    kept: int


def distribution(logits: np.ndarray, sampling: Sampling) -> list[Stage]:
    """The distribution `[V]` after every stage, from the logits `[V]`; the last is the one drawn from.

    Raises CutawayError for logits that hold NaN or +∞, or nothing but −∞.
    """
    logits = _checked(logits)
    if sampling.temperature == 0:
        greedy = np.zeros(len(logits))
        greedy[int(np.argmax(logits))] = 1.0
        return [Stage("greedy", greedy, 1)]
    with np.errstate(over="ignore"):
        p = softmax((logits - logits.max()) / sampling.temperature)  # shifted first: ℓ / T alone may overflow
    stages = [Stage("temperature", p, len(p))]
    filters: tuple[tuple[str, float | None, Callable[[np.ndarray, float], np.ndarray]], ...] = (
        ("top_k", sampling.top_k, _top_k),
        ("top_p", sampling.top_p, _top_p),
        ("min_p", sampling.min_p, _min_p),
    )
    for name, setting, keep in filters:
        if setting is not None:
            kept = keep(p, setting)
            p = np.where(kept, p, 0.0)
            p /= p.sum()
            stages.append(Stage(name, p, int(kept.sum())))
    return stages


def draw(probabilities: np.ndarray, random: np.random.Generator) -> int:
    """One id, each with its probability: where a uniform number falls on the line of summed probabilities."""
    line = np.cumsum(probabilities)
    at = random.random() * line[-1]
    return int(np.searchsorted(line, at, side="right"))


def sample(logits: np.ndarray, sampling: Sampling, random: np.random.Generator) -> int:
    """Pick one token from the logits `[V]`. The same logits, settings and seed give the same token."""
    last = distribution(logits, sampling)[-1]
    if last.kept == 1:
        return int(np.argmax(last.probabilities))
    return draw(last.probabilities, random)


def _checked(logits: np.ndarray) -> np.ndarray:
    logits = np.asarray(logits, dtype=np.float64)
    if logits.ndim != 1 or len(logits) == 0:
        raise CutawayError(f"Sampling needs one row of logits [V], not an array of shape {list(logits.shape)}.")
    if np.isnan(logits).any() or np.isposinf(logits).any():
        bad = int(np.flatnonzero(np.isnan(logits) | np.isposinf(logits))[0])
        raise CutawayError(f"The logit of token {bad} is {logits[bad]}; nothing can be drawn from that.")
    if np.isneginf(logits).all():
        raise CutawayError("Every logit is −∞: no token is left to draw.")
    return logits


def _likeliest(p: np.ndarray, count: int) -> np.ndarray:
    """The ids of the `count` largest, largest first, the lowest id first among equals."""
    if count >= len(p):
        return np.argsort(-p, kind="stable")
    least = np.partition(p, len(p) - count)[len(p) - count]
    candidates = np.flatnonzero(p >= least)  # ascending ids, so that the stable sort settles ties
    return candidates[np.argsort(-p[candidates], kind="stable")][:count]


def _top_k(p: np.ndarray, k: float) -> np.ndarray:
    kept = np.zeros(len(p), dtype=bool)
    kept[_likeliest(p, int(k))] = True
    return kept & (p > 0)


def _top_p(p: np.ndarray, mass: float) -> np.ndarray:
    kept = np.zeros(len(p), dtype=bool)
    if mass == 1:
        return p > 0
    count = 256  # nuclei are mostly small: sort the head of the distribution, more of it only where need be
    while True:
        best = _likeliest(p, count)
        reached = np.cumsum(p[best])
        if reached[-1] >= mass or len(best) == len(p):
            kept[best[: int(np.searchsorted(reached, mass, side="left")) + 1]] = True
            return kept & (p > 0)
        count *= 8


def _min_p(p: np.ndarray, share: float) -> np.ndarray:
    return (p >= share * p.max()) & (p > 0)
