"""A conversation: its exact ids, what of them is read again, and what of it is kept."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_generation import ByteCodec

import cutaway
from cutaway import CutawayError
from cutaway.generate.conversation import Conversation, chat_ids, parts
from cutaway.spec.catalog import llama_like
from cutaway.text.tokenizer import Tokenizer
from random_models import CountingEngine, random_model

SPEC = llama_like("small-chat", vocab_size=49_152, d_model=8, n_layers=1, n_heads=2, n_kv_heads=1, d_ff=8)
WORDS = st.text(st.sampled_from("ab é\n<|>_imedst"), max_size=12) | st.sampled_from(
    ["<|im_end|>", "x<|im_start|>system\n"]
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return cutaway.load("smollm2-135m").tokenizer


@pytest.fixture
def chat(tokenizer) -> Conversation:
    return Conversation(random_model(SPEC, engine=CountingEngine(), tokenizer=tokenizer), max_tokens=5, seed=1)


def say(chat: Conversation, text: str) -> list[int]:
    return [step.token for step in chat.say(text)]


def rows_of(chat: Conversation) -> list[int]:
    return chat.model.engine.rows_through(chat.model.parameters.layers[0]["mlp.up"].weight)


# The exact ids


def test_the_ids_are_those_of_the_text_that_the_template_makes(tokenizer):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi!"},
        {"role": "user", "content": '1 < 2 & "so" on'},
    ]
    text = tokenizer.apply_chat_template(messages)
    assert tokenizer.decode(chat_ids(tokenizer, messages)) == text
    assert chat_ids(tokenizer, messages) == tokenizer.encode(text)


def with_template(template: str, *, custom: bool) -> Tokenizer:
    """A byte tokenizer with BOS, which puts it before every text where `custom`."""

    class Codec(ByteCodec):
        vocab_size = 258

        def encode(self, text: str, *, special: bool) -> list[int]:
            if special and "<s>" in text:
                before, after = text.split("<s>", 1)
                return [*before.encode(), 257, *self.encode(after, special=True)]
            return list(text.encode())

        def name(self, id: int) -> str:
            return "<s>" if id == 257 else super().name(id)

        def token_bytes(self, id: int, *, at_start: bool) -> bytes:
            return b"<s>" if id == 257 else super().token_bytes(id, at_start=at_start)

    return Tokenizer(
        Codec(),
        special_tokens={"</s>": 256, "<s>": 257},
        bos_id=257,
        eos_id=256,
        prefix_ids=[257] if custom else [],
        chat_template=template,
    )


@pytest.mark.parametrize("custom", [True, False])
def test_there_is_the_bos_that_the_template_writes_and_never_a_second(custom):
    asked = [{"role": "user", "content": "hi <s> there"}]
    body = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    assert chat_ids(with_template("{{ bos_token }}" + body, custom=custom), asked).count(257) == 1
    assert chat_ids(with_template(body, custom=custom), asked).count(257) == 0


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant"]), WORDS), min_size=1, max_size=4))
def test_nobody_but_the_template_ends_a_turn(tokenizer, said):
    """A special token that stands in a message stays the characters that it is made of."""
    messages = [{"role": role, "content": content} for role, content in said]
    ids = chat_ids(tokenizer, messages)
    plain = chat_ids(tokenizer, [{"role": role, "content": "x"} for role, _ in said])
    for special in tokenizer.special_tokens.values():
        assert ids.count(special) == plain.count(special)
    text = tokenizer.decode(ids)
    assert all(content.strip() in text for _, content in said)


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant"]), WORDS), min_size=1, max_size=4))
def test_the_parts_are_the_prompt_cut_at_its_messages(tokenizer, said):
    messages = [{"role": role, "content": content} for role, content in said]
    told = parts(tokenizer, messages)
    assert [token for part in told for token in part.ids] == chat_ids(tokenizer, messages)
    assert [part.role for part in told] == [*(role for role, _ in said), "assistant"]
    for part, (_, content) in zip(told, said, strict=False):
        words = tokenizer.decode(part.ids[part.start : part.stop])
        assert content.strip() in words
        assert 0 <= part.start <= part.stop <= len(part.ids)


# Turns


def test_the_next_turn_reads_only_what_is_new(chat):
    say(chat, "Hello there, how are you?")
    shared = len(chat_ids(chat.model.tokenizer, chat.messages[:1]))  # with the beginning of the answer
    asked = chat_ids(chat.model.tokenizer, [*chat.messages, {"role": "user", "content": "And now?"}])
    chat.model.engine.multiplied.clear()
    say(chat, "And now?")
    assert chat.read + chat.reused == len(asked)
    assert chat.reused >= shared
    assert rows_of(chat)[0] == chat.read


def test_an_answer_is_what_the_whole_prompt_alone_gives(chat):
    for text in ("Hello", "Why?", "Is it so?"):
        prompt = chat_ids(chat.model.tokenizer, [*chat.messages, {"role": "user", "content": text}])
        turn = sum(message["role"] == "assistant" for message in chat.messages)
        assert say(chat, text) == chat.model.generate(prompt, 5, seed=1 + turn).tokens


def test_another_answer_takes_the_place_of_the_last(chat):
    first = say(chat, "Hello")
    asked = len(chat.messages)
    other = [step.token for step in chat.regenerate()]
    assert other != first
    assert len(chat.messages) == asked
    assert chat.read == 1  # the prompt is the same, and its last row alone is worked out again
    with pytest.raises(CutawayError, match="There is nothing to answer yet"):
        next(Conversation(chat.model, "Be brief.").regenerate())


def test_an_answer_that_is_stopped_stays_as_far_as_it_came(chat):
    stream = chat.say("Hello")
    texts = [next(stream).text, next(stream).text]
    stream.close()
    assert chat.messages[-1] == {"role": "assistant", "content": "".join(texts)}
    assert len(say(chat, "Go on")) == 5


def test_history_is_written_and_read_back(chat, tmp_path):
    say(chat, "Hello 😀")
    path = chat.save(tmp_path / "talk.json")
    again = Conversation(chat.model, max_tokens=5)
    again.load(path)
    assert again.messages == chat.messages
    (tmp_path / "marked.json").write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    again.load(tmp_path / "marked.json")
    assert again.messages == chat.messages
    (tmp_path / "marked.json").unlink()
    assert [entry.name for entry in tmp_path.iterdir()] == ["talk.json"]
    assert json.loads(path.read_text())["model"] == "small-chat"


@pytest.mark.parametrize(
    "content", ["", "[1", "[" * 100_000, "3", '{"messages": [{"role": "user"}]}', '[{"role": "king", "content": "x"}]']
)
def test_a_file_that_holds_no_conversation_changes_nothing(chat, tmp_path, content):
    say(chat, "Hello")
    before = list(chat.messages)
    (tmp_path / "wrong.json").write_text(content)
    with pytest.raises(CutawayError, match="holds no saved conversation"):
        chat.load(tmp_path / "wrong.json")
    assert chat.messages == before
    with pytest.raises(CutawayError, match="cannot be read: No such file"):
        chat.load(tmp_path / "none.json")
    with pytest.raises(CutawayError, match="could not be written"):
        chat.save(tmp_path / "no" / "folder.json")


def test_what_cannot_be_said_is_refused_and_not_kept(chat):
    for text in ("", "  \n"):
        with pytest.raises(CutawayError, match="The message is empty"):
            chat.say(text)
    assert chat.messages == []


def test_an_answer_that_cannot_begin_leaves_the_conversation_as_it_was(chat):
    say(chat, "Hello")
    before = list(chat.messages)
    chat.settings["top_k"] = 0
    for ask in (lambda: chat.say("More"), chat.regenerate):
        with pytest.raises(CutawayError, match="top_k is 0"):
            ask()
        assert chat.messages == before
    chat.settings["top_k"] = None
    list(chat.regenerate())
    assert [message["role"] for message in chat.messages] == ["user", "assistant"]


def test_a_model_without_a_template_does_not_chat(toy):
    with pytest.raises(CutawayError, match="toy comes without a chat template"):
        Conversation(toy)
