"""Where a token stands: sinusoidal rows to add, and the angles that rotary attention turns by (chapter 10)."""

from functools import lru_cache
from math import ceil, floor, log, pi

import numpy as np

from cutaway.engines.layout import Layout
from cutaway.engines.protocol import Array, Engine
from cutaway.spec import (
    DynamicScaling,
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    RotarySpec,
    YarnScaling,
)

SINUSOIDAL_BASE = 10_000.0
_TOGETHER = 64  # positions whose turns are kept together


def sinusoidal(positions: np.ndarray, d_model: int) -> np.ndarray:
    """PE(p, 2i) = sin(p / 10000^(2i/d)), PE(p, 2i+1) = cos(the same): `[T]` → float64 `[T, d]`.

    (Vaswani et al. 2017, 3.5; chapter 10.4)
    """
    angles = np.outer(positions, _plain(SINUSOIDAL_BASE, d_model))
    rows = np.empty((len(positions), d_model))
    rows[:, 0::2], rows[:, 1::2] = np.sin(angles), np.cos(angles)
    return rows


def rotation(engine: Engine, spec: RotarySpec, layout: Layout) -> tuple[Array, Array]:
    """Cosines and sines, each `[T, dims / 2]`, of the angle of every pair of coordinates in every row.

    The angles are worked out in float64: at position 8,000 a float32 angle is already off by 0.0005.
    """
    of_segments = [_turns(spec, segment.position, segment.end) for segment in layout.segments]
    if len(of_segments) == 1:
        cosines, sines = of_segments[0]
    else:
        cosines, sines = map(np.concatenate, zip(*of_segments, strict=True))
    return engine.array(cosines), engine.array(sines)


def _turns(spec: RotarySpec, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines of positions `start` to `end` of a sequence of `end` tokens, float64 `[end - start, dims / 2]`.

    Those of the few rows of a decoding step are looked up: to work them out takes as long as a small kernel.
    """
    block, first = divmod(start, _TOGETHER)
    if first + end - start > _TOGETHER or _looks_at_length(spec):
        return _worked_out(spec, start, end, end)
    cosines, sines = _kept_turns(spec, block)
    return cosines[first : first + end - start], sines[first : first + end - start]


@lru_cache(128)
def _kept_turns(spec: RotarySpec, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Those of _TOGETHER positions, where the length of the sequence makes no difference."""
    start = block * _TOGETHER
    both = _worked_out(spec, start, start + _TOGETHER, start + _TOGETHER)
    for side in both:
        side.setflags(write=False)
    return both


def _worked_out(spec: RotarySpec, start: int, end: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    per_position, magnitude = frequencies(spec, length)
    angles = np.outer(np.arange(start, end), per_position)
    return np.cos(angles) * magnitude, np.sin(angles) * magnitude


def _looks_at_length(spec: RotarySpec) -> bool:
    """Whether a scaling turns pairs otherwise in a longer sequence."""
    return isinstance(spec.scaling, DynamicScaling | FactorScaling)


def frequencies(spec: RotarySpec, length: int) -> tuple[np.ndarray, float]:
    """Radians that each pair turns per position, float64 `[dims / 2]`, and what cosines and sines are multiplied by.

    `length` is that of the sequence; only some scalings look at it.
    """
    plain = _plain(spec.base, spec.dims)  # θ_i = base^(−2i/dims)
    match spec.scaling:
        case None:
            return plain, 1.0
        case LinearScaling(factor):
            return plain / factor, 1.0
        case DynamicScaling(factor, original):
            stretch = factor * max(length, original) / original - (factor - 1)
            return _plain(spec.base * stretch ** (spec.dims / (spec.dims - 2)), spec.dims), 1.0
        case Llama3Scaling():
            return _llama3(plain, spec.scaling), 1.0
        case YarnScaling():
            return _yarn(plain, spec, spec.scaling), spec.scaling.magnitude
        case FactorScaling(short, long, original, magnitude):
            return plain / np.array(long if length > original else short), magnitude


def settled(spec: RotarySpec, earlier: int, later: int) -> bool:
    """Whether all pairs turn alike in a sequence of `earlier` tokens and in one of `later`: not where a scaling looks.

    Where it does not hold, a longer sequence changes every row, the first one's too.
    """
    if not _looks_at_length(spec):
        return True
    one, other = frequencies(spec, earlier), frequencies(spec, later)
    return one[1] == other[1] and np.array_equal(one[0], other[0])


@lru_cache(64)  # asked for at every token
def _plain(base: float, dims: int) -> np.ndarray:
    plain = base ** (-np.arange(0, dims, 2) / dims)
    plain.setflags(write=False)
    return plain


def _llama3(plain: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    """Long waves are slowed by the factor, short ones kept, those between blended in proportion."""
    turns = scaling.original * plain / (2 * pi)  # within the original context
    if scaling.high == scaling.low:  # nothing to blend: a step
        return np.where(turns < scaling.low, plain / scaling.factor, plain)
    kept = np.clip((turns - scaling.low) / (scaling.high - scaling.low), 0, 1)
    return plain * kept + plain / scaling.factor * (1 - kept)


def _yarn(plain: np.ndarray, spec: RotarySpec, scaling: YarnScaling) -> np.ndarray:
    """Pairs that turn often within the original context are kept, those that hardly turn are slowed, a ramp between."""

    def pair_turning(times: float) -> float:
        return spec.dims * log(scaling.original / (times * 2 * pi)) / (2 * log(spec.base))

    first, last = pair_turning(scaling.fast), pair_turning(scaling.slow)
    if scaling.rounded:
        first, last = floor(first), ceil(last)
    first, last = max(first, 0), min(last, spec.dims - 1)
    if first == last:
        last += 0.001  # a ramp needs some width
    slowed = np.clip((np.arange(len(plain)) - first) / (last - first), 0, 1)
    return plain * (1 - slowed) + plain / scaling.factor * slowed
