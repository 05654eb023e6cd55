"""Norms, non-linearities, rotation, masks and softmax, row by row, in float32.

Every sum runs in a fixed order and every element is worked out by the same instructions, in one thread or
many, so that a row's bits depend on its own values alone.
"""

import numpy as np
from numba.extending import register_jitable

from cutaway.engines.cpu.code.arithmetic import (
    everywhere,
    exponential,
    floats_upto,
    fused,
    greater,
    greatest,
    minus,
    over,
    plus,
    put_upto,
    root,
    times,
    total,
    where_negative,
)
from cutaway.engines.cpu.code.vectors import address, arguments, as_float, float_at, index_at, put_one
from cutaway.engines.cpu.processor import LANES


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


def activation_kernel(given: int, part: int, parts: int) -> None:
    x, up, out, n, kind = arguments(given, 5)  # where `up` is not 0, times what stands there
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
        if up != 0:
            value = times(value, floats_upto(address(up) + at * 4, left))
        put_upto(address(out) + at * 4, value, left)


@register_jitable
def softmax_row(start: int, width: int) -> None:
    """A row of `width` scores at `start` to weights that sum to 1, in place; −∞ becomes exactly 0."""
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


def softmax_kernel(given: int, part: int, parts: int) -> None:
    scores, rows, width = arguments(given, 3)
    for row in _rows_of(part, parts, rows):
        softmax_row(address(scores) + row * width * 4, width)


@register_jitable
def hide(start: int, width: int, first: int, last: int) -> None:
    """−∞ in a row of `width` scores outside first to last."""
    low = min(max(first, 0), width)
    high = min(max(last, low), width)
    for key in range(low):
        put_one(start + key * 4, np.float32(-np.inf))
    for key in range(high, width):
        put_one(start + key * 4, np.float32(-np.inf))


def mask_kernel(given: int, part: int, parts: int) -> None:
    scores, heads, rows, width, first, last = arguments(given, 6)
    from_row, to_row = address(first), address(last)
    for head in range(heads):
        for row in range(rows):
            start = address(scores) + (head * rows + row) * width * 4
            hide(start, width, index_at(from_row + row * 8), index_at(to_row + row * 8))


@register_jitable
def capped(x, limit):  # type: ignore[no-untyped-def]
    """limit · tanh(x / limit); NaN stays NaN.

    tanh u is u + u³ P(u²) up to 0.625 and 1 − 2 / (exp(2u) + 1) beyond. (Moshier 1992, Cephes: tanhf)
    """
    bound = everywhere(limit)
    u = over(x, bound)
    size = where_negative(u, times(u, everywhere(np.float32(-1))), u)
    square = times(u, u)
    series = everywhere(np.float32(-5.70498872745e-3))
    for coefficient in (2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1):
        series = fused(series, square, everywhere(np.float32(coefficient)))
    near = fused(times(series, square), u, u)
    one = everywhere(np.float32(1))
    far = plus(one, over(everywhere(np.float32(-2)), plus(exponential(plus(size, size)), one)))
    signed = where_negative(u, times(far, everywhere(np.float32(-1))), far)
    return times(where_negative(plus(size, everywhere(np.float32(-0.625))), near, signed), bound)


def cap_kernel(given: int, part: int, parts: int) -> None:
    x, n, bits_of_limit = arguments(given, 3)
    limit = as_float(bits_of_limit)
    steps = (n + LANES - 1) // LANES
    for step in _rows_of(part, parts, steps):
        here, left = address(x) + step * LANES * 4, n - step * LANES
        put_upto(here, capped(floats_upto(here, left), limit), left)


def add_kernel(given: int, part: int, parts: int) -> None:
    # out = a + b, n numbers in rows of `width`; b is one such row, the same for all
    a, b, out, n, width = arguments(given, 5)
    for row in _rows_of(part, parts, n // width):
        for at in range(0, width, LANES):
            here, left = (row * width + at) * 4, width - at
            value = plus(floats_upto(address(a) + here, left), floats_upto(address(b) + at * 4, left))
            put_upto(address(out) + here, value, left)


def norm_kernel(given: int, part: int, parts: int) -> None:
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
        size = root(np.float32(total(squares) / np.float32(width) + eps))
        if size == np.float32(np.inf):  # beyond float32: x / infinity would be a row of zeros, and that a lie
            size = np.float32(np.nan)
        divisor = everywhere(size)
        for at in range(0, width, LANES):
            left = width - at
            value = over(floats_upto(target + at * 4, left), divisor)
            value = times(value, floats_upto(address(gain) + at * 4, left))
            if bias != 0:
                value = plus(value, floats_upto(address(bias) + at * 4, left))
            put_upto(target + at * 4, value, left)


def rotate_kernel(given: int, part: int, parts: int) -> None:
    # x: [heads, rows, width] with steps in bytes over heads and rows, as `out` has; cosines, sines: [rows, pairs].
    # Without pairs it only copies.
    x, x_head, x_row, cosines, sines, out, out_head, out_row, heads, rows, width, pairs, adjacent = arguments(given, 13)
    for item in range(heads * rows * part // parts, heads * rows * (part + 1) // parts):
        head, row = item // rows, item % rows
        start = address(x) + (head * x_head + row * x_row)
        target = address(out) + (head * out_head + row * out_row)
        angle = row * pairs * 4
        if adjacent:
            for pair in range(pairs):
                cosine, sine = float_at(address(cosines) + angle), float_at(address(sines) + angle)
                a, b = float_at(start + pair * 8), float_at(start + (pair * 8 + 4))
                put_one(target + pair * 8, a * cosine - b * sine)
                put_one(target + (pair * 8 + 4), b * cosine + a * sine)
                angle += 4
        else:
            for pair in range(0, pairs, LANES):
                left, at, second = pairs - pair, pair * 4, (pairs + pair) * 4
                cosine = floats_upto(address(cosines) + (angle + at), left)
                sine = floats_upto(address(sines) + (angle + at), left)
                one, other = floats_upto(start + at, left), floats_upto(start + second, left)
                put_upto(target + at, minus(times(one, cosine), times(other, sine)), left)
                put_upto(target + second, plus(times(other, cosine), times(one, sine)), left)
        for at in range(2 * pairs, width, LANES):
            put_upto(target + at * 4, floats_upto(start + at * 4, width - at), width - at)
