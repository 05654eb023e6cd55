"""A step's record says what every stage did, and is enough to do the step again without the model."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutaway import CutawayError
from cutaway.generate import Limits, Recording, Request, Response, Sampling

PROMPT = "<BOS> dragon drinks"
SETTINGS = {"temperature": 1.3, "top_k": 6, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.1}


def records(model, **settings):
    return [step.record for step in model.generate(PROMPT, record=True, **settings).steps]


def test_a_run_records_every_stage_of_every_step_in_order(toy):
    told = records(toy, max_tokens=5, seed=2, **SETTINGS)
    assert len(told) == 5
    for record in told:
        assert [stage.name for stage in record.stages] == [
            "logits",
            "repetition_penalty",
            "temperature",
            "top_k",
            "top_p",
            "min_p",
        ]
        for before, after in zip(record.stages, record.stages[1:], strict=False):
            assert after.removed == before.kept - after.kept
            gone = [before.shares[before.ids.tolist().index(i)] for i in after.removed_ids]
            assert after.removed_shares.tolist() == pytest.approx(gone)
            assert after.removed_share == pytest.approx(sum(gone))
            if after.name in ("top_k", "top_p", "min_p"):  # what is left is what it had, divided by what is left
                for token, share in zip(after.ids, after.shares, strict=True):
                    had = before.shares[before.ids.tolist().index(token)]
                    assert share == pytest.approx(had / (1 - after.removed_share))


def test_the_number_fell_into_the_interval_of_the_token(toy):
    for record in records(toy, max_tokens=9, seed=4):
        low, high = record.interval
        assert low <= record.number < high
        last = record.stages[-1]
        assert high - low == pytest.approx(last.shares[last.ids.tolist().index(record.token)])


def test_the_numbers_are_those_that_a_generator_of_this_seed_gives_one_by_one():
    response = Response(Request((1,), Limits(200, None, frozenset(), ()), seed=6, recording=Recording()), None)
    random = np.random.default_rng(6)
    numbers = [response.take(np.zeros(5, np.float32)).record.number for _ in range(150)]
    assert numbers == [random.random() for _ in numbers]


def test_what_a_callback_does_to_the_logits_changes_nothing_of_the_step():
    """It may run the model, which may use the memory of the last pass again."""
    logits = np.log(np.array([0.5, 0.25, 0.25]))

    def until(text):
        logits[:] = -1.0

    request = Request(
        (1,), Limits(9, None, frozenset(), ()), seed=6, recording=Recording(), alternatives=3, until=until
    )
    step = Response(request, None).take(logits)
    probabilities = [0.5, 0.25, 0.25]
    assert np.exp(step.logprob) == pytest.approx(probabilities[step.token])
    assert [np.exp(p) for _, p in step.alternatives] == pytest.approx(probabilities)
    assert step.record.logits.tolist() == np.log(probabilities).tolist()


def test_recording_changes_no_token_and_no_probability(toy):
    plain = toy.generate(PROMPT, max_tokens=20, seed=5, **SETTINGS)
    watched = toy.generate(PROMPT, max_tokens=20, seed=5, record=True, **SETTINGS)
    assert (watched.tokens, watched.logprobs) == (plain.tokens, plain.logprobs)


@given(st.integers(0, 500))
def test_a_record_alone_gives_the_same_step_again(toy, seed):
    for record in records(toy, max_tokens=6, seed=seed, presence_penalty=0.4, frequency_penalty=0.2, **SETTINGS):
        again = record.replay()
        assert (again.token, again.interval, again.entropy) == (record.token, record.interval, record.entropy)
        for one, other in zip(again.stages, record.stages, strict=True):
            assert one.ids.tolist() == other.ids.tolist()
            assert one.shares.tolist() == other.shares.tolist()


def test_a_replay_with_other_settings_is_what_a_run_with_them_draws_there(toy):
    """The first step's logits are the same, whatever the settings."""
    hot = records(toy, max_tokens=1, seed=7, temperature=2.0)[0]
    for settings in (Sampling(0), Sampling(0.3), Sampling(1, top_k=2), Sampling(1, top_p=0.5, order="vllm")):
        run = toy.generate(
            PROMPT, max_tokens=1, seed=7, temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p
        )
        assert hot.replay(settings).token == run.tokens[0]


def test_a_replay_may_let_another_number_fall(toy):
    record = records(toy, max_tokens=1, seed=7)[0]
    drawn = {record.replay(number=number).token for number in np.linspace(0, 0.999, 60)}
    assert len(drawn) > 3
    with pytest.raises(CutawayError, match="The number is 1; it must lie from 0 to 1"):
        record.replay(number=1)


def test_a_replay_of_a_later_step_sees_the_text_as_it_was_then(toy):
    told = records(toy, max_tokens=8, temperature=0, frequency_penalty=3.0)
    assert [record.replay().token for record in told] == [record.token for record in told]
    assert told[2].replay(Sampling(0)).token == toy.generate([*(0, 5, 6), *(r.token for r in told[:2])], 1, 0).tokens[0]


def test_a_record_keeps_as_much_as_it_was_told_to(toy):
    lean = records(toy, max_tokens=1)[0]
    assert lean.logits is not None and len(lean.logits) == 10
    with pytest.raises(CutawayError, match="was not kept; record with Recording"):
        _ = lean.stages[0].probabilities
    steps = toy.generate(PROMPT, max_tokens=1, record=Recording(leading=2, logits=False, whole=True)).steps
    record = steps[0].record
    assert [len(stage.ids) for stage in record.stages] == [2, 2]
    assert record.stages[0].probabilities.sum() == pytest.approx(1)
    assert record.stages[0].tail == pytest.approx(1 - record.stages[0].shares.sum())
    with pytest.raises(CutawayError, match="keeps no logits"):
        record.replay()
    with pytest.raises(CutawayError, match="cannot keep 0 leading"):
        Recording(leading=0)


def test_entropy_and_margin_are_those_of_the_models_own_distribution(toy):
    record = records(toy, max_tokens=1, temperature=0.2, top_k=1)[0]
    p = toy.trace(PROMPT, points=[]).probabilities
    assert record.entropy == pytest.approx(-(p * np.log2(p)).sum())
    assert record.margin == pytest.approx(np.sort(p)[-1] - np.sort(p)[-2])


def test_alternatives_are_the_likeliest_with_their_logarithms(toy):
    step = toy.generate(PROMPT, max_tokens=1, alternatives=3, temperature=0).steps[0]
    expected = [(token.id, np.log(token.probability)) for token in toy.trace(PROMPT, points=[]).next_tokens(3)]
    assert [token for token, _ in step.alternatives] == [token for token, _ in expected]
    assert [logprob for _, logprob in step.alternatives] == pytest.approx([logprob for _, logprob in expected])
    assert step.logprob == step.alternatives[0][1]


def test_each_stage_of_a_record_has_arrays_of_its_own(toy):
    for record in records(toy, max_tokens=2, seed=2, **SETTINGS):
        arrays = [array for stage in record.stages for array in (stage.ids, stage.shares, stage.removed_ids)]
        for index, array in enumerate(arrays):
            assert not any(np.shares_memory(array, other) for other in arrays[index + 1 :])
