"""Stored weights come back as the exact numbers that the format's own tools read."""

import sys

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from cutaway.engines.blocks import BLOCKS, GGUF_TYPES, dequantise
from cutaway.errors import CutawayError

NUMBERS = {name: number for number, name in GGUF_TYPES.items()}
OURS = "F8_E4M3_128"  # unknown to GGUF
QUANTISED = [name for name in BLOCKS if name not in ("F64", "F32", OURS)]
GGUF_CAN_QUANTISE = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]

# Where the half-precision numbers of a block lie, in bytes from its start.
HALVES = {
    "F16": [0],
    "BF16": [],
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
}


def reference(rows: np.ndarray, kind: str) -> np.ndarray:
    return dequantize(rows, gguf.GGMLQuantizationType[kind])


def with_halves(kind: str, rows: np.ndarray, halves: np.ndarray) -> np.ndarray:
    """The rows with the half-precision numbers of every block replaced by numbers drawn from `halves`."""
    blocks = rows.reshape(-1, BLOCKS[kind].bytes).copy()
    for i, at in enumerate(HALVES[kind]):
        chosen = np.roll(np.resize(halves, len(blocks)), i).astype("<f2")
        blocks[:, at : at + 2] = chosen.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows.shape)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("kind", QUANTISED)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 5), per_row=st.integers(1, 4))
def test_random_bytes_read_as_the_gguf_package_reads_them(kind: str, seed: int, n: int, per_row: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 256, (n, per_row * BLOCKS[kind].bytes), dtype=np.uint8)
    if kind == "BF16":
        rows[:, 1::2] &= 0xBF  # exponents below that of infinity
    else:
        rows = with_halves(kind, rows, rng.normal(0, 10.0 ** rng.integers(-6, 4), 257))
    assert same_bits(dequantise(rows, kind), reference(rows, kind))


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("fill", [0, 0xFF, 0x0F, 0xF0, 0x55, 0xAA, 0x80, 0x7F])
def test_blocks_at_the_edges_read_the_same(kind: str, fill: int) -> None:
    halves = np.array([0.0, -0.0, 1.0, -1.0, 65504.0, -65504.0, 2.0**-24, -(2.0**-24), 2.0**-14], np.float16)
    rows = np.full((len(halves), 2 * BLOCKS[kind].bytes), fill, np.uint8)
    if kind == "BF16":
        rows[:, 1::2] &= 0xBF
    else:
        rows = with_halves(kind, rows, halves)
    assert same_bits(dequantise(rows, kind), reference(rows, kind))


@pytest.mark.parametrize("kind", GGUF_CAN_QUANTISE)
def test_what_gguf_quantises_is_read_back_bit_for_bit_and_close_to_the_original(kind: str) -> None:
    array = np.random.default_rng(3).normal(0, 0.05, (70, 2048)).astype(np.float32)  # several pieces
    rows = quantize(array, gguf.GGMLQuantizationType[kind]).view(np.uint8).reshape(70, -1)
    values = dequantise(rows, kind)
    assert same_bits(values, reference(rows, kind))
    bits = 8 * BLOCKS[kind].bytes / BLOCKS[kind].weights
    assert np.abs(values - array).max() <= np.abs(array).max() * 2.0 ** (1.5 - min(bits // 1, 8))


def test_every_8_bit_float_times_every_scale_is_exact_to_the_last_bit_of_a_single() -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(2, 128)
    numbers = torch.from_numpy(codes).view(torch.float8_e4m3fn).double().numpy()
    scales = np.random.default_rng(0).normal(0, 10.0 ** np.arange(-30, 30, 4)[:, None], (15, 20)).ravel()
    scales = np.concatenate([scales, [1.0, -1.0, 0.0, 2.0**-9, 1.17e-38, 1e-44, 3e38]]).astype("<f4")
    rows = np.empty((2, len(scales)), np.dtype([("scale", "<f4"), ("codes", "u1", 128)]))
    rows["scale"], rows["codes"] = scales, codes[:, None]
    with np.errstate(all="ignore"):
        values = dequantise(rows.view(np.uint8).reshape(2, -1), OURS)
        expected = (scales.astype(np.float64)[None, :, None] * numbers[:, None]).astype(np.float32)
    np.testing.assert_array_equal(values, expected.reshape(2, -1))
    assert np.isnan(values).sum() == 2 * len(scales)  # 0x7F and 0xFF


def test_float32_and_float64_are_read_in_place() -> None:
    for dtype, kind in ((np.float32, "F32"), (np.float64, "F64")):
        array = np.random.default_rng(0).normal(size=(3, 5)).astype(dtype)
        values = dequantise(array.view(np.uint8), kind)
        assert same_bits(values, array)
        assert np.shares_memory(values, array)


def test_numbers_at_odd_addresses_are_copied_into_place() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    shifted = np.frombuffer(b"x" + array.tobytes(), np.uint8)[1:].reshape(2, 12)
    values = dequantise(shifted, "F32")
    assert same_bits(values, array)
    assert values.flags.aligned


def test_rows_may_be_strided_views() -> None:
    array = np.random.default_rng(1).normal(size=(8, 64)).astype(np.float32)
    rows = quantize(array, gguf.GGMLQuantizationType.Q5_1)
    assert same_bits(dequantise(rows[::2], "Q5_1"), reference(rows[::2].copy(), "Q5_1"))
    fortran = np.asfortranarray(rows)
    assert same_bits(dequantise(fortran, "Q5_1"), reference(rows, "Q5_1"))


@pytest.mark.parametrize("kind", list(BLOCKS))
def test_no_rows_give_no_numbers(kind: str) -> None:
    block = BLOCKS[kind]
    assert dequantise(np.empty((0, 2 * block.bytes), np.uint8), kind).shape == (0, 2 * block.weights)
    assert dequantise(np.empty((2, 0), np.uint8), kind).shape == (2, 0)


def test_block_sizes_and_type_numbers_agree_with_the_gguf_package() -> None:
    for known in gguf.GGMLQuantizationType:
        assert GGUF_TYPES[known.value] == known.name
    for name, block in BLOCKS.items():
        if name == OURS:
            continue
        assert (block.weights, block.bytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
        assert name in NUMBERS


def test_a_format_that_cannot_be_computed_is_refused_by_name() -> None:
    with pytest.raises(CutawayError, match=r"IQ2_XXS.*Q4_K"):
        dequantise(np.zeros((1, 66), np.uint8), "IQ2_XXS")


@pytest.mark.parametrize("rows", [np.zeros((2, 19), np.uint8), np.zeros(20, np.uint8), np.zeros((2, 20), np.int8)])
def test_rows_that_are_no_whole_blocks_are_refused(rows: np.ndarray) -> None:
    with pytest.raises(CutawayError, match="multiple of 20 bytes"):
        dequantise(rows, "Q4_1")


def test_a_big_endian_machine_is_told_that_it_is_not_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "byteorder", "big")
    with pytest.raises(CutawayError, match="big endian"):
        dequantise(np.zeros((1, 4), np.uint8), "F32")
