"""A transformer written a second time, plainly and in torch's float64, to hold the product against.

Nothing is shared with the product but the spec and the names of its weights. Every head is worked out by
itself, attention over the whole sequence at once, rotary positions as products of complex numbers.
"""

import math

import numpy as np
import torch

from cutaway.spec import AttentionSpec, FeedForwardSpec, ModelSpec, NormSpec, RotarySpec, parameter_shapes

torch.set_num_threads(1)  # arrays this small only wait for a second one
Weights = dict[str, torch.Tensor]
ACTIVATIONS = {
    "relu": torch.relu,
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


def random_weights(spec: ModelSpec, seed: int) -> Weights:
    """Random numbers for every weight of a spec, of a size that keeps the streams about as large as they were."""
    torch.manual_seed(seed)
    return {
        name: torch.randn(shape, dtype=torch.float64) * (1.0 if len(shape) == 1 else 1.5 * shape[-1] ** -0.5)
        for name, shape in parameter_shapes(spec).items()
    }


def run(spec: ModelSpec, weights: Weights, ids: np.ndarray) -> dict[str, np.ndarray]:
    """The points that define the pass: what enters, every layer's pattern, sums and stream, and the logits."""
    points: dict[str, torch.Tensor] = {}
    x = weights["embed.tokens"][torch.from_numpy(ids)] * spec.embed_scale
    if spec.positions is not None:
        x = x + (
            weights["embed.positions"][: len(ids)]
            if spec.positions.kind == "learned"
            else sines_and_cosines(len(ids), spec.d_model)
        )
    x = points["embed.out"] = norm(spec.embed_norm, weights, "embed.norm", x)
    for i, layer in enumerate(spec.layers):
        at = f"layers.{i}."
        inside = {name.removeprefix(at): weight for name, weight in weights.items() if name.startswith(at)}
        for part, stream in (("attn", "resid_mid"), ("mlp", "resid_post")):
            before = layer.norm if layer.placement == "pre" else None
            entry = norm(before, inside, f"{part}.norm", x)
            if part == "attn":
                out, points[f"{at}attn.pattern"] = attention(layer.attention, inside, entry)
            else:
                out = feed_forward(layer.feed_forward, inside, entry)
            points[f"{at}{part}.out"] = out
            after = layer.norm if layer.placement == "post" else None
            x = points[f"{at}{stream}"] = norm(after, inside, f"{part}.norm", x + out)
    x = norm(spec.final_norm, weights, "final.norm", x)
    points["logits"] = x @ weights.get("head.weight", weights["embed.tokens"]).T + weights.get("head.bias", 0)
    return {name: value.numpy() for name, value in points.items()}


def sines_and_cosines(length: int, width: int) -> torch.Tensor:
    """The table of Vaswani et al. (2017), 3.5, entry by entry."""
    rows = [
        [
            math.sin(p / 10000 ** (i / width)) if i % 2 == 0 else math.cos(p / 10000 ** ((i - 1) / width))
            for i in range(width)
        ]
        for p in range(length)
    ]
    return torch.tensor(rows, dtype=torch.float64)


def norm(spec: NormSpec | None, weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    if spec is None:
        return x
    gain, bias = weights[f"{name}.gain"], weights.get(f"{name}.bias", torch.zeros(1, dtype=torch.float64))
    if spec.kind == "layer":
        return torch.nn.functional.layer_norm(x, x.shape[-1:], gain, None, spec.eps) + bias
    return torch.nn.functional.rms_norm(x, x.shape[-1:], gain, spec.eps) + bias


def linear(weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def attention(spec: AttentionSpec, weights: Weights, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    shared = spec.n_heads // spec.n_kv_heads
    q, k, v = (linear(weights, f"attn.{part}", x).split(spec.d_head, dim=1) for part in "qkv")
    patterns, mixed = [], []
    for h in range(spec.n_heads):
        query, key = turned(spec.rotary, q[h]), turned(spec.rotary, k[h // shared])
        scores = query @ key.T * (spec.scale or 1 / math.sqrt(spec.d_head))
        if spec.causal:
            scores = scores + torch.full_like(scores, -torch.inf).triu(1)
        patterns.append(scores.softmax(-1))
        mixed.append(patterns[-1] @ v[h // shared])
    return linear(weights, "attn.o", torch.cat(mixed, dim=1)), torch.stack(patterns)


def turned(spec: RotarySpec | None, x: torch.Tensor) -> torch.Tensor:
    """Each pair of coordinates as a complex number, times e^{i · position · θ}."""
    if spec is None:
        return x
    n = spec.dims // 2
    one, other = (range(n), range(n, 2 * n)) if spec.pairing == "halves" else (range(0, 2 * n, 2), range(1, 2 * n, 2))
    speeds = torch.tensor([spec.base ** (-2 * j / spec.dims) for j in range(n)], dtype=torch.float64)
    angles = torch.arange(len(x), dtype=torch.float64)[:, None] * speeds
    pairs = torch.complex(x[:, list(one)], x[:, list(other)]) * torch.polar(torch.ones_like(angles), angles)
    result = x.clone()
    result[:, list(one)], result[:, list(other)] = pairs.real, pairs.imag
    return result


def feed_forward(spec: FeedForwardSpec, weights: Weights, x: torch.Tensor) -> torch.Tensor:
    up, act = linear(weights, "mlp.up", x), ACTIVATIONS[spec.activation]
    inner = act(linear(weights, "mlp.gate", x)) * up if spec.gated else act(up)
    return linear(weights, "mlp.down", inner)
