"""The address of every intermediate of the forward pass, and the tap through which a stage shows it.

A point has a name, a shape in symbols, a meaning and a reason; `layers.3.attn.pattern` is the pattern of
layer 3.
"""

from cutaway.points.find import Pattern, find_points, parse_point
from cutaway.points.present import (
    all_points,
    choice_points,
    dot_inputs,
    layer_names,
    points_of,
    shape_of,
    shape_symbols,
)
from cutaway.points.table import (
    GLOBAL_FIRST,
    GLOBAL_LAST,
    IN_LAYER,
    LECTURE,
    OF_CHOICE,
    POINTS,
    ROW_BLOCKS,
    Point,
    PointInfo,
)
from cutaway.points.tap import Tap, Unwatched

__all__ = [
    "GLOBAL_FIRST",
    "GLOBAL_LAST",
    "IN_LAYER",
    "LECTURE",
    "OF_CHOICE",
    "POINTS",
    "ROW_BLOCKS",
    "Pattern",
    "Point",
    "PointInfo",
    "Tap",
    "Unwatched",
    "all_points",
    "choice_points",
    "dot_inputs",
    "find_points",
    "layer_names",
    "parse_point",
    "points_of",
    "shape_of",
    "shape_symbols",
]
