"""How weights are stored: for each format what a block holds, and how its numbers come back.

A *block* is the smallest piece of a row that can be read by itself. The plain formats (F32, F16, …) store
one weight to a block. The quantised ones store 32 or 256 weights as small whole numbers that share a
scale `d`, half precision, and in some formats an offset. All are little endian and the bytes of a row
follow one another without gaps. The layouts are those of ggml (`ggml-common.h`, `ggml-quants.c`); every
function here gives, bit for bit, what the `gguf` package's own NumPy code gives. One is our own: DeepSeek's
8-bit floats, whose scales its files keep apart (`checkpoints/eight_bit.py` lays them side by side).
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cutaway.errors import CutawayError


@dataclass(frozen=True)
class Block:
    """One storage format: how many weights a block holds, in how many bytes."""

    name: str
    weights: int
    bytes: int


# Each layout names the fields of a block in the order in which they lie in the file.
_F64 = np.dtype("<f8")
_F32 = np.dtype("<f4")
_F16 = np.dtype("<f2")
_BF16 = np.dtype("<u2")
_Q4_0 = np.dtype([("d", "<f2"), ("low", "u1", 16)])
_Q4_1 = np.dtype([("d", "<f2"), ("m", "<f2"), ("low", "u1", 16)])
_Q5_0 = np.dtype([("d", "<f2"), ("high", "u1", 4), ("low", "u1", 16)])
_Q5_1 = np.dtype([("d", "<f2"), ("m", "<f2"), ("high", "u1", 4), ("low", "u1", 16)])
_Q8_0 = np.dtype([("d", "<f2"), ("q", "i1", 32)])
_Q2_K = np.dtype([("scales", "u1", 16), ("low", "u1", 64), ("d", "<f2"), ("dmin", "<f2")])
_Q3_K = np.dtype([("high", "u1", 32), ("low", "u1", 64), ("scales", "u1", 12), ("d", "<f2")])
_Q4_K = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("low", "u1", 128)])
_Q5_K = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("high", "u1", 32), ("low", "u1", 128)])
_Q6_K = np.dtype([("low", "u1", 128), ("high", "u1", 64), ("scales", "i1", 16), ("d", "<f2")])
_F8_E4M3_128 = np.dtype([("scale", "<f4"), ("codes", "u1", 128)])


def _unpack(packed: np.ndarray, run: int, bits: int) -> np.ndarray:
    """Small whole numbers from bytes that hold several each: uint8 `[…, bytes]` → `[…, bytes · 8 / bits]`.

    The bytes are read in runs of `run`: first the lowest `bits` bits of every byte of the run, then the
    next `bits` of every byte, and so on; then the next run.
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    runs = packed.reshape(*packed.shape[:-1], -1, 1, run)  # […, runs, 1, run]
    numbers = (runs >> shifts) & np.uint8(2**bits - 1)  # […, runs, 8 / bits, run]
    return numbers.reshape(*packed.shape[:-1], -1)


def _scale(blocks: np.ndarray, field: str) -> np.ndarray:
    """A block's half-precision number as float32 `[n, blocks, 1]`, to be multiplied with its weights."""
    return blocks[field].astype(np.float32)[..., None]


def _f64(blocks: np.ndarray) -> np.ndarray:
    """An IEEE double for each weight."""
    return blocks.astype(np.float64, copy=False)


def _f32(blocks: np.ndarray) -> np.ndarray:
    """An IEEE single for each weight."""
    return blocks.astype(np.float32, copy=False)


def _f16(blocks: np.ndarray) -> np.ndarray:
    """An IEEE half for each weight."""
    return blocks.astype(np.float32)


def _bf16(blocks: np.ndarray) -> np.ndarray:
    """The upper half of an IEEE single for each weight; its lower 16 bits are zero."""
    return (blocks.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    """32 numbers of 4 bits, 0 to 15, and a scale: w = d · (q − 8).

    Byte j holds q_j in its lower and q_(j+16) in its upper half.
    """
    q = _unpack(blocks["low"], run=16, bits=4).astype(np.float32)
    return _scale(blocks, "d") * (q - np.float32(8))


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    """As Q4_0, with the smallest weight m stored beside the scale: w = d · q + m."""
    q = _unpack(blocks["low"], run=16, bits=4).astype(np.float32)
    return _scale(blocks, "d") * q + _scale(blocks, "m")


def _five_bits(blocks: np.ndarray) -> np.ndarray:
    """Numbers 0 to 31: four lower bits as in Q4_0, the fifth as bit i of a 32-bit word for weight i."""
    low = _unpack(blocks["low"], run=16, bits=4)
    high = _unpack(blocks["high"], run=1, bits=1)
    return (low | (high << np.uint8(4))).astype(np.float32)


def _q5_0(blocks: np.ndarray) -> np.ndarray:
    """32 numbers of 5 bits and a scale: w = d · (q − 16)."""
    return _scale(blocks, "d") * (_five_bits(blocks) - np.float32(16))


def _q5_1(blocks: np.ndarray) -> np.ndarray:
    """32 numbers of 5 bits, a scale and the smallest weight: w = d · q + m."""
    return _scale(blocks, "d") * _five_bits(blocks) + _scale(blocks, "m")


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    """32 signed bytes and a scale: w = d · q."""
    return _scale(blocks, "d") * blocks["q"].astype(np.float32)


def _grouped(numbers: np.ndarray, groups: int) -> np.ndarray:
    """The 256 numbers of each K block as groups, float32: `[n, blocks, 256]` → `[n, blocks, groups, …]`."""
    return numbers.reshape(*numbers.shape[:-1], groups, -1).astype(np.float32)


def _q2_k(blocks: np.ndarray) -> np.ndarray:
    """256 numbers of 2 bits in 16 groups of 16; each group has a 4-bit scale s and a 4-bit offset o.

    w = (d · s) · q − (dmin · o). The lower half of a group's byte is s, the upper is o. The numbers lie
    two bits a byte deep in runs of 32 bytes.
    """
    scale = _scale(blocks, "d") * (blocks["scales"] & np.uint8(15)).astype(np.float32)  # [n, blocks, 16]
    offset = _scale(blocks, "dmin") * (blocks["scales"] >> np.uint8(4)).astype(np.float32)
    q = _grouped(_unpack(blocks["low"], run=32, bits=2), 16)
    return scale[..., None] * q - offset[..., None]


def _q3_k(blocks: np.ndarray) -> np.ndarray:
    """256 numbers of 3 bits, −4 to 3, in 16 groups of 16; each group has a 6-bit scale s.

    w = d · (s − 32) · q. A set third bit means that nothing is taken off, a clear one that 4 is. The
    scales are split as well: eight bytes hold the lower four bits of all sixteen, four bytes the upper two.
    """
    low_scales = _unpack(blocks["scales"][..., :8], run=8, bits=4)
    high_scales = _unpack(blocks["scales"][..., 8:], run=4, bits=2)
    scales = (low_scales | (high_scales << np.uint8(4))).astype(np.float32) - np.float32(32)
    low = _unpack(blocks["low"], run=32, bits=2)
    third = _unpack(blocks["high"], run=32, bits=1)
    q = _grouped(low | (third << np.uint8(2)), 16) - np.float32(4)
    return (_scale(blocks, "d") * scales)[..., None] * q


def _six_bit_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scale and offset of the eight groups of a Q4_K or Q5_K block, float32 `[n, blocks, 8, 1]` each.

    Twelve bytes hold eight 6-bit scales and eight 6-bit offsets. Bytes 0 to 3: scales 0 to 3; bytes 4 to
    7: offsets 0 to 3; bytes 8 to 11: the lower four bits of scale (lower half) and offset (upper half) of
    groups 4 to 7, whose upper two bits are the upper two bits of bytes 0 to 7.
    """
    first, second, third = (blocks["scales"][..., i : i + 4] for i in (0, 4, 8))
    scales = [first & np.uint8(63), (third & np.uint8(15)) | ((first >> np.uint8(6)) << np.uint8(4))]
    offsets = [second & np.uint8(63), (third >> np.uint8(4)) | ((second >> np.uint8(6)) << np.uint8(4))]
    scale = _scale(blocks, "d") * np.concatenate(scales, axis=-1).astype(np.float32)
    offset = _scale(blocks, "dmin") * np.concatenate(offsets, axis=-1).astype(np.float32)
    return scale[..., None], offset[..., None]


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    """256 numbers of 4 bits in 8 groups of 32, each with a scale s and an offset o of 6 bits.

    w = (d · s) · q − (dmin · o). Each run of 32 bytes holds two groups: the lower and the upper halves.
    """
    scale, offset = _six_bit_scales(blocks)
    return scale * _grouped(_unpack(blocks["low"], run=32, bits=4), 8) - offset


def _q5_k(blocks: np.ndarray) -> np.ndarray:
    """As Q4_K with a fifth bit: bit g of byte j belongs to weight j of group g."""
    scale, offset = _six_bit_scales(blocks)
    fifth = _unpack(blocks["high"], run=32, bits=1)
    q = _unpack(blocks["low"], run=32, bits=4) | (fifth << np.uint8(4))
    return scale * _grouped(q, 8) - offset


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    """256 numbers of 6 bits in 16 groups of 16, each with a signed 8-bit scale s: w = (d · s) · (q − 32).

    The lower four bits lie in runs of 64 bytes, the upper two in runs of 32.
    """
    low = _unpack(blocks["low"], run=64, bits=4)
    high = _unpack(blocks["high"], run=32, bits=2)
    q = _grouped(low | (high << np.uint8(4)), 16) - np.float32(32)
    return (_scale(blocks, "d") * blocks["scales"].astype(np.float32))[..., None] * q


def _e4m3() -> np.ndarray:
    """All 256 8-bit floats: sign, 4 bits of exponent (bias 7), 3 of fraction; all ones are NaN. (arXiv:2209.05433)"""
    codes = np.arange(128)
    exponent, fraction = codes >> 3, codes & 7
    normal = (1 + fraction / 8) * 2.0 ** (exponent - 7.0)
    sizes = np.where(exponent == 0, fraction / 8 * 2.0**-6, normal)
    sizes[127] = np.nan
    return np.concatenate([sizes, -sizes]).astype(np.float32)


_E4M3 = _e4m3()


def _f8_e4m3_128(blocks: np.ndarray) -> np.ndarray:
    """128 8-bit floats and a scale in single precision: w = scale · q."""
    return blocks["scale"][..., None] * _E4M3[blocks["codes"]]


# name: (weights in a block, layout of a block, blocks `[n, blocks]` → floats `[n, blocks, …]`)
_FORMATS: dict[str, tuple[int, np.dtype, Callable[[np.ndarray], np.ndarray]]] = {
    "F64": (1, _F64, _f64),
    "F32": (1, _F32, _f32),
    "F16": (1, _F16, _f16),
    "BF16": (1, _BF16, _bf16),
    "Q4_0": (32, _Q4_0, _q4_0),
    "Q4_1": (32, _Q4_1, _q4_1),
    "Q5_0": (32, _Q5_0, _q5_0),
    "Q5_1": (32, _Q5_1, _q5_1),
    "Q8_0": (32, _Q8_0, _q8_0),
    "Q2_K": (256, _Q2_K, _q2_k),
    "Q3_K": (256, _Q3_K, _q3_k),
    "Q4_K": (256, _Q4_K, _q4_k),
    "Q5_K": (256, _Q5_K, _q5_k),
    "Q6_K": (256, _Q6_K, _q6_k),
    "F8_E4M3_128": (128, _F8_E4M3_128, _f8_e4m3_128),
}

BLOCKS: dict[str, Block] = {
    name: Block(name, weights, layout.itemsize) for name, (weights, layout, _) in _FORMATS.items()
}
"""The formats that can be computed with, by GGUF's names, and the one that GGUF does not know."""

GGUF_TYPES: dict[int, str] = {
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 4: "Q4_2", 5: "Q4_3", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0"},
    **{9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K"},
    **{16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S"},
    **{23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16"},
    **{31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 34: "TQ1_0", 35: "TQ2_0"},
    **{36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0"},
}
"""Every tensor type that ggml has numbered, also those that it has dropped and those we do not compute."""

# Quantised rows are worked through in pieces of about this many weights, so that the unpacked numbers
# stay in the processor's cache and a large matrix needs no scratch of several times its own size.
_WEIGHTS_AT_ONCE = 1 << 16


def dequantise(rows: np.ndarray, kind: str) -> np.ndarray:
    """The numbers stored in `rows`: uint8 `[n, bytes per row]` → float32 `[n, d_in]`, float64 for F64.

    F32 and F64 come back as a view of the same memory where its alignment allows; the rest is new.
    Raises CutawayError for an unknown `kind`, for rows that are no whole number of blocks, and on a
    big-endian machine, whose numbers would be read backwards elsewhere in the engines.
    """
    if sys.byteorder != "little":
        raise CutawayError("Weights are stored little endian; this machine is big endian, which is not supported.")
    if kind not in _FORMATS:
        raise CutawayError(f"There is no weight format {kind}; the formats that work are {', '.join(BLOCKS)}.")
    weights, layout, decode = _FORMATS[kind]
    if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] % layout.itemsize:
        raise CutawayError(
            f"{kind} rows are uint8 [n, bytes] with a multiple of {layout.itemsize} bytes, "
            f"not {rows.dtype} {list(rows.shape)}."
        )
    n, d_in = rows.shape[0], rows.shape[1] // layout.itemsize * weights
    if rows.shape[1] and rows.strides[1] != 1:
        rows = np.ascontiguousarray(rows)
    if kind in ("F64", "F32"):
        return np.require(decode(rows.view(layout)), requirements="A")
    values = np.empty((n, d_in), dtype=np.float32)
    if not values.size:
        return values
    step = max(1, _WEIGHTS_AT_ONCE // d_in)
    for start in range(0, n, step):
        piece = rows[start : start + step]
        values[start : start + step] = decode(piece.view(layout)).reshape(len(piece), d_in)
    return values
