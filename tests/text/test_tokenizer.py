"""What every tokenizer promises, whatever codec is inside: the BOS rule, pieces, refusals, round trips."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cutaway.errors import CutawayError
from cutaway.text.gguf import tokenizer_from_gguf
from cutaway.text.words import word_tokenizer

any_text = st.text(st.characters(exclude_categories=["Cs"]))
same_fixture = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@pytest.fixture
def plain(byte_level_metadata):
    """A vocabulary with a BOS token whose checkpoint does not add it."""
    return tokenizer_from_gguf(byte_level_metadata | {"tokenizer.ggml.add_bos_token": False})


@pytest.fixture
def begins(byte_level_metadata):
    """The same vocabulary where the checkpoint says that texts begin with BOS."""
    return tokenizer_from_gguf(byte_level_metadata | {"tokenizer.ggml.add_bos_token": True})


def test_one_made_of_words_can_be_sent_to_another_process() -> None:
    tokenizer = word_tokenizer(["<BOS>", "the", "dragon"])
    ids = tokenizer.encode("the dragon")
    text = tokenizer.decode(ids)
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.encode("the dragon") == ids and again.decode(ids) == text


class TestBos:
    def test_it_follows_the_checkpoints_custom(self, plain, begins):
        assert begins.adds_bos and not plain.adds_bos
        assert begins.encode("the dragon") == [0, *plain.encode("the dragon")]
        assert 0 not in plain.encode("the dragon")

    def test_the_caller_overrules_the_custom(self, plain, begins):
        assert plain.encode("the dragon", bos=True)[0] == 0
        assert begins.encode("the dragon", bos=False) == plain.encode("the dragon")

    def test_it_is_never_doubled(self, plain, begins):
        once = begins.encode("the dragon")
        assert begins.encode("<s>the dragon") == once
        assert plain.encode("<s>the dragon", bos=True) == once

    def test_written_as_ordinary_text_it_is_no_bos(self, begins):
        ids = begins.encode("<s>the", special=False)
        assert ids[0] == 0 and 0 not in ids[1:]
        assert begins.decode(ids) == "<s><s>the"

    def test_the_explanation_says_what_happened_and_why(self, plain, begins):
        added, left_out, there = begins.explain("a"), plain.explain("a"), begins.explain("<s>a")
        assert (added.bos_added, left_out.bos_added, there.bos_added) == (True, False, False)
        assert added.reason == (
            "BOS <s> (id 0) was added before the text, as is this checkpoint's custom "
            "(tokenizer.ggml.add_bos_token is true)."
        )
        assert "was not added" in left_out.reason and "add_bos_token is false" in left_out.reason
        assert there.reason == "The text already begins with BOS, so none was added."
        assert "asked for" in plain.explain("a", bos=True).reason
        assert "asked to add no BOS" in begins.explain("a", bos=False).reason

    def test_empty_text_is_no_ids_or_bos_alone(self, plain, begins):
        assert plain.encode("") == []
        assert begins.encode("") == [0]

    def test_asking_for_a_bos_that_does_not_exist_is_refused(self, byte_level_metadata):
        del byte_level_metadata["tokenizer.ggml.bos_token_id"]
        tokenizer = tokenizer_from_gguf(byte_level_metadata)
        assert tokenizer.bos_id is None and not tokenizer.adds_bos
        assert "no BOS token" in tokenizer.explain("a").reason
        with pytest.raises(CutawayError, match="this vocabulary has none"):
            tokenizer.encode("a", bos=True)

    def test_a_customary_eos_is_added_and_explained_and_never_doubled(self, byte_level_metadata):
        tokenizer = tokenizer_from_gguf(byte_level_metadata | {"tokenizer.ggml.add_eos_token": True})
        assert tokenizer.encode("the")[-1] == 1 and 1 not in tokenizer.encode("the", bos=False)
        assert tokenizer.encode("the</s>").count(1) == 1
        assert "</s> (id 1) was added after the text" in tokenizer.explain("the").reason


class TestSpecialTokens:
    def test_they_are_recognised_in_the_text_unless_told_otherwise(self, plain):
        assert plain.encode("<|im_start|>the")[0] == 2
        ordinary = plain.encode("<|im_start|>the", special=False)
        assert 2 not in ordinary and plain.decode(ordinary) == "<|im_start|>the"
        assert plain.encode("<|im_start|>the")[0] == 2  # the choice does not stick

    def test_threads_do_not_disturb_one_another(self, plain):
        marked, ordinary = (plain.encode("<s>the</s>", special=special) for special in (True, False))
        asked = [True, False] * 300
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda special: plain.encode("<s>the</s>", special=special), asked))
        assert found == [marked if special else ordinary for special in asked]

    def test_they_can_be_left_out_of_decoded_text(self, plain):
        ids = plain.encode("<|im_start|>the dragon<|im_end|>")
        assert plain.decode(ids) == "<|im_start|>the dragon<|im_end|>"
        assert plain.decode(ids, skip_special=True) == "the dragon"

    def test_every_known_end_of_turn_stops(self, plain):
        assert plain.eos_id == 1
        assert plain.stop_ids == {1, 3}
        assert plain.special_tokens == {"<s>": 0, "</s>": 1, "<|im_start|>": 2, "<|im_end|>": 3}


class TestPieces:
    def test_spaces_stay_and_invisible_characters_are_escaped(self, plain):
        assert [plain.piece(id) for id in plain.encode("the dragon")] == ["the", " dragon"]
        assert plain.piece(plain.encode("\n")[0]) == "\\n"
        assert plain.piece(2) == "<|im_start|>"

    def test_a_byte_that_is_no_character_is_shown_as_a_byte(self, plain):
        ids = plain.encode("\u2603")  # a snowman, in no line of the corpus
        assert [plain.piece(id) for id in ids] == ["<0xE2>", "<0x98>", "<0x83>"]
        assert b"".join(map(plain.token_bytes, ids)) == "\u2603".encode()


class TestForeignIds:
    @pytest.mark.parametrize("ask", ["decode", "piece", "token_bytes", "stream"])
    @pytest.mark.parametrize("id", [-1, 450, 10**12])
    def test_an_id_out_of_range_is_named_with_the_size_of_the_vocabulary(self, plain, ask, id):
        calls = {
            "decode": lambda: plain.decode([5, id]),
            "piece": lambda: plain.piece(id),
            "token_bytes": lambda: plain.token_bytes(id),
            "stream": lambda: plain.stream().push(id),
        }
        with pytest.raises(CutawayError, match=rf"no token {id}: this vocabulary has 450 tokens, 0 to 449"):
            calls[ask]()

    def test_numpy_integers_are_ids_and_other_things_are_not(self, plain):
        ids = plain.encode("the dragon")
        assert plain.decode(np.array(ids)) == "the dragon"
        with pytest.raises(CutawayError, match=r"whole number, not 1\.5"):
            plain.decode([1.5])


class TestText:
    def test_half_a_surrogate_pair_is_refused_with_its_place(self, plain):
        with pytest.raises(CutawayError, match=r"U\+D83D.* at character 2"):
            plain.encode("ab\ud83d")
        with pytest.raises(CutawayError, match="surrogate"):
            word_tokenizer(["a"]).encode("\udc00")

    def test_only_text_is_tokenized(self, plain):
        with pytest.raises(CutawayError, match="not bytes"):
            plain.encode(b"the")

    @same_fixture
    @given(text=any_text)
    @example(text="  two  spaces \r\n\t end ")
    @example(text="\x00\ufffd\ufeff e\u0301")
    def test_byte_level_vocabularies_lose_nothing(self, plain, text):
        assert plain.decode(plain.encode(text, special=False)) == text
        assert plain.decode(plain.encode(text)) == text
