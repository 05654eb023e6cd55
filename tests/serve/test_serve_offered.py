"""Every text that a page offers is one that its model reads, whatever that is called and however few its words."""

from dataclasses import replace

import pytest
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import models, pre_tokenizers

import cutaway
from cutaway.data import TOY_TOKENS
from cutaway.serve.offered import offered
from cutaway.text.library import LibraryCodec
from cutaway.text.tokenizer import Tokenizer
from cutaway.text.words import word_tokenizer
from random_models import LLAMA, random_model


def of_words(words: list[str]) -> cutaway.Model:
    return random_model(replace(LLAMA, vocab_size=len(words)), tokenizer=word_tokenizer(words))


def with_unknown(words: list[str]) -> cutaway.Model:
    """A model to which every word but these is one and the same."""
    inner = LibraryTokenizer(models.WordLevel({word: id for id, word in enumerate(["[UNK]", *words])}, "[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = Tokenizer(LibraryCodec(inner), special_tokens={"[UNK]": 0})
    return random_model(replace(LLAMA, vocab_size=len(words) + 1), tokenizer=tokenizer)


def test_the_toy_is_offered_its_own_words_under_any_name(toy):
    assert offered(toy, 128)[0] == "<BOS> dragon drinks"
    assert offered(of_words(list(TOY_TOKENS)), 128) == offered(toy, 128)


def test_a_model_that_reads_any_text_is_offered_english_and_code():
    texts = offered(cutaway.load("smollm2-135m"), 128)
    assert texts[0] == "The capital of France is" and len(texts) == 5


@pytest.mark.parametrize("made", [of_words, with_unknown])
def test_a_model_of_other_words_is_offered_a_text_of_those(made):
    model = made(["red", "<mark>", "green", "blue", "7", "white", "black"])
    assert offered(model, 128) == ["red green blue white"]
    assert offered(model, 2) == ["red green"]
    assert offered(made(["7", "8"]), 128) == ["7 8"]


def test_no_text_is_longer_than_the_model_takes(toy):
    for longest in range(6):
        assert all(len(toy.tokenizer.encode(text)) <= longest for text in offered(toy, longest))
    assert offered(toy, 3) == ["<BOS> dragon drinks", "<BOS> troll smashes"]


def test_without_a_tokenizer_or_a_word_nothing_is_offered():
    assert offered(random_model(LLAMA), 128) == []
    assert offered(of_words(["<a>", "<b>"]), 128) == []


def test_what_a_page_is_offered_it_can_run(client):
    card = client.get("/api/card", params={"model": "toy"}).json()
    assert len(card["examples"]) == 3
    for text in card["examples"]:
        assert client.post("/api/run", json={"model": "toy", "prompt": text}).status_code == 200
