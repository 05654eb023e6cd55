"""The texts that a page offers to begin with: such as the model at hand can read."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING

from cutaway.errors import CutawayError
from cutaway.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from cutaway.model import Model

# Where the first of these cannot be read, the next are for models of few words.
_TEXTS = (
    (
        "The capital of France is",
        "When Mary and John went to the store, John gave a drink to",
        "the cat sat on the mat because it was",
        "def add(a, b):\n    return a",
        "A B C D A B C",
    ),
    ("<BOS> dragon drinks", "<BOS> wizard mixes glowing", "<BOS> troll smashes"),
)
_LOOKED_AT = 4096  # tokens of a vocabulary among which words are looked for
_WORDS = 4  # in a text that is made of them


def offered(model: "Model", longest: int) -> list[str]:
    """Texts that the model reads whole, of at most `longest` tokens: some of ours, else one of its own words.

    None where it has no tokenizer, or no text that it can read was found.
    """
    try:
        tokenizer = model.tokenizer
    except CutawayError:
        return []

    def readable(texts: Iterable[str]) -> list[str]:
        return [text for text in texts if _reads(model, tokenizer, text, longest)]

    found = next(filter(None, map(readable, _TEXTS)), [])
    return found or readable(_own_texts(tokenizer))[:1]


def _reads(model: "Model", tokenizer: Tokenizer, text: str, longest: int) -> bool:
    """Whether nothing of a text is lost but case and spaces, which some vocabularies do not tell apart."""
    try:
        read = tokenizer.decode(tokenizer.encode(text, bos=False))
        return _letters(read) == _letters(text) and len(model.prompt(text).ids) <= longest
    except CutawayError:
        return False


def _letters(text: str) -> str:
    return "".join(text.split()).casefold()


def _own_texts(tokenizer: Tokenizer) -> Iterator[str]:
    """Texts of words of the vocabulary: several, fewer, one, then each of its first tokens."""
    tokens = list(islice(_plain(tokenizer), _LOOKED_AT))
    words = [token for token in tokens if token.isalpha()] or tokens
    for count in range(_WORDS, 0, -1):
        yield " ".join(words[:count])
    yield from words[:_WORDS]


def _plain(tokenizer: Tokenizer) -> Iterator[str]:
    """The texts of tokens that people can see, special ones left out."""
    special = set(tokenizer.special_tokens.values())
    for token in range(tokenizer.vocab_size):
        with suppress(UnicodeDecodeError):
            text = tokenizer.token_bytes(token).decode("utf-8").strip()
            if token not in special and text and text.isprintable():
                yield text
