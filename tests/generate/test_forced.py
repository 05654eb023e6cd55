"""Another token put at a step, and everything after it follows from it (chapters 14.5 and 15.2)."""

import math

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
    ],
)
def test_what_cannot_be_forced_is_refused(toy, force, said):
    with pytest.raises(CutawayError, match=said):
        toy.generate(PROMPT, force=force)
