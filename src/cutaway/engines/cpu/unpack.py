"""Stored weights to float32, one function for each format, with exactly the values of `blocks.dequantise`.

Each takes the address of the stored bytes and writes its numbers at the address `out`. For a quantised
format that is one block; for a plain one (F32, F16, BF16, F64) sixteen weights, with a scalar reader beside
it for what is left at a row's end. The layouts are described in `engines/blocks.py`.

Rounding: scale times number is exact in float32 (11 + 6 + 5 bits at most) wherever an offset is added to
it, so that fusing the two changes no bit.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numba.core.errors import TypingError
from numba.extending import overload, register_jitable

from cutaway.engines.blocks import BLOCKS
from cutaway.engines.cpu.vectors import (
    LANES,
    bits,
    brain_at,
    brains_at,
    byte_at,
    bytes_at,
    double_at,
    doubles_at,
    eights_at,
    float_at,
    floats_at,
    half_at,
    halves_at,
    joined,
    minus,
    put,
    put_one,
    scaled,
    scaled_plus,
    signed_at,
    word_bits,
)


def _f64(block: int, out: int) -> None:
    put(out, doubles_at(block))


def _f32(block: int, out: int) -> None:
    put(out, floats_at(block))


def _f16(block: int, out: int) -> None:
    put(out, halves_at(block))


def _bf16(block: int, out: int) -> None:
    put(out, brains_at(block))


def _q4_0(block: int, out: int) -> None:
    d = half_at(block)
    packed = bytes_at(block + 2)
    put(out, scaled(minus(bits(packed, 0, 15), 8), d))
    put(out + 64, scaled(minus(bits(packed, 4, 15), 8), d))


def _q4_1(block: int, out: int) -> None:
    d, m = half_at(block), half_at(block + 2)
    packed = bytes_at(block + 4)
    put(out, scaled_plus(minus(bits(packed, 0, 15), 0), d, m))
    put(out + 64, scaled_plus(minus(bits(packed, 4, 15), 0), d, m))


def _q5_0(block: int, out: int) -> None:
    d = half_at(block)
    packed = bytes_at(block + 6)
    put(out, scaled(minus(joined(bits(packed, 0, 15), word_bits(block + 2, 0), 4), 16), d))
    put(out + 64, scaled(minus(joined(bits(packed, 4, 15), word_bits(block + 2, 16), 4), 16), d))


def _q5_1(block: int, out: int) -> None:
    d, m = half_at(block), half_at(block + 2)
    packed = bytes_at(block + 8)
    put(out, scaled_plus(minus(joined(bits(packed, 0, 15), word_bits(block + 4, 0), 4), 0), d, m))
    put(out + 64, scaled_plus(minus(joined(bits(packed, 4, 15), word_bits(block + 4, 16), 4), 0), d, m))


def _q8_0(block: int, out: int) -> None:
    d = half_at(block)
    put(out, scaled(minus(signed_at(block + 2), 0), d))
    put(out + 64, scaled(minus(signed_at(block + 18), 0), d))


def _q2_k(block: int, out: int) -> None:
    d, dmin = half_at(block + 80), half_at(block + 82)
    for group in range(16):
        low = bytes_at(block + 16 + group // 8 * 32 + group % 2 * 16)
        s = byte_at(block + group)
        scale, offset = d * np.float32(s & 15), dmin * np.float32(s >> 4)
        put(out + group * 64, scaled_plus(minus(bits(low, group % 8 // 2 * 2, 3), 0), scale, -offset))


def _q3_k(block: int, out: int) -> None:
    d = half_at(block + 108)
    for group in range(16):
        low = bytes_at(block + 32 + group // 8 * 32 + group % 2 * 16)
        third = bytes_at(block + group % 2 * 16)
        s_low = (byte_at(block + 96 + group % 8) >> np.int32(group // 8 * 4)) & 15
        s_high = (byte_at(block + 104 + group % 4) >> np.int32(group // 4 * 2)) & 3
        scale = d * np.float32((s_low | (s_high << 4)) - 32)
        q = joined(bits(low, group % 8 // 2 * 2, 3), bits(third, group // 2, 1), 2)
        put(out + group * 64, scaled(minus(q, 4), scale))


@register_jitable
def _six_bits(scales: int, group: int) -> tuple[int, int]:
    """Scale and offset of one of the eight groups of a Q4_K or Q5_K block."""
    if group < 4:
        return byte_at(scales + group) & 63, byte_at(scales + 4 + group) & 63
    first, second, third = byte_at(scales + (group - 4)), byte_at(scales + group), byte_at(scales + 4 + group)
    return (third & 15) | ((first >> 6) << 4), (third >> 4) | ((second >> 6) << 4)


def _q4_k(block: int, out: int) -> None:
    d, dmin = half_at(block), half_at(block + 2)
    for group in range(8):
        s, o = _six_bits(block + 4, group)
        scale, offset = d * np.float32(s), dmin * np.float32(o)
        for part in range(2):
            low = bytes_at(block + 16 + group // 2 * 32 + part * 16)
            q = minus(bits(low, group % 2 * 4, 15), 0)
            put(out + group * 128 + part * 64, scaled_plus(q, scale, -offset))


def _q5_k(block: int, out: int) -> None:
    d, dmin = half_at(block), half_at(block + 2)
    for group in range(8):
        s, o = _six_bits(block + 4, group)
        scale, offset = d * np.float32(s), dmin * np.float32(o)
        for part in range(2):
            low = bytes_at(block + 48 + group // 2 * 32 + part * 16)
            fifth = bytes_at(block + 16 + part * 16)
            q = minus(joined(bits(low, group % 2 * 4, 15), bits(fifth, group, 1), 4), 0)
            put(out + group * 128 + part * 64, scaled_plus(q, scale, -offset))


def _q6_k(block: int, out: int) -> None:
    d = half_at(block + 208)
    for group in range(16):
        low = bytes_at(block + group // 8 * 64 + group % 4 * 16)
        high = bytes_at(block + 128 + group // 8 * 32 + group % 2 * 16)
        s = byte_at(block + 192 + group)
        scale = d * np.float32(s - 256 if s > 127 else s)
        q = joined(bits(low, group % 8 // 4 * 4, 15), bits(high, group % 8 // 2 * 2, 3), 4)
        put(out + group * 64, scaled(minus(q, 32), scale))


def _f8_e4m3_128(block: int, out: int) -> None:
    scale = float_at(block)
    for step in range(8):
        put(out + step * 64, scaled(eights_at(block + 4 + step * 16), scale))


_UNPACK: dict[str, Callable[[int, int], None]] = {
    "F64": _f64,
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "F8_E4M3_128": _f8_e4m3_128,
}
_READ_ONE: dict[str, Any] = {"F64": double_at, "F32": float_at, "F16": half_at, "BF16": brain_at}


def unpack_row(kind: str, row: int, out: int, width: int) -> None:
    """Inside a kernel: the `width` weights stored at `row` as float32 at `out`. `kind` is a constant.

    Numba compiles the version of the kind that a kernel names, and no other.
    """
    raise NotImplementedError("unpack_row exists inside compiled kernels only")


@overload(unpack_row, prefer_literal=True)
def _compile_unpack_row(kind: Any, row: Any, out: Any, width: Any) -> Any:
    if not isinstance(kind, types.StringLiteral):
        raise TypingError("the kind of a weight must be a constant of its kernel")
    name = kind.literal_value
    unpack = register_jitable(_UNPACK[name])
    if name not in _READ_ONE:
        weights, size = BLOCKS[name].weights, BLOCKS[name].bytes

        def quantised(kind: Any, row: Any, out: Any, width: Any) -> None:
            for block in range(width // weights):
                unpack(row + block * size, out + block * (4 * weights))

        return quantised
    read, size = _READ_ONE[name], BLOCKS[name].bytes

    def plain(kind: Any, row: Any, out: Any, width: Any) -> None:
        whole = width - width % LANES
        for at in range(0, whole, LANES):
            unpack(row + at * size, out + at * 4)
        for at in range(whole, width):
            put_one(out + at * 4, read(row + at * size))

    return plain
