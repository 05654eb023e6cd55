"""Everything that can be changed in a pass; what `cutaway.edits` is.

    model.trace(prompt, edits=[cutaway.edits.Zero("layers.3.attn.z", heads=[5])])

What all edits are stands in `edit`; the edits themselves are those of values at points (`kinds`, which reach a part by
`selection` and take values from `sources`), of the architecture (`without`), and of weights (`adapting`: LoRA adapters,
which `merging` adds to a model for good). `plain` reads them out of JSON. A run with edits is `editing`: the tap that
puts each where it acts, with the arithmetic of one edit on one value in `applying`; `edited` says what they did.
"""

from cutaway.trace.edits.adapting import Adapter
from cutaway.trace.edits.edit import Edit, edits_key
from cutaway.trace.edits.kinds import (
    Add,
    Drop,
    Freeze,
    Function,
    Keep,
    Knockout,
    Mean,
    PointEdit,
    Replace,
    Resample,
    Scale,
    Zero,
)
from cutaway.trace.edits.plain import edit_from_json, read_edits
from cutaway.trace.edits.selection import Place
from cutaway.trace.edits.sources import difference_of_means
from cutaway.trace.edits.without import PARTS, Without

__all__ = [
    "PARTS",
    "Adapter",
    "Add",
    "Drop",
    "Edit",
    "Freeze",
    "Function",
    "Keep",
    "Knockout",
    "Mean",
    "Place",
    "PointEdit",
    "Replace",
    "Resample",
    "Scale",
    "Without",
    "Zero",
    "difference_of_means",
    "edit_from_json",
    "edits_key",
    "read_edits",
]
