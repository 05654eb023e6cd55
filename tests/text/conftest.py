"""Small vocabularies, trained in a moment on a few hundred lines of our own."""

import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

_CORPUS = (
    "the dragon drinks glowing potion while a wizard mixes fire and water in 1 or 23 old cauldrons isn't "
    "naïve café größer 你好 世界 привет мир don't we've HTTPServer parseJSON value_of x=y+1 (maybe) [3,4] \U0001f642 "
    "something walking talked talking walker under over thinking rethink unthinkable tower lower lowest"
)


@pytest.fixture(scope="session")
def lines() -> list[str]:
    """Six hundred lines of nonsense in which some parts of words are common."""
    chance = random.Random(7)
    return [
        chance.choice(["", "  ", "\t"]) + " ".join(chance.choices(_CORPUS.split(), k=chance.randint(3, 12)))
        for _ in range(600)
    ]


@pytest.fixture(scope="session")
def byte_level(lines: list[str]) -> LibraryTokenizer:
    """Byte-level BPE of 450 tokens, `<s>` 0, `</s>` 1, with all 256 bytes."""
    tokenizer = LibraryTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=450,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    return tokenizer


@pytest.fixture
def byte_level_metadata(byte_level: LibraryTokenizer) -> dict[str, object]:
    """The same vocabulary as a GGUF file would carry it."""
    return gguf_metadata(byte_level)


def gguf_metadata(tokenizer: LibraryTokenizer) -> dict[str, object]:
    model = json.loads(tokenizer.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": [3 if place < 4 else 1 for place in range(len(pieces))],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }


@pytest.fixture
def folder(tmp_path: Path, byte_level: LibraryTokenizer) -> Path:
    """A model folder with nothing but a tokenizer.json."""
    byte_level.save(str(tmp_path / "tokenizer.json"))
    return tmp_path
