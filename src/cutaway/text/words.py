"""The toy's tokenizer: one word, one token. Pure Python, so that it also runs in a browser."""

from collections.abc import Sequence

from cutaway.errors import CutawayError
from cutaway.text.tokenizer import Tokenizer


class WordCodec:
    """Splits at white space; the words are the vocabulary, written `<like this>` where they are special."""

    specials_keep_start = False
    shows_own_pieces = True

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)
        self.ids = {word: id for id, word in enumerate(self.words)}
        self.vocab_size = len(self.words)
        for word in self.words:
            if not isinstance(word, str) or word.split() != [word]:
                raise CutawayError(f"{word!r} cannot be a word of the vocabulary: a word has no white space in it.")
        if len(self.ids) != len(self.words):
            doubled = next(word for id, word in enumerate(self.words) if self.ids[word] != id)
            raise CutawayError(f"The vocabulary holds the word {doubled!r} twice; every word needs one id.")

    def encode(self, text: str, *, special: bool) -> list[int]:
        return [self._id(word, special) for word in text.split()]

    def _id(self, word: str, special: bool) -> int:
        if word not in self.ids:
            raise CutawayError(
                f"The word {word!r} is not in this model's vocabulary, which is: {' '.join(self.words)}."
            )
        if is_special(word) and not special:
            raise CutawayError(
                f"{word!r} is a special token, and this vocabulary has no other way to write it; allow special tokens."
            )
        return self.ids[word]

    def name(self, id: int) -> str:
        return self.words[id]

    def token_bytes(self, id: int, *, at_start: bool) -> bytes:
        return (self.words[id] if at_start else " " + self.words[id]).encode("utf-8")


def is_special(word: str) -> bool:
    """Whether a word of the vocabulary is a mark such as `<BOS>` rather than a word."""
    return len(word) > 2 and word.startswith("<") and word.endswith(">")


def word_tokenizer(words: Sequence[str]) -> Tokenizer:
    """A tokenizer that splits at white space and joins with one space; `words[i]` is token i.

    A `<BOS>` among the words begins every text, an `<EOS>` ends generation. Raises CutawayError for a
    vocabulary with a word twice, and when encoding a word that is not in it.
    """
    codec = WordCodec(words)
    bos_id = codec.ids.get("<BOS>")
    return Tokenizer(
        codec,
        special_tokens={word: id for word, id in codec.ids.items() if is_special(word)},
        bos_id=bos_id,
        eos_id=codec.ids.get("<EOS>"),
        prefix_ids=() if bos_id is None else (bos_id,),
        custom="each of its training sentences begins with <BOS>",
    )
