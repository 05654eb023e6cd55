"""The prompt sent back with its log-probabilities: what harnesses that score texts ask the `openai` client for."""

from collections.abc import Iterator

import numpy as np
import openai
import pytest
from live_server import END, client_of, live

import cutaway


@pytest.fixture(scope="module")
def client(folder) -> Iterator[openai.OpenAI]:
    with live(str(folder), "toy", "smollm2-135m", default="speaker") as port, client_of(port) as opened:
        yield opened


def scored(client: openai.OpenAI, **asked):
    """The one choice of a scored prompt."""
    return client.completions.create(**{"model": "speaker", "temperature": 0, "echo": True, "logprobs": 1} | asked)


def test_the_text_begins_with_the_prompt(client):
    for prompt in ("abc", "x😀न y", "ab\n"):
        plain = client.completions.create(model="speaker", prompt=prompt, max_tokens=4, temperature=0).choices[0]
        echoed = client.completions.create(model="speaker", prompt=prompt, max_tokens=4, temperature=0, echo=True)
        assert echoed.choices[0].text == prompt + plain.text
        assert echoed.choices[0].logprobs is None
        assert echoed.usage.completion_tokens == 4


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_each_token_of_the_prompt_has_its_log_probability(client, speaker, max_tokens):
    prompt = "abcdxyz, mn"
    answer = scored(client, prompt=prompt, max_tokens=max_tokens, logprobs=2)
    told, ids = answer.choices[0].logprobs, speaker.tokenizer.encode(prompt)
    expected = speaker.score(prompt).logprobs
    assert told.token_logprobs[0] is None and told.top_logprobs[0] is None
    np.testing.assert_allclose(told.token_logprobs[1 : len(ids)], expected[1:], rtol=1e-6)
    assert "".join(told.tokens[: len(ids)]) == prompt
    assert told.text_offset[: len(ids)] == list(range(len(prompt)))
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == len(ids) + max_tokens
    for token, value, best in zip(told.tokens[1:], told.token_logprobs[1:], told.top_logprobs[1:], strict=True):
        assert best[token] == value and max(best.values()) >= value and len(best) in (2, 3)
    plain = scored(client, prompt=prompt, max_tokens=5, logprobs=2, echo=False).choices[0]
    assert told.tokens[len(ids) :] == plain.logprobs.tokens[:max_tokens]
    assert told.token_logprobs[len(ids) :] == plain.logprobs.token_logprobs[:max_tokens]
    assert answer.usage.prompt_tokens == len(ids) and answer.usage.completion_tokens == max_tokens
    assert answer.choices[0].finish_reason == "length"


def test_a_harness_sums_the_tokens_that_follow_its_context(client, speaker):
    """As `lm-eval` asks: ids, one token more than wanted, and the last left out, whatever it is."""
    context, ending = speaker.tokenizer.encode("abc:"), speaker.tokenizer.encode("HELO!")
    answer = scored(client, prompt=[context + ending, context], max_tokens=1, seed=1)
    told = answer.choices[0].logprobs
    assert speaker.generate(context + ending, 1, 0).tokens == [END]  # the end token is told too, else the sum is short
    assert len(told.tokens) == len(context + ending) + 1
    expected = speaker.score(context + ending).logprobs[len(context) :]
    np.testing.assert_allclose(told.token_logprobs[len(context) : -1], expected, rtol=1e-6)
    greedy = [max(best, key=best.get) for best in told.top_logprobs[len(context) : -1]]
    assert greedy == list("HELO!")
    assert answer.choices[1].text == "abc:H" and answer.choices[1].index == 1


def test_an_echo_streams_before_the_rest(client):
    whole = scored(client, prompt="abc", max_tokens=4, logprobs=1, n=2, seed=3, temperature=1).choices
    texts, tokens = ["", ""], [[], []]
    for part in scored(client, prompt="abc", max_tokens=4, logprobs=1, n=2, seed=3, temperature=1, stream=True):
        choice = part.choices[0]
        texts[choice.index] += choice.text
        tokens[choice.index] += zip(choice.logprobs.tokens, choice.logprobs.token_logprobs, strict=True)
    assert texts == [choice.text for choice in whole]
    assert tokens == [list(zip(c.logprobs.tokens, c.logprobs.token_logprobs, strict=True)) for c in whole]
    assert [text[:3] for text in texts] == ["abc", "abc"]


def test_scoring_alone_streams_one_piece(client):
    parts = list(scored(client, prompt="abcd", max_tokens=0, stream=True))
    assert [(p.choices[0].text, p.choices[0].finish_reason) for p in parts] == [("abcd", "length")]
    assert parts[0].choices[0].logprobs.tokens == list("abcd")


def test_a_token_of_a_part_of_a_character_is_told_in_bytes_and_offsets_count_characters(client):
    told = scored(client, prompt="a😀b", max_tokens=0).choices[0].logprobs
    assert told.tokens == ["a", "bytes:\\xf0", "bytes:\\x9f", "bytes:\\x98", "bytes:\\x80", "b"]
    assert told.text_offset == [0, 1, 2, 2, 2, 2]


def test_a_prompt_that_was_read_before_is_scored_all_the_same(client):
    prompt = "abcdefghijklmnopqrstuvwxyz" * 2
    once, again = (scored(client, prompt=prompt, max_tokens=2) for _ in range(2))
    client.completions.create(model="speaker", prompt=prompt, max_tokens=2)
    third = scored(client, prompt=prompt, max_tokens=2)
    assert once.choices[0].logprobs == again.choices[0].logprobs == third.choices[0].logprobs


def test_a_prompt_as_long_as_the_context_can_be_scored(client, speaker):
    told = scored(client, prompt="ab" * (speaker.spec.context_length // 2), max_tokens=0).choices[0].logprobs
    assert len(told.tokens) == speaker.spec.context_length
    with pytest.raises(openai.BadRequestError, match="Shorten the prompt"):
        scored(client, prompt="ab" * (speaker.spec.context_length // 2), max_tokens=1)


def test_ids_are_echoed_as_the_text_that_they_are(client, toy):
    answer = scored(client, model="toy", prompt=[0, 5, 6], max_tokens=1)
    told = answer.choices[0].logprobs
    assert answer.choices[0].text.startswith("<BOS> dragon drinks")
    np.testing.assert_allclose(told.token_logprobs[1:3], toy.score([0, 5, 6]).logprobs[1:], rtol=1e-5)
    assert told.tokens[0].strip() == "<BOS>"


def test_a_real_model_scores_as_the_command_does(client):
    model = cutaway.load("smollm2-135m")
    prompt = "The capital of France is Paris, and that of Italy is Rome. " * 8
    told = scored(client, model="smollm2-135m", prompt=prompt, max_tokens=0).choices[0].logprobs
    np.testing.assert_allclose(told.token_logprobs[1:], model.score(prompt).logprobs[1:], rtol=1e-6)
    assert "".join(told.tokens) == prompt


def test_best_of_as_many_as_come_back_changes_nothing(client):
    asked = {"model": "speaker", "prompt": "abc", "max_tokens": 4, "seed": 2, "n": 3}
    best = client.completions.create(**asked, best_of=3).choices
    assert [choice.text for choice in best] == [choice.text for choice in client.completions.create(**asked).choices]
