"""What is kept of a pass can be chosen to the head and the row, reduced on the fly, and is billed before the run."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_bill import WIDE

from cutaway import CutawayError
from cutaway.engines import make_engine
from cutaway.engines.numpy import NumpyEngine
from cutaway.points import POINTS, Point, points_of, shape_of
from cutaway.spec.catalog import llama_like
from cutaway.trace.capture.recorder import Cut
from cutaway.trace.edits import Scale, Zero
from random_models import GPT2, LIKE, LLAMA, POST, random_ids, random_model, specs

# Choosing heads, choosing by a function


@pytest.mark.parametrize("like", LIKE)
@pytest.mark.parametrize("heads", [[0], [2, 0], [1]])
@pytest.mark.parametrize("positions", [None, [3, 1], [-1]])
def test_heads_choose_a_part_of_every_point_that_has_heads(like, heads, positions):
    spec = LIKE[like]
    model, ids = random_model(spec), random_ids(spec, 6)
    whole = model.trace(ids, points=["*"])
    part = model.trace(ids, points=["*"], heads=heads, positions=positions)
    group = spec.layers[0].attention.n_heads // spec.layers[0].attention.n_kv_heads
    for point in points_of(spec):
        expected, symbols = whole[point], point.info.shape
        if "H" in symbols:
            expected = expected[heads]
        elif "H_kv" in symbols:
            expected = expected[sorted({head // group for head in heads})]
        if positions is not None and "T" in symbols:
            expected = np.take(expected, positions, axis=symbols.index("T"))
        assert np.array_equal(part[point], expected), str(point)
    assert part.heads == tuple(heads)


def test_a_head_that_is_not_there_is_refused():
    with pytest.raises(CutawayError, match="Head 4 was asked for; small-llama has heads 0 to 3"):
        random_model(LLAMA).trace([1, 2], heads=[4])
    with pytest.raises(CutawayError, match="heads is 'all'"):
        random_model(LLAMA).trace([1, 2], heads="all")


def test_heads_are_query_heads_in_a_capture_and_the_points_own_in_an_edit():
    model = random_model(LLAMA)  # 4 query heads, 2 key/value heads
    whole = model.trace([1, 2], points=["layers.0.attn.k"])
    part = model.trace([1, 2], points=["layers.0.attn.k"], heads=[3])
    assert np.array_equal(part["layers.0.attn.k"], whole["layers.0.attn.k"][1:])
    with pytest.raises(CutawayError, match=r"layers\.0\.attn\.k has key/value heads 0 to 1"):
        model.trace([1, 2], edits=[Zero("layers.0.attn.k", heads=[3])])


@pytest.mark.parametrize("points", ["layers.0.mlp.act", "layers.0.mlp.act | mean"])
def test_heads_of_points_without_any_are_refused(points):
    model = random_model(LLAMA)
    with pytest.raises(CutawayError, match=r"layers.0.mlp.act is \[T, d_ff\] and has no heads to choose from; leave"):
        model.trace([1, 2], points=[points], heads=[0])
    with pytest.raises(CutawayError, match="no other of the 2 points that were asked for has any"):
        model.trace([1, 2], points=["layers.*.resid_post"], heads=[0])
    both = model.trace([1, 2], points=[points, "layers.0.attn.z"], heads=[0])
    assert both["layers.0.attn.z"].shape[0] == 1


@pytest.mark.parametrize("limit", ["x", True, -1, float("nan"), [5]])
def test_a_limit_that_is_no_number_of_bytes_is_refused(limit):
    with pytest.raises(CutawayError, match="it must be a number of bytes"):
        random_model(LLAMA).trace([1, 2], limit=limit)


def test_a_spill_that_names_no_new_file_is_refused(tmp_path):
    for spill in ("", 5, b"x"):
        with pytest.raises(CutawayError, match="must be the name of a new file"):
            random_model(LLAMA).trace([1, 2], spill=spill)
    with pytest.raises(CutawayError, match="is a folder; name a new file"):
        random_model(LLAMA).trace([1, 2], spill=tmp_path)


def test_a_function_of_a_point_chooses_points():
    model = random_model(LLAMA)
    trace = model.trace([1, 2], points=lambda point: point.layer == 1 and point.name.startswith("mlp"))
    assert trace.points == [f"layers.1.mlp.{name}" for name in ("norm", "gate", "up", "act", "raw", "out")]
    both = model.trace([1, 2], points=["logits", lambda point: point.name == "embed.out"])
    assert both.points == ["embed.out", "logits"]
    with pytest.raises(CutawayError, match="chooses none of the 51 points of small-llama"):
        model.trace([1, 2], points=lambda point: False)


# Reductions


def reduce_by_hand(value, how, axis):
    name, _, count = how.rstrip(")").partition("(")
    if name == "last":
        return np.take(value, -1, axis=axis)
    if name == "mean":
        return value.mean(axis=axis)
    if name == "norm":
        return np.linalg.norm(value, axis=-1)
    order = np.argsort(-value, axis=-1, kind="stable")[..., : int(count)]
    return order if name == "argtop" else np.take_along_axis(value, order, axis=-1)


@given(specs(), st.integers(1, 40), st.data())
def test_a_reduction_on_the_fly_is_that_of_the_whole_value(spec, length, data):
    model, ids = random_model(spec), random_ids(spec, length)
    fitting = [p for p in points_of(spec) if "T" in p.info.shape and p.name not in ("tokens", "moe.chosen")]
    point = data.draw(st.sampled_from(fitting))
    how = data.draw(st.sampled_from(["last", "mean", "norm", "top(3)", "argtop(2)"]))
    positions = data.draw(st.none() | st.lists(st.integers(0, length - 1), min_size=1, max_size=3, unique=True))
    address = f"{point} | {how}"
    by_key = point.name in ("attn.dots", "attn.scores", "attn.masked")
    if by_key and (how in ("mean", "norm") or point.name != "attn.masked"):
        if how != "last":
            with pytest.raises(CutawayError):
                model.trace(ids, points=[address])
        return
    trace = model.trace(ids, points=[address], positions=positions)
    whole = model.trace(ids, points=[str(point)], positions=positions)[point]
    expected = reduce_by_hand(whole, how, point.info.shape.index("T"))
    if how.startswith("argtop"):  # among equal numbers any may come first where they end
        expected, found = (np.take_along_axis(whole, at, axis=-1) for at in (expected, trace[address]))
        assert np.array_equal(found, expected)
    else:
        np.testing.assert_allclose(trace[address], expected, rtol=1e-12, atol=1e-12)
    assert trace.points == [address]


def test_a_pooled_pattern_says_how_much_each_stretch_of_queries_gives_to_each_stretch_of_keys():
    model, ids = random_model(LLAMA), random_ids(LLAMA, 100)
    trace = model.trace(ids, points=["layers.*.attn.pattern | pool(10)", "layers.0.attn.pattern"])
    pooled, whole = trace["layers.0.attn.pattern | pool(10)"], trace["layers.0.attn.pattern"]
    assert pooled.shape == (4, 10, 10)
    np.testing.assert_allclose(pooled, whole.reshape(4, 10, 10, 10, 10).sum(-1).mean(2), atol=1e-12)
    np.testing.assert_allclose(pooled.sum(-1), 1)
    few = model.trace(ids[:7], points=["layers.1.attn.pattern | pool(64)", "layers.1.attn.pattern"])
    np.testing.assert_allclose(few["layers.1.attn.pattern|pool(64)"], few["layers.1.attn.pattern"], atol=1e-12)


def test_a_reduction_of_an_edited_value_is_of_what_was_used():
    model, ids = random_model(LLAMA), random_ids(LLAMA, 30)
    edits = [Scale("layers.0.attn.pattern", 0.5), Zero("layers.1.attn.head_out", heads=[1]), Scale("logits", 2.0)]
    points = ["layers.0.attn.pattern", "layers.1.attn.head_out", "logits"]
    reductions = [f"{point} | {how}" for point in points for how in ("norm", "top(2)")]
    trace = model.trace(ids, points=[*points, *reductions], edits=edits)
    for address in reductions:
        point, how = address.split(" | ")
        expected = reduce_by_hand(trace[point], how, Point(point.split(".", 2)[-1]).info.shape.index("T"))
        np.testing.assert_allclose(trace[address], expected, atol=1e-12)


def test_reductions_are_kept_of_each_step_of_a_generation():
    points = ["layers.0.attn.pattern", "layers.0.attn.pattern | top(2)", "layers.*.resid_post | norm"]
    for step in random_model(LLAMA).generate([1, 2, 3], max_tokens=3, temperature=0, points=points).steps:
        pattern = step.trace["layers.0.attn.pattern"]
        assert np.array_equal(step.trace["layers.0.attn.pattern | top(2)"], -np.sort(-pattern, axis=-1)[..., :2])
        assert step.trace["layers.1.resid_post | norm"].shape == (pattern.shape[1],)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("layers.*.resid_post | median", "'median' is no reduction; it may be last, mean, norm, top"),
        ("layers.*.resid_post | top(0)", "is no reduction"),
        ("layers.*.resid_post | pool(4)", "pool is for attn.pattern"),
        ("layers.*.attn.masked | mean", "it has no mean"),
        ("layers.*.attn.scores | top(2)", r"ask for attn.masked \| top\(2\)"),
        ("tokens | last", "there is nothing in it to reduce"),
        ("layers.*.attn.patern | mean", "the closest are"),
    ],
)
def test_a_reduction_without_a_meaning_is_refused(address, said):
    with pytest.raises(CutawayError, match=said):
        random_model(LLAMA).trace([1, 2], points=[address])


@pytest.mark.parametrize("engine", ["numpy", "cpu"])
def test_at_8000_tokens_every_heads_pattern_is_seen_without_a_t_by_t_array(engine):
    spec = llama_like("long", vocab_size=31, d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, d_ff=16)
    model, ids = random_model(spec, engine=make_engine(engine, "float32"), dtype="float32"), random_ids(spec, 8000)
    tracemalloc.start()
    trace = model.trace(ids, points=["layers.*.attn.pattern | pool(64)", "layers.*.attn.pattern | top(3)"])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    whole = 2 * 8000 * 8000 * 4
    assert peak < whole / 4
    np.testing.assert_allclose(trace["layers.0.attn.pattern | pool(64)"].sum(-1), 1, atol=1e-5)
    assert trace["layers.0.attn.pattern | top(3)"].shape == (2, 8000, 3)


# On disk


def test_a_capture_spilled_to_a_file_reads_the_same_bit_for_bit(tmp_path):
    model, ids = random_model(LLAMA), random_ids(LLAMA, 70)
    points = ["*", "layers.*.attn.pattern | pool(8)"]
    edits = [Scale("layers.1.attn.scores", 0.5)]
    plain = model.trace(ids, points, edits=edits)
    spilled = model.trace(ids, points, edits=edits, spill=tmp_path / "pass.bin", limit=0)
    for point in plain.points:
        assert np.array_equal(plain[point], spilled[point], equal_nan=True), point
    assert (tmp_path / "pass.bin").stat().st_size >= 70 * 70 * 8 * 4
    assert isinstance(spilled._stored.kept[Point("resid_post", 0)], np.memmap)
    with pytest.raises(CutawayError, match=r"There is a file .*pass\.bin already; name a new one"):
        model.trace(ids, points, spill=tmp_path / "pass.bin")
    with pytest.raises(CutawayError, match=r"cannot be spilled to .*No such file or directory"):
        model.trace(ids, points, spill=tmp_path / "missing" / "pass.bin")


def test_a_run_that_fails_leaves_no_file_behind(tmp_path):
    with pytest.raises(CutawayError, match="computes no usable numbers"):
        random_model(LLAMA).trace([1, 2], edits=[Scale("embed.out", np.inf)], spill=tmp_path / "pass.bin")
    assert list(tmp_path.iterdir()) == []


def test_a_spilled_capture_takes_no_memory_of_its_size(tmp_path):
    model, ids = random_model(WIDE, engine=NumpyEngine("float32"), dtype="float32"), random_ids(WIDE, 320)
    points = ["layers.*.resid_post", "layers.*.mlp.act", "layers.*.attn.z"]
    model.trace(ids, points=[])
    tracemalloc.start()
    trace = model.trace(ids, points, spill=tmp_path / "pass.bin")
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held < model.plan(ids, points).bytes / 5
    assert trace["layers.2.mlp.act"].shape == (320, 96)


def test_every_points_shape_is_told_in_numbers():
    for spec in (GPT2, LLAMA, POST):
        trace = random_model(spec).trace(random_ids(spec, 5), points=["*"])
        for point in points_of(spec):
            assert trace[point].shape == shape_of(point, spec, 5)
    assert Cut().heads_of(Point("attn.z", 0), LLAMA) is None
    assert set(POINTS) > {point.name for point in points_of(replace(LLAMA, final_norm=None))}


def test_which_heads_are_meant_is_told_where_a_point_has_fewer_of_them():
    """A capture counts query heads everywhere, an edit a point's own: 4 query heads, 2 key/value heads."""
    model, ids = random_model(LLAMA), random_ids(LLAMA, 5)
    bill = str(model.plan(ids, ["layers.0.attn.k", "layers.0.attn.q", "layers.1.attn.v"], heads=[3]))
    assert bill.count("key/value head 1, which serve the query heads") == 2
    assert "key/value" not in str(model.plan(ids, ["layers.0.attn.k"]))
    with pytest.raises(
        CutawayError, match=r"has key/value heads 0 to 1, which an edit counts; query head 3 is served by 1"
    ):
        model.trace(ids, edits=[Zero("layers.0.attn.k", heads=[3])])
    with pytest.raises(CutawayError, match=r"Head 4 was asked for; layers.0.attn.v has key/value heads 0 to 1\.$"):
        model.trace(ids, edits=[Zero("layers.0.attn.v", heads=[4])])
    with pytest.raises(CutawayError, match=r"Head 4 was asked for; layers.0.attn.z has heads 0 to 3\.$"):
        model.trace(ids, edits=[Zero("layers.0.attn.z", heads=[4])])
