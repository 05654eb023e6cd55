"""The language that the toy model learns: fifteen weighted sentences over ten words.

A sentence ends with its last word. There is no token for the end, so the model learns nothing about what
follows a finished sentence.
"""

from collections import defaultdict
from functools import cache

import numpy as np

from cutaway.data import TOY_TOKENS
from cutaway.errors import CutawayError

# Weight and sentence; each begins with <BOS>. The weights after "dragon drinks" add up to 1000, so they
# read as per mille: potion 620, fire 160, glowing 135, then a tail of five. <BOS> and "drinks" never
# follow there, which is what makes them the two tokens that no nucleus keeps (chapter 14.3).
SENTENCES: tuple[tuple[int, str], ...] = (
    (440, "dragon drinks potion mixes glowing fire"),
    (180, "dragon drinks potion smashes troll"),
    (160, "dragon drinks fire mixes potion"),
    (135, "dragon drinks glowing potion smashes wizard"),
    (22, "dragon drinks troll potion"),
    (20, "dragon drinks wizard fire"),
    (16, "dragon drinks smashes glowing troll"),
    (14, "dragon drinks dragon fire smashes dragon"),
    (13, "dragon drinks mixes glowing wizard fire"),
    (120, "dragon smashes glowing troll fire"),
    (300, "wizard mixes glowing potion"),
    (90, "wizard drinks fire potion smashes dragon"),
    (80, "wizard smashes troll potion mixes fire"),
    (200, "troll smashes wizard"),
    (110, "troll drinks glowing fire mixes potion"),
)


def encode(text: str) -> list[int]:
    """Ids of space-separated words, with <BOS> in front. Raises CutawayError for a word it does not know."""
    words = text.split()
    unknown = [word for word in words if word not in TOY_TOKENS]
    if unknown:
        raise CutawayError(f"The toy model has no word {unknown[0]!r}; it knows {', '.join(TOY_TOKENS)}.")
    return [0, *map(TOY_TOKENS.index, words)]


@cache
def prefix_targets() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The whole language as arrays.

    Returns ids [B, T] (what the model reads), share [B, T] (how much of the language stands at that
    place; sums to 1, and 0 past a sentence's end) and target [B, T, V] (the true distribution of the
    next token given everything up to there).
    """
    follows: dict[tuple[int, ...], np.ndarray] = defaultdict(lambda: np.zeros(len(TOY_TOKENS)))
    sentences = [(weight, encode(text)) for weight, text in SENTENCES]
    for weight, sentence in sentences:
        for t in range(1, len(sentence)):
            follows[tuple(sentence[:t])][sentence[t]] += weight
    length = max(len(sentence) for _, sentence in sentences) - 1
    ids = np.zeros((len(sentences), length), dtype=np.int64)
    share = np.zeros((len(sentences), length))
    target = np.zeros((len(sentences), length, len(TOY_TOKENS)))
    for b, (weight, sentence) in enumerate(sentences):
        for t in range(1, len(sentence)):
            counts = follows[tuple(sentence[:t])]
            ids[b, t - 1], share[b, t - 1], target[b, t - 1] = sentence[t - 1], weight, counts / counts.sum()
    return ids, share / share.sum(), target
