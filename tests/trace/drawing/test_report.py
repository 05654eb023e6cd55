"""A trace as plain data: every number in it is the trace's own."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cutaway
from cutaway.errors import CutawayError
from cutaway.spec import AttentionSpec, FeedForwardSpec, LayerSpec, ModelSpec, NormSpec, RotarySpec
from cutaway.trace.capture.plan import overview_points
from cutaway.trace.drawing.edges import hidden_cells, strongest_edge
from cutaway.trace.drawing.report import plain_numbers, report
from random_models import random_ids, random_model, specs

PROMPT = "<BOS> dragon drinks potion"


@pytest.fixture(scope="module")
def model():
    return cutaway.load("toy")


@pytest.fixture(scope="module")
def trace(model):
    return model.trace(PROMPT, points=overview_points(model.spec, 1))


def test_every_stage_of_the_layer_is_there_in_the_order_of_the_pass(model, trace):
    shown = [stage["point"] for stage in report(trace, layer=1)["stages"]]
    elsewhere = ("layers.0.", "layers.2.", "sample.")  # the other layers, and what comes after the pass
    assert shown == [point for point in model.points if not point.startswith(elsewhere)]


@pytest.mark.parametrize("head", [0, 1])
def test_the_row_of_a_stage_is_the_last_tokens_of_the_head(trace, head):
    stages = {stage["point"]: stage for stage in report(trace, layer=1, head=head, first=99)["stages"]}
    for name, row in {
        "layers.1.resid_pre": trace["layers.1.resid_pre"][-1],
        "layers.1.attn.k": trace["layers.1.attn.k"][head, -1],
        "layers.1.attn.pattern": trace["layers.1.attn.pattern"][head, -1],
        "logits": trace.last_logits,
    }.items():
        assert stages[name]["values"] == row.tolist()
        assert stages[name]["norm"] == pytest.approx(float(np.linalg.norm(row.astype(float))))
        assert stages[name]["shape"] == list(trace[name].shape)


def test_with_fewer_key_heads_a_head_shows_the_one_that_it_reads():
    attention = AttentionSpec(4, 2, 4, rotary=RotarySpec(10000.0, 4))
    block = LayerSpec(attention, FeedForwardSpec(16, "silu", gated=True), NormSpec("rms", 1e-5))
    model = random_model(ModelSpec("grouped", 11, 8, (block,), final_norm=NormSpec("rms", 1e-5)))
    trace = model.trace([1, 2, 3], points=overview_points(model.spec, 0))
    for head in range(4):
        stages = {stage["point"]: stage for stage in report(trace, head=head, first=99)["stages"]}
        assert stages["layers.0.attn.k"]["values"] == trace["layers.0.attn.k"][head // 2, -1].tolist()


@given(specs(), st.integers(1, 6), st.data())
def test_any_model_can_be_told_in_finite_numbers(spec, length, data):
    model = random_model(spec)
    layer = data.draw(st.integers(0, spec.n_layers - 1))
    point = data.draw(st.sampled_from(overview_points(spec, layer)))
    trace = model.trace(random_ids(spec, length), points=overview_points(spec, layer))
    told = report(trace, layer, head=-1, point=point, first=3)
    assert json.dumps(told, allow_nan=False)
    assert [stage["shape"] for stage in told["stages"]] == [
        list(trace[stage["point"]].shape) for stage in told["stages"]
    ]
    assert np.array(told["values"], float).shape == trace[point].shape


def test_the_layers_tell_mean_lengths_without_the_first_token(trace):
    for told in report(trace, layer=1)["layers"]:
        for key, name in (("attn_out", "attn.out"), ("mlp_out", "mlp.out"), ("resid_post", "resid_post")):
            lengths = np.linalg.norm(trace[f"layers.{told['layer']}.{name}"].astype(float), axis=-1)
            assert told[key] == pytest.approx(lengths[1:].mean())


def test_the_strongest_edge_leaves_out_the_first_token_and_oneself(trace):
    for layer in range(3):
        pattern = trace[f"layers.{layer}.attn.pattern"].copy()
        pattern[:, :, 0] = 0
        pattern[:, np.arange(4), np.arange(4)] = 0
        edge = strongest_edge(trace, layer)
        assert (edge.head, edge.query, edge.key) == np.unravel_index(pattern.argmax(), pattern.shape)
        assert edge.weight == pattern.max()


def test_the_strongest_edge_of_a_long_prompt_is_found_block_by_block(model):
    ids = np.random.default_rng(3).integers(0, 10, 128)
    trace = model.trace(ids)
    found = [strongest_edge(trace, layer) for layer in range(3)]
    assert not any(str(point).endswith("attn.pattern") for point in trace._made), "no T × T array was made"
    for layer, edge in enumerate(found):
        pattern = trace[f"layers.{layer}.attn.pattern"].copy()
        pattern[:, :, 0] = 0
        pattern[:, np.arange(128), np.arange(128)] = 0
        assert edge.weight == pattern.max() == pattern[edge.head, edge.query, edge.key]


def test_two_tokens_have_only_the_first_to_look_at_and_one_only_itself(model):
    two, one = strongest_edge(model.trace([0, 5]), 0), strongest_edge(model.trace([0]), 0)
    assert (two.query, two.key) == (1, 0)
    assert (one.query, one.key, one.weight) == (0, 0, 1.0)


def test_what_was_not_captured_is_absent_and_not_zero(model):
    told = report(model.trace(PROMPT, points=["layers.1.attn.out"]), layer=1)
    stages = {stage["point"]: stage for stage in told["stages"]}
    assert stages["layers.1.mlp.up"]["values"] is None
    assert stages["layers.1.attn.out"]["values"]
    assert told["layers"][1]["mlp_out"] is None
    assert told["layers"][0]["strongest_edge"] is None


def test_a_trace_of_some_positions_tells_their_rows(model):
    whole, some = model.trace(PROMPT), model.trace(PROMPT, positions=[2])
    stages = {stage["point"]: stage for stage in report(some)["stages"]}
    assert stages["layers.0.resid_post"]["values"] == whole["layers.0.resid_post"][2, :8].tolist()
    assert strongest_edge(some, 0).query == 2
    assert hidden_cells(some, 0).tolist() == [[False, False, False, True]]
    assert report(some)["row"] == 2
    mixed = report(model.trace(PROMPT, positions=[2, 0]))["layers"][0]
    assert mixed["resid_post"] == pytest.approx(np.linalg.norm(whole["layers.0.resid_post"][2]))


def test_the_mask_hides_the_future_and_nothing_else(trace):
    assert np.array_equal(hidden_cells(trace, 1), np.triu(np.ones((4, 4), bool), 1))
    assert np.array_equal(hidden_cells(trace, 1), np.isneginf(trace["layers.1.attn.masked"][0]))


def test_a_step_of_a_generation_can_be_told(model):
    *_, last = model.stream(PROMPT, max_tokens=3, seed=0, points=["*"])
    told = report(last.trace)
    assert [token["position"] for token in told["tokens"]] == [5]
    assert json.dumps(told, allow_nan=False)


def test_plain_numbers_are_null_where_they_are_not_finite():
    assert plain_numbers(np.array([[1.5, -np.inf], [np.nan, 2.0]])) == [[1.5, None], [None, 2.0]]


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"layer": 3}, "There is no layer 3"),
        ({"head": -3}, "There is no head -3"),
        ({"top": 0}, "at least 1"),
        ({"point": "layers.0.attn.z"}, "was not captured"),
    ],
)
def test_what_is_not_there_is_refused(trace, asked, sentence):
    with pytest.raises(CutawayError, match=sentence):
        report(trace, **asked)
