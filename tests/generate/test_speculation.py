"""Guesses from the text itself give the very same tokens in fewer passes, or stop where they do not pay."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cutaway
from cutaway import CutawayError
from cutaway.generate.speculation import PAUSE, Lookup, Payoff
from random_models import GPT2, LLAMA, random_ids, random_model


def always(monkeypatch) -> None:
    """Guess at every step, whatever it costs."""
    monkeypatch.setattr(Payoff, "wanted", lambda self: True)


# The same tokens


@pytest.mark.parametrize("temperature", [0, 0.7])
@pytest.mark.parametrize(("engine", "dtype"), [("numpy", "float64"), ("numpy", "float32"), ("cpu", "float32")])
@pytest.mark.parametrize("spec", [GPT2, LLAMA], ids=lambda spec: spec.name)
def test_tokens_and_their_probabilities_are_the_same_bit_for_bit(spec, engine, dtype, temperature, monkeypatch):
    from cutaway.engines import make_engine

    always(monkeypatch)
    model = random_model(spec, engine=make_engine(engine, dtype), dtype="float32")
    guessed = 0
    for seed in range(4):
        ids = random_ids(spec, 12, seed).tolist() * 3
        plain = model.generate(ids, 60, temperature, seed=seed)
        quick = model.generate(ids, 60, temperature, seed=seed, guess=6, record=True)
        assert (quick.tokens, quick.logprobs, quick.finish) == (plain.tokens, plain.logprobs, plain.finish)
        assert quick.passes <= plain.passes == 60
        guessed += sum(step.guessed for step in quick.steps)
        assert quick.passes == 60 - sum(step.guessed for step in quick.steps)
    assert guessed > 0


def test_penalties_stops_and_forced_tokens_work_on_guessed_tokens_too(toy, monkeypatch):
    always(monkeypatch)
    for seed in range(10):
        for settings in (
            {"frequency_penalty": 0.7, "top_k": 4},
            {"stop": ["fire"]},
            {"force": {5: 3, 9: 8}},
            {"max_tokens": 7},
            {"until": lambda text: "troll" in text},
        ):
            plain = toy.generate([0, 5, 6], seed=seed, **{"max_tokens": 200} | settings)
            quick = toy.generate([0, 5, 6], seed=seed, guess=5, **{"max_tokens": 200} | settings)
            assert (quick.tokens, quick.text, quick.finish) == (plain.tokens, plain.text, plain.finish)


def test_the_end_of_the_context_is_reached_exactly(toy, monkeypatch):
    always(monkeypatch)
    for length in (118, 126, 127, 128):
        ids = [0, *[5, 6] * 64][:length]
        plain, quick = (toy.generate(ids, 500, 0, guess=guess) for guess in (0, 7))
        assert (quick.tokens, quick.finish) == (plain.tokens, plain.finish)


def test_a_cache_holds_nothing_of_guesses_that_did_not_come_true(toy, monkeypatch):
    always(monkeypatch)
    batch = toy.batch()
    cache = batch._passes.cache()
    out = toy.generate([0, 5, 6, 3, 5, 6], 40, seed=3, guess=6, cache=cache)
    assert cache.ids == [0, 5, 6, 3, 5, 6, *out.tokens[:-1]]


def test_a_text_that_repeats_itself_takes_fewer_passes(monkeypatch):
    always(monkeypatch)
    model = cutaway.load("smollm2-135m")
    prompt = "The cat sat on the mat. The cat sat on the mat. The cat sat"
    plain, quick = (model.generate(prompt, 24, 0, guess=guess) for guess in (0, 8))
    assert quick.tokens == plain.tokens
    assert quick.tokens_per_pass > 1.4
    assert plain.tokens_per_pass == 1


def test_where_angles_hang_on_the_length_nothing_is_guessed():
    from cached_models import DYNAMIC

    model = random_model(DYNAMIC)
    ids = random_ids(DYNAMIC, 6).tolist() * 2
    out = model.generate(ids, 12, 0, guess=4)
    assert (out.passes, out.tokens) == (12, model.generate(ids, 12, 0).tokens)


def test_a_number_of_guesses_that_cannot_be_is_refused(toy):
    for guess in (-1, 1.5, True):
        with pytest.raises(CutawayError, match=r"guess is .*; it must be a whole number, 0 or more"):
            toy.generate([0], guess=guess)


# What is guessed


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 9))
def test_a_guess_is_what_followed_the_last_time(ids, count):
    found = Lookup(ids).guess(count)
    expected = []
    for length in (3, 2):
        if len(ids) > length:
            for start in range(len(ids) - length - 1, -1, -1):
                if ids[start : start + length] == ids[-length:]:
                    expected = ids[start + length :]
                    break
        if expected:
            break
    assert found[: len(expected)] == expected[:count]
    assert len(found) == (count if expected else 0)


def test_a_text_in_a_loop_is_guessed_to_go_on_in_it():
    assert Lookup([9, 1, 2, 3, 1, 2, 3]).guess(7) == [1, 2, 3, 1, 2, 3, 1]


@given(st.lists(st.integers(0, 2), max_size=30))
def test_a_lookup_that_grows_knows_what_one_made_at_once_knows(ids):
    grown = Lookup([])
    for token in ids:
        grown.extend([token])
    assert grown.guess(5) == Lookup(ids).guess(5)


# Whether it pays


def test_the_first_pass_is_plain_so_that_there_is_something_to_compare_with():
    payoff = Payoff()
    assert not payoff.wanted()
    payoff.note(1.0, guessed=0, tokens=1)
    assert payoff.wanted()


def test_guesses_that_do_not_pay_pause_and_pause_longer_each_time():
    payoff = Payoff()
    payoff.note(1.0, 0, 1)
    pauses = []
    for _ in range(3):
        payoff.note(2.0, guessed=8, tokens=1)  # twice the time for one token
        pauses.append(0)
        while not payoff.wanted():
            pauses[-1] += 1
    assert pauses == [PAUSE, 2 * PAUSE, 4 * PAUSE]


def test_guesses_that_pay_go_on():
    payoff = Payoff()
    payoff.note(1.0, 0, 1)
    for _ in range(50):
        payoff.note(1.5, guessed=8, tokens=int(np.random.default_rng(1).integers(2, 6)))
        assert payoff.wanted()
