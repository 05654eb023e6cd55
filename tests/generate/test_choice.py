"""The choice of a token is part of the trace: its stages are points like all others, at every step."""

import numpy as np
import pytest

import cutaway
from cutaway import CutawayError
from cutaway.errors import UnknownPoint
from cutaway.generate import ORDERS, Recording
from cutaway.points import OF_CHOICE
from cutaway.trace.edits import Zero
from cutaway.trace.next_tokens import softmax

PROMPT = "<BOS> dragon drinks"
ALL = {
    "temperature": 0.8,
    "top_k": 6,
    "top_p": 0.97,
    "min_p": 0.01,
    "typical_p": 0.98,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "logit_bias": {3: 0.5},
}


def test_there_is_a_point_for_every_stage():
    assert (*(f"sample.{name}" for name in ORDERS["cutaway"]), "sample.draw", "sample.token") == OF_CHOICE


def test_each_step_holds_what_every_stage_left_the_number_drawn_and_the_token(toy):
    recorded = toy.generate(PROMPT, 5, seed=1, record=Recording(whole=True), **ALL).steps
    steps = toy.generate(PROMPT, 5, seed=1, points=["sample.*"], **ALL).steps
    for step, expected in zip(steps, recorded, strict=True):
        assert step.trace.points == list(OF_CHOICE)
        for stage in expected.record.stages[1:]:
            value = step.trace[f"sample.{stage.name}"]
            np.testing.assert_array_equal(value, stage.probabilities)
            assert value.dtype == np.float64 and not value.flags.writeable
            assert value.sum() == pytest.approx(1)
        number, low, high = step.trace["sample.draw"]
        assert low <= number < high and number == expected.record.number
        assert step.trace["sample.token"].tolist() == [step.token] == [expected.token]
        assert step.record is None  # nobody asked for one


def test_the_stages_stand_in_the_order_that_was_asked_for(toy):
    steps = toy.generate(PROMPT, 1, seed=1, points="sample.*", order="llama.cpp", top_k=5, top_p=0.9).steps
    named = ["sample.top_k", "sample.top_p", "sample.temperature", "sample.draw", "sample.token"]
    assert steps[0].trace.points == named


def test_at_temperature_1_the_first_stage_is_the_softmax_of_the_logits(toy):
    for step in toy.stream(PROMPT, 3, seed=2, points=["logits", "sample.temperature"]):
        np.testing.assert_allclose(step.trace["sample.temperature"], softmax(step.trace.logits[-1]), rtol=1e-12)


def test_points_of_the_pass_and_of_the_choice_may_be_asked_for_at_once(toy):
    everything = toy.generate(PROMPT, 2, seed=1, points="*").steps[1].trace
    assert everything.points == [p for p in toy.points if not p.startswith("sample.")] + [
        f"sample.{name}" for name in ("temperature", "draw", "token")
    ]
    chosen = toy.generate(PROMPT, 2, seed=1, points=lambda point: point.name in ("embed.out", "sample.token")).steps
    assert chosen[1].trace.points == ["embed.out", "sample.token"]
    mixed = toy.generate(PROMPT, 2, seed=1, points=["layers.0.mlp.act | mean", "sample.draw"]).steps
    assert mixed[0].trace.points == ["layers.0.mlp.act | mean", "sample.draw"]


def test_looking_at_the_choice_changes_nothing(toy):
    plain = toy.generate(PROMPT, 8, seed=5, **ALL)
    watched = toy.generate(PROMPT, 8, seed=5, points=["sample.*"], **ALL)
    assert (watched.tokens, watched.logprobs) == (plain.tokens, plain.logprobs)


def test_a_forced_token_fell_into_no_interval(toy):
    trace = toy.generate(PROMPT, 2, seed=1, force={1: 8}, points=["sample.*"]).steps[1].trace
    assert np.isnan(trace["sample.draw"]).tolist() == [False, True, True]
    assert trace["sample.token"].tolist() == [8]


def test_a_record_is_there_beside_the_points_where_it_was_asked_for(toy):
    step = toy.generate(PROMPT, 1, seed=1, points=["sample.token"], record=True).steps[0]
    assert step.record.replay().token == step.trace["sample.token"][0]


def test_a_step_is_saved_and_read_back_with_its_choice(toy, tmp_path):
    trace = toy.generate(PROMPT, 1, seed=1, points=["logits", "sample.*"], top_k=3).steps[0].trace
    again = cutaway.open_trace(trace.save(tmp_path / "step.safetensors"))
    assert again.points == ["logits", "sample.temperature", "sample.top_k", "sample.draw", "sample.token"]
    for name in again.points:
        np.testing.assert_array_equal(again[name], trace[name])


@pytest.mark.parametrize(
    ("points", "said"),
    [
        (["sample.top_p"], r"sample.top_p is a stage that is not in use: set top_p, or ask for one of sample.temp"),
        (["sample.topk"], r"No point 'sample.topk' in toy; the closest are sample.top_k"),
        (["layers.0.attn.patern"], r"the closest are layers\.0\.attn\.pattern"),
        (["sample.* | mean"], "sample.temperature has no rows to reduce; ask for sample.temperature as it is"),
        (["sample.token", "nothing"], "'nothing'"),
    ],
)
def test_what_is_no_point_of_the_choice_is_refused_before_anything_runs(toy, points, said):
    with pytest.raises(UnknownPoint, match=said):
        toy.stream(PROMPT, 3, points=points)


def test_a_trace_of_one_pass_makes_no_choice_and_edits_reach_none(toy):
    for ask in (
        lambda: toy.trace(PROMPT, points=["sample.top_k"]),
        lambda: toy.plan(PROMPT, points=["sample.*"]),
        lambda: toy.trace(PROMPT, edits=[Zero("sample.temperature")]),
        lambda: next(toy.sweep([PROMPT], ["sample.token"])),
    ):
        with pytest.raises(CutawayError, match="no part of a pass but of the choice that follows it"):
            ask()
    step = toy.generate(PROMPT, 1, points=["sample.token"]).steps[0]
    with pytest.raises(UnknownPoint, match=r"sample.draw was not captured in this trace; ask for it"):
        step.trace["sample.draw"]


def test_a_stage_that_is_not_set_is_said_to_have_left_nothing(toy):
    step = toy.generate(PROMPT, 2, seed=1, points=["sample.*"]).steps[0]
    with pytest.raises(CutawayError, match="A stage of the choice that is not set leaves nothing"):
        step.trace["sample.top_k"]
