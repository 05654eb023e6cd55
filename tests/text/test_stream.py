"""Text that arrives token by token is never cut inside a character, and nothing is lost."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cutaway.text.gguf import tokenizer_from_gguf
from cutaway.text.words import word_tokenizer

same_fixture = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
any_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"))


@pytest.fixture
def tokenizer(byte_level_metadata):
    return tokenizer_from_gguf(byte_level_metadata)


def streamed(stream, ids):
    return [*map(stream.push, ids), stream.flush()]


@same_fixture
@given(text=any_text)
def test_whole_characters_only_and_all_of_them(tokenizer, text):
    parts = streamed(tokenizer.stream(), tokenizer.encode(text))
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)


@same_fixture
@given(ids=st.lists(st.integers(0, 449), max_size=40))
def test_any_ids_at_all_come_out_as_decode_says(tokenizer, ids):
    assert "".join(streamed(tokenizer.stream(), ids)) == tokenizer.decode(ids)


def test_a_character_comes_out_with_its_last_token(tokenizer):
    ids = tokenizer.encode("\u2603")
    assert len(ids) == 3
    assert streamed(tokenizer.stream(), ids) == ["", "", "\u2603", ""]


def test_what_never_became_a_character_is_marked_at_the_end(tokenizer):
    ids = tokenizer.encode("a\u2603")[:-1]
    parts = streamed(tokenizer.stream(), ids)
    assert parts == ["a", "", "", "\ufffd"]
    assert "".join(parts) == tokenizer.decode(ids)


def test_an_open_character_is_given_up_when_another_begins(tokenizer):
    stream = tokenizer.stream()
    assert stream.push(tokenizer.encode("\u2603")[0]) == ""
    assert stream.push(tokenizer.encode("a")[0]) == "\ufffda"


@same_fixture
@given(text=any_text, cut=st.integers(0, 30))
def test_a_continuation_joins_onto_its_prompt(tokenizer, text, cut):
    ids = tokenizer.encode(text)
    whole = tokenizer.stream()
    for id in ids[:cut]:
        whole.push(id)
    expected = "".join(streamed(whole, ids[cut:]))
    assert "".join(streamed(tokenizer.stream(after=ids[:cut]), ids[cut:])) == expected


def test_special_tokens_are_text_unless_left_out(tokenizer):
    ids = tokenizer.encode("<s>the</s>")
    assert "".join(streamed(tokenizer.stream(), ids)) == "<s>the</s>"
    assert "".join(streamed(tokenizer.stream(skip_special=True), ids)) == "the"


def test_words_are_joined_by_one_space():
    tokenizer = word_tokenizer(["a", "b"])
    assert streamed(tokenizer.stream(), [0, 1, 0]) == ["a", " b", " a", ""]
    assert streamed(tokenizer.stream(after=[0]), [1]) == [" b", ""]
