"""What may come next: the candidates, and the odds that logits give them."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class NextToken:
    """One candidate for the next token."""

    id: int
    text: str
    logit: float
    probability: float


def softmax(logits: np.ndarray) -> np.ndarray:
    """exp(ℓ − max) / sum over the last axis, in float64 (chapter 14.1)."""
    shifted = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)
