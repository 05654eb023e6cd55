"""What an adapter adds to a projection, by two narrow matrices: the full one that they stand for is never made."""

from dataclasses import replace
from typing import Any

import numpy as np

from cutaway.engines.layout import Layout
from cutaway.engines.protocol import Array, Engine, Linear, LowRank


def with_added(engine: Engine, y: Array, x: Array, linear: Linear, layout: Layout) -> Array:
    """y `[T, d_out]` and Σ scale · (x downᵀ) upᵀ over what is added to this projection of x `[T, d_in]`.

    The narrow products go by the layout's blocks as all others do, so that a row gets the same in any company. Where
    rows change their lengths, what is added is what that makes of the product, beside which other adapters stand.
    (LoRA, Hu et al. 2021; DoRA, Liu et al. 2024)
    """
    whole = y
    for part in linear.added:
        narrow = engine.linear(x, Linear(part.down), layout)  # [T, r]
        more = engine.linear(narrow, Linear(part.up), layout) * part.scale
        if part.gain is not None:
            product = whole if linear.bias is None else whole - linear.bias
            more = (product + more) * engine.array(part.gain) - product
        total = y + more
        if part.told is not None:
            part.told(_changed(engine, y, total), total.shape[-1])
        y = total
    return y


def unheard(linear: Any) -> tuple[LowRank, ...]:
    """What is added to a projection, for products that are no part of the pass: nobody is told of them."""
    return tuple(replace(part, told=None) for part in getattr(linear, "added", ()))


def _changed(engine: Engine, before: Any, after: Any) -> np.ndarray:
    """How many numbers of each row are others now, `int [T]`."""
    return np.count_nonzero(engine.numpy(after) != engine.numpy(before), axis=-1)
