"""Every weight that a spec implies: its name and shape. The loader, the counts and the checks read this one table."""

from collections.abc import Iterator

from cutaway.spec.model import FeedForwardSpec, LayerSpec, ModelSpec, NormSpec

Shape = tuple[int, ...]


def parameter_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Name → shape, in the order of the pass. A matrix has one row per output, `[d_out, d_in]`.

    T is in none of them: the length of the input lives in activations only (chapter 13.4).
    """
    return dict(_parameters(spec))


def _parameters(spec: ModelSpec) -> Iterator[tuple[str, Shape]]:
    d = spec.d_model
    yield "embed.tokens", (spec.vocab_size, d)
    if spec.positions is not None and spec.positions.kind == "learned":
        yield "embed.positions", (spec.positions.n_max or 0, d)
    yield from _norm("embed.norm", spec.embed_norm, d)
    for i, layer in enumerate(spec.layers):
        yield from ((f"layers.{i}.{name}", shape) for name, shape in layer_parameters(layer, d))
    yield from _norm("final.norm", spec.final_norm, d)
    if not spec.tied_head:
        yield "head.weight", (spec.vocab_size, d)
    if spec.head_bias:
        yield "head.bias", (spec.vocab_size,)


def layer_parameters(layer: LayerSpec, d_model: int) -> Iterator[tuple[str, Shape]]:
    """The weights of one block, by their names inside it."""
    attention = layer.attention
    d_query = attention.n_heads * attention.d_head
    d_key = attention.n_kv_heads * attention.d_head
    yield from _norm("attn.norm", layer.norm, d_model)
    yield from _linear("attn.q", (d_query, d_model), attention.qkv_bias)
    yield from _linear("attn.k", (d_key, d_model), attention.qkv_bias)
    yield from _linear("attn.v", (d_key, d_model), attention.qkv_bias)
    yield from _linear("attn.o", (d_model, d_query), attention.out_bias)
    yield from _norm("mlp.norm", layer.norm, d_model)
    yield from _feed_forward(layer.feed_forward, d_model)


def _feed_forward(spec: FeedForwardSpec, d_model: int) -> Iterator[tuple[str, Shape]]:
    if spec.gated:
        yield from _linear("mlp.gate", (spec.d_ff, d_model), spec.bias)
    yield from _linear("mlp.up", (spec.d_ff, d_model), spec.bias)
    yield from _linear("mlp.down", (d_model, spec.d_ff), spec.bias)


def _linear(name: str, shape: Shape, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", shape
    if bias:
        yield f"{name}.bias", shape[:1]


def _norm(name: str, norm: NormSpec | None, d_model: int) -> Iterator[tuple[str, Shape]]:
    if norm is not None:
        yield f"{name}.gain", (d_model,)
        if norm.bias:
            yield f"{name}.bias", (d_model,)
