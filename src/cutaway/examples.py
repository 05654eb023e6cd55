"""Small fixed examples whose numbers the course walks through."""

from dataclasses import dataclass
from importlib.resources import files

import numpy as np

TOKENS = ("the", "cat", "sat", "on", "it")
D_HEAD = 64

# Chapter 7.3: row i holds the dot products of token i's query with every token's key. The course states
# the last row and the first number; the rest is ours, of the same size.
SCORES = np.array(
    [
        [2.1, 4.8, 1.6, 0.9, 1.3],
        [3.7, 6.4, 5.1, 1.2, 2.8],
        [1.8, 9.6, 4.3, 2.9, 3.4],
        [1.1, 3.9, 8.2, 3.6, 4.5],
        [3.2, 12.8, 5.6, 2.4, 7.2],
    ]
)


@dataclass(frozen=True, eq=False)
class Example:
    """One attention head's input: tokens (T words) and float64 arrays q, k, v, each [T, d_head].

    The arrays are read-only. `eq=False`: two arrays have no single answer to "equal?".
    """

    tokens: tuple[str, ...]
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray


def make_example() -> dict[str, np.ndarray]:
    """Work out q, k, v [5, 64] so that q kᵀ is SCORES: how the shipped file was made.

    Keys and values are standard normal. Five random keys in 64 dimensions are linearly independent, so
    for any scores there are queries that give them; q = S pinv(k)ᵀ are the shortest ones. RandomState is
    NumPy's old generator: its stream is promised never to change.
    """
    random = np.random.RandomState(7)
    k = random.standard_normal((len(TOKENS), D_HEAD))
    v = random.standard_normal((len(TOKENS), D_HEAD))
    return {"q": SCORES @ np.linalg.pinv(k).T, "k": k, "v": v}


def cat_sat_on_it() -> Example:
    """Chapter 7's example: "the cat sat on it", one head of 64 dimensions.

    The query of `it` meets the keys with dot products 3.2, 12.8, 5.6, 2.4, 7.2 (to 1e-12). Read from the
    package's own file, so that every machine has the same numbers to the last bit.
    """
    with (files("cutaway.data") / "cat_sat_on_it.npz").open("rb") as file, np.load(file) as arrays:
        q, k, v = (arrays[name] for name in "qkv")
    for array in (q, k, v):
        array.flags.writeable = False
    return Example(TOKENS, q, k, v)
