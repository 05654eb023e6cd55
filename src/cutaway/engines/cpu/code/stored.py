"""The words in which `formats.py` says how stored bytes become weights, inside a kernel that is being emitted."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils

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
from cutaway.engines.cpu.processor import HALVES, LANES, OF_A_HALF, has

_SINGLE, _WORD = ir.FloatType(), ir.IntType(64)
# Sixteen numbers fit one register: a block's sixteen values are worked out once, and looked up by one instruction.
LOOKS_UP = has("avx512f")
_BYTES = ir.VectorType(I8, 32)


def _bytes(values: list[int]) -> ir.Constant:
    return lanes([value - 256 if value > 127 else value for value in values], I8)


class Stored:
    """The bytes at an address, and the few operations that turn them into weights.

    Where a number is expected, a Python number stands for a constant.
    """

    def __init__(self, builder: Any, address: Any, looks_up: bool = False) -> None:
        """With `looks_up`, scales come from a table: no work for the arithmetic units, but lines of the cache."""
        self._builder = builder
        self._address = address
        self._looks_up = looks_up

    def _load(self, offset: int, kind: ir.Type) -> Any:
        return load(self._builder, self._builder.gep(self._address, [ir.IntType(64)(offset)]), kind)

    def half(self, offset: int) -> Any:
        """One float16, as float32."""
        return self._half_times(offset, 0)

    def scale(self, offset: int) -> tuple[Any, Any]:
        """One float16, as float32, and a sixteenth of it: for numbers of four bits that stand in upper halves."""
        whole = self.half(offset)
        if self._looks_up and OF_A_HALF > 1:
            return whole, self._half_times(offset, 1)
        return whole, self._builder.fmul(whole, _SINGLE(1 / 16))

    def _half_times(self, offset: int, which: int) -> Any:
        bits = self._load(offset, I16)
        if not self._looks_up:
            return half_to_single(self._builder, self._builder.zext(bits, I32))
        module, kind = self._builder.module, ir.ArrayType(ir.ArrayType(_SINGLE, OF_A_HALF), 1 << 16)
        table = module.globals.get(HALVES) or cgutils.add_global_variable(module, kind, HALVES)
        place = self._builder.gep(table, [_WORD(0), self._builder.zext(bits, _WORD), _WORD(which)])
        return self._builder.load(place)

    def two_halves(self, offset: int) -> tuple[Any, Any]:
        """Two float16 side by side, as float32."""
        if self._looks_up:
            return self.half(offset), self.half(offset + 2)
        pair = self._load(offset, ir.VectorType(I16, 2))
        both = half_to_single(self._builder, self._builder.zext(pair, ir.VectorType(I32, 2)))
        return self.lane(both, 0), self.lane(both, 1)

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

    def bytes(self, offset: int) -> Any:
        """Sixteen unsigned bytes, as int32."""
        return self._builder.zext(self._load(offset, ir.VectorType(I8, LANES)), INT_LANES)

    def signed_bytes(self, offset: int) -> Any:
        """Sixteen signed bytes, as int32."""
        return self._builder.sext(self._load(offset, ir.VectorType(I8, LANES)), INT_LANES)

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
        """(numbers >> shift) & mask"""
        return self.shifted(numbers, [shift] * LANES, [mask] * LANES)

    def joined(self, low: Any, high: Any, shift: int) -> Any:
        """low | (high << shift)"""
        return self._builder.or_(low, self._builder.shl(high, lanes([shift] * LANES)))

    def minus(self, numbers: Any, taken: int) -> Any:
        """numbers − taken, as floats."""
        lower = self._builder.sub(numbers, lanes([taken] * LANES)) if taken else numbers
        return self._builder.sitofp(lower, FLOAT_LANES)

    def levels(
        self, count: int, taken: int, factor: Any, offset: Any = None, sixteenth: Any = None
    ) -> Callable[..., Any]:
        """How numbers of four bits (`count` of them) become weights: (q − taken) · factor (+ offset).

        With an offset there is one rounding. What is given back makes sixteen weights of sixteen bytes: of their lower
        halves or, with `half` 1, of their upper. Where weights are looked up there may be five bits, and `unset` says
        in which lanes the fifth is 0. `sixteenth` of the factor is worked out where it is not given.
        """
        build, scale = self._builder, splat(self._builder, factor)
        if taken and self._looks_up and not LOOKS_UP:
            # q · factor − taken · factor, at once: exact, for the factor has 11 bits and the numbers five. Of a zero
            # the sign is lost, which a sum cannot tell, and an infinite factor gives only NaN.
            taken, offset = 0, build.fmul(factor, _SINGLE(-taken))
        added = None if offset is None else splat(build, offset)

        def value(numbers: Any, scale: Any = scale) -> Any:
            return build.fmul(numbers, scale) if added is None else fma(build, numbers, scale, added)

        if LOOKS_UP:
            tables = [
                value(lanes([float(level - taken) for level in range(first, first + LANES)], _SINGLE))
                for first in range(0, count, LANES)
            ]

            def looked_up(packed: Any, half: int, unset: Any = None) -> Any:
                indices = build.lshr(packed, lanes([4] * LANES)) if half else packed
                found = [self._looked_up(table, indices) for table in tables]
                return found[0] if unset is None else build.select(unset, *found)

            return looked_up

        def worked_out(packed: Any, half: int) -> Any:
            if not half:
                return value(self.minus(build.and_(packed, lanes([15] * LANES)), taken))
            # As they stand: sixteen times the number, and a sixteenth of the scale.
            share = build.fmul(factor, _SINGLE(1 / 16)) if sixteenth is None else sixteenth
            numbers = build.and_(packed, lanes([240] * LANES))
            return value(self.minus(numbers, 16 * taken), splat(build, share))

        return worked_out

    def _looked_up(self, levels: Any, indices: Any) -> Any:
        """Sixteen of sixteen values; of an index four bits count."""
        kind = ir.FunctionType(FLOAT_LANES, [FLOAT_LANES, INT_LANES])
        function = cgutils.get_or_insert_function(self._builder.module, kind, "llvm.x86.avx512.permvar.sf.512")
        return self._builder.call(function, [levels, indices])

    def unset(self, numbers: Any, bits: Sequence[int]) -> Any:
        """In which lanes each lane's own bit is 0."""
        chosen = self._builder.and_(numbers, lanes([1 << bit if bit < 31 else -(1 << 31) for bit in bits]))
        return self._builder.icmp_signed("==", chosen, lanes([0] * LANES))

    def thirty_two(self, offset: int) -> Any:
        """32 bytes, as bytes: small numbers are put together sooner than each has a lane of its own."""
        return self._load(offset, _BYTES)

    def both_halves(self, offset: int) -> Any:
        """32 bytes: the lower halves of sixteen, and then their upper halves."""
        build, packed = self._builder, self._load(offset, ir.VectorType(I8, LANES))
        twice = build.shuffle_vector(packed, packed, lanes([*range(LANES)] * 2))
        moved = build.lshr(build.bitcast(twice, ir.VectorType(I32, 8)), lanes([0] * 4 + [4] * 4))
        return build.and_(build.bitcast(moved, _BYTES), _bytes([15] * 32))

    def masked(self, numbers: Any, mask: int, shift: int = 0) -> Any:
        """Of 32 bytes, (number << shift) & mask; a negative shift is one to the right."""
        if shift:
            move = self._builder.shl if shift > 0 else self._builder.lshr
            numbers = move(numbers, _bytes([abs(shift)] * 32))
        return self._builder.and_(numbers, _bytes([mask] * 32))

    def either(self, one: Any, other: Any) -> Any:
        """one | other"""
        return self._builder.or_(one, other)

    def fifths(self, offset: int, unset: int, set_: int) -> Any:
        """32 bytes: one or the other number (one of them 0), by the bits of a 32-bit word."""
        build, word = self._builder, self._load(offset, ir.VectorType(I8, 4))
        each = build.shuffle_vector(word, word, lanes([i // 8 for i in range(32)]))
        bits = build.and_(each, _bytes([1 << i % 8 for i in range(32)]))
        alike = build.icmp_signed("==", bits, _bytes([0] * 32 if unset else [1 << i % 8 for i in range(32)]))
        return build.and_(build.sext(alike, _BYTES), _bytes([unset or set_] * 32))

    def widened(self, numbers: Any, taken: int = 0) -> Iterator[Any]:
        """32 signed bytes, less `taken`, as float32, sixteen at a time."""
        build = self._builder
        if taken:
            numbers = build.sub(numbers, _bytes([taken] * 32))
        for half in range(2):
            some = build.shuffle_vector(numbers, numbers, lanes([LANES * half + i for i in range(LANES)]))
            yield build.sitofp(build.sext(some, INT_LANES), FLOAT_LANES)

    def word(self, offset: int) -> Any:
        """A 32-bit word in every lane."""
        return splat(self._builder, self._load(offset, I32))

    def chosen_bytes(self, offset: int, places: list[int]) -> Any:
        """Sixteen of twelve unsigned bytes, as int32."""
        twelve = self._load(offset, ir.VectorType(I8, 12))
        return self._builder.zext(self._builder.shuffle_vector(twelve, twelve, lanes(places)), INT_LANES)

    def shifted(self, numbers: Any, shifts: list[int], masks: list[int]) -> Any:
        """(numbers >> shift) & mask, each lane by its own."""
        return self._builder.and_(self._builder.lshr(numbers, lanes(shifts)), lanes(masks))

    def lane(self, vector: Any, index: int) -> Any:
        """One number of a vector."""
        return self._builder.extract_element(vector, I32(index))

    def negative(self, number: Any) -> Any:
        """−number"""
        return self._builder.fneg(number)

    def scaled_by_two(self, vector: Any, first: Any, second: Any) -> Any:
        """The first eight lanes times one number, the others times another."""
        both = self._builder.shuffle_vector(
            splat(self._builder, first), splat(self._builder, second), lanes([*range(8), *range(24, 32)])
        )
        return self._builder.fmul(vector, both)

    def scaled(self, vector: Any, factor: Any) -> Any:
        """vector · factor"""
        return self._builder.fmul(vector, splat(self._builder, factor))

    def scaled_plus(self, vector: Any, factor: Any, offset: Any) -> Any:
        """vector · factor + offset, with one rounding."""
        return fma(self._builder, vector, splat(self._builder, factor), splat(self._builder, offset))

    def scaled_minus(self, vector: Any, factor: Any, offset: Any) -> Any:
        """vector · factor − offset, with one rounding."""
        return self.scaled_plus(vector, factor, self._builder.fneg(offset))
