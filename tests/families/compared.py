"""What all comparisons with `transformers` share: prompts, how far two arrays are apart, and how far they may be."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers.utils import logging

import cutaway

logging.set_verbosity_error()
logging.disable_progress_bar()
torch.set_num_threads(1)  # arrays this small only wait for a second one

EXACT, SINGLE = 1e-9, 1e-5


def exact(folder: Path) -> cutaway.Model:
    """The model as the reference engine computes it in float64."""
    return cutaway.load(folder, engine="numpy", dtype="float64")


def prompt(vocab_size: int, length: int, seed: int = 0) -> list[int]:
    """Random ids, the last of the vocabulary among them."""
    ids = np.random.default_rng(1000 * seed + length).integers(0, vocab_size, length).tolist()
    ids[length // 2] = vocab_size - 1
    return ids


def deviation(found: np.ndarray, expected: np.ndarray) -> float:
    """max |found − expected| / max |expected|; arrays of different shapes have nothing to do with each other."""
    assert found.shape == expected.shape, f"{found.shape} against {expected.shape}"
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def assert_shown(
    model: cutaway.Model,
    expected: Mapping[str, np.ndarray],
    ids: Sequence[int],
    within: float = EXACT,
    types: list[int] | None = None,
) -> None:
    """The model's pass over `ids` has these values at these points, to `within` of the largest of each."""
    trace = model.trace(ids, points=[*expected], types=types)
    off = {name: deviation(trace[name], value) for name, value in expected.items()}
    assert max(off.values()) < within, {name: value for name, value in off.items() if not value < within}


def assert_verified(model: cutaway.Model) -> None:
    for check in model.verify():
        assert check.holds, check
