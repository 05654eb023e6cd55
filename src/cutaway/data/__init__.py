"""Files that ship inside the package, and the words that belong to them.

`toy.npz`: weights of the ten-token model (made by `python -m cutaway.train.toy`).
`cat_sat_on_it.npz`: chapter 7's queries, keys and values (made by `cutaway.examples.make_example`).
"""

TOY_TOKENS: tuple[str, ...] = (
    "<BOS>",
    "wizard",
    "mixes",
    "glowing",
    "potion",
    "dragon",
    "drinks",
    "fire",
    "troll",
    "smashes",
)
"""The whole vocabulary of the toy model; a token's id is its place in the row (chapter 2)."""
