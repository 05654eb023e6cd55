"""Norms, non-linearities, rotation, masks and softmax, row by row, in float32.

Every sum runs in a fixed order and every element is worked out by the same instructions, in one thread or
many, so that a row's bits depend on its own values alone.
"""

from functools import cache

import numpy as np
from numba.extending import register_jitable

from cutaway.engines.cpu.arithmetic import (
    everywhere,
    exponential,
    floats_upto,
    fused,
    greater,
    greatest,
    over,
    plus,
    put_upto,
    times,
    total,
    where_negative,
)
from cutaway.engines.cpu.compiling import Kernel, place
from cutaway.engines.cpu.threads import thread_count
from cutaway.engines.cpu.vectors import LANES, address, arguments, as_float, float_at, index_at, put_one

_ACTIVATIONS = {"relu": 0, "silu": 1, "gelu": 2, "gelu_tanh": 3}
_PARALLEL_FROM = 1 << 14  # elements; below, starting the threads costs more than it saves


@register_jitable
def _rows_of(part: int, parts: int, n: int) -> range:
    """The rows that belong to one of `parts` threads."""
    return range(n * part // parts, n * (part + 1) // parts)


@register_jitable
def _relu(x):  # type: ignore[no-untyped-def]
    """max(0, x); NaN stays NaN."""
    return where_negative(x, everywhere(np.float32(0)), x)


@register_jitable
def _silu(x):  # type: ignore[no-untyped-def]
    """x / (1 + exp(−x)). (Elfwing et al. 2017)"""
    one = everywhere(np.float32(1))
    return over(x, plus(one, exponential(times(x, everywhere(np.float32(-1))))))


@register_jitable
def _gelu_tanh(x):  # type: ignore[no-untyped-def]
    """0.5 x (1 + tanh u) = x / (1 + exp(−2u)), u = √(2/π) (x + 0.044715 x³). (Hendrycks & Gimpel 2016)"""
    one = everywhere(np.float32(1))
    cube = times(times(x, x), x)
    inner = fused(cube, everywhere(np.float32(0.044715)), x)
    return over(x, plus(one, exponential(times(inner, everywhere(np.float32(-1.5957691216057308))))))


@register_jitable
def _gelu(x):  # type: ignore[no-untyped-def]
    """x Φ(x), with erfc(z) = (a₁t + … + a₅t⁵) exp(−z²), t = 1 / (1 + p z), to 1.5e-7.

    (Abramowitz & Stegun 1964, 7.1.26; Φ(x) = erfc(−x / √2) / 2)
    """
    zero, one = everywhere(np.float32(0)), everywhere(np.float32(1))
    size = where_negative(x, times(x, everywhere(np.float32(-1))), x)
    z = times(size, everywhere(np.float32(0.7071067811865476)))
    t = over(one, fused(z, everywhere(np.float32(0.3275911)), one))
    series = everywhere(np.float32(1.061405429))
    for a in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        series = fused(series, t, everywhere(np.float32(a)))
    half_square = times(times(x, x), everywhere(np.float32(-0.5)))
    tail = times(times(times(series, t), exponential(half_square)), everywhere(np.float32(0.5)))
    share = where_negative(plus(x, zero), tail, plus(one, times(tail, everywhere(np.float32(-1)))))
    return times(x, share)


def _activation(given: int, part: int, parts: int) -> None:
    x, out, n, kind = arguments(given, 4)
    steps = (n + LANES - 1) // LANES
    for step in _rows_of(part, parts, steps):
        at = step * LANES
        left = n - at
        value = floats_upto(address(x) + at * 4, left)
        if kind == 0:
            value = _relu(value)
        elif kind == 1:
            value = _silu(value)
        elif kind == 2:
            value = _gelu(value)
        else:
            value = _gelu_tanh(value)
        put_upto(address(out) + at * 4, value, left)


def _softmax(given: int, part: int, parts: int) -> None:
    scores, rows, width = arguments(given, 3)
    for row in _rows_of(part, parts, rows):
        start = address(scores) + row * width * 4
        best = everywhere(np.float32(-np.inf))
        for at in range(0, width - width % LANES, LANES):
            best = greater(floats_upto(start + at * 4, width - at), best)
        highest = greatest(best)
        for at in range(width - width % LANES, width):
            highest = max(highest, float_at(start + at * 4))
        shift = everywhere(-highest)
        sums = everywhere(np.float32(0))
        for at in range(0, width, LANES):
            left = width - at
            power = exponential(plus(floats_upto(start + at * 4, left), shift))
            put_upto(start + at * 4, power, left)
            sums = plus(sums, floats_upto(start + at * 4, left))
        whole = everywhere(total(sums))
        for at in range(0, width, LANES):
            left = width - at
            put_upto(start + at * 4, over(floats_upto(start + at * 4, left), whole), left)


def _mask(given: int, part: int, parts: int) -> None:
    scores, heads, rows, width, first, last = arguments(given, 6)
    from_row, to_row = address(first), address(last)
    for head in range(heads):
        for row in range(rows):
            start = address(scores) + (head * rows + row) * width * 4
            low = min(max(index_at(from_row + row * 8), 0), width)
            high = min(max(index_at(to_row + row * 8), low), width)
            for key in range(low):
                put_one(start + key * 4, np.float32(-np.inf))
            for key in range(high, width):
                put_one(start + key * 4, np.float32(-np.inf))


def _norm(given: int, part: int, parts: int) -> None:
    x, gain, bias, out, rows, width, bits_of_eps, centre = arguments(given, 8)
    eps = as_float(bits_of_eps)
    for row in _rows_of(part, parts, rows):
        start, target = address(x) + row * width * 4, address(out) + row * width * 4
        mean = np.float32(0)
        if centre:
            sums = everywhere(np.float32(0))
            for at in range(0, width, LANES):
                sums = plus(sums, floats_upto(start + at * 4, width - at))
            mean = total(sums) / np.float32(width)
        shift = everywhere(-mean)
        squares = everywhere(np.float32(0))
        for at in range(0, width, LANES):
            # Lanes beyond the width hold 0 − mean: they are put out and read back as zeros.
            put_upto(target + at * 4, plus(floats_upto(start + at * 4, width - at), shift), width - at)
            value = floats_upto(target + at * 4, width - at)
            squares = fused(value, value, squares)
        size = np.float32(np.sqrt(total(squares) / np.float32(width) + eps))
        divisor = everywhere(size)
        for at in range(0, width, LANES):
            left = width - at
            value = over(floats_upto(target + at * 4, left), divisor)
            value = times(value, floats_upto(address(gain) + at * 4, left))
            if bias != 0:
                value = plus(value, floats_upto(address(bias) + at * 4, left))
            put_upto(target + at * 4, value, left)


def _rotate(given: int, part: int, parts: int) -> None:
    # x: [heads, rows, width] with steps in bytes over heads and rows; cosines, sines: [rows, pairs]
    x, head_step, row_step, cosines, sines, out, heads, rows, width, pairs, adjacent = arguments(given, 11)
    second = 4 if adjacent else 4 * pairs  # from a pair's first coordinate to its second, in bytes
    step = 8 if adjacent else 4  # from pair to pair
    for head in range(heads):
        for row in range(rows):
            start = address(x) + (head * head_step + row * row_step)
            target = address(out) + (head * rows + row) * width * 4
            for pair in range(pairs):
                cosine = float_at(address(cosines) + (row * pairs + pair) * 4)
                sine = float_at(address(sines) + (row * pairs + pair) * 4)
                a, b = float_at(start + pair * step), float_at(start + (pair * step + second))
                put_one(target + pair * step, a * cosine - b * sine)
                put_one(target + (pair * step + second), b * cosine + a * sine)
            for at in range(2 * pairs, width):
                put_one(target + at * 4, float_at(start + at * 4))


@cache
def _kernels() -> dict[str, Kernel]:
    """All of them; each compiles at its first use."""
    return {
        "activation": Kernel(_activation, "non-linearities", "qqqq"),
        "softmax": Kernel(_softmax, "softmax", "qqq"),
        "norm": Kernel(_norm, "norms", "qqqqqqdq"),
        "mask": Kernel(_mask, "masks", "qqqqqq"),
        "rotate": Kernel(_rotate, "rotary positions", "qqqqqqqqqqq"),
    }


def _parts(n: int) -> int:
    return thread_count() if n >= _PARALLEL_FROM else 1


def activate(x: np.ndarray, out: np.ndarray, kind: str) -> None:
    """The non-linearity `kind` of every element; both contiguous and of one size."""
    _kernels()["activation"](place(x), place(out), x.size, _ACTIVATIONS[kind], parts=_parts(x.size))


def softmax(scores: np.ndarray) -> None:
    """Each row of a contiguous array to weights that sum to 1, in place."""
    width = scores.shape[-1]
    _kernels()["softmax"](place(scores), scores.size // width, width, parts=_parts(scores.size))


def mask(scores: np.ndarray, first: np.ndarray, last: np.ndarray) -> None:
    """−∞ outside `first[r] <= key < last[r]` of contiguous scores `[H, R, S]`; int64 `[R]` each."""
    heads, rows, width = scores.shape
    _kernels()["mask"](place(scores), heads, rows, width, place(first), place(last))


def norm(x: np.ndarray, gain: np.ndarray, bias: np.ndarray | None, eps: float, centre: bool, out: np.ndarray) -> None:
    """LayerNorm (`centre`) or RMSNorm of each row of `[T, d]`, all contiguous."""
    width = x.shape[-1]
    shift = 0 if bias is None else place(bias)
    _kernels()["norm"](
        place(x), place(gain), shift, place(out), x.size // width, width, eps, int(centre), parts=_parts(x.size)
    )


def rotate(x: np.ndarray, cosines: np.ndarray, sines: np.ndarray, adjacent: bool, out: np.ndarray) -> None:
    """Turn pairs of coordinates of `[H, T, d_head]`, whose rows may lie anywhere, into contiguous `out`."""
    heads, rows, width = x.shape
    head_step, row_step, _ = x.strides
    pairs = cosines.shape[-1]
    _kernels()["rotate"](
        *(place(x), head_step, row_step, place(cosines), place(sines), place(out)),
        *(heads, rows, width, pairs, int(adjacent)),
    )
