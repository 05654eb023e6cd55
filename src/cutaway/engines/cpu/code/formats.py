"""Stored weights as vectors, inside a kernel that is being emitted: exactly the values of `blocks.dequantise`.

Each format is one generator that yields a block's weights, sixteen at a time and in their order, as LLVM values;
whoever asks stores them or multiplies them at once (both in `unpack.py`). A plain format (F32, F16, BF16, F64)
counts as blocks of sixteen, with a reader of one weight for what is left at a row's end. The layouts are described
in `engines/blocks.py`.

Rounding: scale times number is exact in float32 (11 + 6 + 5 bits at most) wherever an offset is added to
it, so that fusing the two changes no bit.
"""

from collections.abc import Callable, Iterator
from typing import Any

from cutaway.engines.blocks import BLOCKS
from cutaway.engines.cpu.code.stored import LOOKS_UP, Stored
from cutaway.engines.cpu.processor import LANES


def _f64(b: Stored) -> Iterator[Any]:
    yield b.doubles(0)


def _f32(b: Stored) -> Iterator[Any]:
    yield b.singles(0)


def _f16(b: Stored) -> Iterator[Any]:
    yield b.halves(0)


def _bf16(b: Stored) -> Iterator[Any]:
    yield b.brains(0)


def _q4_0(b: Stored) -> Iterator[Any]:
    scale, sixteenth = b.scale(0)
    packed, weights = b.bytes(2), b.levels(16, 8, scale, sixteenth=sixteenth)
    for half in range(2):
        yield weights(packed, half)


def _q4_1(b: Stored) -> Iterator[Any]:
    scale, sixteenth = b.scale(0)
    packed, weights = b.bytes(4), b.levels(16, 0, scale, b.half(2), sixteenth)
    for half in range(2):
        yield weights(packed, half)


def _five_bits(b: Stored, at: int, taken: int, factor: Any, offset: Any = None) -> Iterator[Any]:
    """32 numbers: their fifth bits in the word at byte `at`, the other four in the bytes that follow it."""
    if LOOKS_UP:
        weights, fifths, packed = b.levels(32, taken, factor, offset), b.word(at), b.bytes(at + 4)
        for half in range(2):
            yield weights(packed, half, b.unset(fifths, range(16 * half, 16 * half + 16)))
        return
    four = b.both_halves(at + 4)
    # Less sixteen where the bit is unset and sixteen are taken: the four bits with ones before them, a negative byte.
    numbers = b.either(four, b.fifths(at, 0xF0, 0)) if taken == 16 else b.either(four, b.fifths(at, 0, 16))
    for sixteen in b.widened(numbers):
        yield b.scaled(sixteen, factor) if offset is None else b.scaled_plus(sixteen, factor, offset)


def _q5_0(b: Stored) -> Iterator[Any]:
    yield from _five_bits(b, 2, 16, b.half(0))


def _q5_1(b: Stored) -> Iterator[Any]:
    yield from _five_bits(b, 4, 0, *b.two_halves(0))


def _q8_0(b: Stored) -> Iterator[Any]:
    d = b.half(0)
    for half in range(2):
        yield b.scaled(b.minus(b.signed_bytes(2 + 16 * half), 0), d)


def _q2_k(b: Stored) -> Iterator[Any]:
    both = b.bytes(0)
    d, dmin = b.two_halves(80)
    scales, offsets = (b.scaled(b.minus(b.bits(both, 4 * i, 15), 0), part) for i, part in enumerate((d, dmin)))
    for group in range(16):
        low = b.bytes(16 + group // 8 * 32 + group % 2 * 16)
        q = b.minus(b.bits(low, group % 8 // 2 * 2, 3), 0)
        yield b.scaled_minus(q, b.lane(scales, group), b.lane(offsets, group))


def _q3_k(b: Stored) -> Iterator[Any]:
    groups = range(16)  # a scale's four lower bits stand in byte g % 8, its two upper ones in byte 8 + g % 4
    low = b.shifted(b.chosen_bytes(96, [g % 8 for g in groups]), [g // 8 * 4 for g in groups], [15] * 16)
    high = b.shifted(b.chosen_bytes(96, [8 + g % 4 for g in groups]), [g // 4 * 2 for g in groups], [3] * 16)
    scales = b.scaled(b.minus(b.joined(low, high, 4), 32), b.half(108))
    thirds = b.thirty_two(0)
    for pair in range(8):  # groups of sixteen
        low = b.masked(b.thirty_two(32 + pair // 4 * 32), 3, -(pair % 4) * 2)
        for group, q in enumerate(b.widened(b.either(low, b.masked(thirds, 4, 2 - pair)), 4), 2 * pair):
            yield b.scaled(q, b.lane(scales, group))


def _scales_and_offsets(b: Stored) -> Any:
    """The eight scales of a Q4_K or Q5_K block and then its eight offsets, from the six bits of each at byte 4."""
    lower = b.chosen_bytes(4, [0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 8, 9, 10, 11])
    upper = b.chosen_bytes(4, [0, 0, 0, 0, 0, 1, 2, 3, 0, 0, 0, 0, 4, 5, 6, 7])
    low = b.shifted(lower, [0] * 12 + [4] * 4, [63] * 4 + [15] * 4 + [63] * 4 + [15] * 4)
    high = b.shifted(upper, [6] * 16, ([0] * 4 + [3] * 4) * 2)
    return b.scaled_by_two(b.minus(b.joined(low, high, 4), 0), *b.two_halves(0))


def _q4_k(b: Stored) -> Iterator[Any]:
    numbers = _scales_and_offsets(b)
    for group in range(8):
        weights = b.levels(16, 0, b.lane(numbers, group), b.negative(b.lane(numbers, 8 + group)))
        for part in range(2):
            yield weights(b.bytes(16 + group // 2 * 32 + part * 16), group % 2)


def _q5_k(b: Stored) -> Iterator[Any]:
    numbers, fifths = _scales_and_offsets(b), b.thirty_two(16)
    for group in range(8):
        four = b.masked(b.thirty_two(48 + group // 2 * 32), 15, -(group % 2) * 4)
        for q in b.widened(b.either(four, b.masked(fifths, 16, 4 - group))):
            yield b.scaled_minus(q, b.lane(numbers, group), b.lane(numbers, 8 + group))


def _q6_k(b: Stored) -> Iterator[Any]:
    scales = b.scaled(b.minus(b.signed_bytes(192), 0), b.half(208))
    for pair in range(8):  # groups of sixteen
        half, quarter = divmod(pair, 4)
        low = b.masked(b.thirty_two(half * 64 + quarter % 2 * 32), 15, -(quarter // 2) * 4)
        high = b.masked(b.thirty_two(128 + half * 32), 48, 4 - 2 * quarter)
        for group, q in enumerate(b.widened(b.either(low, high), 32), 2 * pair):
            yield b.scaled(q, b.lane(scales, group))


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
