"""The arithmetic of a mixture's cells: the router's scores, who is chosen, the gates, what an expert gives."""

from collections.abc import Callable, Mapping, Sequence
from math import exp

import numpy as np

from cutaway.engines.numpy import ACTIVATIONS
from cutaway.points import Point
from cutaway.serve.terms import Made, biased, dotted, factor, number, through
from cutaway.spec import ExpertsSpec, FeedForwardSpec

Value = Callable[[Point], np.ndarray]


def expert_cell(
    spec: ExpertsSpec, weights: Mapping, value: Value, source: Point, point: Point, at: Sequence[int], found: float
) -> Made:
    """A number of `moe.scores`, `chosen`, `gates`, `expert_out`, `shared_out`; `source` is what the experts read."""
    i, t = point.layer, at[0]
    router = spec.router
    match point.name:
        case "moe.scores":
            return _score(router.scores, value(Point("moe.router_logits", i))[t], at[1], found)
        case "moe.chosen":
            scores = value(Point("moe.scores", i))[t]
            place = ("the best", "the second", "the third")[at[1]] if at[1] < 3 else f"place {at[1] + 1}"
            because = r"\text{ by score and its correction}" if router.correction else ""
            return Made(
                steps=[
                    rf"\text{{{place} of }} {spec.n_experts}: \text{{ expert }} {int(found)}{because}",
                    rf"\text{{score }} {number(float(scores[int(found)]))}",
                ]
            )
        case "moe.gates":
            chosen = value(Point("moe.chosen", i))[t]
            return _gate(spec, value(Point("moe.scores", i))[t][chosen], at[1], found)
        case "moe.shared_out":
            assert spec.shared is not None
            return _given(spec.shared, weights, "moe.shared", value(source)[t], at[1], found)
    expert = int(value(Point("moe.chosen", i))[t, at[1]])
    row = value(source)[t].astype(np.float64)
    if router.gate_input:
        row = row * float(value(Point("moe.gates", i))[t, at[1]])
    return _given(spec.expert, weights, f"moe.experts.{expert}", row, at[2], found)


def _score(kind: str, logits: np.ndarray, expert: int, found: float) -> Made:
    logit = float(logits[expert])
    if kind == "sigmoid":
        return Made(steps=[rf"\sigma(r) = \frac{{1}}{{1 + e^{{-{factor(logit)}}}}} = {number(found)}"])
    top = float(logits.max())
    total = float(np.exp(logits.astype(np.float64) - top).sum())
    return Made(
        steps=[
            r"\frac{e^{r_e - \max}}{\sum_{e'} e^{r_{e'} - \max}}",
            rf"\frac{{e^{{{number(logit)} - {factor(top)}}}}}{{{number(total)}}}"
            rf" = \frac{{{number(exp(logit - top))}}}{{{number(total)}}} = {number(found)}",
        ]
    )


def _gate(spec: ExpertsSpec, chosen: np.ndarray, place: int, found: float) -> Made:
    score = number(float(chosen[place]))
    scaled = "" if spec.router.scale == 1.0 else rf" \cdot {number(spec.router.scale)}"
    if not spec.router.renormalise:
        return Made(steps=[rf"{score}{scaled} = {number(found)}" if scaled else rf"\text{{its score, }} {score}"])
    below = " + ".join(number(float(one)) for one in chosen[:6]) + (r" + \ldots" if len(chosen) > 6 else "")
    return Made(steps=[rf"\frac{{{score}}}{{{below}}}{scaled} = {number(found)}"])


def _given(spec: FeedForwardSpec, weights: Mapping, name: str, row: np.ndarray, output: int, found: float) -> Made:
    """One output of a whole feed-forward: its neurons, worked out again, times the row of the down projection."""
    up = through(weights[f"{name}.up"], row)
    bend = ACTIVATIONS[spec.activation]
    act = bend(through(weights[f"{name}.gate"], row)) * up if spec.gated else bend(up)
    down = weights[f"{name}.down"]
    steps = biased(down.bias, output, found)
    title = f"neurons of {name.removeprefix('moe.').replace('experts.', 'expert ')}"
    return dotted(
        title, f"row {output} of its down weight", act, down.weight.take([output], np.float64)[0], None, steps
    )
