"""The tokenizer that a GGUF file carries: rebuilt exactly, or refused by name."""

import numpy as np
import pytest
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN2
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX as QWEN35

from cutaway.errors import CutawayError
from cutaway.text.gguf import tokenizer_from_gguf
from cutaway.text.pretokenizers import pre_tokenizer

LLAMA3 = TikTokenConverter.__init__.__defaults__[1]
TEXTS = [
    "The capital of France is",
    "we've WE'VE don't DON'T I'm isn'T",
    "1 12 123 1234 12345,678.90 x1y22z333 ½ Ⅷ",
    "a  b   c\n\n\n d \n\t e\r\n f   ",
    "HTTPServer parseJSONValue iPhone ÉCOLEécole ǅungla",
    "你好世界 привет мир かな カナ ไทย हिन्दी 한국어",
    "e\u0301 n\u0303andu naïve café — “quotes” … 🙂🏳️‍🌈",
    "x = y+1; // a/b\n/* c */ {[(<>)]} $5 ^_^ ~`|",
    "\u3000wide\u00a0space\u2003and\x0btabs\x1f",
]


def library_tokenizer(model, *before):
    """The `tokenizers` library around the same merges, cut as the model's own tokenizer.json cuts."""
    tokenizer = LibraryTokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(before))
    return tokenizer


def split(pattern):
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


TO_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2_CUT = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
PUBLISHED_CUTS = {
    "gpt-2": [GPT2_CUT],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), GPT2_CUT],
    "starcoder": [pre_tokenizers.Digits(individual_digits=True), GPT2_CUT],
    "llama-bpe": [split(LLAMA3), TO_BYTES],
    "llama3": [split(LLAMA3), TO_BYTES],
    "qwen2": [split(QWEN2), TO_BYTES],
    "qwen35": [split(QWEN35), TO_BYTES],
}


@pytest.mark.parametrize("name", PUBLISHED_CUTS)
def test_texts_are_cut_as_the_models_own_tokenizer_cuts_them(name, byte_level, byte_level_metadata):
    tokenizer = tokenizer_from_gguf(byte_level_metadata | {"tokenizer.ggml.pre": name})
    reference = library_tokenizer(byte_level.model, *PUBLISHED_CUTS[name])
    for text in TEXTS:
        assert tokenizer.encode(text, bos=False) == reference.encode(text).ids, text


def pieces_of(name, text):
    """The text as it is cut under `name`, before any merge."""
    cuts = pre_tokenizers.Sequence([split(pattern) for pattern in pre_tokenizer(name).patterns])
    return [piece for piece, _ in cuts.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("default", "ab 12345!?", ["ab", " ", "123", "45", "!?"]),
        ("falcon", "ab 12345`x", ["ab", " ", "123", "45", "`", "x"]),
        ("deepseek-llm", "Hi there 123!\n\nok", ["Hi", " there", " ", "123", "!", "\n", "\n", "ok"]),
        ("deepseek-coder", "Hi there 12", ["Hi", " there", " ", "1", "2"]),
        ("deepseek-v3", "Hi 12345 你好x", ["Hi", " ", "123", "45", " ", "你好", "x"]),
        ("tekken", "HTTPServer parseJSON 12", ["HTTPServer", " parse", "JSON", " ", "1", "2"]),
        ("gpt-4o", "we'VE 1234 iPhone", ["we'VE", " ", "123", "4", " i", "Phone"]),
    ],
)
def test_the_other_cuts(name, text, pieces):
    assert pieces_of(name, text) == pieces
    assert "".join(pieces_of(name, "".join(TEXTS))) == "".join(TEXTS)


def test_deepseeks_letters_are_letters():
    """Listed by range: a range end that Unicode normalisation had changed would cut at other places."""
    letters = "".join(map(chr, (0x41, 0xB5, 0x390, 0x1F7D, 0x1FBE, 0x1FD3, 0x1FDB, 0x2126, 0x212A, 0x10400)))
    cut = split(pre_tokenizer("deepseek-llm").patterns[1])
    assert [piece for piece, _ in cut.pre_tokenize_str(letters)] == [letters]
    assert [piece for piece, _ in cut.pre_tokenize_str("a\u05d0b")] == ["a", "\u05d0", "b"]


def test_an_unknown_cut_is_refused_with_the_known_ones(byte_level_metadata):
    with pytest.raises(CutawayError, match=r"'my-cut' \(tokenizer.ggml.pre\).*known are .*llama-bpe.*qwen2"):
        tokenizer_from_gguf(byte_level_metadata | {"tokenizer.ggml.pre": "my-cut"})


def test_an_unknown_kind_is_refused_with_the_known_ones(byte_level_metadata):
    with pytest.raises(CutawayError, match=r"'t5' .*known are gpt2, llama, bert"):
        tokenizer_from_gguf(byte_level_metadata | {"tokenizer.ggml.model": "t5"})


def test_bos_is_customary_where_the_cut_implies_it_and_the_file_is_silent(byte_level_metadata):
    def adds(**entries):
        named = {f"tokenizer.ggml.{name}": value for name, value in entries.items()}
        return tokenizer_from_gguf(byte_level_metadata | named).adds_bos

    assert not adds(pre="gpt-2")
    assert adds(pre="llama-bpe") and adds(pre="tekken")
    assert not adds(pre="llama-bpe", add_bos_token=False)
    assert adds(pre="gpt-2", add_bos_token=True)


def test_a_whole_word_that_is_a_token_needs_no_merges_where_the_model_says_so(byte_level_metadata):
    tokens = [*byte_level_metadata["tokenizer.ggml.tokens"], "Ġxyzzy"]
    longer = byte_level_metadata | {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [*byte_level_metadata["tokenizer.ggml.token_type"], 1],
    }
    whole = tokenizer_from_gguf(longer | {"tokenizer.ggml.pre": "llama3"})
    merged = tokenizer_from_gguf(longer | {"tokenizer.ggml.pre": "gpt-2"})
    assert whole.encode("a xyzzy", bos=False)[-1] == len(tokens) - 1
    assert len(tokens) - 1 not in merged.encode("a xyzzy")


def test_user_defined_tokens_are_always_found_but_are_no_special_tokens(byte_level_metadata):
    tokens = [*byte_level_metadata["tokenizer.ggml.tokens"], "<think> now", "<|pad|>"]
    types = [*byte_level_metadata["tokenizer.ggml.token_type"], 4, 5]
    tokenizer = tokenizer_from_gguf(
        byte_level_metadata | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": np.array(types)}
    )
    think, unused = len(tokens) - 2, len(tokens) - 1
    for special in (True, False):
        ids = tokenizer.encode("a<think> now<|pad|>", special=special)
        assert think in ids and unused not in ids
        assert tokenizer.decode(ids, skip_special=True) == "a<think> now<|pad|>"
    assert "<think> now" not in tokenizer.special_tokens
    assert tokenizer.piece(think) == "<think> now"


def test_the_chat_template_and_the_named_tokens_come_along(byte_level_metadata):
    tokenizer = tokenizer_from_gguf(
        byte_level_metadata
        | {
            "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ pad_token }}",
            "tokenizer.ggml.padding_token_id": 3,
            "tokenizer.ggml.add_bos_token": True,
        }
    )
    text = tokenizer.apply_chat_template([{"role": "user", "content": "the"}])
    assert text == "<s>the</s><|im_end|>"
    assert tokenizer.encode(text).count(0) == 1


@pytest.mark.parametrize(
    ("entries", "fault"),
    [
        ({"model": None}, "no tokenizer.ggml.model"),
        ({"model": 7}, "model must be a string, not 7"),
        ({"tokens": None}, "tokens is missing"),
        ({"tokens": []}, "tokens is missing or empty"),
        ({"tokens": "abc"}, "must be an array, not str"),
        ({"tokens": ["a", 7]}, r"tokens\[1\] must be a string, not 7"),
        ({"tokens": ["a", "b", "a"]}, "'a' twice, as 0 and 2"),
        ({"token_type": [1, 1]}, "2 entries for 450 tokens"),
        ({"token_type": ["x"] * 450}, "finite numbers only"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["Ġ t", "abc"]}, r"merges\[1\] is 'abc'"),
        ({"merges": ["Ġ t", "Ġ quux"]}, r"merges\[1\].*needs the token 'quux'"),
        ({"bos_token_id": 450}, "bos_token_id is 450, but a token's id lies from 0 to 449"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x'"),
        ({"add_bos_token": "yes"}, "must be true or false, not 'yes'"),
        ({"model": "llama", "scores": None}, "scores is missing"),
        ({"model": "llama", "scores": [float("nan")] * 450}, "finite numbers only"),
        ({"model": "bert"}, "bert tokenizer names its unknown_token_id"),
    ],
)
def test_entries_that_are_missing_or_do_not_fit_are_named(byte_level_metadata, entries, fault):
    for name, value in entries.items():
        byte_level_metadata[f"tokenizer.ggml.{name}"] = value
    with pytest.raises(CutawayError, match=fault):
        tokenizer_from_gguf(byte_level_metadata)


class TestBert:
    PIECES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "paris", "##ian", "is", "big", ".", "cafe", "##s")

    @pytest.fixture
    def tokenizer(self):
        pieces = [p[2:] if p.startswith("##") else p if p.startswith("[") else "▁" + p for p in self.PIECES]
        return tokenizer_from_gguf(
            {
                "tokenizer.ggml.model": "bert",
                "tokenizer.ggml.tokens": pieces,
                "tokenizer.ggml.token_type": [3, 2, 3, 3, *[1] * 7],
                "tokenizer.ggml.unknown_token_id": 1,
                "tokenizer.ggml.cls_token_id": 2,
                "tokenizer.ggml.seperator_token_id": 3,
            }
        )

    def test_it_encodes_as_the_library_does(self, tokenizer):
        reference = LibraryTokenizer(
            models.WordPiece({piece: id for id, piece in enumerate(self.PIECES)}, unk_token="[UNK]")
        )
        reference.normalizer = normalizers.BertNormalizer(lowercase=True)
        reference.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        reference.decoder = decoders.WordPiece(cleanup=False)
        reference.add_special_tokens(["[UNK]"])
        for text in ("Parisian cafés", "PARIS is big.", "zebra is", ""):
            ids = reference.encode(text).ids
            assert tokenizer.encode(text, bos=False) == ids
            assert tokenizer.decode(ids, skip_special=True) == reference.decode(ids)

    def test_what_stands_around_a_text_is_explained(self, tokenizer):
        encoding = tokenizer.explain("paris")
        assert encoding.ids == [2, 4, 3]
        assert encoding.reason.startswith(
            "[CLS] (id 2) was added before the text and [SEP] (id 3) after it, as is this checkpoint's custom"
        )
        assert tokenizer.decode(encoding.ids) == "[CLS] paris [SEP]"
        assert [tokenizer.piece(id) for id in (4, 5, 2)] == ["paris", "##ian", "[CLS]"]
