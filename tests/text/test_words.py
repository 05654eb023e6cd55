"""The toy's tokenizer: a word is a token."""

import subprocess
import sys

import pytest

from cutaway.errors import CutawayError
from cutaway.text.words import word_tokenizer

WORDS = ["<BOS>", "wizard", "mixes", "glowing", "potion", "dragon", "drinks", "fire", "troll", "smashes"]


@pytest.fixture
def toy():
    return word_tokenizer(WORDS)


def test_the_lectures_prompt(toy):
    assert toy.encode("<BOS> dragon drinks") == [0, 5, 6]
    assert toy.decode([0, 5, 6, 4]) == "<BOS> dragon drinks potion"


def test_bos_begins_every_text_once(toy):
    assert toy.bos_id == 0 and toy.adds_bos
    assert toy.encode("dragon drinks") == toy.encode("<BOS> dragon drinks") == [0, 5, 6]
    assert toy.encode("dragon drinks", bos=False) == [5, 6]
    assert "training sentences" in toy.explain("dragon").reason


def test_any_white_space_separates(toy):
    assert toy.encode("  dragon\n drinks\t") == [0, 5, 6]


def test_an_unknown_word_is_named_with_the_vocabulary(toy):
    with pytest.raises(CutawayError, match=r"'cat' is not in .* wizard mixes glowing"):
        toy.encode("dragon cat")


def test_a_mark_cannot_be_written_as_an_ordinary_word(toy):
    with pytest.raises(CutawayError, match="special token"):
        toy.encode("<BOS> dragon", special=False)


def test_pieces_are_the_words(toy):
    assert [toy.piece(id) for id in range(10)] == WORDS
    assert toy.vocab_size == 10 and toy.special_tokens == {"<BOS>": 0}


@pytest.mark.parametrize(("words", "fault"), [(["a", "b", "a"], "'a' twice"), (["a b"], "white space"), ([""], "''")])
def test_a_vocabulary_that_could_not_be_read_back_is_refused(words, fault):
    with pytest.raises(CutawayError, match=fault):
        word_tokenizer(words)


def test_it_needs_no_library():
    """A browser has neither `tokenizers` nor `jinja2`."""
    program = (
        "import sys; sys.modules.update(tokenizers=None, jinja2=None)\n"
        "from cutaway.text.words import word_tokenizer\n"
        "assert word_tokenizer(['a', 'b']).encode('b a') == [1, 0]"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
