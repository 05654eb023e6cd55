"""Stored weights as vectors, inside a kernel that is being emitted: exactly the values of `blocks.dequantise`.

Each format is one generator that yields a block's weights, sixteen at a time and in their order, as LLVM values;
whoever asks stores them (`unpack.py`) or multiplies them at once (`few.py`). A plain format (F32, F16, BF16, F64)
counts as blocks of sixteen, with a reader of one weight for what is left at a row's end. The layouts are described
in `engines/blocks.py`.

Rounding: scale times number is exact in float32 (11 + 6 + 5 bits at most) wherever an offset is added to
it, so that fusing the two changes no bit.
"""

from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import ir

from cutaway.engines.blocks import BLOCKS
from cutaway.engines.cpu.code.vectors import (
    FLOAT_LANES,
    I8,
    I16,
    I32,
    INT_LANES,
    fma,
    half_to_single,
    lanes,
    load,
    splat,
)
from cutaway.engines.cpu.processor import LANES

_SINGLE = ir.FloatType()


class Stored:
    """The bytes at an address, and the few operations that turn them into weights.

    Where a number is expected, a Python number stands for a constant.
    """

    def __init__(self, builder: Any, address: Any) -> None:
        self._builder = builder
        self._address = address

    def _load(self, offset: int, kind: ir.Type) -> Any:
        return load(self._builder, self._builder.gep(self._address, [ir.IntType(64)(offset)]), kind)

    def half(self, offset: int) -> Any:
        """One float16, as float32."""
        return half_to_single(self._builder, self._builder.zext(self._load(offset, I16), I32))

    def two_halves(self, offset: int) -> tuple[Any, Any]:
        """Two float16 side by side, as float32: one conversion for a block's scale and offset."""
        pair = self._load(offset, ir.VectorType(I16, 2))
        both = half_to_single(self._builder, self._builder.zext(pair, ir.VectorType(I32, 2)))
        return tuple(self._builder.extract_element(both, I32(i)) for i in range(2))

    def single(self, offset: int) -> Any:
        """One float32."""
        return self._load(offset, _SINGLE)

    def double(self, offset: int) -> Any:
        """One float64, rounded to float32."""
        return self._builder.fptrunc(self._load(offset, ir.DoubleType()), _SINGLE)

    def brain(self, offset: int) -> Any:
        """One bfloat16: the upper half of a single."""
        upper = self._builder.zext(self._load(offset, I16), I32)
        return self._builder.bitcast(self._builder.shl(upper, I32(16)), _SINGLE)

    def byte(self, offset: int) -> Any:
        """One unsigned byte, as int32."""
        return self._builder.zext(self._load(offset, I8), I32)

    def signed_byte(self, offset: int) -> Any:
        """One signed byte, as int32."""
        return self._builder.sext(self._load(offset, I8), I32)

    def bytes(self, offset: int) -> Any:
        """Sixteen unsigned bytes, as int32."""
        return self._builder.zext(self._load(offset, ir.VectorType(I8, LANES)), INT_LANES)

    def signed_bytes(self, offset: int) -> Any:
        """Sixteen signed bytes, as int32."""
        return self._builder.sext(self._load(offset, ir.VectorType(I8, LANES)), INT_LANES)

    def word_bits(self, offset: int, first: int) -> Any:
        """Bit `first + l` of a 32-bit word, in lane l."""
        word = splat(self._builder, self._load(offset, I32))
        shifted = self._builder.lshr(word, lanes([first + lane for lane in range(LANES)]))
        return self._builder.and_(shifted, lanes([1] * LANES))

    def singles(self, offset: int) -> Any:
        """Sixteen float32."""
        return self._load(offset, FLOAT_LANES)

    def doubles(self, offset: int) -> Any:
        """Sixteen float64, rounded to float32."""
        return self._builder.fptrunc(self._load(offset, ir.VectorType(ir.DoubleType(), LANES)), FLOAT_LANES)

    def halves(self, offset: int) -> Any:
        """Sixteen float16."""
        short = self._load(offset, ir.VectorType(I16, LANES))
        return half_to_single(self._builder, self._builder.zext(short, INT_LANES))

    def brains(self, offset: int) -> Any:
        """Sixteen bfloat16."""
        upper = self._builder.zext(self._load(offset, ir.VectorType(I16, LANES)), INT_LANES)
        return self._builder.bitcast(self._builder.shl(upper, lanes([16] * LANES)), FLOAT_LANES)

    def eights(self, offset: int) -> Any:
        """Sixteen 8-bit floats E4M3: a half whose exponent is 8 smaller, but that all ones are NaN."""
        build = self._builder
        codes = self.bytes(offset)
        size = build.and_(codes, lanes([0x7F] * LANES))
        sign = build.and_(codes, lanes([0x80] * LANES))
        half = build.or_(build.shl(size, lanes([7] * LANES)), build.shl(sign, lanes([8] * LANES)))
        number = build.fmul(half_to_single(build, half), lanes([256.0] * LANES, _SINGLE))
        nan = build.bitcast(lanes([0x7FC00000] * LANES), FLOAT_LANES)
        return build.select(build.icmp_unsigned("==", size, lanes([0x7F] * LANES)), nan, number)

    def bits(self, numbers: Any, shift: int, mask: int) -> Any:
        """(numbers >> shift) & mask, of one int32 or sixteen."""
        count = LANES if isinstance(numbers.type, ir.VectorType) else 0

        def constant(value: int) -> ir.Constant:
            return lanes([value] * count) if count else I32(value)

        return self._builder.and_(self._builder.lshr(numbers, constant(shift)), constant(mask))

    def joined(self, low: Any, high: Any, shift: int) -> Any:
        """low | (high << shift), of one int32 or sixteen."""
        places = lanes([shift] * LANES) if isinstance(high.type, ir.VectorType) else I32(shift)
        return self._builder.or_(low, self._builder.shl(high, places))

    def number(self, whole: Any, taken: int = 0) -> Any:
        """whole − taken, of one int32, as float32."""
        lower = self._builder.sub(whole, I32(taken)) if taken else whole
        return self._builder.sitofp(lower, _SINGLE)

    def minus(self, numbers: Any, taken: int) -> Any:
        """numbers − taken, as floats."""
        lower = self._builder.sub(numbers, lanes([taken] * LANES)) if taken else numbers
        return self._builder.sitofp(lower, FLOAT_LANES)

    def product(self, one: Any, other: Any) -> Any:
        """one · other, of single numbers."""
        return self._builder.fmul(one, other)

    def scaled(self, vector: Any, factor: Any) -> Any:
        """vector · factor"""
        return self._builder.fmul(vector, splat(self._builder, factor))

    def scaled_plus(self, vector: Any, factor: Any, offset: Any) -> Any:
        """vector · factor + offset, with one rounding."""
        return fma(self._builder, vector, splat(self._builder, factor), splat(self._builder, offset))

    def scaled_minus(self, vector: Any, factor: Any, offset: Any) -> Any:
        """vector · factor − offset, with one rounding."""
        return self.scaled_plus(vector, factor, self._builder.fneg(offset))


def _f64(b: Stored) -> Iterator[Any]:
    yield b.doubles(0)


def _f32(b: Stored) -> Iterator[Any]:
    yield b.singles(0)


def _f16(b: Stored) -> Iterator[Any]:
    yield b.halves(0)


def _bf16(b: Stored) -> Iterator[Any]:
    yield b.brains(0)


def _q4_0(b: Stored) -> Iterator[Any]:
    d, packed = b.half(0), b.bytes(2)
    for half in range(2):
        yield b.scaled(b.minus(b.bits(packed, 4 * half, 15), 8), d)


def _q4_1(b: Stored) -> Iterator[Any]:
    (d, m), packed = b.two_halves(0), b.bytes(4)
    for half in range(2):
        yield b.scaled_plus(b.minus(b.bits(packed, 4 * half, 15), 0), d, m)


def _q5_0(b: Stored) -> Iterator[Any]:
    d, packed = b.half(0), b.bytes(6)
    for half in range(2):
        fifth = b.word_bits(2, 16 * half)
        yield b.scaled(b.minus(b.joined(b.bits(packed, 4 * half, 15), fifth, 4), 16), d)


def _q5_1(b: Stored) -> Iterator[Any]:
    (d, m), packed = b.two_halves(0), b.bytes(8)
    for half in range(2):
        fifth = b.word_bits(4, 16 * half)
        yield b.scaled_plus(b.minus(b.joined(b.bits(packed, 4 * half, 15), fifth, 4), 0), d, m)


def _q8_0(b: Stored) -> Iterator[Any]:
    d = b.half(0)
    for half in range(2):
        yield b.scaled(b.minus(b.signed_bytes(2 + 16 * half), 0), d)


def _q2_k(b: Stored) -> Iterator[Any]:
    d, dmin = b.two_halves(80)
    for group in range(16):
        low, s = b.bytes(16 + group // 8 * 32 + group % 2 * 16), b.byte(group)
        scale, offset = b.product(d, b.number(b.bits(s, 0, 15))), b.product(dmin, b.number(b.bits(s, 4, 15)))
        yield b.scaled_minus(b.minus(b.bits(low, group % 8 // 2 * 2, 3), 0), scale, offset)


def _q3_k(b: Stored) -> Iterator[Any]:
    d = b.half(108)
    for group in range(16):
        low, third = b.bytes(32 + group // 8 * 32 + group % 2 * 16), b.bytes(group % 2 * 16)
        s_low = b.bits(b.byte(96 + group % 8), group // 8 * 4, 15)
        s_high = b.bits(b.byte(104 + group % 4), group // 4 * 2, 3)
        scale = b.product(d, b.number(b.joined(s_low, s_high, 4), 32))
        q = b.joined(b.bits(low, group % 8 // 2 * 2, 3), b.bits(third, group // 2, 1), 2)
        yield b.scaled(b.minus(q, 4), scale)


def _six_bits(b: Stored, group: int) -> tuple[Any, Any]:
    """Scale and offset of one of the eight groups of a Q4_K or Q5_K block, whose scales begin at its byte 4."""
    if group < 4:
        return b.bits(b.byte(4 + group), 0, 63), b.bits(b.byte(8 + group), 0, 63)
    first, second, third = b.byte(group), b.byte(4 + group), b.byte(8 + group)
    scale = b.joined(b.bits(third, 0, 15), b.bits(first, 6, 3), 4)
    return scale, b.joined(b.bits(third, 4, 15), b.bits(second, 6, 3), 4)


def _q4_k(b: Stored) -> Iterator[Any]:
    d, dmin = b.two_halves(0)
    for group in range(8):
        s, o = _six_bits(b, group)
        scale, offset = b.product(d, b.number(s)), b.product(dmin, b.number(o))
        for part in range(2):
            low = b.bytes(16 + group // 2 * 32 + part * 16)
            yield b.scaled_minus(b.minus(b.bits(low, group % 2 * 4, 15), 0), scale, offset)


def _q5_k(b: Stored) -> Iterator[Any]:
    d, dmin = b.two_halves(0)
    for group in range(8):
        s, o = _six_bits(b, group)
        scale, offset = b.product(d, b.number(s)), b.product(dmin, b.number(o))
        for part in range(2):
            low, fifth = b.bytes(48 + group // 2 * 32 + part * 16), b.bytes(16 + part * 16)
            q = b.joined(b.bits(low, group % 2 * 4, 15), b.bits(fifth, group, 1), 4)
            yield b.scaled_minus(b.minus(q, 0), scale, offset)


def _q6_k(b: Stored) -> Iterator[Any]:
    d = b.half(208)
    for group in range(16):
        low = b.bytes(group // 8 * 64 + group % 4 * 16)
        high = b.bytes(128 + group // 8 * 32 + group % 2 * 16)
        scale = b.product(d, b.number(b.signed_byte(192 + group)))
        q = b.joined(b.bits(low, group % 8 // 4 * 4, 15), b.bits(high, group % 8 // 2 * 2, 3), 4)
        yield b.scaled(b.minus(q, 32), scale)


def _f8_e4m3_128(b: Stored) -> Iterator[Any]:
    scale = b.single(0)
    for step in range(8):
        yield b.scaled(b.eights(4 + step * 16), scale)


VECTORS: dict[str, Callable[[Stored], Iterator[Any]]] = {
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
ONE: dict[str, Callable[[Stored], Any]] = {
    "F64": lambda b: b.double(0),
    "F32": lambda b: b.single(0),
    "F16": lambda b: b.half(0),
    "BF16": lambda b: b.brain(0),
}


def block_of(kind: str) -> tuple[int, int]:
    """How many weights the generator of `kind` yields at a time, a multiple of sixteen, and in how many bytes."""
    weights = max(BLOCKS[kind].weights, LANES)
    return weights, weights // BLOCKS[kind].weights * BLOCKS[kind].bytes
