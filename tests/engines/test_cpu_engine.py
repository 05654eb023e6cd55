"""The cpu engine computes what the reference computes, and a row's bits never depend on its company."""

import sys
import threading
from collections.abc import Callable

import gguf
import numpy as np
import pytest
from beside_numpy import assert_close, engine, random, reference
from gguf.quants import quantize
from hypothesis import given
from hypothesis import strategies as st

from cutaway.engines import make_engine
from cutaway.engines.blocks import BLOCKS
from cutaway.engines.cpu.engine import CpuEngine
from cutaway.engines.layout import Layout
from cutaway.engines.numpy import NumpyEngine
from cutaway.engines.protocol import Gain, Linear, Scoring
from cutaway.engines.weights import Weight
from cutaway.errors import CutawayError
from cutaway.spec import ACTIVATIONS

MADE_BY_GGUF = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16")


def stored(kind: str, d_out: int, d_in: int, seed: int = 0) -> Weight:
    """A weight of this kind whose numbers have a usual size."""
    values = random(d_out, d_in, seed=seed)
    if kind in ("F64", "F32", "F16"):
        return Weight.of(values.astype({"F64": "f8", "F32": "f4", "F16": "f2"}[kind]))
    if kind in MADE_BY_GGUF:
        rows = quantize(values, gguf.GGMLQuantizationType[kind])
        return Weight(kind, (d_out, d_in), np.ascontiguousarray(rows).view(np.uint8))
    block = BLOCKS[kind]
    rows = np.random.default_rng(seed).integers(0, 256, (d_out, d_in // block.weights, block.bytes), dtype=np.uint8)
    if kind == "F8_E4M3_128":
        rows[rows & 0x7F == 0x7F] = 0  # not a number
        rows[:, :, :4] = np.frombuffer(np.float32(0.01).tobytes(), np.uint8)
        return Weight(kind, (d_out, d_in), rows.reshape(d_out, -1))
    scales = {"Q2_K": (81, 83), "Q3_K": (109,), "Q4_K": (1, 3), "Q5_K": (1, 3), "Q6_K": (209,)}[kind]
    rows[:, :, list(scales)] = 0x20  # upper bytes of half-precision scales: about 0.008
    return Weight(kind, (d_out, d_in), rows.reshape(d_out, -1))


def product(x: np.ndarray, weight: Weight, layout: Layout, bias: np.ndarray | None = None) -> np.ndarray:
    return engine.linear(x, Linear(weight, bias), layout)


@pytest.mark.parametrize("kind", sorted(BLOCKS))
def test_every_kind_of_weight_is_multiplied_right(kind):
    """Few rows, blocks of 64 and of 256, tiles that do not divide d_out."""
    weight = stored(kind, 75, 512)
    layout = Layout.of([1, 300, 70, 5])
    x = random(layout.rows, 512)
    assert_close(product(x, weight, layout), reference.linear(x.astype(float), Linear(weight), layout))


@given(
    d_out=st.integers(1, 150),
    d_in=st.integers(1, 100),
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=3),
    bias=st.booleans(),
)
def test_products_of_any_shape_are_right(d_out, d_in, lengths, bias):
    weight, layout = stored("F16", d_out, d_in), Layout.of(lengths, [3 * n for n in lengths])
    x = random(layout.rows, d_in)
    added = random(d_out) if bias else None
    exact = reference.linear(x.astype(float), Linear(weight, added), layout)
    length = np.linalg.norm(weight.dequantise(np.float64)) * np.linalg.norm(x, axis=1, keepdims=True)
    assert (np.abs(product(x, weight, layout, added) - exact) <= 1e-6 * (1 + length)).all()


@pytest.mark.parametrize("kind", ["F32", "Q4_1", "Q6_K"])
@given(lengths=st.lists(st.sampled_from([1, 2, 5, 16, 17, 64, 65, 256, 270]), min_size=1, max_size=3))
def test_company_changes_nothing_bit_for_bit(kind, lengths):
    weight = stored(kind, 100, 256)
    layout = Layout.of(lengths)
    x = random(layout.rows, 256)
    together = product(x, weight, layout)
    for segment in layout.segments:
        rows = slice(segment.start, segment.stop)
        assert np.array_equal(together[rows], product(x[rows], weight, Layout.of([segment.length])))


@pytest.mark.parametrize("length", [16, 300])
def test_many_rows_have_the_bits_of_one(length):
    weight, x = stored("Q4_1", 600, 576), random(length, 576)
    together = product(x, weight, Layout.of([length]))
    for row in range(0, length, 7):
        assert np.array_equal(together[row], product(x[row : row + 1], weight, Layout.of([1], [row]))[0])


@pytest.mark.parametrize("d_out", [10, 100, 600])
def test_a_row_has_the_same_bits_in_a_full_block_and_in_one_that_is_padded(d_out):
    weight, x = stored("Q4_1", d_out, 96), random(64, 96)
    full = product(x, weight, Layout.of([64]))
    assert np.array_equal(full[:40], product(x[:40], weight, Layout.of([40])))
    assert np.array_equal(full[20:], product(x[20:], weight, Layout.of([44], [20])))


@pytest.mark.parametrize("kind", sorted(BLOCKS))
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_what_is_0_but_for_some_columns_is_multiplied_by_these_alone_bit_for_bit(kind, rows):
    weight, whole = stored(kind, 70, 1536), np.zeros((rows, 1536), np.float32)
    for first, n in ((0, 64), (320, 64), (1472, 64), (256, 768), (512, 1024)):
        whole[...] = 0
        whole[:, first : first + n] = random(rows, n, seed=first)
        x = whole[:, first : first + n]
        found, block = engine.linear_of_part(x, Linear(weight), first), BLOCKS[kind].weights
        if first % block or n % block:
            assert found is None
        else:
            assert np.array_equal(found, product(whole, weight, Layout.of([rows])))
    assert engine.linear_of_part(x[:, :20], Linear(weight), 20) is None, "its numbers would change their lanes"


def test_a_permuted_weight_is_multiplied_in_its_order():
    weight = stored("Q8_0", 90, 64)
    order = np.random.default_rng(0).permutation(90)
    for length in (3, 80):
        x, layout = random(length, 64), Layout.of([length])
        expected = product(x, weight, layout)[:, order]
        assert_close(product(x, weight.reorder(order), layout), expected.astype(float))


@pytest.mark.parametrize("order", [[0, 1, 90], [0, 1, -1]])
def test_an_order_that_leaves_the_weight_is_refused(order):
    with pytest.raises(CutawayError, match="order"):
        weight = Weight("F32", (3, 8), stored("F32", 3, 8).rows, np.array(order))
        product(random(1, 8), weight, Layout.of([1]))


def test_weights_may_lie_at_any_address_and_be_read_only():
    """A memory map is read-only, and a tensor in it need not be aligned."""
    values = random(70, 33)
    for offset in (0, 1, 2, 3):
        memory = np.zeros(values.nbytes + 8, np.uint8)
        memory[offset : offset + values.nbytes] = values.view(np.uint8).ravel()
        memory.flags.writeable = False
        weight = Weight("F32", (70, 33), memory[offset : offset + values.nbytes].reshape(70, -1))
        for length in (2, 64):
            x, layout = random(length, 33), Layout.of([length])
            assert np.array_equal(product(x, weight, layout), product(x, Weight.of(values), layout))


def test_x_may_be_a_strided_view():
    weight, layout = stored("Q4_0", 40, 64), Layout.of([5])
    wide = random(5, 128)
    assert np.array_equal(
        product(wide[:, ::2], weight, layout), product(np.ascontiguousarray(wide[:, ::2]), weight, layout)
    )


def test_embeddings_are_the_stored_rows():
    weight = stored("Q8_0", 50, 64)
    assert np.array_equal(engine.embed(weight, np.array([7, 0, 7])), weight.dequantise(np.float32)[[7, 0, 7]])


@given(rows=st.integers(1, 40), width=st.integers(1, 150), bias=st.booleans(), shift=st.floats(-3, 3, width=32))
def test_norms_agree_with_the_reference(rows, width, bias, shift):
    x = random(rows, width) + np.float32(shift)
    gain = Gain(random(width, seed=1), random(width, seed=2) if bias else None)
    for name in ("layer_norm", "rms_norm"):
        ours, exact = (getattr(e, name)(e.array(x), gain, 1e-5) for e in (engine, reference))
        # Taking the mean off loses what it is larger than the rest.
        assert (np.abs(ours - exact) <= 1e-4 * (np.linalg.norm(exact, axis=1, keepdims=True) + 1)).all()
        assert np.array_equal(ours[-1], getattr(engine, name)(x[-1:], gain, 1e-5)[0])


@pytest.mark.parametrize("kind", ACTIVATIONS)
@given(rows=st.integers(1, 30), width=st.integers(1, 800), size=st.sampled_from([0.01, 1.0, 10.0]))
def test_activations_agree_with_the_reference(kind, rows, width, size):
    x = random(rows, width) * np.float32(size)
    ours = engine.activate(x, kind)
    assert (np.abs(ours - reference.activate(x.astype(float), kind)) <= 1e-6 * (1 + np.abs(x))).all()
    assert np.array_equal(ours[-1], engine.activate(x[-1:], kind)[0])
    assert np.array_equal(engine.activate(x, kind, times=x), ours * x)


@pytest.mark.parametrize("pairing", ["halves", "adjacent"])
@given(heads=st.integers(1, 4), rows=st.integers(1, 20), d_head=st.integers(2, 70), data=st.data())
def test_rotation_agrees_with_the_reference(pairing, heads, rows, d_head, data):
    pairs = data.draw(st.integers(1, d_head // 2))
    x = random(rows, heads, d_head).swapaxes(0, 1)  # as the stages have it: a view of [T, H · d_head]
    angles = random(rows, pairs)
    cosines, sines = np.cos(angles), np.sin(angles)
    exact = reference.rotate(x.astype(float), cosines.astype(float), sines.astype(float), pairing)
    assert_close(engine.rotate(x, cosines, sines, pairing), exact)


def test_in_place_work_reaches_a_strided_view():
    whole = random(2, 3, 20)
    view = whole[:, :, 3:11]
    expected = reference.softmax(view.astype(float))
    engine.softmax(view)
    assert_close(np.ascontiguousarray(whole[:, :, 3:11]), expected)


def test_nan_is_never_hidden():
    x = random(70, 64)
    x[40, 3] = np.nan
    weight, layout = stored("F32", 30, 64), Layout.of([70])
    assert np.isnan(product(x, weight, layout)[40]).all()
    assert np.isnan(engine.rms_norm(x, Gain(np.ones(64, np.float32)), 1e-5)[40]).all()
    scores = engine.dots(x[None, 38:42], random(1, 9, 64))
    assert np.isnan(engine.softmax(scores)[0, 2]).all()


@pytest.mark.parametrize("made", [CpuEngine(), NumpyEngine("float32")], ids=["cpu", "numpy"])
def test_a_row_too_large_to_norm_is_no_row_of_zeros(made):
    """Its squares leave float32; x / infinity would be zeros, which nobody could tell from a result."""
    x = random(3, 40)
    x[1] *= np.float32(1e30)
    gain = Gain(np.ones(40, np.float32))
    with np.errstate(all="ignore"):
        for normed in (made.rms_norm(x, gain, 1e-5), made.layer_norm(x, gain, 1e-5)):
            assert np.isnan(normed[1]).all() and np.isfinite(normed[[0, 2]]).all()


def test_several_threads_may_use_one_engine_at_once():
    weight, layout = stored("Q4_1", 300, 256), Layout.of([3, 80])
    inputs = [random(layout.rows, 256, seed=i) for i in range(4)]
    alone = [product(x, weight, layout) for x in inputs]
    wrong: list[int] = []

    def repeat(i: int) -> None:
        wrong.extend(i for _ in range(30) if not np.array_equal(product(inputs[i], weight, layout), alone[i]))

    workers = [threading.Thread(target=repeat, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_no_float_copy_of_a_weight_is_kept():
    """4 million weights in 2.5 MB; the engine's own memory stays far below the 16 MB of their floats."""
    import tracemalloc

    weight = stored("Q4_1", 8192, 512)
    x, layout = random(64, 512), Layout.of([64])
    product(x, weight, layout)
    tracemalloc.start()
    try:
        fresh = CpuEngine()
        y = fresh.linear(x, Linear(weight), layout)
        few = fresh.linear(x[:3], Linear(weight), Layout.of([3]))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak - y.nbytes - few.nbytes < 6e6


MISTAKES: list[Callable[[], object]] = [
    lambda: product(random(2, 9), stored("F32", 3, 8), Layout.of([2])),
    lambda: product(random(2, 8), stored("F32", 3, 8), Layout.of([3])),
    lambda: engine.linear_of_part(random(2, 16), Linear(stored("F32", 3, 40)), 32),
    lambda: engine.rms_norm(random(2, 8), Gain(random(7)), 1e-5),
    lambda: engine.layer_norm(random(2, 8), Gain(random(8), random(7)), 1e-5),
    lambda: engine.rotate(random(2, 3, 8), random(2, 4), random(2, 4), "halves"),
    lambda: engine.rotate(random(2, 3, 8), random(3, 5), random(3, 5), "halves"),
    lambda: engine.dots(random(3, 1, 8), random(2, 5, 8)),
    lambda: engine.dots(random(2, 1, 8), random(2, 5, 7)),
    lambda: engine.square(
        "attn.dots", random(2, 3, 8), random(2, 3, 8), Scoring(1.0, np.zeros(2, int), np.ones(2, int))
    ),
    lambda: engine.mix(random(2, 1, 8), random(2, 5, 7)),
    lambda: engine.mask(random(2, 3, 8), np.zeros(2, int), np.zeros(3, int)),
]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_shapes_that_do_not_fit_are_refused_before_a_kernel_reads_them(mistake):
    with pytest.raises(CutawayError, match=r"\[\d"):
        mistake()


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("auto", None, ("cpu", "float32")),
        ("auto", "float32", ("cpu", "float32")),
        ("auto", "float64", ("numpy", "float64")),
        ("cpu", None, ("cpu", "float32")),
        ("numpy", np.float32, ("numpy", "float32")),
        ("numpy", None, ("numpy", "float64")),
    ],
)
def test_an_engine_is_made_by_name(name, dtype, expected):
    made = make_engine(name, dtype)
    assert (made.name, made.dtype.name) == expected
    assert made.note is None


@pytest.mark.parametrize(
    ("name", "dtype", "told"),
    [
        ("gpu", None, "auto, cpu, numpy"),
        ("auto", "float16", "float32 and float64"),
        ("numpy", "nonsense", "float32 and float64"),
        ("cpu", "float64", "numpy engine"),
    ],
)
def test_an_engine_that_cannot_be_had_is_refused_with_the_choices(name, dtype, told):
    with pytest.raises(CutawayError, match=told):
        make_engine(name, dtype)


def test_without_numba_numpy_computes_and_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path))  # where no kernel has been compiled yet
    monkeypatch.setitem(sys.modules, "numba", None)
    for module in [name for name in sys.modules if name.startswith("cutaway.engines.cpu.")]:
        monkeypatch.delitem(sys.modules, module)
    made = make_engine()
    assert (made.name, made.dtype.name) == ("numpy", "float32")
    assert made.note is not None and "Numba" in made.note
    with pytest.raises(CutawayError, match="Numba"):
        make_engine("cpu")


def test_a_product_of_no_rows_runs_no_kernel(monkeypatch):
    """A pass of which nobody wants logits has none; a kernel would write before the beginning of the result."""
    import cutaway.engines.cpu.engine as module

    monkeypatch.setattr(module, "few_rows", lambda kind: pytest.fail("a kernel was called"))
    weight = Weight.of(np.ones((5, 4), np.float32))
    for bias in (None, np.ones(5, np.float32)):
        y = engine.linear(np.empty((0, 4), np.float32), Linear(weight, bias), Layout.of([]))
        assert y.shape == (0, 5)
