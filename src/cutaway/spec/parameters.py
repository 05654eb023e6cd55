"""Every weight that a spec implies: its name and shape. The loader, the counts and the checks read this one table."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from cutaway.spec.attention import AttentionSpec
from cutaway.spec.feedforward import ExpertsSpec, FeedForwardSpec
from cutaway.spec.norm import NormSpec

if TYPE_CHECKING:
    from cutaway.spec.model import LayerSpec, ModelSpec

Shape = tuple[int, ...]


def parameter_shapes(spec: "ModelSpec") -> dict[str, Shape]:
    """Name → shape, in the order of the pass. A matrix has one row per output, `[d_out, d_in]`.

    T is in none of them: the length of the input lives in activations only (chapter 13.4).
    """
    return dict(_parameters(spec))


def _parameters(spec: "ModelSpec") -> Iterator[tuple[str, Shape]]:
    d = spec.d_model
    yield "embed.tokens", (spec.vocab_size, d)
    if spec.positions is not None and spec.positions.kind == "learned":
        yield "embed.positions", (spec.positions.n_max or 0, d)
    if spec.token_types is not None:
        yield "embed.types", (spec.token_types, d)
    yield from _norm("embed.norm", spec.embed_norm, d)
    for i, layer in enumerate(spec.layers):
        yield from ((f"layers.{i}.{name}", shape) for name, shape in layer_parameters(layer, d))
    yield from _norm("final.norm", spec.final_norm, d)
    if spec.pooler:
        yield from _linear("pooler", (d, d), bias=True)
    if spec.headless:
        return
    if spec.head_transform is not None:
        yield from _linear("head.transform", (d, d), bias=True)
        yield from _norm("head.norm", spec.head_transform.norm, d)
    if not spec.tied_head:
        yield "head.weight", (spec.vocab_size, d)
    if spec.head_bias:
        yield "head.bias", (spec.vocab_size,)


def layer_parameters(layer: "LayerSpec", d_model: int) -> Iterator[tuple[str, Shape]]:
    """The weights of one block, by their names inside it."""
    yield from _norm("attn.norm", layer.norm, d_model)
    yield from _attention(layer.attention, d_model)
    yield from _norm("attn.out_norm", layer.out_norm, d_model)
    if not layer.shared_norm:
        yield from _norm("mlp.norm", layer.norm, d_model)
    if isinstance(layer.feed_forward, ExpertsSpec):
        yield from _experts(layer.feed_forward, d_model)
    else:
        yield from _feed_forward("mlp", layer.feed_forward, d_model)
    yield from _norm("mlp.out_norm", layer.out_norm, d_model)


def _attention(spec: AttentionSpec, d_model: int) -> Iterator[tuple[str, Shape]]:
    d_query, d_key = spec.n_heads * spec.d_head, spec.n_kv_heads * spec.d_head
    latent = spec.latent
    if latent is None:
        yield from _linear("attn.q", (d_query, d_model), spec.qkv_bias)
        yield from _linear("attn.k", (d_key, d_model), spec.qkv_bias)
        yield from _linear("attn.v", (spec.n_kv_heads * spec.value_width, d_model), spec.qkv_bias)
    else:
        if latent.q_rank is None:
            yield from _linear("attn.q", (d_query, d_model))
        else:
            yield from _linear("attn.q_down", (latent.q_rank, d_model), spec.qkv_bias)
            yield from _norm("attn.q_latent_norm", latent.norm, latent.q_rank)
            yield from _linear("attn.q", (d_query, latent.q_rank))
        yield from _linear("attn.kv_down", (latent.kv_rank, d_model), spec.qkv_bias)
        yield from _linear("attn.k_shared", (latent.d_rope, d_model), spec.qkv_bias)
        yield from _norm("attn.kv_latent_norm", latent.norm, latent.kv_rank)
        yield from _linear("attn.k", (spec.n_heads * latent.d_nope, latent.kv_rank))
        yield from _linear("attn.v", (spec.n_heads * spec.value_width, latent.kv_rank))
    yield from _norm("attn.q_norm", spec.qk_norm, spec.d_head)
    yield from _norm("attn.k_norm", spec.qk_norm, spec.d_head)
    yield from _linear("attn.o", (d_model, spec.n_heads * spec.value_width), spec.out_bias)


def _feed_forward(name: str, spec: FeedForwardSpec, d_model: int) -> Iterator[tuple[str, Shape]]:
    if spec.gated:
        yield from _linear(f"{name}.gate", (spec.d_ff, d_model), spec.bias)
    yield from _linear(f"{name}.up", (spec.d_ff, d_model), spec.bias)
    yield from _linear(f"{name}.down", (d_model, spec.d_ff), spec.bias)


def _experts(spec: ExpertsSpec, d_model: int) -> Iterator[tuple[str, Shape]]:
    yield "moe.router.weight", (spec.n_experts, d_model)
    if spec.router.correction:
        yield "moe.correction", (spec.n_experts,)
    for e in range(spec.n_experts):
        yield from _feed_forward(f"moe.experts.{e}", spec.expert, d_model)
    if spec.shared is not None:
        yield from _feed_forward("moe.shared", spec.shared, d_model)


def _linear(name: str, shape: Shape, bias: bool = False) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", shape
    if bias:
        yield f"{name}.bias", shape[:1]


def _norm(name: str, norm: NormSpec | None, width: int) -> Iterator[tuple[str, Shape]]:
    if norm is not None and norm.gain:
        yield f"{name}.gain", (width,)
        if norm.bias:
            yield f"{name}.bias", (width,)
