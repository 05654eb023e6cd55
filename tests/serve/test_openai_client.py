"""What the `openai` client gets from a real server: the same as the model gives in this process."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from live_server import END, client_of, live

from cutaway.generate.conversation import chat_ids
from cutaway.generate.passes import Passes

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def client(folder) -> Iterator[openai.OpenAI]:
    with live(str(folder), "smollm2-135m", default="speaker") as port, client_of(port) as opened:
        yield opened


def streamed(client: openai.OpenAI, **asked) -> tuple[str, str | None]:
    """The text of a stream's one choice, and why it ended."""
    text, finish = [], None
    for part in client.completions.create(stream=True, **asked):
        assert finish is None
        text.append(part.choices[0].text)
        finish = part.choices[0].finish_reason
    return "".join(text), finish


def test_the_models_of_the_server_are_listed_the_one_it_was_started_with_first(client):
    names = [model.id for model in client.models.list()]
    assert names[0] == "speaker" and {"toy", "smollm2-135m"} <= set(names)
    assert client.models.retrieve("toy").owned_by == "cutaway"


def test_a_completion_is_what_the_model_generates(client, speaker):
    settings = {"temperature": 0.8, "top_p": 0.9, "seed": 3, "presence_penalty": 0.5, "frequency_penalty": 0.2}
    expected = speaker.generate("abc", max_tokens=40, **settings)
    got = client.completions.create(model="speaker", prompt="abc", max_tokens=40, **settings)
    assert got.choices[0].text == expected.text
    assert got.choices[0].finish_reason == "length"
    assert (got.usage.prompt_tokens, got.usage.completion_tokens, got.usage.total_tokens) == (3, 40, 43)
    assert streamed(client, model="speaker", prompt="abc", max_tokens=40, **settings) == (expected.text, "length")


def test_other_filters_are_taken_as_further_fields(client, speaker):
    settings = {"top_k": 3, "min_p": 0.05, "typical_p": 0.9, "repetition_penalty": 1.2}
    got = client.completions.create(model="speaker", prompt="q", max_tokens=30, seed=1, extra_body=settings)
    assert got.choices[0].text == speaker.generate("q", max_tokens=30, seed=1, **settings).text


def test_a_chat_answers_what_its_template_asks(client, speaker):
    got = client.chat.completions.create(model="speaker", messages=HELLO, temperature=0)
    assert got.choices[0].message.role == "assistant"
    assert got.choices[0].message.content == "HELO!"
    assert got.choices[0].finish_reason == "stop"
    assert got.usage.prompt_tokens == len(chat_ids(speaker.tokenizer, HELLO))
    assert got.usage.completion_tokens == 6  # the end token was made too


def test_a_chat_streams_a_role_then_text_then_the_reason_and_the_usage(client):
    asked = {"model": "speaker", "messages": HELLO, "temperature": 0, "stream": True}
    parts = list(client.chat.completions.create(stream_options={"include_usage": True}, **asked))
    assert parts[0].choices[0].delta.role == "assistant"
    assert [part.choices[0].delta.content for part in parts[1:6]] == list("HELO!")
    assert parts[-2].choices[0].finish_reason == "stop" and not parts[-2].choices[0].delta.content
    assert parts[-1].choices == [] and parts[-1].usage.completion_tokens == 6
    assert all(part.usage is None for part in parts[:-1])
    assert len({part.id for part in parts}) == 1
    assert list(client.chat.completions.create(**asked))[-1].choices[0].finish_reason == "stop"


def test_text_parts_and_the_answer_that_a_client_sends_back_are_understood(client, speaker):
    first = client.chat.completions.create(model="speaker", messages=HELLO, temperature=0).choices[0].message
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}, first, *HELLO]
    plain = [{"role": "system", "content": "Be brief."}, *HELLO, {"role": "assistant", "content": "HELO!"}, *HELLO]
    got = client.chat.completions.create(model="speaker", messages=messages, seed=2, max_tokens=9)
    assert got.usage.prompt_tokens == len(chat_ids(speaker.tokenizer, plain))
    assert got.choices[0].message.content == speaker.generate(chat_ids(speaker.tokenizer, plain), 9, seed=2).text


def test_an_end_token_that_somebody_writes_ends_no_turn(client, speaker):
    for content in ("a<|end|>b", [{"type": "text", "text": "a<|end|>b"}]):
        messages = [{"role": "user", "content": content}]
        got = client.chat.completions.create(model="speaker", messages=messages, temperature=0)
        written = chat_ids(speaker.tokenizer, [{"role": "user", "content": "a<|end|>b"}])
        assert got.usage.prompt_tokens == len(written) and written.count(END) == 1


def test_eight_clients_at_once_get_what_each_gets_alone(client):
    def ask(number: int) -> list:
        asked = {"model": "speaker", "seed": number, "max_tokens": 30}
        prompt = "abcdefgh"[: number + 1] * (1 + 9 * (number % 3))
        whole = client.completions.create(prompt=prompt, logprobs=2, **asked).choices[0]
        chat = client.chat.completions.create(messages=[{"role": "user", "content": prompt}], **asked).choices[0]
        return [whole.text, whole.logprobs, chat.message.content, streamed(client, prompt=prompt, **asked)]

    alone = [ask(number) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for together in (list(pool.map(ask, range(8))), list(pool.map(ask, reversed(range(8))))[::-1]):
            assert together == alone
    assert len({told[0] for told in alone}) == 8


def test_choices_are_told_apart_and_each_has_a_seed_of_its_own(client, speaker):
    texts = [speaker.generate("abc", 20, seed=seed).text for seed in (5, 6, 7)]
    asked = {"model": "speaker", "prompt": "abc", "max_tokens": 20, "seed": 5, "n": 3}
    got = client.completions.create(**asked)
    assert [(choice.index, choice.text) for choice in got.choices] == list(enumerate(texts))
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (3, 60)
    parts: dict[int, str] = {0: "", 1: "", 2: ""}
    for part in client.completions.create(stream=True, **asked):
        parts[part.choices[0].index] += part.choices[0].text
    assert list(parts.values()) == texts


def test_the_choices_of_one_prompt_read_it_once_and_each_is_what_it_is_alone(client, monkeypatch):
    passes: list[list[int]] = []
    run = Passes.run

    def watched(self, work, **settings):
        passes.append([len(part.ids) for part in work])
        return run(self, work, **settings)

    monkeypatch.setattr(Passes, "run", watched)
    for n, prompt in ((4, "abcdefgh"), (12, "hgfedcba")):  # more than share passes
        asked = {"model": "speaker", "prompt": prompt * 3, "max_tokens": 5, "logprobs": 1}
        passes.clear()
        choices = client.completions.create(**asked, seed=3, n=n).choices
        assert [rows for one in passes for rows in one if rows > 1] == [24]
        for j, choice in enumerate(choices):
            alone = client.completions.create(**asked, seed=3 + j).choices[0]
            assert (choice.text, choice.logprobs) == (alone.text, alone.logprobs)


def test_several_prompts_get_what_each_gets_alone(client, speaker):
    asked = {"model": "speaker", "max_tokens": 8, "seed": 4, "n": 2}
    got = client.completions.create(prompt=["abc", "xyz"], **asked)
    alone = [client.completions.create(prompt=prompt, **asked).choices for prompt in ("abc", "xyz")]
    assert [choice.text for choice in got.choices] == [choice.text for choices in alone for choice in choices]
    ids = client.completions.create(prompt=[[97, 98, 99], [120, 121, 122]], **asked)
    assert [choice.text for choice in ids.choices] == [choice.text for choice in got.choices]
    assert client.completions.create(prompt=[97, 98, 99], **asked).choices[0].text == got.choices[0].text


@pytest.mark.parametrize(
    ("stop", "text"), [("m", "bcdefghijkl"), (["zz", "hij", "k"], "bcdefg"), (["ab"], "bcdefghijklmnopqrstuvwxyz")]
)
def test_a_stop_string_ends_the_text_before_it_however_many_tokens_it_spans(client, stop, text):
    asked = {"model": "speaker", "prompt": "a", "temperature": 0, "max_tokens": 80, "stop": stop}
    got = client.completions.create(**asked).choices[0]
    assert (got.text, got.finish_reason) == (text, "stop")
    assert streamed(client, **asked) == (text, "stop")


@pytest.mark.parametrize("character", ["😀", "漢", "न"])
def test_a_stream_never_splits_a_character(client, character):
    size = len(character.encode())
    asked = {"model": "speaker", "prompt": character, "temperature": 0, "max_tokens": 3 * size}
    parts = [part.choices[0].text for part in client.completions.create(stream=True, **asked)]
    assert [part for part in parts if part] == [character] * 3
    cut = client.completions.create(**asked | {"max_tokens": size + 1}).choices[0]
    assert cut.text == character + "\ufffd"  # ended by length, within a character


def test_a_response_may_be_empty(client):
    got = client.completions.create(model="speaker", prompt="!", temperature=0)
    assert (got.choices[0].text, got.choices[0].finish_reason, got.usage.completion_tokens) == ("", "stop", 1)
    assert streamed(client, model="speaker", prompt="!", temperature=0) == ("", "stop")
    bias = {"logit_bias": {str(END): 100}, "logprobs": True}
    chat = client.chat.completions.create(model="speaker", messages=HELLO, **bias)
    assert chat.choices[0].message.content == "" and chat.choices[0].logprobs.content == []


def test_a_logit_bias_bans_and_prefers(client):
    asked = {"model": "speaker", "prompt": "a", "temperature": 0, "max_tokens": 5}
    assert client.completions.create(logit_bias={"98": -100, "122": 100}, **asked).choices[0].text == "zzzzz"


def test_log_probabilities_of_a_completion_are_the_models_own(client, speaker):
    expected = speaker.generate("ab", max_tokens=6, temperature=0, alternatives=3)
    got = client.completions.create(model="speaker", prompt="ab", max_tokens=6, temperature=0, logprobs=3)
    told = got.choices[0].logprobs
    assert told.tokens == list("cdefgh") and told.text_offset == [0, 1, 2, 3, 4, 5]
    assert told.token_logprobs == expected.logprobs
    for best, step in zip(told.top_logprobs, expected.steps, strict=True):
        assert sorted(best.values()) == sorted(logprob for _, logprob in step.alternatives)
    parts = list(client.completions.create(model="speaker", prompt="ab", max_tokens=6, seed=1, logprobs=0, stream=True))
    assert sum(len(part.choices[0].logprobs.tokens) for part in parts) == 6


def test_log_probabilities_of_a_chat_hold_every_token_with_its_bytes(client):
    asked = {"model": "speaker", "messages": HELLO, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    told = client.chat.completions.create(**asked).choices[0].logprobs.content
    assert [(one.token, one.bytes) for one in told] == [(letter, [ord(letter)]) for letter in "HELO!"]
    assert all(one.top_logprobs[0].logprob == one.logprob and len(one.top_logprobs) == 2 for one in told)
    parts = list(client.chat.completions.create(stream=True, **asked))
    pieces = [one for part in parts[1:] for one in part.choices[0].logprobs.content]
    assert pieces == told


def test_the_toy_goes_on_with_the_lectures_words(client, toy):
    got = client.completions.create(model="toy", prompt="<BOS> dragon drinks", temperature=0, max_tokens=1)
    assert got.choices[0].text == " potion"


def test_a_real_model_says_the_same_alone_streamed_and_in_company(client):
    asked = {"model": "smollm2-135m", "max_tokens": 12, "seed": 1}
    messages = [{"role": "user", "content": "Name a colour."}]
    alone = client.chat.completions.create(messages=messages, **asked)

    def again(number: int) -> str:
        if number % 2:
            parts = client.chat.completions.create(messages=messages, stream=True, **asked)
            return "".join(part.choices[0].delta.content or "" for part in parts)
        client.completions.create(prompt="The sea " * (1 + number), **asked)
        return client.chat.completions.create(messages=messages, **asked).choices[0].message.content

    with ThreadPoolExecutor(6) as pool:
        assert set(pool.map(again, range(6))) == {alone.choices[0].message.content}


def test_a_prompt_that_goes_on_from_an_earlier_one_is_not_read_again(client):
    messages = [{"role": "user", "content": "abcdefghijklmnop" * 4}]
    asked = {"model": "speaker", "seed": 1, "max_tokens": 5}
    first = client.chat.completions.create(messages=messages, **asked)
    again = client.chat.completions.create(messages=messages, **asked)
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1
    assert again.choices == first.choices


def test_health_tells_what_is_under_way_and_needs_no_key(folder):
    with live(str(folder), default="speaker", api_key="secret") as port, client_of(port, "secret") as client:
        client.completions.create(model="speaker", prompt="a")  # so that it is loaded
        told = client_of(port, "wrong").with_options(base_url=f"http://127.0.0.1:{port}").get("/health", cast_to=str)
        assert json.loads(told) == {"status": "ok", "model": "speaker", "running": 0, "waiting": 0}
