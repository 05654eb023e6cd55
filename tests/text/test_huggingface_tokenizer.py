"""A model folder's tokenizer gives the ids that `transformers` gives, and adds nothing unseen."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as LibraryTokenizer
from transformers import GPT2Tokenizer, PreTrainedTokenizerFast

from cutaway.errors import CutawayError
from cutaway.text.huggingface import tokenizer_from_folder

TEXTS = [
    "",
    " ",
    "the dragon drinks glowing potion",
    "  two  spaces \n\n and\tlines \r\n",
    "naïve café größer 你好 世界 🙂 \u2603 e\u0301",
    "<s>the</s> dragon <|im_start|>x",
    "don't we've 12345 [MASK] ,.;:",
]


def write(folder: Path, name: str, content: object) -> None:
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


def bos_first(tokenizer):
    return processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])


def trained(model, trainer, lines, **parts):
    tokenizer = LibraryTokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.train_from_iterator(lines, trainer)
    return tokenizer


def llama_like(lines):
    """SentencePiece's manner inside tokenizer.json, as Llama 2 has it."""
    tokenizer = trained(
        models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True),
        trainers.BpeTrainer(
            vocab_size=600,
            special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
            show_progress=False,
        ),
        [line.replace(" ", "▁") for line in lines],
    )
    # Bytes are ordinary tokens of the vocabulary, not marks to be found in a text.
    settings = json.loads(tokenizer.to_str())
    settings["added_tokens"] = settings["added_tokens"][:3]
    tokenizer = LibraryTokenizer.from_str(json.dumps(settings))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def bert_like(lines):
    tokenizer = trained(
        models.WordPiece(unk_token="[UNK]"),
        trainers.WordPieceTrainer(
            vocab_size=300, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], show_progress=False
        ),
        lines,
        normalizer=normalizers.BertNormalizer(lowercase=True),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
        decoder=decoders.WordPiece(),
    )
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=12)
    return tokenizer


def unigram_like(lines):
    return trained(
        models.Unigram(),
        trainers.UnigramTrainer(
            vocab_size=300, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
        ),
        lines,
        pre_tokenizer=pre_tokenizers.Metaspace(),
        decoder=decoders.Metaspace(),
        post_processor=processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)]),
    )


def word_like(lines):
    return trained(
        models.WordLevel(unk_token="<unk>"),
        trainers.WordLevelTrainer(special_tokens=["<unk>"], show_progress=False),
        lines,
        pre_tokenizer=pre_tokenizers.WhitespaceSplit(),
    )


@pytest.fixture(params=["byte level", llama_like, bert_like, unigram_like, word_like])
def library(request, lines, byte_level):
    return byte_level if request.param == "byte level" else request.param(lines)


def test_every_kind_gives_the_ids_and_the_text_of_transformers(library, tmp_path):
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = tokenizer_from_folder(tmp_path)
    library.no_truncation()
    library.no_padding()
    reference = PreTrainedTokenizerFast(tokenizer_object=library)
    assert tokenizer.vocab_size == len(reference)
    for text in TEXTS:
        ids = reference.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text, bos=False) == ids, text
        assert tokenizer.encode(text)[: len(tokenizer.prefix_ids)] == list(tokenizer.prefix_ids)
        skipped = reference.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert tokenizer.decode(ids, skip_special=True) == skipped, text
        stream = tokenizer.stream()
        assert "".join([*map(stream.push, ids), stream.flush()]) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", [llama_like, bert_like, unigram_like])
def test_what_the_post_processor_adds_is_added_in_the_open(kind, lines, tmp_path):
    library = kind(lines)
    library.no_truncation()
    library.no_padding()
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = tokenizer_from_folder(tmp_path)
    for text in ("", "the dragon", "drinks potion and fire"):
        assert tokenizer.encode(text) == library.encode(text).ids
        assert tokenizer.encode(text, bos=False) == library.encode(text, add_special_tokens=False).ids
    assert "post-processor of tokenizer.json" in tokenizer.explain("the dragon").reason


def test_texts_are_never_cut_or_padded_behind_our_back(lines, tmp_path):
    bert_like(lines).save(str(tmp_path / "tokenizer.json"))
    ids = tokenizer_from_folder(tmp_path).encode("the dragon drinks glowing potion and fire and water")
    assert len(ids) > 8 and 0 not in ids
    assert ids[0] == 2 and ids[-1] == 3


class TestWhatTheFilesSayAboutBos:
    def test_nothing_said_adds_nothing(self, folder):
        tokenizer = tokenizer_from_folder(folder)
        assert tokenizer.bos_id is None
        assert 0 not in tokenizer.encode("the dragon")

    def test_the_post_processor_says_so(self, folder, byte_level):
        copy = LibraryTokenizer.from_str(byte_level.to_str())
        copy.post_processor = bos_first(copy)
        copy.save(str(folder / "tokenizer.json"))
        tokenizer = tokenizer_from_folder(folder)
        assert tokenizer.bos_id == 0 and tokenizer.adds_bos
        assert tokenizer.encode("<s>the") == tokenizer.encode("the") == copy.encode("the").ids

    @pytest.mark.parametrize("asked", [True, False])
    def test_tokenizer_config_overrules_it(self, folder, byte_level, asked):
        copy = LibraryTokenizer.from_str(byte_level.to_str())
        if not asked:
            copy.post_processor = bos_first(copy)
        copy.save(str(folder / "tokenizer.json"))
        write(folder, "tokenizer_config.json", {"bos_token": {"content": "<s>"}, "add_bos_token": asked})
        tokenizer = tokenizer_from_folder(folder)
        assert tokenizer.adds_bos is asked
        assert f"add_bos_token is {str(asked).lower()} in tokenizer_config.json" in tokenizer.explain("a").reason

    def test_a_byte_level_post_processor_adds_nothing(self, folder, byte_level):
        copy = LibraryTokenizer.from_str(byte_level.to_str())
        copy.post_processor = processors.ByteLevel(trim_offsets=False)
        copy.save(str(folder / "tokenizer.json"))
        assert tokenizer_from_folder(folder).prefix_ids == ()


def test_names_stops_and_templates_come_from_the_files_beside(folder):
    write(folder, "special_tokens_map.json", {"bos_token": "<s>", "eos_token": "</s>"})
    write(folder, "generation_config.json", {"eos_token_id": [1, 7, 10**6]})
    write(folder, "config.json", {"eos_token_id": 5})
    tokenizer = tokenizer_from_folder(folder)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)
    assert tokenizer.stop_ids == {1, 3, 7}  # </s>, <|im_end|> by its name, and what generation_config names


def test_the_template_in_a_file_of_its_own_comes_first(folder):
    assert tokenizer_from_folder(folder).chat_template is None
    write(
        folder,
        "tokenizer_config.json",
        {"chat_template": [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]},
    )
    assert tokenizer_from_folder(folder).chat_template == "d"
    write(folder, "chat_template.json", {"chat_template": "j"})
    assert tokenizer_from_folder(folder).chat_template == "j"
    write(folder, "chat_template.jinja", "x")
    assert tokenizer_from_folder(folder).chat_template == "x"


def marked(folder: Path) -> None:
    """Write a byte order mark before every file, as some editors do."""
    for file in folder.iterdir():
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())


def test_a_byte_order_mark_before_any_file_is_no_part_of_it(folder):
    write(folder, "tokenizer_config.json", {"bos_token": "<s>"})
    write(folder, "chat_template.jinja", "x{{ bos_token }}")
    plain = tokenizer_from_folder(folder)
    marked(folder)
    tokenizer = tokenizer_from_folder(folder)
    assert (tokenizer.chat_template, tokenizer.bos_id) == (plain.chat_template, plain.bos_id)
    for text in TEXTS:
        assert tokenizer.encode(text) == plain.encode(text)
    (folder / "chat_template.jinja").write_bytes("x".encode("utf-16"))
    with pytest.raises(CutawayError, match=r"chat_template\.jinja cannot be read: it is UTF-16 text"):
        tokenizer_from_folder(folder)


def test_tokens_that_only_the_config_knows_are_added_under_their_ids(folder):
    entry = {"450": {"content": "<new>", "special": True}, "451": {"content": "<plain>"}}
    write(folder, "tokenizer_config.json", {"added_tokens_decoder": entry})
    tokenizer = tokenizer_from_folder(folder)
    assert tokenizer.vocab_size == 452 and tokenizer.special_tokens["<new>"] == 450
    assert tokenizer.encode("the<new><plain>")[-2:] == [450, 451]
    write(folder, "tokenizer_config.json", {"added_tokens_decoder": {"460": entry["450"]}})
    with pytest.raises(CutawayError, match="gives '<new>' the id 460, but in the vocabulary it is 450"):
        tokenizer_from_folder(folder)


class TestGpt2Files:
    @pytest.fixture
    def gpt2(self, tmp_path, byte_level):
        byte_level.model.save(str(tmp_path))
        return tmp_path

    def test_they_give_the_ids_of_transformers(self, gpt2):
        tokenizer = tokenizer_from_folder(gpt2)
        vocabulary = json.loads((gpt2 / "vocab.json").read_text(encoding="utf-8"))
        merges = [tuple(line.split(" ")) for line in (gpt2 / "merges.txt").read_text(encoding="utf-8").splitlines()[1:]]
        reference = GPT2Tokenizer(vocab=vocabulary, merges=merges)
        for text in TEXTS:
            if "<" not in text:
                assert tokenizer.encode(text) == reference.encode(text), text
                assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.vocab_size == 450 and not tokenizer.adds_bos

    def test_a_byte_order_mark_before_any_file_is_no_part_of_it(self, gpt2):
        plain = tokenizer_from_folder(gpt2)
        marked(gpt2)
        for text in TEXTS:
            assert tokenizer_from_folder(gpt2).encode(text) == plain.encode(text)

    def test_a_model_that_cuts_differently_is_refused(self, gpt2):
        write(gpt2, "tokenizer_config.json", {"tokenizer_class": "Qwen2Tokenizer"})
        with pytest.raises(CutawayError, match=r"for a Qwen2Tokenizer.*add the model's tokenizer.json"):
            tokenizer_from_folder(gpt2)

    @pytest.mark.parametrize(
        ("name", "content", "fault"),
        [
            ("vocab.json", "{", "vocab.json cannot be read as JSON"),
            ("vocab.json", {"a": "b"}, "must map every token to its id"),
            ("vocab.json", '{"a": 1, "a": 2}', "'a' is given twice"),
            ("merges.txt", "#version: 0.2\na b c\n", "line 2: 'a b c' is not two tokens"),
            ("merges.txt", "#version: 0.2\nĠ t\nĠ quux\n", "line 3: 'Ġ quux' needs the token 'quux'"),
        ],
    )
    def test_malformed_files_are_named(self, gpt2, name, content, fault):
        write(gpt2, name, content)
        with pytest.raises(CutawayError, match=fault):
            tokenizer_from_folder(gpt2)


def test_a_folder_without_tokenizer_has_none(tmp_path):
    write(tmp_path, "config.json", {})
    assert tokenizer_from_folder(tmp_path) is None


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.txt"])
def test_a_form_that_is_not_read_is_refused_by_name(tmp_path, name):
    write(tmp_path, name, "")
    with pytest.raises(CutawayError, match=f"only as {name}.*add the model's tokenizer.json"):
        tokenizer_from_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("tokenizer.json", "", "is empty"),
        ("tokenizer.json", {"model": {}}, "holds no tokenizer that can be read"),
        ("tokenizer_config.json", "[1]", "it holds a list where an object is needed"),
        ("tokenizer_config.json", "{'a'", "cannot be read as JSON"),
        ("tokenizer_config.json", {"bos_token": 7}, "bos_token must be a token's text, not 7"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": 1}}, "must map ids to tokens"),
        ("tokenizer_config.json", {"chat_template": 7}, "chat_template must be text, not int"),
        ("generation_config.json", {"eos_token_id": "x"}, "eos_token_id must be a token id or a list"),
    ],
)
def test_malformed_files_are_named(folder, name, content, fault):
    write(folder, name, content)
    with pytest.raises(CutawayError, match=f"{name}.*{fault}"):
        tokenizer_from_folder(folder)


def test_a_text_that_the_vocabulary_cannot_write_is_refused_not_thinned(tmp_path, lines):
    """Byte-level BPE without all 256 bytes and without an unknown token would drop what it does not know."""
    plain = ["the dragon drinks"]
    tokenizer = trained(
        models.BPE(),
        trainers.BpeTrainer(special_tokens=["<ü>"], show_progress=False),
        plain,
        pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoder=decoders.ByteLevel(),
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours = tokenizer_from_folder(tmp_path)
    assert ours.decode(ours.encode("the dragon")) == "the dragon"
    assert ours.encode("<ü>") == [0]
    with pytest.raises(CutawayError, match="no tokens for the bytes of 'ö'"):
        ours.encode("the dragön")


def test_ids_may_leave_gaps_and_a_gap_stands_for_nothing(tmp_path):
    tokenizer = LibraryTokenizer(models.WordLevel({"a": 0, "b": 4, "?": 5}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours = tokenizer_from_folder(tmp_path)
    assert ours.vocab_size == 6 and ours.encode("a b c") == [0, 4, 5]
    with pytest.raises(CutawayError, match="Token 2 is a gap in this vocabulary of 6 ids"):
        ours.decode([2])


def test_a_decoder_that_is_not_known_is_refused(folder, byte_level):
    copy = LibraryTokenizer.from_str(byte_level.to_str())
    copy.decoder = decoders.CTC()
    copy.save(str(folder / "tokenizer.json"))
    with pytest.raises(CutawayError, match="decodes through CTC"):
        tokenizer_from_folder(folder)


def test_added_tokens_are_text_as_they_stand(folder, byte_level):
    copy = LibraryTokenizer.from_str(byte_level.to_str())
    copy.add_tokens([AddedToken("é —", normalized=False)])
    copy.save(str(folder / "tokenizer.json"))
    ours = tokenizer_from_folder(folder)
    ids = ours.encode("café —!")
    assert 450 in ids and ours.decode(ids) == "café —!" and ours.piece(450) == "é —"
