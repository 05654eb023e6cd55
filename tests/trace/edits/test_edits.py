"""An edit does what writing the same numbers into the pass by hand does, at every point, and tells what it did."""

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutaway import CutawayError
from cutaway.engines import make_engine
from cutaway.engines.layout import Layout
from cutaway.engines.numpy import NumpyEngine
from cutaway.forward.transformer import transformer
from cutaway.points import POINTS, ROW_BLOCKS, Point, points_of
from cutaway.trace.edits import (
    Add,
    Drop,
    Freeze,
    Function,
    Keep,
    Knockout,
    Mean,
    Replace,
    Resample,
    Scale,
    Zero,
    difference_of_means,
)
from random_models import GPT2, LIKE, LLAMA, POST, by_hand, random_ids, random_model, specs


def setting(index, number):
    def write(value, start):
        value[index] = number
        return value

    return write


Z, RAW, HEAD_OUT = Point("attn.z", 1), Point("attn.raw", 0), Point("attn.head_out", 1)
STREAM, PATTERN, MASKED = Point("resid_mid", 0), Point("attn.pattern", 0), Point("attn.masked", 1)


def other_row(value, start):
    value[2:4] += 3.0 * np.arange(value.shape[1])
    return value


def cut_edges(value, start):
    for query, key in ((5, 2), (6, 0)):
        if start <= query < start + value.shape[1]:
            value[0, query - start, key] = -np.inf
    return value


def halved_rows(value, start):
    for query in (3, 4):
        if start <= query < start + value.shape[1]:
            value[:, query - start] *= 0.5
    return value


KINDS = {
    "zero of a head": (Zero("layers.1.attn.z", heads=[1]), {Z: setting(1, 0)}),
    "zero of positions": (Zero("layers.0.resid_mid", positions=[-1, 0]), {STREAM: setting([0, 8], 0)}),
    "zero of a neuron": (Zero("layers.0.mlp.act", neurons=[2]), {Point("mlp.act", 0): setting((..., 2), 0)}),
    "mean": (Mean("layers.0.attn.raw"), {RAW: lambda v, _: np.broadcast_to(v.mean(0), v.shape).copy()}),
    "an array": (Replace("layers.1.attn.z", np.ones((3, 9, 4)), heads=[2]), {Z: setting(2, 1)}),
    "one row for all": (Replace("layers.0.attn.raw", np.arange(12.0)), {RAW: setting(..., np.arange(12.0))}),
    "steering": (Add("layers.0.resid_mid", np.arange(12.0), 3.0, positions="2:4"), {STREAM: other_row}),
    "scale": (Scale("layers.0.attn.raw", 0.25), {RAW: lambda v, _: v * 0.25}),
    "a scaled pattern": (Scale("layers.0.attn.pattern", 0.5, positions=[3, 4]), {PATTERN: halved_rows}),
    "knocked-out edges": (Knockout("layers.1.attn.masked", [[5, 2], [6, 0]], heads=[0]), {MASKED: cut_edges}),
    "a dropped head": (Drop("layers.1.attn.z", heads=[0]), {Z: setting(0, 0)}),
    "one kept head": (Keep("layers.1.attn.z", heads=[0]), {Z: setting([1, 2], 0)}),
    "one kept position": (Keep("layers.0.attn.raw", positions=[4]), {RAW: setting([0, 1, 2, 3, 5, 6, 7, 8], 0)}),
    "a function": (Function("layers.0.attn.raw", lambda v, _: np.tanh(v)), {RAW: lambda v, _: np.tanh(v)}),
    "a head's part": (Zero("layers.1.attn.head_out", heads=[2], positions=[3]), {HEAD_OUT: setting((2, 3), 0)}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_edit_gives_what_writing_the_same_by_hand_gives(kind):
    edit, write = KINDS[kind]
    model, ids = random_model(GPT2), random_ids(GPT2, 9)
    expected, shown = by_hand(model, ids, write)
    trace = model.trace(ids, points=["*"], edits=[edit])
    assert np.array_equal(trace.logits, expected)
    assert np.array_equal(trace.last_logits, expected[-1])
    for point in trace.points:
        address = Point(*reversed(point.split(".", 2)[1:])) if point.startswith("layers.") else Point(point)
        address = Point(address.name, None if address.layer is None else int(address.layer))
        if address in shown and address.name not in ("logits", "attn.head_out"):
            assert np.array_equal(trace[point], shown[address]), point
    assert not np.array_equal(expected, model.trace(ids, points=["logits"]).logits)


@given(specs(), st.integers(1, 30), st.data())
def test_any_point_of_any_model_can_be_overwritten_and_everything_after_follows(spec, length, data):
    if spec.headless:
        return
    model, ids = random_model(spec), random_ids(spec, length)
    left_out = ("tokens", "pooler.out", "moe.chosen", "attn.masked", "attn.head_out", "logits")
    point = data.draw(st.sampled_from([p for p in points_of(spec) if p.name not in left_out]))
    expected, _ = by_hand(model, ids, {point: lambda value, start: value * 0.5})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # where all there is happens to be 0
        trace = model.trace(ids, points=["logits"], edits=[Scale(str(point), 0.5)])
    np.testing.assert_allclose(trace.logits, expected, rtol=1e-12, atol=1e-12)
    assert trace.edits[0].elements > 0


# Identities


@pytest.mark.parametrize("spec", [GPT2, LLAMA], ids=lambda spec: spec.name)
@pytest.mark.parametrize("point", ["attn.z", "attn.head_out"])
def test_without_all_heads_the_stream_passes_attention_with_the_bias_alone(spec, point):
    model, ids = random_model(spec), random_ids(spec, 20)
    trace = model.trace(ids, points=["*"], edits=[Zero(f"layers.*.{point}")])
    for i in range(spec.n_layers):
        bias = model.parameters.layers[i]["attn.o"].bias
        expected = trace[f"layers.{i}.resid_pre"] + (0 if bias is None else bias)
        assert np.array_equal(trace[f"layers.{i}.resid_mid"], expected)


@pytest.mark.parametrize("engine", ["numpy", "cpu"])
@pytest.mark.parametrize("like", LIKE)
@pytest.mark.parametrize("length", [5, 70])
def test_a_patch_from_the_same_run_changes_nothing_bit_for_bit(like, engine, length):
    spec = LIKE[like]
    model, ids = random_model(spec, engine=make_engine(engine, "float32")), random_ids(spec, length)
    plain = model.trace(ids, points=["*"])
    for pattern in ["layers.*.resid_p*", *(str(p) for p in points_of(spec) if p.layer == 1), "embed.out"]:
        if POINTS[pattern.split(".", 2)[2] if pattern.startswith("layers.1") else "logits"].shape == ("T",):
            continue
        with pytest.warns(UserWarning, match="changed nothing"):
            patched = model.trace(ids, points=["*"], edits=[Replace(pattern, plain)])
        assert np.array_equal(patched.last_logits, plain.last_logits), pattern
        known = [p for p in plain.points if not p.endswith(("dots", "scores"))]
        assert all(np.array_equal(patched[point], plain[point]) for point in known), pattern
        assert patched.edits[0].elements > 0 and patched.edits[0].changed == 0


@given(specs(), st.integers(1, 30), st.data())
def test_looking_changes_no_bit_of_an_edited_run(spec, length, data):
    model, ids = random_model(spec, engine=NumpyEngine("float32")), random_ids(spec, length)
    names = ("resid_pre", "attn.z", "attn.pattern", "attn.scores", "mlp.out", "attn.head_out")
    point = data.draw(st.sampled_from([str(p) for p in points_of(spec) if p.name in names]))
    edits = [Scale(point, 0.5)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        plain, watched = model.trace(ids, points=[], edits=edits), model.trace(ids, points=["*"], edits=edits)
    _ = [watched[point] for point in watched.points]
    if not spec.headless:
        assert np.array_equal(plain.last_logits, watched.last_logits)


@pytest.mark.parametrize("like", LIKE)
@pytest.mark.parametrize("point", ROW_BLOCKS)
def test_of_an_edited_pattern_the_trace_holds_what_was_used(like, point):
    spec = LIKE[like]
    model, ids = random_model(spec), random_ids(spec, 12)
    edit = Scale(f"layers.1.{point}", 0.5) if point != "attn.masked" else Drop("layers.1.attn.masked", keys=[2])
    trace = model.trace(ids, points=["*"], edits=[edit])
    group = spec.layers[1].attention.n_heads // spec.layers[1].attention.n_kv_heads
    v = np.repeat(trace["layers.1.attn.v"], group, axis=0)
    np.testing.assert_allclose(trace["layers.1.attn.pattern"] @ v, trace["layers.1.attn.z"], atol=1e-12)
    untouched = model.trace(ids, points=["layers.1.attn.pattern"])
    assert not np.allclose(trace["layers.1.attn.pattern"], untouched["layers.1.attn.pattern"])


def test_an_edited_pattern_is_the_same_whole_and_of_chosen_positions():
    model, ids = random_model(LLAMA), random_ids(LLAMA, 30)
    edits = [Drop("layers.0.attn.masked", keys=[2]), Scale("layers.1.attn.scores", 2.0)]
    whole = model.trace(ids, points=["*"], edits=edits)
    part = model.trace(ids, points=["*"], positions=[29, 4], edits=edits)
    for name in ("attn.pattern", "attn.masked", "attn.z", "resid_post"):
        for layer in range(2):
            axis = POINTS[name].shape.index("T")
            expected = np.take(whole[f"layers.{layer}.{name}"], [29, 4], axis=axis)
            assert np.array_equal(part[f"layers.{layer}.{name}"], expected)


# Nothing outlives a run


@pytest.mark.parametrize("engine", ["numpy", "cpu"])
def test_edits_write_into_nothing_that_anybody_else_holds(engine):
    model, ids = random_model(LLAMA, engine=make_engine(engine, "float32"), dtype="float32"), random_ids(LLAMA, 9)
    weights = {name: weight.dequantise(np.float32).copy() for name, weight in model.parameters.stored.items()}
    plain = model.trace(ids, points=["*"])
    before = {point: plain[point].copy() for point in plain.points}
    everywhere = [Scale(str(p), 0.5) for p in points_of(LLAMA) if p.name not in ("tokens", "attn.masked")]
    model.trace(ids, points=["*"], edits=[*everywhere, Replace("layers.1.attn.z", plain, heads=[0])])
    assert all(np.array_equal(plain[point], before[point]) for point in plain.points)
    again = model.trace(ids, points=["*"])
    assert all(np.array_equal(again[point], before[point]) for point in again.points)
    for name, weight in model.parameters.stored.items():
        assert np.array_equal(weight.dequantise(np.float32), weights[name])


def test_an_earlier_point_keeps_its_value_when_the_same_array_is_edited_later():
    """layers.0.resid_post and layers.1.resid_pre are one array until somebody edits it."""
    model, ids = random_model(LLAMA), random_ids(LLAMA, 6)
    plain = model.trace(ids, points=["*"])
    trace = model.trace(ids, points=["*"], edits=[Zero("layers.1.resid_pre")])
    assert np.array_equal(trace["layers.0.resid_post"], plain["layers.0.resid_post"])
    assert not trace["layers.1.resid_pre"].any()


# What an edit tells


def test_every_edit_tells_where_it_fired_on_how_much_and_how_far_the_logits_moved():
    model, ids = random_model(LLAMA), random_ids(LLAMA, 6)
    edits = [Zero("layers.*.attn.z", heads=[1]), Scale("layers.1.mlp.out", 2.0, positions=[-1])]
    trace = model.trace(ids, points=[], edits=edits)
    assert trace.edits[0].fired == {"layers.0.attn.z": 36, "layers.1.attn.z": 36}
    assert trace.edits[1].fired == {"layers.1.mlp.out": 12}
    assert (trace.edits[0].elements, trace.edits[0].changed) == (72, 72)
    plain = model.trace(ids, points=[]).last_logits
    alone = [model.trace(ids, points=[], edits=[edit]).last_logits for edit in edits]
    for report, logits in zip(trace.edits, alone, strict=True):
        assert report.moved.largest == np.abs(logits - plain).max() > 0
        assert report.moved.divergence > 0
    assert np.array_equal(trace.edited.unedited_logits, plain)
    assert trace.edited.moved.largest == np.abs(trace.last_logits - plain).max()
    assert "fired at layers.1.mlp.out; 12 of 12 elements changed" in str(trace.edits[1])
    assert repr(trace.edits[1]) == f"<{trace.edits[1]}>"


def test_how_far_the_logits_moved_is_not_worked_out_unless_somebody_asks():
    class Counting(NumpyEngine):
        embedded = 0

        def embed(self, weight, ids):
            self.embedded += 1
            return super().embed(weight, ids)

    engine = Counting("float64")
    trace = random_model(LLAMA, engine=engine).trace([1, 2, 3], points=[], edits=[Zero("layers.0.attn.z")])
    assert engine.embedded == 1
    _ = trace.edits[0].moved
    assert engine.embedded == 2
    _ = trace.edits[0].moved, trace.edited.moved
    assert engine.embedded == 2


def test_an_edit_that_changes_no_number_is_warned_of():
    with pytest.warns(UserWarning, match="scale at layers.0.attn.z changed nothing: all 72 numbers"):
        random_model(LLAMA).trace([1, 2, 3], edits=[Scale("layers.0.attn.z", 1.0)])


REFUSED = [
    (Zero("layers.0.attn.q_rot"), GPT2, "learned positions, nothing turns its queries"),
    (Zero("layers.9.attn.z"), GPT2, "layers 0 to 1"),
    (Zero("layers.0.attn.z", heads=[3]), GPT2, "Head 3 was asked for; layers.0.attn.z has heads 0 to 2"),
    (Zero("layers.0.attn.k", heads=[2]), LLAMA, "Head 2 was asked for; layers.0.attn.k has key/value heads 0 to 1"),
    (Zero("layers.0.attn.z", positions=[6]), GPT2, "Position 6 was asked for; the prompt has positions 0 to 5"),
    (Zero("layers.0.attn.z", positions="6:"), GPT2, "positions '6:' hold none of the prompt's 0 to 5"),
    (Zero("layers.0.resid_post", heads=[0]), GPT2, r"layers.0.resid_post is \[T, d\] and has no heads"),
    (Zero("layers.0.mlp.act", neurons=[48]), GPT2, "Neuron 48 was asked for"),
    (Zero("tokens"), GPT2, "tokens cannot be edited: give another prompt"),
    (Knockout("layers.0.attn.masked", [[2, 4]]), GPT2, "fired nowhere: none of these queries may see that key"),
    (Knockout("layers.0.attn.z", [[2, 1]]), GPT2, "An edge is cut at attn.masked"),
    (Knockout("layers.0.attn.masked", [[0, 0]]), GPT2, "leaves query 0 of head 0 no key to listen to"),
    (Add("layers.0.resid_post", np.ones(5)), GPT2, r"vector has shape \[5\] and what it is added to \[6, 12\]"),
    (Function("layers.0.resid_post", lambda v, p: v[:, :2]), GPT2, r"gives shape \[6, 2\] where \[6, 12\] stands"),
    (Function("layers.0.resid_post", lambda v, p: "zero"), GPT2, "gave str instead of numbers"),
    (Freeze("layers.0.attn.z"), GPT2, "Freeze is for attn.pattern"),
    (Mean("layers.0.attn.pattern"), GPT2, "have no mean: each row sees other keys"),
    (Drop("logits", tokens=[3]), GPT2, "no lasting meaning at logits"),
    (Scale("layers.0.resid_post", np.inf), GPT2, "computes no usable numbers with these edits: layers.0.resid_post"),
    (Replace("layers.0.resid_post", np.ones((4, 12))), GPT2, r"source has shape \[4, 12\]"),
]


@pytest.mark.parametrize(("edit", "spec", "said"), REFUSED, ids=[f"{e} {s.name}" for e, s, _ in REFUSED])
def test_an_edit_that_cannot_act_is_refused_with_the_reason(edit, spec, said):
    with pytest.raises(CutawayError, match=said):
        random_model(spec).trace(random_ids(spec, 6), edits=[edit])


def test_a_source_is_refused_where_it_has_no_such_value():
    model = random_model(LLAMA)
    short = model.trace([1, 2, 3], points=["layers.0.attn.z", "layers.0.attn.pattern"])
    with pytest.raises(CutawayError, match=r"holds no layers.1.attn.z; capture it there with points=\['layers.1"):
        model.trace([1, 2, 3], edits=[Replace("layers.1.attn.z", short)])
    with pytest.raises(CutawayError, match=r"holds no position 3 of layers.0.attn.z \(it has 0 to 2\)"):
        model.trace([1, 2, 3, 4], edits=[Replace("layers.0.attn.z", short)])
    with pytest.raises(CutawayError, match=r"\[3, 1, 4\] per token in the source.*and \[4, 1, 6\]"):
        other = random_model(GPT2).trace([1, 2, 3], points=["layers.0.attn.z"])
        model.trace([1, 2, 3], edits=[Replace("layers.0.attn.z", other)])
    longer = model.trace([7, 2, 9, 4], edits=[Freeze("layers.0.attn.pattern", short, positions=[0, 1, 2])])
    assert longer.edits[0].elements == 4 * 6


# Sources


def test_a_row_may_come_from_another_position_of_the_source():
    model = random_model(GPT2)
    source = model.trace([5, 6, 7, 8], points=["layers.0.resid_mid"])
    edit = Replace("layers.0.resid_mid", source, positions=[-1, 0], source_positions=[1, -1])
    trace = model.trace([1, 2, 3], points=["layers.0.resid_mid"], edits=[edit])
    assert np.array_equal(trace["layers.0.resid_mid"][[2, 0]], source["layers.0.resid_mid"][[1, 3]])


def test_a_frozen_pattern_stays_that_of_the_unedited_run_whatever_else_is_edited():
    model, ids = random_model(LLAMA), random_ids(LLAMA, 9)
    plain = model.trace(ids, points=["layers.*.attn.pattern"])
    edits = [Scale("layers.0.resid_pre", 3.0), Freeze("layers.*.attn.pattern")]
    trace = model.trace(ids, points=["layers.*.attn.pattern"], edits=edits)
    assert all(np.array_equal(trace[point], plain[point]) for point in plain.points)
    loose = model.trace(ids, points=["layers.*.attn.pattern"], edits=edits[:1])
    assert not np.allclose(loose["layers.1.attn.pattern"], plain["layers.1.attn.pattern"])


def test_a_resampled_row_is_one_of_the_sources_and_the_draw_can_be_repeated():
    model = random_model(GPT2)
    sources = [model.trace(random_ids(GPT2, 7, seed), points=["layers.0.attn.raw"]) for seed in (1, 2)]
    rows = np.concatenate([source["layers.0.attn.raw"] for source in sources])

    def taken(seed):
        edit = Resample("layers.0.attn.raw", sources, seed)
        return model.trace([1, 2, 3, 4], points=["layers.0.attn.raw"], edits=[edit])["layers.0.attn.raw"]

    assert all(any(np.array_equal(row, one) for one in rows) for row in taken(3))
    assert np.array_equal(taken(3), taken(3))
    assert not np.array_equal(taken(3), taken(4))


def test_the_mean_of_other_runs_is_over_all_their_rows():
    model = random_model(GPT2)
    sources = [model.trace(random_ids(GPT2, n, n), points=["layers.0.attn.z"]) for n in (3, 8)]
    trace = model.trace([1, 2], points=["layers.0.attn.z"], edits=[Mean("layers.0.attn.z", sources)])
    rows = np.concatenate([source["layers.0.attn.z"] for source in sources], axis=1)
    np.testing.assert_allclose(trace["layers.0.attn.z"][:, 0], rows.mean(axis=1), rtol=1e-12)


def test_a_direction_is_the_mean_of_some_runs_minus_that_of_others():
    model, point = random_model(GPT2), "layers.0.resid_post"
    one, other = ([model.trace(random_ids(GPT2, n, n + seed), points=[point]) for n in (3, 5)] for seed in (0, 10))
    whole = difference_of_means(one, other, point)
    rows = [np.concatenate([trace[point] for trace in group]) for group in (one, other)]
    np.testing.assert_allclose(whole, rows[0].mean(0) - rows[1].mean(0), atol=1e-12)
    last = difference_of_means(one[0], other, point, positions=[-1])
    ends = one[0][point][-1] - (other[0][point][-1] + other[1][point][-1]) / 2
    np.testing.assert_allclose(last, ends, atol=1e-12)
    steered = model.trace([1, 2], points=[point], edits=[Add(point, whole, 2.0)])
    plain = model.trace([1, 2], points=[point])
    np.testing.assert_allclose(steered[point] - plain[point], np.broadcast_to(2 * whole, (2, 12)), atol=1e-12)
    with pytest.raises(CutawayError, match="no rows that a mean could be of"):
        trace = model.trace([1], points=["layers.0.attn.pattern"])
        difference_of_means(trace, trace, "layers.0.attn.pattern")


def test_the_bidirectional_encoder_is_edited_too():
    model, ids = random_model(POST), random_ids(POST, 8)
    trace = model.trace(ids, points=["*"], edits=[Drop("layers.*.attn.masked", keys=[3])])
    pattern = trace["layers.0.attn.pattern"]
    assert not np.delete(pattern[:, :, 3], 3, axis=1).any()
    assert pattern[:, 3, 3].all()


def test_positions_of_a_packed_pass_are_those_of_each_sequence():
    from cutaway.points import Unwatched
    from cutaway.trace.edits.editing import Editing

    engine = NumpyEngine("float64")
    model, sequences = random_model(LLAMA, engine=engine), [random_ids(LLAMA, n, n) for n in (4, 7)]
    layout = Layout.of([4, 7])
    editing = Editing([Zero("layers.0.resid_post", positions=[3])], LLAMA, 4)
    tap = editing.tap(engine, layout, Unwatched(), layout.last_rows)
    packed = transformer(engine, LLAMA, model.parameters, sequences, tap=tap).logits
    for sequence, row in zip(sequences, packed, strict=True):
        alone = model.trace(sequence, points=[], edits=[Zero("layers.0.resid_post", positions=[3])])
        np.testing.assert_allclose(row, alone.last_logits, atol=1e-12)


def test_a_trace_says_how_many_edits_made_it():
    trace = random_model(LLAMA).trace([3], points=[], edits=[Zero("layers.0.mlp.out"), Scale("layers.0.attn.z", 2.0)])
    assert repr(trace) == "<Trace of small-llama: 1 token, 0 points, 2 edits, float64>"
