"""Arithmetic with vectors for the element-wise kernels: sums, quotients, comparisons, the exponential."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from cutaway.engines.cpu.code.vectors import (
    ADDRESS,
    FLOAT_LANES,
    FLOATS,
    I8,
    I32,
    I64,
    INT_LANES,
    first_lanes,
    fma,
    lane_sum,
    lanes,
    load,
    load_some,
    operation,
    splat,
)
from cutaway.engines.cpu.processor import LANES


@operation(FLOATS, ADDRESS, types.int64)
def floats_upto(builder: Any, address: Any, count: Any) -> Any:
    """The next sixteen float32, or the first `count` of them and zeros where fewer are left."""
    result = cgutils.alloca_once(builder, FLOAT_LANES)
    with builder.if_else(builder.icmp_signed(">=", count, I64(LANES)), likely=True) as (whole, part):
        with whole:
            builder.store(load(builder, address, FLOAT_LANES), result)
        with part:
            builder.store(load_some(builder, address, count, FLOAT_LANES), result)
    return builder.load(result)


@operation(types.void, ADDRESS, FLOATS, types.int64)
def put_upto(builder: Any, address: Any, vector: Any, count: Any) -> Any:
    """Store sixteen floats, or the first `count` of them where fewer are left."""
    with builder.if_else(builder.icmp_signed(">=", count, I64(LANES)), likely=True) as (whole, part):
        with whole:
            builder.store(vector, builder.bitcast(address, FLOAT_LANES.as_pointer()), align=4)
        with part:
            _put_some(builder, address, vector, count)
    return ir.Constant(I8.as_pointer(), None)


def _put_some(builder: Any, address: Any, vector: Any, count: Any) -> None:
    mask = first_lanes(builder, count, FLOAT_LANES)
    declared = ir.FunctionType(ir.VoidType(), [FLOAT_LANES, I8.as_pointer(), I32, mask.type])
    function = cgutils.get_or_insert_function(builder.module, declared, "llvm.masked.store.v16f32.p0")
    builder.call(function, [vector, address, I32(4), mask])


@operation(FLOATS, types.float32)
def everywhere(builder: Any, value: Any) -> Any:
    """The same number in every lane."""
    return splat(builder, value)


@operation(FLOATS, FLOATS, FLOATS)
def plus(builder: Any, left: Any, right: Any) -> Any:
    """left + right"""
    return builder.fadd(left, right)


@operation(FLOATS, FLOATS, FLOATS)
def minus(builder: Any, left: Any, right: Any) -> Any:
    """left − right"""
    return builder.fsub(left, right)


@operation(FLOATS, FLOATS, FLOATS)
def times(builder: Any, left: Any, right: Any) -> Any:
    """left · right"""
    return builder.fmul(left, right)


@operation(FLOATS, FLOATS, FLOATS)
def over(builder: Any, left: Any, right: Any) -> Any:
    """left / right"""
    return builder.fdiv(left, right)


@operation(FLOATS, FLOATS, FLOATS, FLOATS)
def fused(builder: Any, left: Any, right: Any, added: Any) -> Any:
    """left · right + added, with one rounding."""
    return fma(builder, left, right, added)


@operation(FLOATS, FLOATS, FLOATS)
def greater(builder: Any, left: Any, right: Any) -> Any:
    """The greater of two; `right` where either is not a number."""
    return builder.select(builder.fcmp_ordered(">", left, right), left, right)


@operation(FLOATS, FLOATS, FLOATS, FLOATS)
def where_negative(builder: Any, tested: Any, negative: Any, other: Any) -> Any:
    """`negative` in the lanes in which `tested` is below zero, else `other`."""
    zero = ir.Constant(FLOAT_LANES, [0.0] * LANES)
    return builder.select(builder.fcmp_ordered("<", tested, zero), negative, other)


@operation(types.float32, FLOATS)
def total(builder: Any, vector: Any) -> Any:
    """The sum of the lanes, added in pairs."""
    return lane_sum(builder, vector)


@operation(types.float32, types.float32)
def root(builder: Any, number: Any) -> Any:
    """The square root of one number."""
    kind = ir.FunctionType(ir.FloatType(), [ir.FloatType()])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.sqrt.f32"), [number])


@operation(types.float32, FLOATS)
def greatest(builder: Any, vector: Any) -> Any:
    """The greatest lane; lanes that are not a number are passed over if they can be."""
    best = builder.extract_element(vector, I32(0))
    for lane in range(1, LANES):
        other = builder.extract_element(vector, I32(lane))
        best = builder.select(builder.fcmp_unordered("<=", best, other), other, best)
    return best


# exp(x) = 2^n · exp(r) with n = round(x / ln 2) and |r| <= ln 2 / 2. ln 2 is split in two, so that x − n ln 2
# is exact; exp(r) is its Taylor series up to r^7, whose remainder is below 4e-9.
_LOG2_E, _LN2_HIGH, _LN2_LOW = 1.4426950408889634, 0.693145751953125, 1.428606765330187e-06
_EXP_SERIES = [1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0]
_ROUNDER = 12582912.0  # 1.5 · 2^23: added to a number it leaves the nearest integer in the lowest bits


@operation(FLOATS, FLOATS)
def exponential(builder: Any, x: Any) -> Any:
    """exp(x), to 2 units in the last place; 0 below −104, infinity above 88.8; NaN stays NaN."""

    def constant(value: float) -> ir.Constant:
        return lanes([value] * LANES, ir.FloatType())

    def power_of_two(exponent: Any) -> Any:
        biased = builder.add(exponent, lanes([127] * LANES))
        return builder.bitcast(builder.shl(biased, lanes([23] * LANES)), FLOAT_LANES)

    high = constant(89.0)
    lost = builder.fcmp_ordered("<", x, constant(-104.0))
    # What is lost is worked out for 0, not for −104: a product too small for a normal number takes a hundred cycles.
    inside = builder.select(lost, constant(0.0), x)
    inside = builder.select(builder.fcmp_ordered(">", inside, high), high, inside)
    rounded = fma(builder, inside, constant(_LOG2_E), constant(_ROUNDER))
    n = builder.sub(builder.bitcast(rounded, INT_LANES), builder.bitcast(constant(_ROUNDER), INT_LANES))
    whole = builder.fsub(rounded, constant(_ROUNDER))
    r = fma(builder, whole, constant(-_LN2_HIGH), inside)
    r = fma(builder, whole, constant(-_LN2_LOW), r)
    value = constant(_EXP_SERIES[0])
    for coefficient in _EXP_SERIES[1:]:
        value = fma(builder, value, r, constant(coefficient))
    # In two steps: 2^n itself leaves the range of normal numbers before the result does.
    half = builder.ashr(n, lanes([1] * LANES))
    value = builder.fmul(builder.fmul(value, power_of_two(half)), power_of_two(builder.sub(n, half)))
    value = builder.select(lost, constant(0.0), value)
    return builder.select(builder.fcmp_unordered("uno", x, x), x, value)
