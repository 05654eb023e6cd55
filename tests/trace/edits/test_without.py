"""A part of the architecture can be left out for one run: that is the run of a model that lacks it."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutaway import CutawayError
from cutaway.forward.transformer import transformer
from cutaway.points import points_of
from cutaway.spec import NormSpec
from cutaway.trace.edits import Keep
from cutaway.trace.edits.plain import edit_from_json
from cutaway.trace.edits.without import PARTS, Without
from random_models import GPT2, LLAMA, POST, random_ids, random_model, specs, with_attention, with_layers


def logits_of(model, spec, ids):
    """What the same weights give under another spec."""
    return transformer(model.engine, spec, model.parameters, [np.asarray(ids)], rows=range(len(ids))).logits


SAME = [
    ("mask", GPT2, with_attention(GPT2, causal=False)),
    ("mask", LLAMA, with_attention(LLAMA, causal=False)),
    ("scale", GPT2, with_attention(GPT2, scale=1.0)),
    ("positions", GPT2, replace(GPT2, positions=None)),
    ("positions", LLAMA, with_attention(LLAMA, rotary=None)),
    ("norms", GPT2, replace(with_layers(GPT2, norm=None), final_norm=None)),
    ("norms", POST, with_layers(POST, norm=None)),
    ("final.norm", LLAMA, replace(LLAMA, final_norm=None)),
]


@pytest.mark.parametrize(("part", "spec", "lacking"), SAME, ids=[f"{part} {spec.name}" for part, spec, _ in SAME])
def test_a_run_without_a_part_is_that_of_a_model_that_never_had_it(part, spec, lacking):
    model, ids = random_model(spec), random_ids(spec, 40)
    trace = model.trace(ids, points=["logits"], edits=[Without(part)])
    np.testing.assert_allclose(trace.logits, logits_of(model, lacking, ids), rtol=0, atol=1e-12)
    assert trace.edits[0].changed > 0
    assert np.array_equal(model.trace(ids, points=["logits"]).logits, logits_of(model, spec, ids))


def test_without_its_positions_a_model_cannot_tell_one_order_from_another():
    ids = random_ids(LLAMA, 12)
    shuffled = np.concatenate([np.random.default_rng(1).permutation(ids[:-1]), ids[-1:]])
    one_layer = replace(LLAMA, layers=LLAMA.layers[:1])
    model = random_model(one_layer)
    found = [model.trace(x, points=[], edits=[Without("positions")]).last_logits for x in (ids, shuffled)]
    np.testing.assert_allclose(*found, atol=1e-12)
    plain = [model.trace(x, points=[]).last_logits for x in (ids, shuffled)]
    assert not np.allclose(*plain, atol=1e-3)


def test_without_the_mask_a_token_reads_its_future_and_the_next_token_is_still_told():
    model, ids = random_model(LLAMA), random_ids(LLAMA, 9)
    trace = model.trace(ids, points=["*"], edits=[Without("mask")])
    assert (trace["layers.0.attn.pattern"][:, 0] > 0).all()
    np.testing.assert_allclose(trace["layers.1.attn.pattern"].sum(-1), 1)
    assert trace.edits[0].fired == {f"layers.{i}.attn.masked": 4 * 9 * 8 // 2 for i in range(2)}
    assert len(trace.next_tokens(3)) == 3
    with pytest.raises(CutawayError, match="one token has no other that a mask could hide"):
        model.trace([1], edits=[Without("mask")])


@pytest.mark.parametrize("spec", [GPT2, LLAMA, POST], ids=lambda spec: spec.name)
def test_without_a_residual_path_the_stream_is_what_the_sublayer_gave(spec):
    model, ids = random_model(spec), random_ids(spec, 7)
    trace = model.trace(ids, points=["*"], edits=[Without("attn.residual", layers=1)])
    total = "attn.sum" if spec is POST else "resid_mid"
    assert np.array_equal(trace[f"layers.1.{total}"], trace["layers.1.attn.out"])
    assert not np.array_equal(trace[f"layers.0.{total}"], trace["layers.0.attn.out"])
    trace = model.trace(ids, points=["*"], edits=[Without("mlp.residual")])
    total = "mlp.sum" if spec is POST else "resid_post"
    assert all(np.array_equal(trace[f"layers.{i}.{total}"], trace[f"layers.{i}.mlp.out"]) for i in range(2))


def test_the_same_addresses_are_there_so_that_two_runs_can_be_held_against_each_other():
    model, ids = random_model(LLAMA), random_ids(LLAMA, 7)
    plain = model.trace(ids, points=["*"])
    for part in PARTS:
        if part != "head norms":
            trace = model.trace(ids, points=["*"], edits=[Without(part)])
            assert trace.points == plain.points
            assert trace.diff(plain).first_change is not None


@given(specs(), st.integers(2, 12), st.sampled_from(sorted(PARTS)))
def test_whatever_a_model_has_can_be_left_out_and_what_it_has_not_is_said(spec, length, part):
    model, ids = random_model(spec), random_ids(spec, length)
    try:
        edit = Without(part)
        trace = model.trace(ids, points=["*"], edits=[edit])
    except (CutawayError, UserWarning) as refusal:
        said = ("that could be left out", "changed nothing", "a mask could hide")
        assert any(words in str(refusal) for words in said)
        return
    assert trace.edits[0].elements > 0
    assert set(trace.points) == {str(point) for point in points_of(trace.spec)}


def test_several_parts_can_be_left_out_at_once_the_lectures_stages_one_after_another():
    model, ids = random_model(LLAMA), random_ids(LLAMA, 9)
    edits = [Without("mask"), Without("positions"), Without("scale"), Keep("layers.*.attn.z", heads=[0])]
    lacking = with_attention(LLAMA, causal=False, rotary=None, scale=1.0)
    found = model.trace(ids, points=["logits"], edits=edits[:3])
    np.testing.assert_allclose(found.logits, logits_of(model, lacking, ids), atol=1e-12)
    moved = [model.trace(ids, points=[], edits=edits[: n + 1]).edited.moved.largest for n in range(4)]
    assert all(moved)


def test_a_part_that_sits_between_norm_and_stream_of_a_sublayers_output_goes_too():
    spec = with_layers(LLAMA, out_norm=NormSpec("rms", 1e-6))
    model, ids = random_model(spec), random_ids(spec, 5)
    trace = model.trace(ids, points=["*"], edits=[Without("attn.norm")])
    assert np.array_equal(trace["layers.0.attn.out"], trace["layers.0.attn.raw"])
    assert np.array_equal(trace["layers.0.attn.norm"], trace["layers.0.resid_pre"])


@pytest.mark.parametrize(
    ("edit", "spec", "said"),
    [
        (lambda: Without("soul"), LLAMA, "A run can be without mask, scale"),
        (lambda: Without("positions", "7"), LLAMA, "no layers '7': small-llama has layers 0 to 1"),
        (lambda: Without("positions", "first"), LLAMA, "no layers 'first'"),
        (lambda: Without("mask"), POST, "small-post has no mask that could be left out"),
        (lambda: Without("head norms"), LLAMA, "small-llama has no head norms"),
        (lambda: Without("positions", 1), GPT2, "no positions in its layers 1"),
    ],
)
def test_what_is_not_there_cannot_be_left_out(edit, spec, said):
    with pytest.raises(CutawayError, match=said):
        random_model(spec).trace(random_ids(spec, 5), edits=[edit()])


def test_it_is_written_as_plain_data():
    assert Without("mask").to_json() == {"without": "mask"}
    assert edit_from_json('{"without": "positions", "layers": "0:2"}') == Without("positions", "0:2")
    assert Without("scale", 3) == Without("scale", "3") != Without("scale")
