"""What the server says, byte for byte, and that the page's types are made of it."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from cutaway.serve.protocol import MIDDLE, STEPS, WEIGHT_STEPS
from cutaway.serve.slices import coded, envelope, pooled
from cutaway.serve.typescript import typescript

ROOT = Path(__file__).parents[2]
finite = st.floats(-1e6, 1e6, width=32)
matrices = arrays(np.float64, array_shapes(min_dims=3, max_dims=3, max_side=9), elements=finite)


def read(data: bytes) -> tuple[dict, bytes]:
    length = int.from_bytes(data[:4], "little")
    return json.loads(data[4 : 4 + length]), data[4 + length :]


def test_the_pages_types_are_those_of_the_protocol():
    assert (ROOT / "web/src/protocol.ts").read_text() == typescript(), (
        "run: python -m cutaway.serve.typescript > web/src/protocol.ts"
    )


@given(matrices, st.integers(1, 9), st.integers(1, 9))
def test_a_pooled_cell_is_the_value_of_its_tile_that_is_furthest_from_zero(values, rows, columns):
    small = pooled(values, rows, columns)
    assert small.shape == (values.shape[0], min(rows, values.shape[1]), min(columns, values.shape[2]))
    assert set(np.abs(small).ravel()) <= set(np.abs(values).ravel())
    assert np.abs(small).max() == np.abs(values).max()


def test_pooling_keeps_the_sign_and_what_is_hidden_stays_hidden_only_where_all_of_a_tile_is():
    values = np.array([[[1.0, -3.0, np.nan, np.nan], [2.0, 2.5, 4.0, np.nan]]])
    np.testing.assert_array_equal(pooled(values, 1, 2), [[[-3.0, 4.0]]])
    np.testing.assert_array_equal(pooled(values, 2, 2), [[[-3.0, np.nan], [2.5, 4.0]]])


@given(matrices)
def test_codes_hold_a_value_to_half_a_step_of_their_scale(values):
    codes, scale, largest, beyond = coded(values, "signed")
    back = (codes.astype(float) - MIDDLE) / STEPS * scale
    assert largest == np.abs(values).max()
    assert beyond == (np.abs(values) > scale).sum()
    np.testing.assert_allclose(back, np.clip(values, -scale, scale), atol=scale / STEPS / 2 + 1e-12)


def test_outliers_do_not_stretch_the_scale_of_all_others():
    values = np.random.default_rng(0).standard_normal((1, 50, 50))
    values[0, 0, 0] = 1e5
    _, scale, largest, beyond = coded(values, "signed")
    assert 2 < scale < 4 and largest == 1e5 and beyond >= 1


def test_weights_and_hidden_cells_have_codes_of_their_own():
    codes, scale, *_ = coded(np.array([[[0.0, 1.0, 0.5, np.nan]]]), "weights")
    assert codes.ravel().tolist() == [1, 1 + WEIGHT_STEPS, 1 + WEIGHT_STEPS // 2, 0] and scale == 1.0


@pytest.mark.parametrize("format", ["u8", "f32"])
def test_numbers_begin_and_end_at_multiples_of_eight(format):
    values = np.arange(15.0).reshape(1, 3, 5)
    data = envelope("embed.out", values, "signed", format, (0, 2, 1), 99, 99)
    header, body = read(data)
    assert len(data) % 8 == 0 and (len(data) - len(body)) % 8 == 0
    assert header["shape"] == [1, 3, 5] and header["start"] == [0, 2, 1] and header["point"] == "embed.out"
    if format == "f32":
        np.testing.assert_array_equal(np.frombuffer(body, "<f4", 15).reshape(1, 3, 5), values)
