"""What must hold inside every trace, whatever the model: each stage's output follows from its inputs.

Worked out in float64 from the captured values, independently of the engine; the deviation is the largest
difference divided by the largest value, so it measures the engine's rounding and any mistake.
"""

from collections.abc import Callable, Iterator

import numpy as np

from cutaway.forward.parameters import Parameters
from cutaway.trace.trace import Trace
from cutaway.trace.verification import attention, feedforward
from cutaway.trace.verification.check import ACTIVATIONS, Check, Inside, deviation, largest, normed, product

# How far rounding alone may carry the two sides apart, by the engine's precision.
TOLERANCE = {"float64": 1e-11, "float32": 2e-5, "bfloat16": 0.02, "float16": 2.5e-3}


def _norms(here: Inside) -> float | None:
    if here.spec.norm is None or here.spec.placement == "post":
        return None
    off = []
    for part in ("attn",) if here.spec.shared_norm else ("attn", "mlp"):
        expected = normed(here.spec.norm, here.weights.get(f"{part}.norm"), here[here.stream_before(part)])
        off.append(deviation(here[f"{part}.norm"], expected))
    return largest(*off)


def _added(here: Inside) -> float:
    off = []
    for part in ("attn", "mlp"):
        raw = here[f"{part}.raw"]
        if here.spec.out_norm is not None:
            raw = normed(here.spec.out_norm, here.weights.get(f"{part}.out_norm"), raw)
        off.append(deviation(here[f"{part}.out"], raw))
    return largest(*off)


def _first_sum(here: Inside) -> float | None:
    return None if here.spec.parallel else _sum(here, "attn", "resid_pre", "resid_mid")


def _second_sum(here: Inside) -> float:
    if here.spec.parallel:
        return deviation(here["resid_post"], here["resid_pre"] + here["attn.out"] + here["mlp.out"])
    return _sum(here, "mlp", "resid_mid", "resid_post")


def _sum(here: Inside, part: str, before: str, after: str) -> float:
    total = here[before] + here[f"{part}.out"]
    if here.spec.norm is None or here.spec.placement == "pre":
        return deviation(here[after], total)
    expected = normed(here.spec.norm, here.weights.get(f"{part}.norm"), total)
    return largest(deviation(here[f"{part}.sum"], total), deviation(here[after], expected))


def _handed_on(here: Inside) -> float:
    left = here.trace["embed.out"] if here.index == 0 else here.trace[f"layers.{here.index - 1}.resid_post"]
    return deviation(here["resid_pre"], left)


# What holds in each layer, in the order of the pass; None where a layer has no such thing.
RULES: dict[str, Callable[[Inside], float | None]] = {
    "each layer reads what the one before left": _handed_on,
    "each norm is the norm of the stream that it reads": _norms,
    "q, k and v are the projections of what attention reads": attention.projections,
    "each head's q and k, normed": attention.normed_heads,
    "rotation keeps the lengths of q and k": attention.lengths,
    "each pair of q and k is turned by its position's angle": attention.rotation,
    "q · k, scaled, = the scores, query heads beside their key head": attention.scores,
    "softmax of the scores that may be seen = the pattern": attention.pattern,
    "rows of the pattern sum to 1": attention.rows_sum,
    "the pattern is 0 on what may not be seen": attention.unseen,
    "pattern · v = z": attention.mix,
    "the heads' outputs (+ bias) sum to attn.raw": attention.heads,
    "φ(up) or φ(gate) · up = act, of what the feed-forward reads": feedforward.widening,
    "down(act) (+ bias) = mlp.raw": feedforward.down,
    "each token's experts are those that its router scores highest": feedforward.routing,
    "the experts' outputs, each times its gate (+ the shared one), sum to mlp.raw": feedforward.blend,
    "what is added is what the sub-layer worked out, normed where the spec says": _added,
    "the stream plus attention is the stream after it": _first_sum,
    "the stream plus the feed-forward is the stream after it": _second_sum,
}
EXACT = {"each layer reads what the one before left", "the pattern is 0 on what may not be seen"}


def identities(trace: Trace, parameters: Parameters) -> Iterator[Check]:
    """Every identity of the design on a trace of all points; for those that hold in each layer, the worst layer.

    The trace is one whose tokens are all of the first kind, where the model tells kinds apart.
    """
    tolerance = TOLERANCE[trace.dtype]
    spec = trace.spec
    yield Check("embed.out = tokens (+ types, positions), scaled and normed", _embedding(trace, parameters), tolerance)
    inside = [Inside(trace, i, layer, parameters.layers[i]) for i, layer in enumerate(spec.layers)]
    for name, rule in RULES.items():
        found = [(rule(here), here.index) for here in inside]
        known = [(value, i) for value, i in found if value is not None]
        if known:
            worst, layer = max(known, key=lambda pair: np.inf if np.isnan(pair[0]) else pair[0])
            yield Check(name, worst, 0.0 if name in EXACT else tolerance, f"layer {layer}")
    last = trace[f"layers.{spec.n_layers - 1}.resid_post"]
    if spec.final_norm is not None:
        off = deviation(trace["final.norm"], normed(spec.final_norm, parameters.final_norm, last))
        yield Check("final.norm = norm of the last stream", off, tolerance)
        last = trace["final.norm"]
    if spec.pooler and parameters.pooler is not None:
        off = deviation(trace["pooler.out"], np.tanh(product(last[:1].astype(np.float64), parameters.pooler)))
        yield Check("tanh of the pooler's projection of the first token = pooler.out", off, tolerance)
    if not spec.headless:
        off = deviation(trace.logits, _logits(trace, parameters, last.astype(np.float64)))
        yield Check("final.norm · W_Uᵀ (+ bias) = logits", off, tolerance)


def _embedding(trace: Trace, parameters: Parameters) -> float:
    spec = trace.spec
    table = parameters.embed_tokens.take(trace["tokens"], np.float64)
    off = deviation(trace["embed.tokens"], table)
    x = trace["embed.tokens"].astype(np.float64) * spec.embed_scale
    if spec.token_types is not None and parameters.embed_types is not None:
        x = x + trace["embed.types"]
        kinds = parameters.embed_types.take(np.zeros(len(x), np.intp), np.float64)
        off = largest(off, deviation(trace["embed.types"], kinds))
    if spec.positions is not None:
        x = x + trace["embed.positions"]
        rows = _position_rows(trace, parameters, trace.past + np.arange(len(x)))
        off = largest(off, deviation(trace["embed.positions"], rows))
    if spec.embed_norm is not None:
        x = normed(spec.embed_norm, parameters.embed_norm, x)
        off = largest(off, deviation(trace["embed.norm"], x))
    return largest(off, deviation(trace["embed.out"], x))


def _position_rows(trace: Trace, parameters: Parameters, positions: np.ndarray) -> np.ndarray:
    """What is added at each position: its row of the learned table, or sin and cos of p / 10000^(2i/d), in turns."""
    if parameters.embed_positions is not None:
        return parameters.embed_positions.take(positions, np.float64)
    d = trace.spec.d_model
    angles = positions[:, None] * np.exp(-np.log(10_000.0) * 2 * np.arange(d // 2) / d)
    return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(len(positions), d)


def _logits(trace: Trace, parameters: Parameters, x: np.ndarray) -> np.ndarray:
    spec = trace.spec
    if spec.head_transform is not None and parameters.head_transform is not None:
        turned = ACTIVATIONS[spec.head_transform.activation](product(x, parameters.head_transform))
        x = normed(spec.head_transform.norm, parameters.head_norm, turned)
    scores = product(x, parameters.head)
    return scores if spec.logit_cap is None else spec.logit_cap * np.tanh(scores / spec.logit_cap)
