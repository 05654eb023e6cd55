"""One number of a tensor, and the arithmetic that made it, from the very values and weights of the run."""

from collections.abc import Callable, Collection, Sequence
from math import exp

import numpy as np

from cutaway.errors import CutawayError
from cutaway.forward.parameters import Parameters
from cutaway.forward.positions import frequencies
from cutaway.points import Point, dot_inputs
from cutaway.serve.lineage import inputs_of
from cutaway.serve.protocol import Cell, Term
from cutaway.spec import ModelSpec, NormSpec

SHOWN = 8  # terms of a sum that are told one by one

Value = Callable[[Point], np.ndarray]  # the run's tensor at a point
Square = Callable[[Point, int], np.ndarray]  # `[T, S]` of one head of a T × T point


def number(value: float) -> str:
    """A number in LaTeX with four significant digits."""
    if value == float("-inf"):
        return r"-\infty"
    text = f"{value:.4g}"
    if "e" in text:
        mantissa, power = text.split("e")
        return rf"{mantissa}\cdot 10^{{{int(power)}}}"
    return text


class Arithmetic:
    """Explains the cells of one run. `pieces` name its tokens, `edited` the points that edits act at."""

    def __init__(
        self,
        spec: ModelSpec,
        parameters: Parameters,
        value: Value,
        square: Square,
        pieces: Sequence[str],
        edited: Collection[str] = (),
    ) -> None:
        self._spec, self._parameters, self._value, self._square = spec, parameters, value, square
        self._pieces, self._edited = pieces, edited

    def cell(self, point: Point, at: Sequence[int]) -> Cell:
        """The number at index `at` of `point`. Raises CutawayError for an index that the tensor does not have."""
        found = self._found(point, at)
        explain = self._explainers().get(point.name)
        made = explain(point, at, found) if explain is not None else _Made()
        hidden = bool(np.isneginf(found)) or (
            point.name == "attn.pattern" and found == 0.0 and np.isneginf(self._square(_masked(point), at[0])[at[1:]])
        )
        rest = made.products[SHOWN:]
        return Cell(
            str(point),
            [int(index) for index in at],
            float(found) if np.isfinite(found) else None,
            bool(hidden),
            str(point) in self._edited,
            made.left,
            made.right,
            made.products[:SHOWN],
            len(rest),
            sum(term.product for term in rest),
            made.steps,
        )

    def _found(self, point: Point, at: Sequence[int]) -> float:
        squared = point.info.shape[-1] == "S"
        shape = self._value(point).shape if not squared else (self._heads(point), len(self._pieces), len(self._pieces))
        if len(at) != len(shape) or any(not 0 <= i < n for i, n in zip(at, shape, strict=False)):
            raise CutawayError(f"{point} has shape {list(shape)}; there is no number at {list(at)}.")
        return float(self._square(point, at[0])[at[1], at[2]] if squared else self._value(point)[tuple(at)])

    def _heads(self, point: Point) -> int:
        return self._spec.layers[point.layer or 0].attention.n_heads

    def _explainers(self) -> dict[str, "Callable[[Point, Sequence[int], float], _Made]"]:
        return {
            "embed.tokens": self._row,
            "embed.out": self._sum,
            "resid_pre": self._same,
            "attn.norm": self._norm,
            "mlp.norm": self._norm,
            "final.norm": self._norm,
            "attn.q": self._projected,
            "attn.k": self._projected,
            "attn.v": self._projected,
            "attn.q_rot": self._turned,
            "attn.k_rot": self._turned,
            "attn.dots": self._dots,
            "attn.scores": self._scaled,
            "attn.masked": self._masked,
            "attn.pattern": self._softmax,
            "attn.z": self._mixed,
            "attn.head_out": self._head_out,
            "attn.raw": self._projected,
            "attn.out": self._same,
            "attn.sum": self._sum,
            "resid_mid": self._sum,
            "mlp.gate": self._projected,
            "mlp.up": self._projected,
            "mlp.act": self._activated,
            "moe.router_logits": self._projected,
            "mlp.raw": self._projected,
            "mlp.out": self._same,
            "mlp.sum": self._sum,
            "resid_post": self._sum,
            "logits": self._projected,
        }

    def _row(self, point: Point, at: Sequence[int], found: float) -> "_Made":
        token = int(self._value(Point("tokens"))[at[0]])
        return _Made(steps=[rf"E[{token}, {at[1]}] = {number(found)}"])

    def _same(self, point: Point, at: Sequence[int], found: float) -> "_Made":
        source = inputs_of(point, self._spec)[0]
        if not np.array_equal(self._value(source)[tuple(at)], found):
            return _Made()  # normed on the way
        return _Made(steps=[rf"\text{{{source}}}[{at[0]}, {at[1]}] = {number(found)}"])

    def _sum(self, point: Point, at: Sequence[int], found: float) -> "_Made":
        sources = inputs_of(point, self._spec)
        if len(sources) < 2 or (point.name == "embed.out" and self._spec.embed_scale != 1.0):
            return self._same(point, at, found) if len(sources) == 1 else _Made()
        parts = [float(self._value(source)[tuple(at)]) for source in sources]
        names = " + ".join(rf"\text{{{source}}}" for source in sources)
        return _Made(steps=[names, rf"{_added(parts)} = {number(found)}"])

    def _norm(self, point: Point, at: Sequence[int], found: float) -> "_Made":
        layer = None if point.layer is None else self._spec.layers[point.layer]
        spec = layer.norm if layer is not None else self._spec.final_norm
        if spec is None:
            return _Made()
        gains = self._parameters.final_norm if layer is None else self._weights(point).get(point.name)
        x = self._value(inputs_of(point, self._spec)[0])[at[0]].astype(np.float64)
        return _Made(steps=_norm_steps(spec, x, at[1], gains, found))

    def _projected(self, point: Point, at: Sequence[int], found: float) -> "_Made":
        """An output of a matrix: the row that was read times the matrix's row."""
        source = inputs_of(point, self._spec)[0]
        weight, output = self._matrix(point, at)
        if weight is None:
            return self._blended(point, at, found) if point.name == "mlp.raw" else _Made()
        x = self._value(source)
        read = x[:, at[-2]].reshape(-1) if source.name == "attn.z" else x[at[-2]]
        row = weight.weight.take([output], np.float64)[0]
        bias = None if weight.bias is None else float(np.asarray(weight.bias)[output])
        steps = [] if bias is None else [rf"\ldots + b = {number(found - bias)} + {number(bias)} = {number(found)}"]
        label = str(source) if len(str(source)) < 40 else source.name
        return _Made(label, f"row {output} of the weight", _products(read, row), steps)

    def _matrix(self, point: Point, at: Sequence[int]) -> tuple:
        """The `Linear` behind a point and which of its outputs the cell is; (None, 0) where there is no single one."""
        if point.name == "logits":
            capped = self._spec.head_transform is not None or self._spec.logit_cap is not None
            return (None, 0) if capped else (self._parameters.head, at[-1])
        weights, spec = self._weights(point), self._spec.layers[point.layer or 0].attention
        if point.name in ("attn.q", "attn.k", "attn.v"):
            if spec.latent is not None:
                return None, 0
            width = spec.value_width if point.name == "attn.v" else spec.d_head
            return weights[point.name], at[0] * width + at[2]
        name = {"attn.raw": "attn.o", "mlp.raw": "mlp.down", "moe.router_logits": "moe.router"}.get(
            point.name, point.name
        )
        return weights.get(name), at[-1]

    def _blended(self, point: Point, at: Sequence[int], found: float) -> "_Made":
        """The weighed sum of the chosen experts, and the shared one."""
        i = point.layer
        router = self._spec.layers[i or 0].feed_forward.router  # type: ignore[union-attr]
        gates = self._value(Point("moe.gates", i))[at[0]]
        given = self._value(Point("moe.expert_out", i))[at[0], :, at[1]]
        chosen = self._value(Point("moe.chosen", i))[at[0]]
        if router.gate_input:
            gates = np.ones_like(gates)
        return _Made("gate", "expert's output", _products(gates, given, [f"expert {int(e)}" for e in chosen]))

    def _turned(self, point: Point, at: Sequence[int], found: float) -> "_Made":
        spec = self._spec.layers[point.layer or 0].attention
        source = inputs_of(point, self._spec)[0]
        head, t, c = at
        if spec.rotary is None or spec.latent is not None:
            return _Made()
        x = self._value(source)[head, t]
        half = spec.rotary.dims // 2
        if c >= spec.rotary.dims:
            return _Made(steps=[rf"\text{{not turned: }} {number(found)}"])
        halves = spec.rotary.pairing == "halves"
        pair = c % half if halves else c // 2
        first, second = (pair, pair + half) if halves else (2 * pair, 2 * pair + 1)
        angles, grown = frequencies(spec.rotary, len(self._pieces))
        angle = t * float(angles[pair])
        cos, sin = grown * float(np.cos(angle)), grown * float(np.sin(angle))
        a, b, sign, turn = (
            (x[first], x[second], "-", (cos, sin)) if c == first else (x[first], x[second], "+", (sin, cos))
        )
        return _Made(
            steps=[
                rf"t\,\theta_{{{pair}}} = {t} \cdot {number(float(angles[pair]))} = {number(angle)}",
                rf"{_factor(float(a))} \cdot {_factor(turn[0])} {sign} {_factor(float(b))} \cdot {_factor(turn[1])}"
                rf" = {number(found)}",
            ]
        )

    def _dots(self, point: Point, at: Sequence[int], found: float) -> "_Made":
        head, t, s = at
        q, k = self._query_and_key(point)
        group = head * len(k) // len(q)
        return _Made(f"query of {self._token(t)}", f"key of {self._token(s)}", _products(q[head, t], k[group, s]))

    def _query_and_key(self, point: Point) -> tuple[np.ndarray, np.ndarray]:
        q, k = dot_inputs(self._spec.layers[point.layer or 0].attention)
        return self._value(Point(q, point.layer)), self._value(Point(k, point.layer))

    def _scaled(self, point: Point, at: Sequence[int], found: float) -> "_Made":
        spec = self._spec.layers[point.layer or 0].attention
        dot = float(self._square(Point("attn.dots", point.layer), at[0])[at[1], at[2]])
        if spec.growth is not None or spec.cap is not None:
            return _Made(steps=[rf"q \cdot k = {number(dot)} \;\to\; {number(found)}"])
        by = rf"\sqrt{{{spec.d_head}}}" if spec.scale is None else number(1 / spec.scale)
        return _Made(steps=[rf"\frac{{{number(dot)}}}{{{by}}} = {number(found)}"])

    def _masked(self, point: Point, at: Sequence[int], found: float) -> "_Made":
        score = float(self._square(Point("attn.scores", point.layer), at[0])[at[1], at[2]])
        told = (
            rf"{number(score)} - \infty = -\infty" if np.isneginf(found) else rf"{number(score)} + 0 = {number(found)}"
        )
        return _Made(steps=[told])

    def _softmax(self, point: Point, at: Sequence[int], found: float) -> "_Made":
        row = self._square(_masked(point), at[0])[at[1]].astype(np.float64)
        score = float(row[at[2]])
        if np.isneginf(score):
            return _Made(steps=[r"e^{-\infty} = 0"])
        top, total = float(row.max()), float(np.exp(row - row.max()).sum())
        return _Made(
            steps=[
                r"\frac{e^{S_{ts} - \max}}{\sum_s e^{S_{ts} - \max}}",
                rf"\frac{{e^{{{number(score)} - {_factor(top)}}}}}{{{number(total)}}}"
                rf" = \frac{{{number(exp(score - top))}}}{{{number(total)}}} = {number(found)}",
            ]
        )

    def _mixed(self, point: Point, at: Sequence[int], found: float) -> "_Made":
        head, t, c = at
        v = self._value(Point("attn.v", point.layer))
        weights = self._square(Point("attn.pattern", point.layer), head)[t]
        values = v[head * len(v) // self._heads(point), :, c]
        names = [self._token(s) for s in range(len(weights))]
        return _Made("weight", "value", _products(weights, values, names))

    def _head_out(self, point: Point, at: Sequence[int], found: float) -> "_Made":
        head, t, output = at
        z = self._value(Point("attn.z", point.layer))[head, t]
        row = self._weights(point)["attn.o"].weight.take([output], np.float64)[0]
        return _Made("head's mix", "its slice of W_O", _products(z, row[head * len(z) : (head + 1) * len(z)]))

    def _activated(self, point: Point, at: Sequence[int], found: float) -> "_Made":
        spec = self._spec.layers[point.layer or 0].feed_forward
        kind = {"silu": "SiLU", "relu": "ReLU"}.get(getattr(spec, "activation", ""), "GELU")
        up = float(self._value(Point("mlp.up", point.layer))[tuple(at)])
        if not getattr(spec, "gated", False):
            return _Made(steps=[rf"\mathrm{{{kind}}}({number(up)}) = {number(found)}"])
        gate = float(self._value(Point("mlp.gate", point.layer))[tuple(at)])
        return _Made(steps=[rf"\mathrm{{{kind}}}({number(gate)}) \cdot {_factor(up)} = {number(found)}"])

    def _weights(self, point: Point) -> dict:
        return self._parameters.layers[point.layer or 0]

    def _token(self, position: int) -> str:
        return f"“{self._pieces[position]}” ({position})"


class _Made:
    """How a number came about: the products of a sum, largest first, or steps of arithmetic."""

    def __init__(
        self, left: str = "", right: str = "", products: list[Term] | None = None, steps: list[str] | None = None
    ) -> None:
        self.left, self.right = left, right
        self.products, self.steps = products or [], steps or []


def _products(left: np.ndarray, right: np.ndarray, names: Sequence[str] | None = None) -> list[Term]:
    left, right = np.asarray(left, dtype=np.float64), np.asarray(right, dtype=np.float64)
    product = left * right
    order = np.argsort(-np.abs(product), kind="stable")
    return [
        Term(names[i] if names else str(i), float(left[i]), float(right[i]), float(product[i])) for i in order.tolist()
    ]


def _norm_steps(spec: NormSpec, x: np.ndarray, c: int, gains: object, found: float) -> list[str]:
    gain = getattr(gains, "gain", None)
    bias = getattr(gains, "bias", None)
    g = "" if gain is None else rf" \cdot {_factor(float(np.asarray(gain)[c]))}"
    b = "" if bias is None else rf" + {_factor(float(np.asarray(bias)[c]))}"
    if spec.kind == "layer":
        mean, size = float(x.mean()), float(np.sqrt(x.var() + spec.eps))
        top = rf"{number(float(x[c]))} - {_factor(mean)}"
        named = rf"\mu = {number(mean)},\ \sqrt{{\sigma^2 + \epsilon}} = {number(size)}"
    else:
        size = float(np.sqrt(np.square(x).mean() + spec.eps))
        top = number(float(x[c]))
        named = rf"\mathrm{{rms}} = \sqrt{{\tfrac1{{{len(x)}}} \textstyle\sum_j x_j^2 + \epsilon}} = {number(size)}"
    return [named, rf"\frac{{{top}}}{{{number(size)}}}{g}{b} = {number(found)}"]


def _masked(point: Point) -> Point:
    return Point("attn.masked", point.layer)


def _factor(value: float) -> str:
    return number(value) if value >= 0 else f"({number(value)})"


def _added(parts: Sequence[float]) -> str:
    return " + ".join([number(parts[0]), *(_factor(part) for part in parts[1:])])
