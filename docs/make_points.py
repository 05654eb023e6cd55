"""Write docs/POINTS.md, the list of every address, from the table that the product itself uses.

python docs/make_points.py
"""

from pathlib import Path

from cutaway.points import GLOBAL_FIRST, GLOBAL_LAST, IN_LAYER, OF_CHOICE, POINTS

PAGE = Path(__file__).with_name("POINTS.md")

INTRODUCTION = """# Every address of a pass

Made by `python docs/make_points.py` from `cutaway.points`; `model.points` lists those of one model.

An address is a name, with its layer in front where it stands in one: `embed.out`, `layers.3.attn.pattern`. Layers,
heads and positions count from 0; `layers.-1` is the last; patterns may hold `*` and half-open ranges
(`layers.5:8.resid_post`). A model has the points that its architecture implies: no `attn.q_rot` without rotary
positions, no `mlp.gate` without a gate; asking for one that it lacks says why.

Symbols: T tokens, S keys that are seen (T, where nothing is cached), d model width, V vocabulary, H query heads, H_kv
key/value heads, d_head and d_value the widths of a head's keys and values, d_ff neurons, E experts, k experts chosen
per token, q_rank and kv_rank the widths of latents, d_rope the rotated part of a latent key. Chapters are those of
the lecture “Inside the Transformer: The Complete Forward Pass”.

After an address may stand what is to be kept of it, worked out while the pass runs: `| last` (the last row), `| mean`
(over the rows), `| norm` (of each row), `| top(k)` and `| argtop(k)` (the k largest of each row, and where they stand),
and of `attn.pattern` `| pool(n)`: at most n × n cells, each what a stretch of queries gives to a stretch of keys.
[NAMES.md](NAMES.md) has the names of other tools.

`attn.dots`, `attn.scores`, `attn.masked`, `attn.pattern`, `attn.head_out` and `logits` are not stored when they are
captured but worked out on access from what is, by the very functions of the pass: the bits are the same. Where an edit
reaches them on the way, they are stored as the pass used them.
`attn.out` and `mlp.out` are exactly what is added to the residual stream; `attn.raw` and `mlp.raw` are what the
sub-layer gave, before a norm that some models put between. `resid_mid` and `resid_post` are what the next part reads:
in post-norm models that is after the norm, and `attn.sum` and `mlp.sum` hold the sum before it.

The last table is of no pass but of the choice that follows it: each step's trace of `model.generate(…,
points=["sample.*"])` has the stages that are in use, in their order, as float64. A forced token was not drawn: its
interval is NaN.
"""


def page() -> str:
    sections = [
        ("Before the layers", GLOBAL_FIRST, ""),
        ("In each layer", IN_LAYER, "layers.*i*."),
        ("After the layers", GLOBAL_LAST, ""),
        ("When a token is chosen", OF_CHOICE, ""),
    ]
    parts = [INTRODUCTION]
    for title, names, prefix in sections:
        rows = [
            f"## {title}\n",
            "| address | shape | what it is | why it is there | chapter |",
            "|---|---|---|---|---|",
        ]
        for name in names:
            info = POINTS[name]
            shape = ", ".join(info.shape)
            rows.append(f"| {prefix}`{name}` | [{shape}] | {info.meaning} | {info.reason} | {info.chapter} |")
        parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.name}")
