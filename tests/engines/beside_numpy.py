"""What tests of the cpu engine share: it, what it is held against, and how close is close."""

import numpy as np

from cutaway.engines.cpu.engine import CpuEngine
from cutaway.engines.numpy import NumpyEngine

TOLERANCE = 1e-5  # of a row's length, against float64

engine = CpuEngine()
reference = NumpyEngine("float64")


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def assert_close(ours: np.ndarray, exact: np.ndarray) -> None:
    assert ours.shape == exact.shape and ours.dtype == np.float32
    deviation = np.linalg.norm(ours - exact, axis=-1)
    assert (deviation <= TOLERANCE * np.linalg.norm(exact, axis=-1) + 1e-30).all()
