"""The arithmetic of latent attention's cells: squeezed, normed, unfolded to heads, one key shared by all."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cutaway.points import Point
from cutaway.serve.terms import Made, biased, dotted, norm_steps, number, through
from cutaway.spec import AttentionSpec, LatentSpec

Value = Callable[[Point], np.ndarray]


def latent_cell(
    spec: AttentionSpec, weights: Mapping, value: Value, source: Point, point: Point, at: Sequence[int], found: float
) -> Made:
    """A number of `q_latent`, `kv_latent`, `k_shared`, `q`, `k` or `v`; `source` is the point that was read."""
    latent = spec.latent
    assert latent is not None
    match point.name:
        case "attn.q_latent" | "attn.kv_latent":
            which = "q" if point.name == "attn.q_latent" else "kv"
            return _squeezed(latent, weights, which, value(source)[at[0]], source, at[1], found)
        case "attn.k_shared":
            return _unfolded(weights["attn.k_shared"], value(source)[at[0]], source, at[1], found)
        case "attn.q":
            return _unfolded(weights["attn.q"], value(source)[at[1]], source, at[0] * spec.d_head + at[2], found)
        case "attn.v":
            return _unfolded(weights["attn.v"], value(source)[at[1]], source, at[0] * spec.value_width + at[2], found)
    head, t, c = at
    if c < latent.d_nope:
        return _unfolded(weights["attn.k"], value(source)[t], source, head * latent.d_nope + c, found)
    shared = Point("attn.k_shared", point.layer)
    return Made(steps=[rf"\text{{{shared}}}[{t}, {c - latent.d_nope}] = {number(found)}"])


def _unfolded(linear: Any, row: np.ndarray, source: Point, output: int, found: float) -> Made:
    weight = linear.weight.take([output], np.float64)[0]
    steps = biased(linear.bias, output, found)
    return dotted(str(source), f"row {output} of the weight", row, weight, steps=steps)


def _squeezed(
    latent: LatentSpec, weights: Mapping, which: str, row: np.ndarray, source: Point, c: int, found: float
) -> Made:
    """One coordinate of a latent: a dot product, brought to size by the norm of all of them."""
    down = weights[f"attn.{which}_down"]
    narrow = through(down, row)
    steps = biased(down.bias, c, float(narrow[c])) or [rf"c_{{{c}}} = {number(float(narrow[c]))}"]
    steps += norm_steps(latent.norm, narrow, c, weights.get(f"attn.{which}_latent_norm"), found)
    weight = down.weight.take([c], np.float64)[0]
    return dotted(str(source), f"row {c} of the weight", row, weight, steps=steps)
