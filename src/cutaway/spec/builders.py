"""Specs of the two shapes that most models have, from a handful of sizes."""

from dataclasses import replace

from cutaway.spec.attention import AttentionSpec
from cutaway.spec.feedforward import Activation, FeedForwardSpec
from cutaway.spec.model import LayerSpec, ModelSpec
from cutaway.spec.norm import NormSpec
from cutaway.spec.positions import PositionsSpec, RotaryScaling, RotarySpec


def gpt2_like(
    name: str,
    *,
    vocab_size: int = 50257,
    d_model: int,
    n_layers: int,
    n_heads: int,
    n_max: int = 1024,
    d_ff: int | None = None,
    activation: Activation = "gelu_tanh",
    eps: float = 1e-5,
    tied_head: bool = True,
    scale: float | None = None,
) -> ModelSpec:
    """The GPT-2 shape: pre-LayerNorm, learned positions, biases everywhere (Radford et al. 2019)."""
    norm = NormSpec("layer", eps, bias=True)
    layer = LayerSpec(
        AttentionSpec(n_heads, n_heads, d_model // n_heads, qkv_bias=True, out_bias=True, scale=scale),
        FeedForwardSpec(d_ff or 4 * d_model, activation, bias=True),
        norm,
    )
    return ModelSpec(
        name,
        vocab_size,
        d_model,
        (layer,) * n_layers,
        PositionsSpec("learned", n_max),
        final_norm=norm,
        tied_head=tied_head,
        context_length=n_max,
    )


def alternately_banded(spec: ModelSpec, band: int) -> ModelSpec:
    """The same model, but every second layer, from layer 1, sees only the last `band` tokens, its own included.

    (GPT-3's "alternating dense and locally banded" layers, Brown et al. 2020; the sparse transformer of Child et
    al. 2019.) Every weight stays as it is.
    """
    layers = tuple(
        replace(layer, attention=replace(layer.attention, window=band)) if i % 2 else layer
        for i, layer in enumerate(spec.layers)
    )
    return replace(spec, layers=layers)


def llama_like(
    name: str,
    *,
    vocab_size: int,
    d_model: int,
    n_layers: int,
    n_heads: int,
    n_kv_heads: int,
    d_ff: int,
    d_head: int | None = None,
    eps: float = 1e-5,
    rope_base: float = 10_000.0,
    rope_dims: int | None = None,
    rope_scaling: RotaryScaling | None = None,
    window: int | None = None,
    qk_norm: NormSpec | None = None,
    activation: Activation = "silu",
    tied_head: bool = False,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    context_length: int | None = None,
) -> ModelSpec:
    """The Llama shape: pre-RMSNorm, rotary positions, grouped queries, a gated feed-forward (Touvron et al. 2023)."""
    d_head = d_head or d_model // n_heads
    norm = NormSpec("rms", eps)
    layer = LayerSpec(
        AttentionSpec(
            n_heads,
            n_kv_heads,
            d_head,
            rotary=RotarySpec(rope_base, rope_dims or d_head, scaling=rope_scaling),
            qkv_bias=qkv_bias,
            out_bias=out_bias,
            window=window,
            qk_norm=qk_norm,
        ),
        FeedForwardSpec(d_ff, activation, gated=True, bias=mlp_bias),
        norm,
    )
    return ModelSpec(
        name,
        vocab_size,
        d_model,
        (layer,) * n_layers,
        final_norm=norm,
        tied_head=tied_head,
        context_length=context_length,
    )
