"""The reference engine against independent implementations: torch, the standard library, complex numbers."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from cutaway import CutawayError
from cutaway.engines.layout import Layout
from cutaway.engines.numpy import NumpyEngine
from cutaway.engines.protocol import Gain, Linear
from cutaway.engines.weights import Weight
from cutaway.spec import ACTIVATIONS

ENGINE = NumpyEngine("float64")
BOTH = pytest.mark.parametrize("engine", [NumpyEngine("float64"), NumpyEngine("float32")], ids=lambda e: e.dtype.name)
IN_TORCH = {
    "relu": torch.nn.functional.relu,
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


def ordinary(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape) * scale


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_an_activation_is_the_one_torch_computes(kind):
    x = np.concatenate([np.linspace(-40, 40, 4001), [-800.0, -0.0, 0.0, 800.0]])
    before = x.copy()
    np.testing.assert_allclose(
        ENGINE.activate(x, kind), IN_TORCH[kind](torch.tensor(x)).numpy(), rtol=1e-12, atol=1e-12
    )
    assert np.array_equal(x, before)  # in a new array


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_an_activation_in_float32_stays_finite_and_float32(kind):
    x = np.array([-3e38, -100, -1, 0, 1, 100], np.float32)
    with np.errstate(all="raise", under="ignore"):
        y = NumpyEngine("float32").activate(x[1:], kind)
    assert y.dtype == np.float32
    assert np.isfinite(y).all()
    expected = IN_TORCH[kind](torch.tensor(x[1:], dtype=torch.float64)).numpy()
    np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("eps", [1e-5, 1e-12])
def test_layer_norm_is_torchs(bias, eps):
    x, gain = ordinary(7, 13, scale=3) + 5, ordinary(13, seed=1)
    shift = ordinary(13, seed=2) if bias else None
    to = torch.tensor
    expected = torch.nn.functional.layer_norm(to(x), (13,), to(gain), to(shift) if bias else None, eps)
    np.testing.assert_allclose(ENGINE.layer_norm(x, Gain(gain, shift), eps), expected.numpy(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_rms_norm_is_torchs(eps):
    x, gain = ordinary(7, 13, scale=3) + 5, ordinary(13, seed=1)
    expected = torch.nn.functional.rms_norm(torch.tensor(x), (13,), torch.tensor(gain), eps)
    np.testing.assert_allclose(ENGINE.rms_norm(x, Gain(gain), eps), expected.numpy(), rtol=1e-12, atol=1e-12)


@BOTH
def test_a_norm_of_a_row_of_zeros_is_its_bias(engine):
    gain, bias = engine.array(ordinary(5)), engine.array(ordinary(5, seed=1))
    zeros = engine.array(np.zeros((2, 5)))
    for norm in (engine.layer_norm, engine.rms_norm):
        assert np.array_equal(norm(zeros, Gain(gain, bias), 1e-5), np.stack([bias, bias]))
        assert np.array_equal(norm(zeros, Gain(gain), 1e-5), zeros)


@given(st.sampled_from(("halves", "adjacent")), st.integers(1, 3), st.integers(0, 4), st.integers(0, 99))
def test_rotation_is_multiplication_by_a_complex_number_of_length_1(pairing, half, rest, seed):
    dims = 2 * half
    x = ordinary(2, 5, dims + rest, seed=seed)
    angles = ordinary(5, half, seed=seed + 1, scale=3)
    turned = ENGINE.rotate(x, np.cos(angles), np.sin(angles), pairing)
    pairs = {
        "halves": [(i, i + half) for i in range(half)],
        "adjacent": [(2 * i, 2 * i + 1) for i in range(half)],
    }[pairing]
    for number, (real, imaginary) in enumerate(pairs):
        expected = (x[..., real] + 1j * x[..., imaginary]) * np.exp(1j * angles[:, number])
        np.testing.assert_allclose(turned[..., real] + 1j * turned[..., imaginary], expected, atol=1e-12)
    assert np.array_equal(turned[..., dims:], x[..., dims:])


def test_rotation_leaves_what_it_was_given_alone():
    x = ordinary(1, 3, 4)
    before = x.copy()
    ENGINE.rotate(x, np.cos(np.ones((3, 2))), np.sin(np.ones((3, 2))), "halves")
    assert np.array_equal(x, before)


def test_query_heads_share_key_heads_in_neighbouring_groups():
    """GQA's order: heads 0 and 1 read key head 0, heads 2 and 3 key head 1; never 0 and 2."""
    q, k, v = ordinary(4, 5, 3), ordinary(2, 6, 3, seed=1), ordinary(2, 6, 3, seed=2)
    dots = ENGINE.dots(q, k)
    pattern = ENGINE.softmax(dots.copy())
    mixed = ENGINE.mix(pattern, v)
    for head, shared in enumerate([0, 0, 1, 1]):
        np.testing.assert_allclose(dots[head], q[head] @ k[shared].T, atol=1e-14)
        np.testing.assert_allclose(mixed[head], pattern[head] @ v[shared], atol=1e-14)


@BOTH
def test_the_mask_hides_exactly_what_is_outside_the_half_open_range(engine):
    scores = engine.array(ordinary(2, 3, 5))
    before = scores.copy()
    first, last = np.array([0, 1, 2]), np.array([1, 4, 5])
    masked = engine.mask(scores, first, last)
    assert masked is scores
    for row in range(3):
        seen = np.arange(first[row], last[row])
        hidden = np.setdiff1d(np.arange(5), seen)
        assert np.array_equal(masked[:, row, seen], before[:, row, seen])
        assert np.isneginf(masked[:, row, hidden]).all()


@BOTH
def test_one_visible_key_gets_all_the_weight_and_hidden_ones_exactly_none(engine):
    masked = engine.array(np.full((1, 2, 4), -np.inf))
    masked[0, 0, 2] = -1e30
    masked[0, 1, 0] = 1e30
    assert engine.softmax(masked).tolist() == [[[0, 0, 1, 0], [1, 0, 0, 0]]]


@given(arrays(np.float64, (3, 5), elements=st.floats(-1e6, 1e6)))
def test_softmax_is_torchs_and_sums_to_1(x):
    p = ENGINE.softmax(x.copy())
    np.testing.assert_allclose(p, torch.softmax(torch.tensor(x), -1).numpy(), rtol=1e-12, atol=1e-300)
    np.testing.assert_allclose(p.sum(-1), 1, atol=1e-14)


def test_scaling_and_softmax_work_in_place():
    x = ordinary(1, 2, 3)
    assert ENGINE.scale(x, 0.5) is x
    assert ENGINE.softmax(x) is x


@BOTH
@pytest.mark.parametrize("length", [1, 16, 17, 64, 65, 100, 256, 300])
def test_a_product_is_x_times_w_plus_b(engine, length):
    x, w, b = ordinary(length, 21), ordinary(19, 21, seed=1), ordinary(19, seed=2)
    y = engine.linear(engine.array(x), Linear(Weight.of(w), engine.array(b)), Layout.of([length]))
    tolerance = 1e-12 if engine.dtype == np.float64 else 1e-5
    np.testing.assert_allclose(y, x @ w.T + b, rtol=tolerance, atol=tolerance)
    assert y.dtype == engine.dtype


@given(st.lists(st.integers(1, 330), min_size=2, max_size=4), st.integers(0, 99), st.data())
def test_a_sequence_is_multiplied_to_the_same_bits_alone_and_in_company(lengths, seed, data):
    engine = NumpyEngine("float32")
    layout = Layout.of(lengths)
    x = ordinary(layout.rows, 24, seed=seed).astype(np.float32)
    linear = Linear(Weight.of(ordinary(30, 24, seed=seed + 1).astype(np.float32)))
    together = engine.linear(x, linear, layout)
    which = data.draw(st.integers(0, len(lengths) - 1))
    mine = slice(layout.segments[which].start, layout.segments[which].stop)
    alone = engine.linear(x[mine].copy(), linear, Layout.of([lengths[which]]))
    assert np.array_equal(alone, together[mine])


@given(st.integers(2, 200), st.data())
def test_a_row_of_a_product_depends_on_no_other_row(length, data):
    engine = NumpyEngine("float32")
    x = ordinary(length, 24).astype(np.float32)
    linear = Linear(Weight.of(ordinary(30, 24, seed=1).astype(np.float32)))
    row = data.draw(st.integers(0, length - 1))
    others = x * 3 + 1
    others[row] = x[row]
    layout = Layout.of([length])
    assert np.array_equal(engine.linear(x, linear, layout)[row], engine.linear(others, linear, layout)[row])


@BOTH
def test_embedding_takes_rows_and_refuses_ids_that_are_not_there(engine):
    table = ordinary(6, 4)
    rows = engine.embed(Weight.of(table), np.array([5, 0, 5]))
    assert np.array_equal(rows, table[[5, 0, 5]].astype(engine.dtype))
    for outside in (-1, 6):
        with pytest.raises(CutawayError, match=f"Row {outside} was asked for; the weight has 6 rows"):
            engine.embed(Weight.of(table), np.array([0, outside]))


def test_another_precision_is_refused():
    with pytest.raises(CutawayError, match="The numpy engine computes in float64 or float32, not in float16"):
        NumpyEngine("float16")


@BOTH
def test_a_copy_is_a_copy_and_arrays_are_the_engines_own(engine):
    values = engine.array([[1, 2], [3, 4]])
    copied = engine.copy(values)
    copied[0, 0] = 9
    assert values[0, 0] == 1
    assert values.dtype == engine.dtype == engine.empty((2, 3)).dtype
    assert engine.numpy(values) is values


def test_of_several_threads_one_unpacks_a_weight_and_all_use_what_it_made(monkeypatch):
    weight, unpacked, gate = Weight.of(ordinary(4, 3)), [], threading.Barrier(4)
    right = Weight.dequantise

    def slowly(self, *arguments):
        unpacked.append(self)
        threading.Event().wait(0.05)  # long enough for the others to come by
        return right(self, *arguments)

    monkeypatch.setattr(Weight, "dequantise", slowly)
    engine, x = NumpyEngine("float64"), ordinary(2, 3, seed=1)

    def multiply(_: int) -> np.ndarray:
        gate.wait()
        return engine.linear(x, Linear(weight), Layout.of([2]))

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(multiply, range(4)))
    assert unpacked == [weight]
    assert all(np.array_equal(one, found[0]) for one in found)
