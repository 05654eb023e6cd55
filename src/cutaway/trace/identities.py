"""What must hold inside every trace, whatever the model: each stage's output follows from its inputs.

Worked out in float64 from the captured values, independently of the engine; the deviation is the largest
difference divided by the largest value, so it measures the engine's rounding and any mistake.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from cutaway.engines.layout import Layout
from cutaway.engines.numpy import ACTIVATIONS, softmax
from cutaway.engines.protocol import Gain, Linear
from cutaway.forward.attention import visible
from cutaway.forward.parameters import Parameters
from cutaway.spec import LayerSpec, NormSpec
from cutaway.trace.trace import Trace

# How far rounding alone may carry the two sides apart, by the engine's precision.
TOLERANCE = {"float64": 1e-11, "float32": 2e-5}

_STREAM = {"attn": "resid_pre", "mlp": "resid_mid"}  # the stream that each half of a block reads


@dataclass(frozen=True)
class Check:
    """One identity: what holds, how far it is off at most, where that is, and how far it may be off."""

    name: str
    deviation: float
    tolerance: float
    where: str = ""

    @property
    def holds(self) -> bool:
        return bool(self.deviation <= self.tolerance)  # a NaN deviation does not hold


def identities(trace: Trace, parameters: Parameters) -> Iterator[Check]:
    """Every identity of the design on a trace of all points; for those that hold in each layer, the worst layer."""
    tolerance = TOLERANCE[trace.dtype]
    spec = trace.spec
    yield Check("embed.out = tokens (+ positions), scaled and normed", _embedding(trace, parameters), tolerance)
    rules: dict[str, Callable[[Trace, int, LayerSpec, dict[str, Linear | Gain]], float | None]] = {
        "each norm is the norm of the stream that it reads": _norms,
        "q, k and v are the projections of what attention reads": _projections,
        "rotation keeps the lengths of q and k": _rotation,
        "q · k, scaled, = the scores, query heads beside their key head": _scores,
        "softmax of the scores that may be seen = the pattern": _softmax,
        "rows of the pattern sum to 1": _rows_sum,
        "the pattern is 0 on what may not be seen": _unseen,
        "pattern · v = z": _mix,
        "the heads' outputs (+ bias) sum to attn.raw": _heads,
        "φ(up) or φ(gate) · up = act, of what the feed-forward reads": _widening,
        "down(act) (+ bias) = mlp.raw": _down,
        "the stream plus attention is the stream after it": _first_sum,
        "the stream plus the feed-forward is the stream after it": _second_sum,
        "each layer reads what the one before left": _handed_on,
    }
    for name, rule in rules.items():
        found = [(rule(trace, i, layer, parameters.layers[i]), i) for i, layer in enumerate(spec.layers)]
        known = [(value, i) for value, i in found if value is not None]
        if known:
            worst, layer = max(known, key=lambda pair: np.inf if np.isnan(pair[0]) else pair[0])
            exact = rule in (_unseen, _handed_on)
            yield Check(name, worst, 0.0 if exact else tolerance, f"layer {layer}")
    if spec.final_norm is not None and parameters.final_norm is not None:
        last = trace[f"layers.{spec.n_layers - 1}.resid_post"]
        off = deviation(trace["final.norm"], _norm(spec.final_norm, parameters.final_norm, last))
        yield Check("final.norm = norm of the last stream", off, tolerance)
    yield Check("final.norm · W_Uᵀ (+ bias) = logits", _head(trace, parameters), tolerance)


def deviation(found: np.ndarray, expected: np.ndarray) -> float:
    """max |found − expected| / max |expected|"""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    return float(np.abs(found - expected).max() / max(np.abs(expected).max(), np.finfo(np.float32).tiny))


def _largest(*values: float) -> float:
    """The largest, NaN above all: what is no number must not pass for a small one."""
    return float(np.max(values))


def _f64(trace: Trace, layer: int, name: str) -> np.ndarray:
    return trace[f"layers.{layer}.{name}"].astype(np.float64)


def _norm(spec: NormSpec, gain: Gain, x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    if spec.kind == "layer":
        x = x - x.mean(-1, keepdims=True)
    scaled = x / np.sqrt((x * x).mean(-1, keepdims=True) + spec.eps) * np.asarray(gain.gain, np.float64)
    return scaled if gain.bias is None else scaled + np.asarray(gain.bias, np.float64)


def _embedding(trace: Trace, parameters: Parameters) -> float:
    spec = trace.spec
    x = trace["embed.tokens"].astype(np.float64) * spec.embed_scale
    if spec.positions is not None:
        x = x + trace["embed.positions"]
    if spec.embed_norm is not None and parameters.embed_norm is not None:
        x = _norm(spec.embed_norm, parameters.embed_norm, x)
    return deviation(trace["embed.out"], x)


def _read_by(trace: Trace, i: int, layer: LayerSpec, part: str) -> np.ndarray:
    """What attention ("attn") or the feed-forward ("mlp") reads: the norm, or the stream itself."""
    normed = layer.norm is not None and layer.placement == "pre"
    return _f64(trace, i, f"{part}.norm" if normed else _STREAM[part])


def _norms(trace: Trace, i: int, layer: LayerSpec, weights: dict) -> float | None:
    if layer.norm is None or layer.placement == "post":
        return None
    return _largest(
        *(
            deviation(
                trace[f"layers.{i}.{part}.norm"], _norm(layer.norm, weights[f"{part}.norm"], _f64(trace, i, stream))
            )
            for part, stream in _STREAM.items()
        )
    )


def _projections(trace: Trace, i: int, layer: LayerSpec, weights: dict) -> float:
    x = _read_by(trace, i, layer, "attn")
    found = {name: _f64(trace, i, name) for name in ("attn.q", "attn.k", "attn.v")}
    flat = {name: value.swapaxes(0, 1).reshape(len(x), -1) for name, value in found.items()}
    return _largest(*(deviation(value, _product(x, weights[name])) for name, value in flat.items()))


def _widening(trace: Trace, i: int, layer: LayerSpec, weights: dict) -> float:
    spec, x = layer.feed_forward, _read_by(trace, i, layer, "mlp")
    up = _f64(trace, i, "mlp.up")
    off = deviation(up, _product(x, weights["mlp.up"]))
    act = ACTIVATIONS[spec.activation]
    if not spec.gated:
        return _largest(off, deviation(trace[f"layers.{i}.mlp.act"], act(up)))
    gate = _f64(trace, i, "mlp.gate")
    off = _largest(off, deviation(gate, _product(x, weights["mlp.gate"])))
    return _largest(off, deviation(trace[f"layers.{i}.mlp.act"], act(gate) * up))


def _rotation(trace: Trace, i: int, layer: LayerSpec, weights: dict) -> float | None:
    if layer.attention.rotary is None:
        return None
    lengths = [np.linalg.norm(_f64(trace, i, f"attn.{name}"), axis=-1) for name in ("q", "q_rot", "k", "k_rot")]
    return _largest(deviation(lengths[1], lengths[0]), deviation(lengths[3], lengths[2]))


def _scores(trace: Trace, i: int, layer: LayerSpec, weights: dict) -> float:
    turned = "_rot" if layer.attention.rotary is not None else ""
    q, k = _f64(trace, i, f"attn.q{turned}"), _f64(trace, i, f"attn.k{turned}")
    k = np.repeat(k, layer.attention.n_heads // layer.attention.n_kv_heads, axis=0)
    expected = q @ k.swapaxes(1, 2)
    seen = _seen(layer, q.shape[1])
    scaled = expected * layer.attention.score_scale
    return _largest(
        deviation(trace[f"layers.{i}.attn.dots"][:, seen], expected[:, seen]),
        deviation(trace[f"layers.{i}.attn.scores"][:, seen], scaled[:, seen]),
    )


def _softmax(trace: Trace, i: int, layer: LayerSpec, weights: dict) -> float:
    scores, masked = _f64(trace, i, "attn.scores"), trace[f"layers.{i}.attn.masked"]
    expected = np.where(_seen(layer, scores.shape[1]), scores, -np.inf)
    if not np.array_equal(masked, expected):
        return np.inf
    return deviation(trace[f"layers.{i}.attn.pattern"], softmax(expected))


def _seen(layer: LayerSpec, length: int) -> np.ndarray:
    """Which key each query may see, `bool [T, T]`."""
    first, last = visible(layer.attention, Layout.of([length]).segments[0], slice(0, length))
    keys = np.arange(length)
    return (keys >= first[:, None]) & (keys < last[:, None])


def _rows_sum(trace: Trace, i: int, layer: LayerSpec, weights: dict) -> float:
    sums = _f64(trace, i, "attn.pattern").sum(-1)
    return deviation(sums, np.ones_like(sums))


def _unseen(trace: Trace, i: int, layer: LayerSpec, weights: dict) -> float | None:
    if not layer.attention.causal:
        return None
    pattern = trace[f"layers.{i}.attn.pattern"]
    return float(np.abs(np.triu(pattern, k=1)).max())


def _mix(trace: Trace, i: int, layer: LayerSpec, weights: dict) -> float:
    shared = layer.attention.n_heads // layer.attention.n_kv_heads
    v = np.repeat(_f64(trace, i, "attn.v"), shared, axis=0)
    return deviation(trace[f"layers.{i}.attn.z"], _f64(trace, i, "attn.pattern") @ v)


def _heads(trace: Trace, i: int, layer: LayerSpec, weights: dict) -> float:
    total = _f64(trace, i, "attn.head_out").sum(0)
    bias = weights["attn.o"].bias
    return deviation(trace[f"layers.{i}.attn.raw"], total if bias is None else total + bias)


def _down(trace: Trace, i: int, layer: LayerSpec, weights: dict) -> float:
    return deviation(trace[f"layers.{i}.mlp.raw"], _product(_f64(trace, i, "mlp.act"), weights["mlp.down"]))


def _first_sum(trace: Trace, i: int, layer: LayerSpec, weights: dict) -> float:
    return _residual(trace, i, layer, weights, "attn", "resid_pre", "resid_mid")


def _second_sum(trace: Trace, i: int, layer: LayerSpec, weights: dict) -> float:
    return _residual(trace, i, layer, weights, "mlp", "resid_mid", "resid_post")


def _residual(trace: Trace, i: int, layer: LayerSpec, weights: dict, part: str, before: str, after: str) -> float:
    total = _f64(trace, i, before) + trace[f"layers.{i}.{part}.out"]
    if layer.norm is None or layer.placement == "pre":
        return deviation(trace[f"layers.{i}.{after}"], total)
    normed = _norm(layer.norm, weights[f"{part}.norm"], total)
    return _largest(deviation(trace[f"layers.{i}.{part}.sum"], total), deviation(trace[f"layers.{i}.{after}"], normed))


def _handed_on(trace: Trace, i: int, layer: LayerSpec, weights: dict) -> float:
    left = trace["embed.out"] if i == 0 else trace[f"layers.{i - 1}.resid_post"]
    return deviation(trace[f"layers.{i}.resid_pre"], left)


def _head(trace: Trace, parameters: Parameters) -> float:
    spec = trace.spec
    final = "final.norm" if spec.final_norm is not None else f"layers.{spec.n_layers - 1}.resid_post"
    return deviation(trace.logits, _product(trace[final].astype(np.float64), parameters.head))


def _product(x: np.ndarray, linear: Linear) -> np.ndarray:
    """x Wᵀ + b in float64, some rows of W at a time."""
    d_out = linear.weight.shape[0]
    parts = [
        x @ linear.weight.dequantise(np.float64, start, min(start + 4096, d_out)).T for start in range(0, d_out, 4096)
    ]
    y = np.concatenate(parts, axis=-1)
    return y if linear.bias is None else y + linear.bias
