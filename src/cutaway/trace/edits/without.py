"""Leaving out a part of the architecture for one run: the lecture's stages, undone one at a time on a real model.

Where the part is data of the spec (the mask, the scale) the run gets another spec. Everything else is a value that
stands in the place of another: without its norm, a sub-layer reads the stream; without its positions, the rotated
queries are the queries. So the points stay what they were, and two runs can be compared address by address.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from cutaway.errors import CutawayError
from cutaway.points import Point, layer_names, points_of
from cutaway.points.find import layer_range
from cutaway.spec import LayerSpec, ModelSpec
from cutaway.trace.edits.edit import Edit

# Points whose values are put, added up, in the place of another's; none: 0.
Instead = dict[Point, tuple[Point, ...]]


@dataclass(frozen=True, eq=False)
class Without(Edit):
    """The run without a part: one of `PARTS`, in all layers or in `layers` ("3", "2:5", "*")."""

    part: str
    layers: str | int = "*"

    kind: ClassVar[str] = "without"

    def __post_init__(self) -> None:
        if self.part not in PARTS:
            raise CutawayError(f"A run can be without {', '.join(PARTS)}; {self.part!r} is none of them.")
        object.__setattr__(self, "layers", str(self.layers))

    def __str__(self) -> str:
        return f"without {self.part}" + ("" if self.layers == "*" else f" in layers {self.layers}")

    def changed(self, spec: ModelSpec) -> ModelSpec:
        """The spec of the run; the same where the part is no data of the spec."""
        change = _SPECS.get(self.part)
        if change is None:
            return spec
        which = self._which(spec)
        return replace(
            spec, layers=tuple(change(layer) if i in which else layer for i, layer in enumerate(spec.layers))
        )

    def witness(self, spec: ModelSpec) -> dict[Point, None]:
        """Where a change of the spec is felt."""
        name = {"mask": "attn.masked", "scale": "attn.scores"}.get(self.part)
        if name is None:
            return {}
        found = [i for i in self._which(spec) if _has(self.part, spec.layers[i])]
        if not found:
            raise CutawayError(self._lacks(spec))
        return {Point(name, i): None for i in found}

    def instead(self, spec: ModelSpec) -> Instead:
        """Which values stand in the place of which."""
        if self.part in _SPECS:
            return {}
        available, found = set(points_of(spec)), {}
        for i in self._which(spec):
            for name, sources in PARTS[self.part](spec.layers[i], layer_names(spec, i)).items():
                found[Point(name, i)] = tuple(Point(source, i) for source in sources)
        if self.layers == "*":  # what stands outside the layers goes with all of them
            last = Point("resid_post", spec.n_layers - 1)
            if self.part in ("norms", "final.norm") and Point("final.norm") in available:
                found[Point("final.norm")] = (last,)
            if self.part == "positions" and Point("embed.positions") in available:
                found[Point("embed.positions")] = ()
        if not found:
            raise CutawayError(self._lacks(spec))
        return found

    def _which(self, spec: ModelSpec) -> range:
        try:
            which = layer_range(str(self.layers), spec.n_layers)
        except ValueError:
            which = range(0)
        if not which:
            raise CutawayError(
                f"There are no layers {self.layers!r}: {spec.name} has layers 0 to {spec.n_layers - 1}, "
                "of which '*', '3' or '2:5' name some."
            )
        return which

    def _lacks(self, spec: ModelSpec) -> str:
        where = "" if self.layers == "*" else f" in its layers {self.layers}"
        return f"{spec.name} has no {self.part}{where} that could be left out."


def _positions(layer: LayerSpec, names: list[str]) -> dict[str, tuple[str, ...]]:
    before = ("attn.q_normed", "attn.k_normed") if "attn.q_normed" in names else ("attn.q", "attn.k")
    if layer.attention.norm_after_rotary:
        before = ("attn.q", "attn.k")
    return {f"{before_rotation[:6]}_rot": (before_rotation,) for before_rotation in before if "attn.q_rot" in names}


def _head_norms(layer: LayerSpec, names: list[str]) -> dict[str, tuple[str, ...]]:
    if "attn.q_normed" not in names:
        return {}
    turned = layer.attention.norm_after_rotary and "attn.q_rot" in names
    return {f"attn.{x}_normed": (f"attn.{x}_rot" if turned else f"attn.{x}",) for x in "qk"}


def _norm(part: str) -> Callable[[LayerSpec, list[str]], dict[str, tuple[str, ...]]]:
    def instead(layer: LayerSpec, names: list[str]) -> dict[str, tuple[str, ...]]:
        stream, left = ("resid_pre", "resid_mid") if part == "attn" else ("resid_mid", "resid_post")
        found: dict[str, tuple[str, ...]] = {}
        if f"{part}.norm" in names:
            found[f"{part}.norm"] = (stream if stream in names else "resid_pre",)
        if f"{part}.sum" in names:
            found[left] = (f"{part}.sum",)
        if layer.out_norm is not None:
            found[f"{part}.out"] = (f"{part}.raw",)
        return found

    return instead


def _residual(part: str) -> Callable[[LayerSpec, list[str]], dict[str, tuple[str, ...]]]:
    def instead(layer: LayerSpec, names: list[str]) -> dict[str, tuple[str, ...]]:
        if layer.parallel:  # one sum of both: one residual path
            return {"resid_post": ("attn.out", "mlp.out")}
        total = f"{part}.sum" if f"{part}.sum" in names else ("resid_mid" if part == "attn" else "resid_post")
        return {total: (f"{part}.out",)}

    return instead


def _all_of(*parts: str) -> Callable[[LayerSpec, list[str]], dict[str, tuple[str, ...]]]:
    def instead(layer: LayerSpec, names: list[str]) -> dict[str, tuple[str, ...]]:
        return {point: sources for part in parts for point, sources in PARTS[part](layer, names).items()}

    return instead


def _nothing(layer: LayerSpec, names: list[str]) -> dict[str, tuple[str, ...]]:
    return {}


# What can be left out, and what then stands where, in one layer.
PARTS: dict[str, Callable[[LayerSpec, list[str]], dict[str, tuple[str, ...]]]] = {
    "mask": _nothing,
    "scale": _nothing,
    "positions": _positions,
    "attn": lambda layer, names: {"attn.out": ()},
    "mlp": lambda layer, names: {"mlp.out": ()},
    "attn.norm": _norm("attn"),
    "mlp.norm": _norm("mlp"),
    "head norms": _head_norms,
    "final.norm": _nothing,
    "norms": _all_of("attn.norm", "mlp.norm", "head norms"),
    "attn.residual": _residual("attn"),
    "mlp.residual": _residual("mlp"),
    "residuals": _all_of("attn.residual", "mlp.residual"),
}

_SPECS: dict[str, Callable[[LayerSpec], LayerSpec]] = {
    "mask": lambda layer: replace(layer, attention=replace(layer.attention, causal=False, window=None, chunk=None)),
    "scale": lambda layer: replace(layer, attention=replace(layer.attention, scale=1.0)),
}


def _has(part: str, layer: LayerSpec) -> bool:
    attention = layer.attention
    if part == "scale":
        return attention.score_scale != 1.0
    return attention.causal or attention.chunk is not None


def put(values: list[np.ndarray], like: np.ndarray) -> Any:
    """The sum of some values, the value itself where it is one, 0 where there are none."""
    if not values:
        return np.zeros_like(like)
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total
