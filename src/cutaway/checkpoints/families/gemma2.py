"""Gemma 2: four norms a block, capped scores and logits, every other layer with a window (Gemma team 2024).

A norm multiplies by 1 + w: Hugging Face stores w, so 1 is added while loading; GGUF files hold the sum.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt

import numpy as np

from cutaway.checkpoints.families import llama
from cutaway.checkpoints.families.config import MOST_LAYERS, Config, decimal, refuse_encoder_and_quantised
from cutaway.checkpoints.families.gguf_rope import gguf_rotary
from cutaway.checkpoints.families.names import Source
from cutaway.checkpoints.families.rope import rotary
from cutaway.checkpoints.families.windows import SLIDING, layer_types
from cutaway.checkpoints.stored import Tensors, quoted
from cutaway.engines.weights import Weight
from cutaway.errors import CutawayError
from cutaway.spec import AttentionSpec, FeedForwardSpec, LayerSpec, ModelSpec, NormSpec

MODEL_TYPES = ("gemma2",)
GGUF_ARCHITECTURES = ("gemma2",)
HARMLESS = ("cache_implementation",)
IGNORED = llama.IGNORED
GGUF_HARMLESS = llama.GGUF_HARMLESS
# What Hugging Face and GGUF call the parts of a layer: as Llama's, but for the norms.
PARTS = llama.PARTS | {
    "attn.out_norm": "post_attention_layernorm",
    "mlp.norm": "pre_feedforward_layernorm",
    "mlp.out_norm": "post_feedforward_layernorm",
}
GGUF_PARTS = llama.GGUF_PARTS | {"attn.out_norm": "post_attention_norm", "mlp.out_norm": "post_ffw_norm"}
_WINDOW = 4096
_SCORE_CAP, _LOGIT_CAP = 50.0, 30.0
_27B_LAYERS = 46


def spec_from_config(config: Config, name: str) -> ModelSpec:
    """The spec that a Hugging Face `config.json` describes; what it leaves out is as `transformers` has it."""
    attention = attention_from_config(config)
    cap = cap_from_config(config, "attn_logit_softcapping", _SCORE_CAP)
    attention = replace(attention, rotary=rotary(config, attention.d_head), cap=cap)
    windows = windows_from_config(config, every=2)
    config.only("sliding_window_size", *windows, why="it is 'sliding_window' under an old name")
    attentions = [replace(attention, window=window) for window in windows]
    cap = cap_from_config(config, "final_logit_softcapping", _LOGIT_CAP)
    spec = model_from_config(config, name, config.size("vocab_size", 256_000), attentions, cap)
    config.refuse_unread(HARMLESS)
    return spec


def attention_from_config(config: Config) -> AttentionSpec:
    """The attention that all layers share, not yet told how it turns and what it sees."""
    config.only("use_bidirectional_attention", False, why="an encoder made of this model is another architecture")
    bias = config.get("attention_bias", bool, False)
    scalar = config.get("query_pre_attn_scalar", float, 256.0)
    if not scalar > 0:
        raise CutawayError(f"'query_pre_attn_scalar' is {scalar} in {config.where}; it must be above 0.")
    return AttentionSpec(
        config.size("num_attention_heads", 8),
        config.size("num_key_value_heads", 4),
        config.size("head_dim", 256),
        qkv_bias=bias,
        out_bias=bias,
        scale=scalar**-0.5,
    )


def windows_from_config(config: Config, every: int) -> list[int | None]:
    """The window of each layer: where `layer_types` says so, or in all but every `every`-th layer."""
    n_layers = config.size("num_hidden_layers", 26, most=MOST_LAYERS)
    kinds = layer_types(config, n_layers)
    inside = [(i + 1) % every != 0 for i in range(n_layers)] if kinds is None else [kind == SLIDING for kind in kinds]
    if config.is_null("sliding_window"):
        if any(inside):
            raise CutawayError(f"'sliding_window' is null in {config.where}, but some layers see through a window.")
        return [None] * n_layers
    window = config.size("sliding_window", _WINDOW)
    return [window if within else None for within in inside]


def cap_from_config(config: Config, key: str, default: float) -> float | None:
    """A cap on scores or logits; there is none where null is written in its place."""
    return None if config.is_null(key) else config.get(key, float, default)


def model_from_config(
    config: Config, name: str, vocab_size: int, attentions: Sequence[AttentionSpec], logit_cap: float | None
) -> ModelSpec:
    """The whole model around its attention: what Gemma 2 and Gemma 3 have in common."""
    config.only("hidden_activation", "gelu_pytorch_tanh")
    config.only("hidden_act", "gelu_pytorch_tanh", why="it is 'hidden_activation' under an old name")
    refuse_encoder_and_quantised(config)
    d_model = config.size("hidden_size", 2304)
    norm = NormSpec("rms", config.get("rms_norm_eps", float, 1e-6))
    feed_forward = FeedForwardSpec(config.size("intermediate_size", 9216), "gelu_tanh", gated=True)
    dtype = config.optional("dtype", str) or config.optional("torch_dtype", str)
    return ModelSpec(
        name,
        vocab_size,
        d_model,
        tuple(LayerSpec(attention, feed_forward, norm, out_norm=norm) for attention in attentions),
        embed_scale=embedding_scale(d_model, dtype),
        final_norm=norm,
        tied_head=config.get("tie_word_embeddings", bool, True),
        context_length=config.optional_size("max_position_embeddings"),
        logit_cap=logit_cap,
    )


def as_stored(spec: ModelSpec, tensors: Tensors) -> ModelSpec:
    """The spec with √d rounded as the embedding is stored, where the configuration named no precision."""
    if spec.embed_scale != sqrt(spec.d_model):
        return spec
    kinds = {"F64": "float64", "F16": "float16", "BF16": "bfloat16"}
    kind = tensors[sources(spec, tensors)["embed.tokens"].name].kind
    return replace(spec, embed_scale=embedding_scale(spec.d_model, kinds.get(kind, "float32")))


def embedding_scale(d_model: int, dtype: str | None) -> float:
    """√d, rounded to the precision of the checkpoint: the model was trained with the rounded number.

    (transformers#29402; 3072 gives 55.5 in bfloat16 where √3072 is 55.4256.) Not rounded where none is named.
    """
    match dtype:
        case "float64" | None:
            return sqrt(d_model)
        case "float32" | "float16":
            return float(np.dtype(dtype).type(np.float32(sqrt(d_model))))
        case "bfloat16":
            bits = int(np.float32(sqrt(d_model)).view(np.uint32))
            kept = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16  # to the nearest, ties to even
            return float(np.uint32(kept).view(np.float32))
    raise CutawayError(
        f"The configuration gives the precision {quoted(dtype)}; the embedding is scaled by √d in float64, float32, "
        "float16 or bfloat16."
    )


def sources(spec: ModelSpec, tensors: Tensors) -> dict[str, Source]:
    """Our names → the tensors of a Hugging Face checkpoint, gains with their 1 added."""
    # The text model alone; beside a vision tower, as it is saved; the same as `transformers` names it inside; bare.
    heads = {"model.": "lm_head", "language_model.model.": "language_model.lm_head", "model.language_model.": "lm_head"}
    prefix = next((prefix for prefix in heads if f"{prefix}embed_tokens.weight" in tensors), "")
    head = heads.get(prefix, "lm_head")
    whole = {"embed.tokens": f"{prefix}embed_tokens", "final.norm": f"{prefix}norm", "head": head}
    names = llama.named(spec, whole, PARTS, f"{prefix}layers.")
    return {ours: Source(s.name, one_more) if ours.endswith(".gain") else s for ours, s in names.items()}


def one_more(weight: Weight) -> Weight:
    """1 + w, worked out as wide as it is used: in float32, or in float64 where w is stored so."""
    wide = np.float64 if weight.kind == "F64" else np.float32
    return Weight.of(weight.dequantise(wide) + wide(1))


def spec_from_gguf(config: Config, tensors: Tensors, name: str) -> ModelSpec:
    """The spec that the metadata of a GGUF file describes (keys without their "gemma2.")."""
    attention = attention_from_gguf(config, tensors, _27B_LAYERS)
    attention = replace(attention, cap=decimal(config.get("attn_logit_softcapping", float, _SCORE_CAP)))
    window = config.size("attention.sliding_window", _WINDOW)
    n_layers = config.size("block_count", most=MOST_LAYERS)
    attentions = [replace(attention, window=None if i % 2 else window) for i in range(n_layers)]
    cap = decimal(config.get("final_logit_softcapping", float, _LOGIT_CAP))
    spec = model_from_gguf(config, tensors, name, attentions, cap)
    config.refuse_unread(GGUF_HARMLESS)
    return spec


def attention_from_gguf(config: Config, tensors: Tensors, deep: int) -> AttentionSpec:
    """The attention that all layers share, as those without a window turn.

    Files do not say how scores are scaled. It is by 1/√d_head, but in the largest model by 1/√(d/H); as in
    llama.cpp that one is known by its `deep` layers.
    """
    d_model, n_heads = config.size("embedding_length"), config.size("attention.head_count")
    d_head = config.size("attention.key_length", max(d_model // n_heads, 1))
    config.only("attention.value_length", d_head, why="keys and values must be of one width here")
    config.only("rope.dimension_count", d_head, why="all coordinates of a head turn in this architecture")
    largest = config.size("block_count", most=MOST_LAYERS) == deep
    return AttentionSpec(
        n_heads,
        config.size("attention.head_count_kv", n_heads),
        d_head,
        rotary=gguf_rotary(config, tensors, d_head),
        qkv_bias="blk.0.attn_q.bias" in tensors,
        out_bias="blk.0.attn_output.bias" in tensors,
        scale=(d_model // n_heads if largest else d_head) ** -0.5,
    )


def model_from_gguf(
    config: Config, tensors: Tensors, name: str, attentions: Sequence[AttentionSpec], logit_cap: float | None
) -> ModelSpec:
    """The whole model around its attention: what Gemma 2 and Gemma 3 have in common."""
    d_model = config.size("embedding_length")
    norm = NormSpec("rms", decimal(config.get("attention.layer_norm_rms_epsilon", float)))
    feed_forward = FeedForwardSpec(config.size("feed_forward_length"), "gelu_tanh", gated=True)
    return ModelSpec(
        name,
        tensors["token_embd.weight"].shape[0],
        d_model,
        tuple(LayerSpec(attention, feed_forward, norm, out_norm=norm) for attention in attentions),
        embed_scale=embedding_scale(d_model, "float32"),
        final_norm=norm,
        tied_head="output.weight" not in tensors,
        context_length=config.optional_size("context_length"),
        logit_cap=logit_cap,
    )


def gguf_sources(spec: ModelSpec, tensors: Tensors) -> dict[str, Source]:
    """Our names → the tensors of a GGUF file."""
    whole = {"embed.tokens": "token_embd", "final.norm": "output_norm", "head": "output"}
    return llama.named(spec, whole, GGUF_PARTS, "blk.")
