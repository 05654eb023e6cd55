"""What programs are refused, in the form in which the `openai` client raises it."""

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from live_server import client_of, live
from starlette.testclient import TestClient

from cutaway.cli import main
from cutaway.generate import Batch
from cutaway.serve import make_app
from cutaway.serve.models import Models
from cutaway.serve.openai.asked import chat_asked
from cutaway.serve.openai.prepare import prepared
from cutaway.serve.openai.refusals import Refused
from random_models import POST, random_model

STREAM_OPTION = "stream_options.include_usage"


@pytest.fixture(scope="module")
def speaking(folder) -> Iterator[TestClient]:
    with TestClient(make_app(Models([str(folder)]), default="speaker", hosts=("testserver",))) as opened:
        yield opened


def refused(answer, status: int, *words: str, param: str | None = None) -> None:
    assert answer.status_code == status, answer.text
    told = answer.json()
    assert set(told) == {"error"} and set(told["error"]) == {"message", "type", "param", "code"}
    if param is not None:
        assert told["error"]["param"] == param
    for word in words:
        assert word in told["error"]["message"], told["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": None}, ["must be a text"]),
        ({"prompt": ""}, ["empty"]),
        ({"prompt": []}, ["must be a text"]),
        ({"prompt": ["a", ""]}, ["empty"]),
        ({"prompt": ["a", 1]}, ["must be a text"]),
        ({"prompt": [97, True]}, ["must be a text"]),
        ({"prompt": [97, 999]}, ["999"]),
        ({"prompt": [-1]}, ["-1"]),
        ({"prompt": "\ud800"}, ["surrogate"]),
        ({"max_tokens": 0}, ["whole number from 1"]),
        ({"max_tokens": 1.5}, ["whole number"]),
        ({"max_tokens": True}, ["whole number"]),
        ({"temperature": -1}, ["number from 0"]),
        ({"temperature": "hot"}, ["'hot'"]),
        ({"temperature": False}, ["number from 0"]),
        ({"top_p": 0}, ["above 0"]),
        ({"top_p": 1.1}, ["from 0 to 1"]),
        ({"n": 0}, ["whole number"]),
        ({"n": 17}, ["from 1 to 16"]),
        ({"n": 9, "prompt": ["a", "b"]}, ["more than 16"]),
        ({"seed": -1}, ["seed is -1"]),
        ({"seed": 10**30}, ["whole number"]),
        ({"stop": ""}, ["empty"]),
        ({"stop": 3}, ["list of texts"]),
        ({"stop": ["x"] * 17}, ["16 texts"]),
        ({"stop": "x" * 1001}, ["1000 characters"]),
        ({"logit_bias": [1]}, ["map"]),
        ({"logit_bias": {"x": 1}}, ["'x'"]),
        ({"logit_bias": {"1": 101}}, ["-100 to 100"]),
        ({"logit_bias": {"1": True}}, ["-100 to 100"]),
        ({"logit_bias": {"99999": 1}}, ["99999"]),
        ({"presence_penalty": 3}, ["-2 to 2"]),
        ({"frequency_penalty": "x"}, ["-2 to 2"]),
        ({"logprobs": 21}, ["0 to 20"]),
        ({"logprobs": True}, ["whole number"]),
        ({"stream": 1}, ["true or false"]),
        ({"stream_options": {"include_usage": True}}, ["set stream"]),
        ({"stream": True, "stream_options": {"x": 1}}, ["'stream_options.x'"]),
        ({"stream": True, "stream_options": []}, ["object"]),
        ({"echo": 1}, ["true or false"]),
        ({"echo": True, "max_tokens": -1}, ["whole number from 0"]),
        ({"echo": True, "prompt": "a" * 257, "max_tokens": 0}, ["the prompt has 257"]),
        ({"suffix": "b"}, ["gap"]),
        ({"best_of": 3}, ["best_of is 3 and n 1", "ask for n"]),
        ({"best_of": 2, "n": 3}, ["best_of is 2 and n 3"]),
        ({"best_of": "x"}, ["whole number"]),
        ({"tools": []}, ["no field 'tools'"]),
        ({"maxtokens": 3}, ["no field 'maxtokens'"]),
        ({"\ud800": 3}, ["no field"]),
        ({"temperature": 10**400}, ["number from 0"]),
        ({"top_p": -(10**400)}, ["number from 0"]),
        ({"user": "me", "seed": "\ud800"}, ["seed"]),
        ({"model": None}, ["model is missing"]),
        ({"model": 3}, ["model must be a text"]),
        ({"store": True}, ["not kept"]),
    ],
)
def test_a_completion_that_cannot_be_is_refused_with_the_field_and_the_reason(speaking, fields, words):
    body = json.dumps({"model": "speaker", "prompt": "a", **fields}).encode()
    answer = speaking.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    refused(answer, 400, *words)
    told = answer.json()["error"]
    assert told["type"] == "invalid_request_error"
    assert told["param"].partition(".")[0] in fields.keys() - {"user"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": None}, ["at least one message"]),
        ({"messages": []}, ["at least one message"]),
        ({"messages": ["a"]}, ["messages[0]"]),
        ({"messages": [{"content": "a"}]}, ["role"]),
        ({"messages": [{"role": "wizard", "content": "a"}]}, ["'wizard'"]),
        ({"messages": [{"role": "user"}]}, ["content"]),
        ({"messages": [{"role": "user", "content": 3}]}, ["content"]),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, ["'image_url'"]),
        ({"messages": [{"role": "user", "content": ["a"]}]}, ["only text"]),
        ({"messages": [{"role": "user", "content": "a", "name": "Ann"}]}, ["name", "not supported"]),
        ({"messages": [{"role": "user", "content": "a", "mood": "x"}]}, ["'mood'"]),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, ["tool_calls"]),
        ({"messages": [{"role": "tool", "content": "a"}]}, ["tool"]),
        ({"tools": [{"type": "function"}]}, ["tools"]),
        ({"tool_choice": "required"}, ["tools"]),
        ({"functions": [{"name": "f"}]}, ["tools"]),
        ({"service_tier": "flex"}, ["only one kind"]),
        ({"verbosity": "low"}, ["max_tokens ends it"]),
        ({"echo": True}, ["no field 'echo'"]),
        ({"best_of": 1}, ["no field 'best_of'"]),
        ({"response_format": {"type": "json_object"}}, ["plain text"]),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, ["plain text"]),
        ({"modalities": ["text", "audio"]}, ["only text"]),
        ({"reasoning_effort": "low"}, ["cannot be set"]),
        ({"logprobs": 3}, ["true or false"]),
        ({"top_logprobs": 3}, ["logprobs to be true"]),
        ({"max_tokens": 3, "max_completion_tokens": 4}, ["mean the same"]),
        ({"prompt": "a"}, ["no field 'prompt'"]),
    ],
)
def test_a_chat_that_cannot_be_is_refused_with_the_reason(speaking, fields, words):
    asked = {"model": "speaker", "messages": [{"role": "user", "content": "a"}], **fields}
    answer = speaking.post("/v1/chat/completions", json=asked)
    refused(answer, 400, *words)
    assert re.sub(r"\[\d+\]$", "", answer.json()["error"]["param"]) in fields


def test_values_that_ask_for_nothing_are_no_reason_to_refuse(speaking):
    idle = {"user": "me", "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "store": False}
    idle |= {"modalities": ["text"], "reasoning_effort": None, "logit_bias": {}, "stop": [], "metadata": {"a": "b"}}
    idle |= {"parallel_tool_calls": True, "service_tier": "auto", "verbosity": "medium", "top_logprobs": 0, "n": 1}
    idle |= {"safety_identifier": "x", "prompt_cache_key": "y", "prompt_cache_retention": "24h", "stream": False}
    asked = {"model": "speaker", "messages": [{"role": "user", "content": "a"}], "temperature": 0, **idle}
    assert speaking.post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]["content"] == "HELO!"


def test_a_prompt_longer_than_the_context_is_refused_by_its_name(speaking):
    answer = speaking.post("/v1/completions", json={"model": "speaker", "prompt": "a" * 256})
    refused(answer, 400, "256 tokens", "Shorten", param="prompt")
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    answer = speaking.post("/v1/completions", json={"model": "speaker", "prompt": "a" * 200, "max_tokens": 57})
    refused(answer, 400, "the prompt has 200", "57 more")
    messages = [{"role": "user", "content": "a" * 300}]
    refused(
        speaking.post("/v1/chat/completions", json={"model": "speaker", "messages": messages}), 400, param="messages"
    )
    toy = speaking.post("/v1/completions", json={"model": "toy", "prompt": [0] * 500})
    refused(toy, 400, "context of toy is 128", "500")


def test_a_response_without_a_limit_ends_with_the_context(speaking):
    messages = [{"role": "user", "content": "a" * 200}]
    asked = {"model": "speaker", "messages": messages, "temperature": 0, "logit_bias": {"256": -100}}
    told = speaking.post("/v1/chat/completions", json=asked).json()
    assert told["usage"]["total_tokens"] == 256 and told["choices"][0]["finish_reason"] == "length"
    asked = {"model": "speaker", "prompt": "b" * 250, "temperature": 0}
    assert speaking.post("/v1/completions", json=asked).json()["usage"]["completion_tokens"] == 6


def test_a_model_without_a_template_does_not_chat(speaking):
    asked = {"model": "toy", "messages": [{"role": "user", "content": "a"}]}
    refused(speaking.post("/v1/chat/completions", json=asked), 400, "chat template", param="model")


@pytest.mark.parametrize(
    ("path", "asked", "param"),
    [
        ("completions", {"prompt": "<BOS> unicorn"}, "prompt"),
        ("completions", {"prompt": [0, 10]}, "prompt"),
        ("completions", {"prompt": [0], "logit_bias": {"10": 1}}, "logit_bias"),
        ("completions", {"prompt": [0], "stream": True, "stream_options": {"include_usage": 1}}, STREAM_OPTION),
        ("completions", {"prompt": [0], "stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ("completions", {"prompt": [0], "model": "none"}, "model"),
        ("completions", {"prompt": [0] * 16, "n": 3, "max_tokens": 10**6}, "prompt"),
        ("completions", {"prompt": ["<BOS>"] * 9, "n": 2}, "n"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}, {"role": "x"}]}, "messages[1]"),
    ],
)
def test_a_refusal_that_is_about_one_field_names_it(speaking, path, asked, param):
    answer = speaking.post(f"/v1/{path}", json={"model": "toy", **asked})
    assert answer.json()["error"]["param"] == param, answer.text


def test_messages_that_the_template_refuses_are_to_blame_and_a_model_that_cannot_go_on_is(speaker, monkeypatch):
    asked = chat_asked(b'{"model": "speaker", "messages": [{"role": "user", "content": "a"}]}')
    monkeypatch.setattr(speaker.tokenizer, "chat_template", "{{ raise_exception('the user comes second') }}")
    with pytest.raises(Refused, match="the user comes second") as refusal:
        prepared(speaker, asked)
    assert refusal.value.param == "messages"
    with pytest.raises(Refused, match="is an encoder") as refusal:
        prepared(random_model(POST), asked)
    assert refusal.value.param == "model"


@pytest.mark.parametrize(
    "body", ["{", "nul", "[" * 100_000, "\xff", "[]", "3", '{"a": NaN}', '{"a": ' + "9" * 5000 + "}"]
)
def test_what_is_no_json_object_is_refused(speaking, body):
    headers = {"content-type": "application/json"}
    refused(speaking.post("/v1/completions", content=body.encode("latin-1"), headers=headers), 400, "body")


def test_oversized_and_unmeasured_bodies_and_other_kinds_are_refused(speaking):
    refused(speaking.post("/v1/completions", json={"model": "toy", "prompt": "a" * 2_000_000}), 413, "1,000,000")
    headers = {"content-type": "application/json"}
    refused(speaking.post("/v1/completions", content=iter([b"{}"]), headers=headers), 411, "how long")
    refused(speaking.post("/v1/completions", content="{}", headers={"content-type": "text/plain"}), 415, "json")


def test_foreign_hosts_and_pages_are_refused_in_the_form_of_this_interface(speaking):
    asked = {"model": "toy", "prompt": "<BOS>"}
    refused(speaking.post("/v1/completions", json=asked, headers={"host": "evil.example"}), 403, "evil.example")
    refused(speaking.post("/v1/completions", json=asked, headers={"origin": "http://evil.example"}), 403, "may not")


def test_what_is_not_there_is_told_so(speaking):
    refused(speaking.get("/v1/embeddings"), 404, "/v1/embeddings", "/v1/completions")
    refused(speaking.get("/v1/completions"), 405, "takes POST")
    refused(speaking.get("/v1/models/nobody"), 404, "no model 'nobody'", param="model")
    refused(speaking.post("/v1/completions", json={"model": "../toy", "prompt": "a"}), 404, "no model")


def test_a_model_that_cannot_be_loaded_says_why_and_health_says_that_it_cannot(tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUFnonsense")
    with TestClient(make_app(Models([str(broken)]), default="broken.gguf", hosts=("testserver",))) as client:
        refused(client.post("/v1/completions", json={"model": "broken.gguf", "prompt": "x"}), 503, "broken.gguf")
        health = client.get("/health")
        assert health.status_code == 503 and health.json()["status"] == "failed"


@pytest.mark.parametrize(
    "given", [None, "Bearer wrong", "Bearer ", "Bearer", "secret", "Token secret", "Basic !!!", "Basic c2VjcmV0"]
)
def test_without_the_key_nothing_opens(given):
    with TestClient(make_app(hosts=("testserver",), api_key="secret")) as client:
        headers = {} if given is None else {"authorization": given}
        refused(client.get("/v1/models", headers=headers), 401, "API key")
        page = client.get("/", headers=headers)
        assert page.status_code == 401 and page.headers["www-authenticate"].startswith("Basic")
        assert client.post("/api/run", json={"model": "toy", "prompt": "<BOS>"}, headers=headers).status_code == 401


def test_the_key_opens_everything_to_programs_and_to_browsers():
    with TestClient(make_app(hosts=("testserver",), api_key="secret")) as client:
        assert client.get("/v1/models", headers={"authorization": "Bearer secret"}).status_code == 200
        for path in ("/", "/api/models", "/v1/models"):
            assert client.get(path, auth=("", "secret")).status_code == 200
        assert client.get("/health").status_code == 200


def test_the_client_raises_its_own_errors():
    with live(api_key="secret") as port, client_of(port, "secret") as client:
        with pytest.raises(openai.NotFoundError, match="no model 'nobody'") as missing:
            client.completions.create(model="nobody", prompt="a")
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError, match="must be a number") as wrong:
            client.completions.create(model="toy", prompt="<BOS>", temperature=-1)
        assert wrong.value.param == "temperature"
        with pytest.raises(openai.AuthenticationError, match="API key"):
            client_of(port, "wrong").models.list()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--at-once", "0"], "--at-once is 0"),
        (["--waiting", "0"], "--waiting is 0"),
        (["--drain", "-1"], "--drain is -1"),
        (["--api-key", " "], "key is empty"),
    ],
)
def test_options_that_cannot_be_are_refused_before_anything_starts(capsys, options, word):
    assert main(["serve", "--no-browser", "--port", "0", *options]) == 2
    assert word in capsys.readouterr().err


def test_a_full_queue_answers_429_and_those_that_wait_get_their_answers(monkeypatch, toy):
    gate, step = threading.Event(), Batch.step

    def gated(batch: Batch) -> bool:
        gate.wait(30)
        return step(batch)

    monkeypatch.setattr(Batch, "step", gated)
    asked = {"model": "toy", "prompt": "<BOS> dragon", "max_tokens": 4, "seed": 1}
    with live(at_once=1, queued=2) as port, client_of(port) as client, ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(client.completions.create, **asked) for _ in range(2)]
        plain = client.with_options(base_url=f"http://127.0.0.1:{port}")
        while json.loads(plain.get("/health", cast_to=str))["waiting"] < 2:
            pass
        with pytest.raises(openai.RateLimitError, match="requests are waiting") as full:
            client.completions.create(**asked)
        assert full.value.response.headers["retry-after"] == "1"
        with pytest.raises(openai.BadRequestError, match="3 responses are more than the 2"):
            client.completions.create(n=3, **asked)
        gate.set()
        texts = {one.result(30).choices[0].text for one in waiting}
    assert texts == {" " + toy.generate("<BOS> dragon", 4, seed=1).text.strip()}
