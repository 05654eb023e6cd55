"""Write docs/NAMES.md, our addresses beside the names of other tools, from the table that the product itself uses.

python docs/make_names.py
"""

import re
from pathlib import Path

from cutaway.points import POINTS
from cutaway.points.foreign import FOREIGN

PAGE = Path(__file__).with_name("NAMES.md")

INTRODUCTION = """# The same points under other names

Made by `python docs/make_names.py` from `cutaway.points.foreign`. [POINTS.md](POINTS.md) says what stands at each.

Wherever an address is asked for (`points=`, `trace[…]`, edits, `cutaway trace --point`) a name of TransformerLens, of a
module of Hugging Face's models or of llama.cpp may stand instead, where what it names has the same axes (but for their
batch of one in front). Where the axes or the meaning are others, the name is refused with ours and the difference, so
that nobody reads the wrong axis. *i* is a layer, or `*`.
"""


def page() -> str:
    parts = [INTRODUCTION]
    for tool in dict.fromkeys(foreign.tool for foreign in FOREIGN):
        rows = [f"## {tool}\n", "| there | here | taken as ours |", "|---|---|---|"]
        for foreign in FOREIGN:
            if foreign.tool != tool:
                continue
            name = re.sub(r"([\w.]+_?\w*\.[\w.]+|\b(?:tokens|logits|resid_\w+)\b)", r"`\1`", foreign.ours)
            ours = f"layers.*i*.{name}" if "{i}" in foreign.name else name
            if foreign.accepted:
                taken = "yes"
            elif foreign.note is not None:
                taken = f"no: {foreign.note}"
            else:
                here = f", here [{', '.join(POINTS[foreign.ours].shape)}]" if foreign.ours in POINTS else ""
                taken = f"no: [{', '.join(foreign.theirs or ())}] there{here}"
            rows.append(f"| `{foreign.name.replace('{i}', 'i')}` | {ours} | {taken} |")
        parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.name}")
