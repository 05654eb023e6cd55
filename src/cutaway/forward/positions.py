"""Where a token stands: sinusoidal rows to add, and the angles that rotary attention turns by (chapter 10)."""

import numpy as np

from cutaway.engines.protocol import Array, Engine
from cutaway.spec import RotarySpec

SINUSOIDAL_BASE = 10_000.0


def sinusoidal(positions: np.ndarray, d_model: int) -> np.ndarray:
    """PE(p, 2i) = sin(p / 10000^(2i/d)), PE(p, 2i+1) = cos(the same): `[T]` → float64 `[T, d]`.

    (Vaswani et al. 2017, 3.5; chapter 10.4)
    """
    angles = _angles(positions, SINUSOIDAL_BASE, d_model)
    rows = np.empty((len(positions), d_model))
    rows[:, 0::2], rows[:, 1::2] = np.sin(angles), np.cos(angles)
    return rows


def rotation(engine: Engine, spec: RotarySpec, positions: np.ndarray) -> tuple[Array, Array]:
    """Cosines and sines, each `[T, dims / 2]`, of the angle of every pair of coordinates at every position.

    The angles are worked out in float64: at position 8,000 a float32 angle is already off by 0.0005.
    """
    angles = _angles(positions, spec.base, spec.dims)
    return engine.array(np.cos(angles)), engine.array(np.sin(angles))


def _angles(positions: np.ndarray, base: float, dims: int) -> np.ndarray:
    frequencies = base ** (-np.arange(0, dims, 2) / dims)  # θ_i = base^(−2i/dims)
    return np.outer(positions, frequencies)
