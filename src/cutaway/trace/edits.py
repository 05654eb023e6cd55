"""Every kind of edit in one place: what `cutaway.edits` is.

model.trace(prompt, edits=[cutaway.edits.Zero("layers.3.attn.z", heads=[5])])
"""

from cutaway.trace.adapting import Adapter
from cutaway.trace.edit import Edit, edits_key
from cutaway.trace.edit_json import edit_from_json, read_edits
from cutaway.trace.edit_kinds import (
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
from cutaway.trace.edit_sources import difference_of_means
from cutaway.trace.selection import Place
from cutaway.trace.without import PARTS, Without

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
