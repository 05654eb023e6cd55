"""Another token put at a step, and everything after it follows from it (chapters 14.5 and 15.2)."""

import math

import numpy as np
import pytest

from cutaway import CutawayError

PROMPT = "<BOS> dragon drinks"


def test_one_forced_token_changes_what_follows_and_nothing_before(toy):
    free = toy.generate(PROMPT, max_tokens=6, temperature=0)
    forced = toy.generate(PROMPT, max_tokens=6, temperature=0, force={1: "troll"})
    troll = toy.tokenizer.encode("troll", bos=False)[0]
    assert forced.tokens[0] == free.tokens[0]
    assert forced.tokens[1] == troll != free.tokens[1]
    after = toy.generate([0, 5, 6, free.tokens[0], troll], max_tokens=4, temperature=0)
    assert forced.tokens[2:] == after.tokens  # as if the model had said it itself


def test_a_forced_token_keeps_its_own_probability_and_is_told_as_forced(toy):
    steps = toy.generate(PROMPT, max_tokens=3, temperature=0, force={1: 8}, record=True).steps
    assert [step.forced for step in steps] == [False, True, False]
    assert steps[1].record.interval is None and steps[1].record.token == 8
    assert steps[1].record.replay().token == 8
    assert math.exp(steps[1].logprob) == pytest.approx(toy.trace([0, 5, 6, steps[0].token], []).probabilities[8])


def test_forcing_takes_its_random_number_so_that_later_draws_stay_where_they_were(toy):
    free = toy.generate(PROMPT, max_tokens=6, seed=3)
    same = toy.generate(PROMPT, max_tokens=6, seed=3, force={2: free.tokens[2]})
    assert same.tokens == free.tokens


def test_a_text_of_several_tokens_takes_as_many_steps(toy):
    ids = toy.tokenizer.encode("troll smashes", bos=False)
    assert toy.generate(PROMPT, max_tokens=3, seed=0, force={0: "troll smashes"}).tokens[:2] == ids


@pytest.mark.parametrize(
    ("force", "said"),
    [
        ({-1: 3}, "force names step -1; steps are counted from 0"),
        ({"a": 3}, "force names step 'a'"),
        ({0: 10}, "Token 10 cannot be forced: toy has ids 0 to 9"),
        ({0: ""}, "There is nothing to force at step 0"),
        ({0: "troll smashes", 1: "dragon"}, "Two tokens are forced at step 1"),
        ([3], r"force is \[3\]; it must map steps to tokens"),
        ({9: 3}, "force names step 9, but max_tokens 9 ends at step 8 "),
        ({8: "troll smashes"}, "force names step 9, but max_tokens 9 ends at step 8 "),
    ],
)
def test_what_cannot_be_forced_is_refused(toy, force, said):
    with pytest.raises(CutawayError, match=said):
        toy.generate(PROMPT, 9, force=force)


def test_a_step_past_the_last_position_is_refused_and_the_last_is_not(toy):
    long = [0] * (toy.spec.n_max - 2)
    with pytest.raises(CutawayError, match="force names step 3, but after a prompt of 126 tokens the 128 positions"):
        toy.generate(long, 9, force={3: 4})
    assert toy.generate(long, 9, seed=0, force={2: 4}).tokens[2:] == [4]


def test_numbers_of_numpy_force_plain_ones(toy):
    tokens = toy.generate(PROMPT, 2, force={np.int64(1): np.int64(3)}).tokens
    assert tokens[1] == 3 and type(tokens[1]) is int


@pytest.mark.parametrize("watched", [{}, {"points": ["sample.token"]}, {"cache": False}])
@pytest.mark.parametrize("ending", [{"stop": [" potion"]}, {"until": lambda text: True}])
def test_a_text_that_ends_before_a_forced_step_says_so_however_it_is_run(toy, watched, ending):
    settings = {"temperature": 0, "force": {5: 8}, **ending, **watched}
    said = r"force names step 5, but the text ended after 1 token \(steps count from 0\); name an earlier step"
    with pytest.raises(CutawayError, match=said):
        toy.generate(PROMPT, 9, **settings)
    with pytest.raises(CutawayError, match=said):
        list(toy.stream(PROMPT, 9, **settings))
    if not watched:
        with pytest.raises(CutawayError, match=said):
            toy.generate_many([PROMPT] * 2, 9, **settings)
