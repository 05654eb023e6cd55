"""How much arithmetic a pass is, part by part, as a function of T (chapters 11.2, 13.4 and 15.3).

A product of `[T, a]` with a matrix of a · b weights is T · a · b multiplications and as many additions: 2 FLOPs a
weight and row. Norms, activations and softmaxes are counted by their elements, at the few operations each takes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from cutaway.errors import CutawayError
from cutaway.spec.attention import AttentionSpec
from cutaway.spec.feedforward import FeedForwardSpec
from cutaway.spec.model import LayerSpec, ModelSpec
from cutaway.spec.parameters import layer_parameters

TRAINING = 3  # forward once, backward twice as much (Kaplan et al. 2020)
_PER_NORM, _PER_SOFTMAX, _PER_ACTIVATION = 5, 5, 8  # operations per element, roughly


@dataclass(frozen=True)
class Work:
    """FLOPs of one part of a pass. `growth` says how it grows with T, in symbols."""

    part: str
    flops: int
    growth: str

    @property
    def quadratic(self) -> bool:
        return "T²" in self.growth


def pass_work(spec: ModelSpec, tokens: int, past: int = 0, logits: int | None = None) -> list[Work]:
    """The parts of a pass over `tokens` tokens after `past` cached ones; `logits` rows go through the head.

    By default every row does (training, and a whole forward pass). Only pairs of tokens that may see each other are
    counted: a causal layer has about half of T². Raises CutawayError for lengths that are none.
    """
    if tokens < 1 or past < 0:
        raise CutawayError(
            f"A pass of {tokens} tokens after {past} cannot be; there must be at least 1, after 0 or more."
        )
    rows = tokens if logits is None else logits
    d, v = spec.d_model, spec.vocab_size
    totals: dict[tuple[str, str], int] = {("embedding", "O(T d)"): tokens * d}
    for layer in spec.layers:
        for part, growth, flops in _layer_work(layer, d, tokens, past):
            totals[part, growth] = totals.get((part, growth), 0) + flops
    if not spec.headless:
        totals["head", "O(T d V)"] = 2 * rows * d * v
    return [Work(part, flops, growth) for (part, growth), flops in totals.items()]


def total_flops(spec: ModelSpec, tokens: int, past: int = 0, logits: int | None = None) -> int:
    """All FLOPs of a pass."""
    return sum(work.flops for work in pass_work(spec, tokens, past, logits))


def flops_in_units(count: int) -> str:
    """Operations as people read them."""
    for unit, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= scale:
            return f"{count / scale:,.3g} {unit}" if count < 1000 * scale else f"{count / scale:,.0f} {unit}"
    return str(count)


def visible_pairs(spec: AttentionSpec, tokens: int, past: int = 0) -> int:
    """How many (query, key) pairs a layer works on: queries at positions past … past + tokens − 1."""
    end = past + tokens
    if not spec.causal:
        return tokens * end
    reach, chunk = spec.window or end, spec.chunk or end

    def before(position: int) -> int:
        """The pairs of all queries before `position`: query p sees the min(p mod chunk + 1, reach) keys up to it."""
        chunks, rest = divmod(position, chunk)
        return chunks * _growing(chunk, reach) + _growing(rest, reach)

    return before(end) - before(past)


def _growing(count: int, reach: int) -> int:
    """1 + 2 + … for `count` terms, of which none passes `reach`."""
    growing = min(count, reach)
    return growing * (growing + 1) // 2 + (count - growing) * reach


def _layer_work(layer: LayerSpec, d: int, tokens: int, past: int) -> Iterator[tuple[str, str, int]]:
    attention = layer.attention
    sizes = {name: prod(shape) for name, shape in layer_parameters(layer, d) if name.endswith(".weight")}
    projections = sum(size for name, size in sizes.items() if name.startswith("attn."))
    yield "attention projections", "O(T d²)", 2 * tokens * projections
    pairs = visible_pairs(attention, tokens, past) * attention.n_heads
    reach = "T²" if attention.window is None and attention.chunk is None else "T w"  # w: the window or chunk
    yield "attention scores and mix", f"O({reach} d)", 2 * pairs * (attention.d_head + attention.value_width)
    yield "attention softmax", f"O({reach} H)", _PER_SOFTMAX * pairs
    yield "norms", "O(T d)", _PER_NORM * tokens * _normed(layer, d)
    feed_forward = layer.feed_forward
    if isinstance(feed_forward, FeedForwardSpec):
        yield "feed-forward", "O(T d d_ff)", _perceptron(feed_forward, d, tokens)
        return
    yield "router", "O(T d E)", 2 * tokens * sizes["moe.router.weight"]
    yield "experts", "O(T d d_ff k)", _perceptron(feed_forward.expert, d, tokens) * feed_forward.router.n_active
    if feed_forward.shared is not None:
        yield "shared expert", "O(T d d_ff)", _perceptron(feed_forward.shared, d, tokens)


def _normed(layer: LayerSpec, d: int) -> int:
    """How many numbers of a token the norms of a layer go over: streams, every head's query and key, latents."""
    attention, latent = layer.attention, layer.attention.latent
    streams = (1 if layer.shared_norm else 2) * (layer.norm is not None) + 2 * (layer.out_norm is not None)
    if latent is not None:
        return streams * d + latent.kv_rank + (latent.q_rank or 0)
    heads = attention.n_heads + attention.n_kv_heads if attention.qk_norm is not None else 0
    return streams * d + heads * attention.d_head


def _perceptron(spec: FeedForwardSpec, d: int, tokens: int) -> int:
    matrices = 3 if spec.gated else 2
    return tokens * spec.d_ff * (2 * matrices * d + _PER_ACTIVATION)
