"""Vocabularies of the Llama kind encode exactly as the `sentencepiece` package does."""

import io
import random

import pytest
import sentencepiece
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cutaway.errors import CutawayError
from cutaway.text.gguf import tokenizer_from_gguf
from cutaway.text.sentencepiece import SentencePieceCodec

same_fixture = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)

USER_DEFINED = ["<table>", "wal", "▁▁", "\n\n"]
KINDS = {
    "as Llama": {},
    "as Gemma": {"add_dummy_prefix": False, "user_defined_symbols": USER_DEFINED},
    "without bytes": {"byte_fallback": False, "character_coverage": 0.98},
    "pieces across words": {"split_by_whitespace": False},
    "pieces of spaces": {"allow_whitespace_only_pieces": True},
}


def trained(lines, **settings):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="bpe",
        vocab_size=600,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        minloglevel=2,
        **({"byte_fallback": True} | settings),
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def gguf_metadata(reference, *, space_prefix, user_defined=()):
    ids = range(reference.get_piece_size())
    pieces = [reference.id_to_piece(id) for id in ids]

    def kind(id):
        if reference.is_unknown(id):
            return 2
        if reference.is_control(id):
            return 3
        if reference.is_byte(id):
            return 6
        return 4 if pieces[id] in user_defined else 1

    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [reference.get_score(id) for id in ids],
        "tokenizer.ggml.token_type": [kind(id) for id in ids],
        "tokenizer.ggml.bos_token_id": reference.bos_id(),
        "tokenizer.ggml.eos_token_id": reference.eos_id(),
        "tokenizer.ggml.unknown_token_id": reference.unk_id(),
        "tokenizer.ggml.add_space_prefix": space_prefix,
    }


def odd_texts(lines, count):
    """Pieces of the corpus, and what it never had, in any order and with any spaces between."""
    chance = random.Random(11)
    parts = [
        "  ",
        "    ",
        "\n",
        "\n\n",
        "\t",
        "▁",
        "▁▁",
        "\u3000",
        "é",
        "e\u0301",
        "🙂",
        "🏳️‍🌈",
        "語",
        "<table>",
        "<s>",
        "<0x41>",
    ]
    parts += " ".join(lines[:20]).split(" ") + list("abcdefgst 0123.,()\x00\r")
    return ["".join(chance.choices(parts, k=chance.randint(0, 25))) for _ in range(count)]


@pytest.fixture(scope="module", params=KINDS)
def pair(request, lines):
    """(the package, our tokenizer) on the same vocabulary."""
    options = KINDS[request.param]
    reference = trained(lines, **options)
    metadata = gguf_metadata(
        reference,
        space_prefix=options.get("add_dummy_prefix", True),
        user_defined=options.get("user_defined_symbols", ()),
    )
    return reference, tokenizer_from_gguf(metadata)


def test_odd_texts_give_the_packages_ids(pair, lines):
    reference, tokenizer = pair
    for text in odd_texts(lines, 1500):
        assert tokenizer.encode(text, bos=False, special=False) == reference.encode(text), text


@settings(deadline=None, max_examples=200)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_gives_the_packages_ids(pair, text):
    reference, tokenizer = pair
    assert tokenizer.encode(text, bos=False, special=False) == reference.encode(text)


@pytest.fixture(scope="module")
def llama(lines):
    return tokenizer_from_gguf(gguf_metadata(trained(lines), space_prefix=True))


@settings(deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁")))
def test_text_comes_back_as_it_was(llama, text):
    ids = llama.encode(text, special=False)
    assert llama.decode(ids, skip_special=True) == text
    stream = llama.stream(skip_special=True)
    assert "".join([*map(stream.push, ids), stream.flush()]) == text


def test_words_one_by_one_and_the_whole_at_once_agree(lines):
    metadata = gguf_metadata(trained(lines), space_prefix=True)
    by_words, whole = tokenizer_from_gguf(metadata), tokenizer_from_gguf(metadata)
    assert by_words._codec._word_by_word
    whole._codec._word_by_word = False
    for text in odd_texts(lines, 300):
        assert by_words.encode(text) == whole.encode(text)


def test_llama_begins_with_bos_where_the_file_does_not_say(llama):
    assert llama.adds_bos
    assert llama.encode("<s>the dragon") == llama.encode("the dragon")
    assert "means true for this kind" in llama.explain("the").reason


def test_a_continuation_keeps_the_space_that_a_beginning_drops(llama):
    prompt, rest = llama.encode("the dragon"), llama.encode("drinks", bos=False)
    assert llama.decode(rest) == "drinks"
    stream = llama.stream(after=prompt)
    assert "".join(map(stream.push, rest)) == " drinks"
    assert llama.decode(prompt + rest, skip_special=True) == "the dragon drinks"


def test_bytes_and_spaces_are_shown_to_people(llama):
    newline = llama.encode("\n", bos=False)[-1]
    assert llama.piece(newline) == "\\n" and llama.token_bytes(newline) == b"\n"
    snowman = llama.encode("\u2603", bos=False)[-3:]
    assert [llama.piece(id) for id in snowman] == ["<0xE2>", "<0x98>", "<0x83>"]
    assert llama.piece(llama.encode("dragon", bos=False)[0]).startswith(" ")
    assert llama.piece(1) == "<s>"


def built(pieces, *, types=None, scores=None):
    ranks = scores or [-float(place) for place in range(len(pieces))]
    codec = SentencePieceCodec(pieces, ranks, types or [1] * len(pieces), unknown_id=0, space_prefix=False)
    return lambda text: [pieces[id] for id in codec.encode(text, special=True)]


def test_equal_scores_merge_from_the_left():
    encode = built(["?", "a", "b", "c", "ab", "bc"], scores=[0.0] * 6)
    assert encode("abc") == ["ab", "c"]


def test_an_unused_piece_is_taken_apart_again():
    pieces = ["?", "ab", "abc", "a", "b", "c"]
    assert built(pieces, types=[2, 5, 1, 1, 1, 1])("abc") == ["abc"]
    assert built(pieces, types=[2, 5, 1, 1, 1, 1])("ab") == ["a", "b"]
    assert built(pieces, types=[2, 1, 5, 1, 1, 1])("abc") == ["ab", "c"]


def test_a_byte_that_is_not_written_as_one_is_refused():
    with pytest.raises(CutawayError, match="'A', is marked as a byte"):
        built(["?", "A"], types=[2, 6])
