"""A weight is read where it lies: slices, permutations and stacks share the stored bytes."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from cutaway.engines.blocks import dequantise
from cutaway.engines.weights import Weight
from cutaway.errors import CutawayError


def stored(shape: tuple[int, ...], kind: str = "Q4_1", seed: int = 0) -> Weight:
    values = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    rows = quantize(values.reshape(-1, shape[-1]), gguf.GGMLQuantizationType[kind])
    return Weight(kind, shape, np.ascontiguousarray(rows).view(np.uint8))


def values(weight: Weight) -> np.ndarray:
    return weight.dequantise(np.float32)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_a_float_array_is_wrapped_without_a_copy(dtype: type) -> None:
    array = np.arange(12, dtype=dtype).reshape(3, 4)
    weight = Weight.of(array)
    assert np.shares_memory(weight.rows, array)
    assert np.array_equal(weight.dequantise(dtype), array)
    assert weight.nbytes == array.nbytes


def test_a_big_endian_array_keeps_its_values() -> None:
    array = np.arange(6, dtype=">f4").reshape(2, 3)
    assert np.array_equal(values(Weight.of(array)), array)


def test_an_array_of_integers_is_refused() -> None:
    with pytest.raises(CutawayError, match="int64"):
        Weight.of(np.arange(4))


def test_a_mapped_file_is_not_copied(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    np.arange(24, dtype=np.float32).tofile(path)
    mapped = np.memmap(path, np.uint8, mode="r")
    weight = Weight("F32", (6, 4), mapped.reshape(6, 16))
    for part in (weight, weight.row_slice(1, 3), weight.reorder(np.array([5, 4, 3, 2, 1, 0]))):
        assert np.shares_memory(part.rows, mapped)
    assert np.shares_memory(values(weight), mapped)  # float32 needs no conversion either


@settings(max_examples=40, deadline=None)
@given(ids=st.lists(st.integers(0, 9), max_size=20), kind=st.sampled_from(["F32", "Q8_0", "Q4_1"]))
def test_take_looks_up_rows(ids: list[int], kind: str) -> None:
    weight = stored((10, 64), kind)
    assert np.array_equal(weight.take(ids, np.float32), values(weight)[ids].reshape(len(ids), 64))


@pytest.mark.parametrize("index", [-1, 10, 2**40])
def test_take_refuses_a_row_that_is_not_there(index: int) -> None:
    with pytest.raises(CutawayError, match=rf"Row {index} was asked for; the weight has 10 rows"):
        stored((10, 64)).take([3, index], np.float32)


def test_dequantise_gives_a_range_of_rows_and_any_dtype() -> None:
    weight = stored((10, 64))
    assert np.array_equal(weight.dequantise(np.float32, 2, 5), values(weight)[2:5])
    assert weight.dequantise(np.float64).dtype == np.float64
    assert np.array_equal(weight.dequantise(np.float64), values(weight))


@settings(max_examples=40, deadline=None)
@given(order=st.permutations(range(8)), start=st.integers(0, 8), stop=st.integers(0, 8), data=st.data())
def test_slices_and_permutations_compose(order: list[int], start: int, stop: int, data: st.DataObject) -> None:
    start, stop = min(start, stop), max(start, stop)
    weight = stored((8, 32))
    expected = values(weight)[order][start:stop]
    part = weight.reorder(np.array(order)).row_slice(start, stop)
    assert part.shape == (stop - start, 32)
    assert part.nbytes == (stop - start) * 20
    assert np.shares_memory(part.rows, weight.rows)
    assert np.array_equal(values(part), expected)
    again = data.draw(st.permutations(range(stop - start)))
    reordered = part.reorder(np.array(again, dtype=int))
    assert np.array_equal(values(reordered), expected[again])
    if again:
        ids = data.draw(st.lists(st.integers(0, stop - start - 1), min_size=1))
        assert np.array_equal(reordered.take(ids, np.float32), expected[again][ids])
    sliced_first = weight.row_slice(start, stop).reorder(np.array(again, dtype=int))
    assert np.array_equal(values(sliced_first), values(weight)[start:stop][again])


def test_a_fused_bias_is_taken_apart_like_its_matrix() -> None:
    for dtype in (np.float64, np.float32, np.float16):
        bias = np.arange(12, dtype=dtype)
        weight = Weight.of(bias)
        part = weight.row_slice(4, 8)
        assert part.shape == (4,)
        assert np.shares_memory(part.rows, bias)
        assert np.array_equal(part.dequantise(dtype), bias[4:8])
        assert np.array_equal(weight.reorder(np.arange(12)[::-1]).dequantise(dtype), bias[::-1])


def test_a_stack_of_experts_gives_its_matrices() -> None:
    stack = stored((3, 4, 64))
    whole = values(stack)
    assert whole.shape == (3, 4, 64)
    for e in range(3):
        expert = stack.expert(e)
        assert expert.shape == (4, 64)
        assert np.shares_memory(expert.rows, stack.rows)
        assert np.array_equal(values(expert), whole[e])
        assert np.array_equal(values(expert.row_slice(2, 4)), whole[e, 2:4])  # a fused gate and up
    assert np.array_equal(values(stack.row_slice(1, 3)), whole[1:3])
    backwards = stack.reorder(np.arange(12)[::-1])
    assert np.array_equal(values(backwards.expert(0)), whole.reshape(12, 64)[::-1][:4])


def test_rows_that_lie_among_others_are_a_weight_of_their_own_on_the_same_bytes() -> None:
    """Keys and values stored head by head in one matrix: each side names its own rows."""
    weight = stored((12, 64))
    keys, values_ = np.arange(12).reshape(3, 4)[:, :3].ravel(), np.arange(12).reshape(3, 4)[:, 3]
    for rows in (keys, values_, np.array([], int)):
        part = weight.reorder(rows)
        assert part.shape == (len(rows), 64)
        assert np.shares_memory(part.rows, weight.rows)
        assert part.nbytes == len(rows) * weight.rows.shape[1]
        assert np.array_equal(values(part), values(weight)[rows])
    again = weight.reorder(keys).reorder(np.array([8, 0])).row_slice(0, 1)
    assert np.array_equal(values(again), values(weight)[[10]])


def test_parts_that_are_not_there_are_refused() -> None:
    weight, stack = stored((8, 32)), stored((3, 4, 32))
    for start, stop in ((-1, 2), (3, 9), (4, 2)):
        with pytest.raises(CutawayError, match=f"no part {start}:{stop} of a first axis of 8"):
            weight.row_slice(start, stop)
    with pytest.raises(CutawayError, match="3:4"):
        stack.expert(3)
    with pytest.raises(CutawayError, match="no stack of experts"):
        weight.expert(0)
    with pytest.raises(CutawayError, match="rows from -1 to 2"):
        weight.reorder(np.array([0, -1, 2, 1, 1, 1, 1, 1]))
    with pytest.raises(CutawayError, match="names 12 rows"):
        stack.reorder(np.arange(7))
    with pytest.raises(CutawayError, match="vector cannot be taken apart"):
        Weight("Q4_1", (32,), np.zeros((1, 20), np.uint8)).row_slice(0, 16)


@pytest.mark.parametrize(
    ("kind", "shape", "rows", "message"),
    [
        ("IQ2_XXS", (1, 256), np.zeros((1, 66), np.uint8), "IQ2_XXS cannot be computed with"),
        ("Q4_1", (2, 48), np.zeros((2, 30), np.uint8), "48 weights is no whole number of Q4_1 blocks of 32"),
        ("F32", (2, 3), np.zeros((3, 12), np.uint8), r"needs rows of uint8 \[2, 12\], not uint8 \[3, 12\]"),
        ("F32", (2, 3), np.zeros((2, 12), np.int8), "not int8"),
        ("F32", (), np.zeros((1, 4), np.uint8), "one dimension at least"),
    ],
)
def test_bytes_that_do_not_fit_the_shape_are_refused(
    kind: str, shape: tuple[int, ...], rows: np.ndarray, message: str
) -> None:
    with pytest.raises(CutawayError, match=message):
        Weight(kind, shape, rows)


def test_an_order_outside_the_stored_rows_is_refused() -> None:
    with pytest.raises(CutawayError, match="rows 0 to 1 are stored"):
        Weight("F32", (2, 1), np.zeros((2, 4), np.uint8), order=np.array([0, 2]))


def test_a_vector_reads_as_a_vector() -> None:
    weight = stored((64,), "Q8_0")
    assert weight.dequantise(np.float32).shape == (64,)
    assert np.array_equal(values(weight), dequantise(weight.rows, "Q8_0")[0])
