"""How much a text repeats itself is measured, and a loop is told from a refrain."""

from hypothesis import given
from hypothesis import strategies as st

import cutaway
from cutaway.generate.repetition import Loop, ending_loop, repetition


def test_a_text_that_says_nothing_twice_repeats_nothing():
    told = repetition(range(50))
    assert (told.repeated, told.distinct, told.loop) == (0, 1, None)


def test_a_text_of_one_sentence_over_and_over_is_a_loop():
    told = repetition([9, 9, 9, 8] + [1, 2, 3, 4, 5] * 6 + [1, 2])
    assert told.loop == Loop(start=4, period=5, rounds=6.4)
    assert told.repeated > 0.7
    assert told.distinct < 0.3


def test_one_token_for_ever_is_a_loop_and_a_short_refrain_is_none():
    assert ending_loop([7] * 8) == Loop(0, 1, 8.0)
    assert ending_loop([7] * 7) is None
    assert ending_loop([1, 2, 3, 4, 5, 1, 2, 3, 4, 5]) is None
    assert ending_loop([1, 2, 3] * 5 + [9]) is None  # it has left the loop


def test_too_short_to_measure_is_no_repetition():
    for ids in ([], [1], [1, 1]):
        assert repetition(ids) == repetition([])


@given(st.lists(st.integers(0, 3), max_size=9), st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(3, 9))
def test_a_loop_is_found_wherever_it_begins_and_wherever_it_is_broken_off(before, round_of, rounds):
    ids = [100 + token for token in before] + round_of * rounds
    for cut in range(len(round_of)):
        said = ids + round_of[:cut]
        loop = ending_loop(said)
        if len(round_of) * rounds >= 8:
            assert loop is not None
            assert len(round_of) % loop.period == 0 or loop.period < len(round_of)
            assert said[loop.start :] == (said[loop.start : loop.start + loop.period] * 99)[: len(said) - loop.start]


def test_greedy_decoding_runs_into_a_loop_that_sampling_leaves():
    """Chapter 14.1 on the real model."""
    model = cutaway.load("smollm2-135m")
    prompt = "The cat sat on the mat. The cat"
    greedy = model.generate(prompt, 30, 0)
    sampled = model.generate(prompt, 30, 1.0, seed=1)
    assert repetition(greedy.tokens).loop == Loop(start=0, period=5, rounds=6.0)
    assert repetition(sampled.tokens).loop is None
    assert repetition(greedy.tokens).repeated > repetition(sampled.tokens).repeated
