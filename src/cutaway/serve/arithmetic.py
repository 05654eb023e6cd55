"""One number of a tensor, and the arithmetic that made it, from the very values and weights of the run."""

from collections.abc import Callable, Collection, Sequence
from math import exp

import numpy as np

from cutaway.engines.numpy import ACTIVATIONS
from cutaway.errors import CutawayError
from cutaway.forward.parameters import Parameters
from cutaway.forward.positions import frequencies
from cutaway.points import Point, dot_inputs
from cutaway.serve.expert_cells import expert_cell
from cutaway.serve.latent_cells import latent_cell
from cutaway.serve.lineage import inputs_of
from cutaway.serve.protocol import Cell
from cutaway.serve.terms import Made, biased, dotted, factor, norm_steps, normed, number, through
from cutaway.spec import ExpertsSpec, ModelSpec

SHOWN = 8  # terms of a sum that are told one by one
LONGEST_ROW = 4096  # factors of a dot product that are told in their own order

Value = Callable[[Point], np.ndarray]  # the run's tensor at a point
OneHead = Callable[[Point, int], np.ndarray]  # one head of a T × T point `[T, S]`, or of `attn.head_out` `[T, d]`


class Arithmetic:
    """Explains the cells of one run. `pieces` name its tokens, `edited` the points that edits act at."""

    def __init__(
        self,
        spec: ModelSpec,
        parameters: Parameters,
        value: Value,
        one_head: OneHead,
        pieces: Sequence[str],
        edited: Collection[str] = (),
    ) -> None:
        self._spec, self._parameters, self._value, self._one_head = spec, parameters, value, one_head
        self._pieces, self._edited = pieces, edited

    def cell(self, point: Point, at: Sequence[int]) -> Cell:
        """The number at index `at` of `point`. Raises CutawayError for an index that the tensor does not have."""
        found = self._found(point, at)
        explain = self._explainers().get(point.name)
        made = explain(point, at, found) if explain is not None else Made()
        hidden = bool(np.isneginf(found)) or (
            point.name == "attn.pattern" and found == 0.0 and np.isneginf(self._one_head(_masked(point), at[0])[at[1:]])
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
            *_told_rows(made),
        )

    def _found(self, point: Point, at: Sequence[int]) -> float:
        squared = point.info.shape[-1] == "S"
        by_head = squared or point.name == "attn.head_out"  # of these only the head that is asked for is worked out
        width = len(self._pieces) if squared else self._spec.d_model
        shape = (self._heads(point), len(self._pieces), width) if by_head else self._value(point).shape
        if len(at) != len(shape) or any(not 0 <= i < n for i, n in zip(at, shape, strict=False)):
            raise CutawayError(f"{point} has shape {list(shape)}; there is no number at {list(at)}.")
        return float(self._one_head(point, at[0])[at[1], at[2]] if by_head else self._value(point)[tuple(at)])

    def _heads(self, point: Point) -> int:
        return self._spec.layers[point.layer or 0].attention.n_heads

    def _explainers(self) -> dict[str, Callable[[Point, Sequence[int], float], Made]]:
        return {
            "embed.tokens": self._row,
            "embed.positions": self._position,
            "embed.types": self._kind,
            "embed.norm": self._norm,
            "embed.out": self._sum,
            "resid_pre": self._same,
            "attn.norm": self._norm,
            "mlp.norm": self._norm,
            "final.norm": self._norm,
            "attn.q": self._projected,
            "attn.k": self._projected,
            "attn.v": self._projected,
            "attn.q_latent": self._latent,
            "attn.kv_latent": self._latent,
            "attn.k_shared": self._latent,
            "attn.q_normed": self._head_norm,
            "attn.k_normed": self._head_norm,
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
            "moe.scores": self._expert,
            "moe.chosen": self._expert,
            "moe.gates": self._expert,
            "moe.expert_out": self._expert,
            "moe.shared_out": self._expert,
            "mlp.raw": self._projected,
            "mlp.out": self._same,
            "mlp.sum": self._sum,
            "resid_post": self._sum,
            "logits": self._logit,
            "pooler.out": self._pooled,
        }

    def _row(self, point: Point, at: Sequence[int], found: float) -> Made:
        token = int(self._value(Point("tokens"))[at[0]])
        return Made(steps=[rf"E[{token}, {at[1]}] = {number(found)}"])

    def _position(self, point: Point, at: Sequence[int], found: float) -> Made:
        t, c = at
        if self._spec.positions is not None and self._spec.positions.kind == "sinusoidal":
            wave, power = ("\\cos", c - 1) if c % 2 else ("\\sin", c)
            return Made(steps=[rf"{wave}({t} / 10000^{{{power} / {self._spec.d_model}}}) = {number(found)}"])
        return Made(steps=[rf"E_{{pos}}[{t}, {c}] = {number(found)}"])

    def _kind(self, point: Point, at: Sequence[int], found: float) -> Made:
        return Made(steps=[rf"E_{{type}}[\mathrm{{kind}}_{{{at[0]}}}, {at[1]}] = {number(found)}"])

    def _same(self, point: Point, at: Sequence[int], found: float) -> Made:
        source = inputs_of(point, self._spec)[0]
        layer = self._spec.layers[point.layer] if point.layer is not None else None
        part = point.name.split(".")[0]
        if layer is not None and layer.out_norm is not None and point.name in ("attn.out", "mlp.out"):
            gains = self._weights(point).get(f"{part}.out_norm")
            return Made(steps=norm_steps(layer.out_norm, self._row_of(source, at[0]), at[1], gains, found))
        if not np.array_equal(self._value(source)[tuple(at)], found):
            return Made()
        return Made(steps=[rf"\text{{{source}}}[{at[0]}, {at[1]}] = {number(found)}"])

    def _row_of(self, source: Point, t: int) -> np.ndarray:
        return self._value(source)[t].astype(np.float64)

    def _sum(self, point: Point, at: Sequence[int], found: float) -> Made:
        sources = inputs_of(point, self._spec)
        scaled = point.name == "embed.out" and self._spec.embed_scale != 1.0 and sources[0].name == "embed.tokens"
        if len(sources) == 1 and sources[0].name.endswith(".sum"):
            return self._norm(point, at, found)
        if len(sources) == 1 and not scaled:
            return self._same(point, at, found)
        parts = [float(self._value(source)[tuple(at)]) for source in sources]
        names = " + ".join(rf"\text{{{source}}}" for source in sources)
        by = rf"{number(self._spec.embed_scale)} \cdot " if scaled else ""
        head = factor(parts[0]) if scaled else number(parts[0])
        told = " + ".join([by + head, *(factor(part) for part in parts[1:])])
        return Made(steps=[by + names, rf"{told} = {number(found)}"])

    def _norm(self, point: Point, at: Sequence[int], found: float) -> Made:
        layer = None if point.layer is None else self._spec.layers[point.layer]
        if point.name == "embed.norm":
            spec, gains = self._spec.embed_norm, self._parameters.embed_norm
            x = sum(self._row_of(source, at[0]) for source in inputs_of(point, self._spec))
        elif layer is None:
            spec, gains = self._spec.final_norm, self._parameters.final_norm
            x = self._row_of(inputs_of(point, self._spec)[0], at[0])
        else:
            name = {"resid_mid": "attn.norm", "resid_post": "mlp.norm"}.get(point.name, point.name)
            spec, gains = layer.norm, self._weights(point).get(name)
            x = self._row_of(inputs_of(point, self._spec)[0], at[0])
        return Made() if spec is None else Made(steps=norm_steps(spec, np.asarray(x), at[1], gains, found))

    def _head_norm(self, point: Point, at: Sequence[int], found: float) -> Made:
        """A query or key of one head, brought to size by itself."""
        head, t, c = at
        spec = self._spec.layers[point.layer or 0].attention.qk_norm
        x = self._value(inputs_of(point, self._spec)[0])[head, t].astype(np.float64)
        gains = self._weights(point).get("attn.q_norm" if point.name == "attn.q_normed" else "attn.k_norm")
        return Made() if spec is None else Made(steps=norm_steps(spec, x, c, gains, found))

    def _latent(self, point: Point, at: Sequence[int], found: float) -> Made:
        spec = self._spec.layers[point.layer or 0].attention
        source = inputs_of(point, self._spec)[0]
        return latent_cell(spec, self._weights(point), self._value, source, point, at, found)

    def _expert(self, point: Point, at: Sequence[int], found: float) -> Made:
        spec = self._spec.layers[point.layer or 0].feed_forward
        assert isinstance(spec, ExpertsSpec)
        source = inputs_of(Point("moe.router_logits", point.layer), self._spec)[0]
        return expert_cell(spec, self._weights(point), self._value, source, point, at, found)

    def _projected(self, point: Point, at: Sequence[int], found: float) -> Made:
        """An output of a matrix: the row that was read times the matrix's row."""
        layer = None if point.layer is None else self._spec.layers[point.layer]
        if layer is not None and layer.attention.latent is not None and point.name in ("attn.q", "attn.k", "attn.v"):
            return self._latent(point, at, found)
        source = inputs_of(point, self._spec)[0]
        weight, output = self._matrix(point, at)
        if weight is None:
            return self._blended(point, at, found) if point.name == "mlp.raw" else Made()
        x = self._value(source)
        read = x[:, at[-2]].reshape(-1) if source.name == "attn.z" else x[at[-2]]
        row = weight.weight.take([output], np.float64)[0]
        label = str(source) if len(str(source)) < 40 else source.name
        return dotted(label, f"row {output} of the weight", read, row, steps=biased(weight.bias, output, found))

    def _matrix(self, point: Point, at: Sequence[int]) -> tuple:
        """The `Linear` behind a point and which of its outputs the cell is; (None, 0) where there is no single one."""
        weights, spec = self._weights(point), self._spec.layers[point.layer or 0].attention
        if point.name in ("attn.q", "attn.k", "attn.v"):
            width = spec.value_width if point.name == "attn.v" else spec.d_head
            return weights[point.name], at[0] * width + at[2]
        name = {"attn.raw": "attn.o", "mlp.raw": "mlp.down", "moe.router_logits": "moe.router"}.get(
            point.name, point.name
        )
        return weights.get(name), at[-1]

    def _logit(self, point: Point, at: Sequence[int], found: float) -> Made:
        """A token's score: what the head reads times the token's row, bent where the model caps its logits."""
        source = inputs_of(point, self._spec)[0]
        row, read = self._row_of(source, at[0]), str(source)
        transform, between = self._spec.head_transform, self._parameters.head_transform
        if transform is not None and between is not None:
            row, read = ACTIVATIONS[transform.activation](through(between, row)), "the head's own layer"
            row = normed(transform.norm, row, self._parameters.head_norm)
        head = self._parameters.head
        weight = head.weight.take([at[1]], np.float64)[0]
        cap = self._spec.logit_cap
        steps = biased(head.bias, at[1], found) if cap is None else []
        if cap is not None:
            inner = float(row @ weight) + (0.0 if head.bias is None else float(np.asarray(head.bias)[at[1]]))
            steps = [rf"{cap:g} \tanh({number(inner)} / {cap:g}) = {number(found)}"]
        return dotted(read, f"row {at[1]} of the head", row, weight, steps=steps)

    def _pooled(self, point: Point, at: Sequence[int], found: float) -> Made:
        linear = self._parameters.pooler
        source = inputs_of(point, self._spec)[0]
        if linear is None:
            return Made()
        row, weight = self._row_of(source, 0), linear.weight.take([at[1]], np.float64)[0]
        inner = float(row @ weight) + (0.0 if linear.bias is None else float(np.asarray(linear.bias)[at[1]]))
        steps = [rf"\tanh({number(inner)}) = {number(found)}"]
        return dotted(f"{source}, row 0", f"row {at[1]} of the weight", row, weight, steps=steps)

    def _blended(self, point: Point, at: Sequence[int], found: float) -> Made:
        """The weighed sum of the chosen experts, and the shared one."""
        i = point.layer
        spec = self._spec.layers[i or 0].feed_forward
        assert isinstance(spec, ExpertsSpec)
        gates = self._value(Point("moe.gates", i))[at[0]].astype(np.float64)
        given = self._value(Point("moe.expert_out", i))[at[0], :, at[1]].astype(np.float64)
        names = [f"expert {int(e)}" for e in self._value(Point("moe.chosen", i))[at[0]]]
        if spec.router.gate_input:
            gates = np.ones_like(gates)
        if spec.shared is not None:
            names.append("the shared one")
            gates = np.append(gates, 1.0)
            given = np.append(given, self._value(Point("moe.shared_out", i))[tuple(at)])
        return dotted("gate", "what the expert gives", gates, given, names)

    def _turned(self, point: Point, at: Sequence[int], found: float) -> Made:
        """A coordinate of a rotated query or key: its pair, turned by the angle of the position."""
        spec = self._spec.layers[point.layer or 0].attention
        head, t, c = at
        if spec.rotary is None:
            return Made()
        x = self._value(inputs_of(point, self._spec)[0])[head, t].astype(np.float64)
        first_turned = 0 if spec.latent is None else spec.latent.d_nope
        place = c - first_turned
        if not 0 <= place < spec.rotary.dims:
            return Made(steps=[rf"\text{{not turned: }} {number(found)}"])
        half = spec.rotary.dims // 2
        halves = spec.rotary.pairing == "halves"
        pair = place % half if halves else place // 2
        first, second = (pair, pair + half) if halves else (2 * pair, 2 * pair + 1)
        angles, grown = frequencies(spec.rotary, len(self._pieces))
        angle = t * float(angles[pair])
        cos, sin = grown * float(np.cos(angle)), grown * float(np.sin(angle))
        names = [f"column {first_turned + first}", f"column {first_turned + second}"]
        turn = [cos, -sin] if place == first else [sin, cos]
        both = [x[first_turned + first], x[first_turned + second]]
        made = dotted("before the turn", "cos and sin", both, turn, names)
        made.products.sort(key=lambda term: names.index(term.at))
        made.rows = None
        made.steps = [
            rf"t\,\theta_{{{pair}}} = {t} \cdot {number(float(angles[pair]))} = {number(angle)}\ \mathrm{{rad}}"
        ]
        return made

    def _dots(self, point: Point, at: Sequence[int], found: float) -> Made:
        head, t, s = at
        q, k = self._query_and_key(point)
        group = head * len(k) // len(q)
        return dotted(f"query of {self._token(t)}", f"key of {self._token(s)}", q[head, t], k[group, s])

    def _query_and_key(self, point: Point) -> tuple[np.ndarray, np.ndarray]:
        q, k = dot_inputs(self._spec.layers[point.layer or 0].attention)
        return self._value(Point(q, point.layer)), self._value(Point(k, point.layer))

    def _scaled(self, point: Point, at: Sequence[int], found: float) -> Made:
        spec = self._spec.layers[point.layer or 0].attention
        dot = float(self._one_head(Point("attn.dots", point.layer), at[0])[at[1], at[2]])
        by = rf"\sqrt{{{spec.d_head}}}" if spec.scale is None else number(1 / spec.scale)
        scaled = rf"\frac{{{number(dot)}}}{{{by}}}"
        if spec.growth is not None:
            grown = 1 + spec.growth.strength * float(np.log1p((at[1] + 1) // spec.growth.every))
            scaled += rf" \cdot {number(grown)}"
        if spec.cap is not None:
            scaled = rf"{spec.cap:g} \tanh\!\left({scaled} \Big/ {spec.cap:g}\right)"
        return Made(steps=[rf"{scaled} = {number(found)}"])

    def _masked(self, point: Point, at: Sequence[int], found: float) -> Made:
        score = float(self._one_head(Point("attn.scores", point.layer), at[0])[at[1], at[2]])
        told = (
            rf"{number(score)} - \infty = -\infty" if np.isneginf(found) else rf"{number(score)} + 0 = {number(found)}"
        )
        return Made(steps=[told])

    def _softmax(self, point: Point, at: Sequence[int], found: float) -> Made:
        row = self._one_head(_masked(point), at[0])[at[1]].astype(np.float64)
        score = float(row[at[2]])
        if np.isneginf(score):
            return Made(steps=[r"e^{-\infty} = 0"])
        top, total = float(row.max()), float(np.exp(row - row.max()).sum())
        return Made(
            steps=[
                r"\frac{e^{S_{ts} - \max}}{\sum_s e^{S_{ts} - \max}}",
                rf"\frac{{e^{{{number(score)} - {factor(top)}}}}}{{{number(total)}}}"
                rf" = \frac{{{number(exp(score - top))}}}{{{number(total)}}} = {number(found)}",
            ]
        )

    def _mixed(self, point: Point, at: Sequence[int], found: float) -> Made:
        head, t, c = at
        v = self._value(Point("attn.v", point.layer))
        weights = self._one_head(Point("attn.pattern", point.layer), head)[t]
        values = v[head * len(v) // self._heads(point), :, c]
        names = [self._token(s) for s in range(len(weights))]
        return dotted("weight", "value", weights, values, names)

    def _head_out(self, point: Point, at: Sequence[int], found: float) -> Made:
        head, t, output = at
        z = self._value(Point("attn.z", point.layer))[head, t]
        row = self._weights(point)["attn.o"].weight.take([output], np.float64)[0]
        return dotted("head's mix", "its slice of W_O", z, row[head * len(z) : (head + 1) * len(z)])

    def _activated(self, point: Point, at: Sequence[int], found: float) -> Made:
        spec = self._spec.layers[point.layer or 0].feed_forward
        kind = {"silu": "SiLU", "relu": "ReLU"}.get(getattr(spec, "activation", ""), "GELU")
        up = float(self._value(Point("mlp.up", point.layer))[tuple(at)])
        if not getattr(spec, "gated", False):
            return Made(steps=[rf"\mathrm{{{kind}}}({number(up)}) = {number(found)}"])
        gate = float(self._value(Point("mlp.gate", point.layer))[tuple(at)])
        return Made(steps=[rf"\mathrm{{{kind}}}({number(gate)}) \cdot {factor(up)} = {number(found)}"])

    def _weights(self, point: Point) -> dict:
        return self._parameters.layers[point.layer or 0]

    def _token(self, position: int) -> str:
        return f"“{self._pieces[position]}” ({position})"


def _masked(point: Point) -> Point:
    return Point("attn.masked", point.layer)


def _told_rows(made: Made) -> tuple[list[float], list[float]]:
    """The two rows of a dot product, to the four digits that are drawn; empty where there are none, or too long."""
    if made.rows is None or len(made.rows[0]) > LONGEST_ROW:
        return [], []
    left, right = ([float(f"{value:.4g}") for value in row.tolist()] for row in made.rows)
    return left, right
