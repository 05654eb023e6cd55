"""Llama 4, text part: chunked rotary layers, some without positions that see everything, one expert a token.

The expert's gate, a sigmoid, multiplies what the expert reads. Experts are stored one matrix per layer, one row per
input, gate and up side by side; each is turned once. Of a checkpoint with images only the text part is loaded.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cutaway.checkpoints.families import llama
from cutaway.checkpoints.families.config import MOST_LAYERS, Config, decimal
from cutaway.checkpoints.families.gguf_rope import gguf_rotary
from cutaway.checkpoints.families.llama import ACTIVATIONS, head_width, named
from cutaway.checkpoints.families.mixtures import expert_sources, gguf_experts
from cutaway.checkpoints.families.names import Source, transposed_columns
from cutaway.checkpoints.families.rope import rotary
from cutaway.checkpoints.stored import Tensors
from cutaway.engines.weights import Weight
from cutaway.errors import CutawayError
from cutaway.spec import (
    AttentionSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
    QueryGrowth,
    RouterSpec,
)

MODEL_TYPES = ("llama4_text", "llama4")
GGUF_ARCHITECTURES = ("llama4",)
GGUF_HARMLESS = ("vocab_size", "rope.scaling.finetuned")
HARMLESS = (
    *("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),  # they act in training only
    "for_llm_compressor",  # how other programs are to quantise it
)
# Around the text part: the vision tower and the ids that stand for images, which a prompt of text never has.
HARMLESS_AROUND = ("vision_config", "boi_token_index", "eoi_token_index", "image_token_index", "image_token_id")
IGNORED = llama.IGNORED
LEFT_OUT = {r"(model\.)?(vision_model|multi_modal_projector)\..*": "its vision tower"}
PARTS = {
    "attn.norm": "input_layernorm",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj",
    "mlp.norm": "post_attention_layernorm",
    "mlp.gate": "feed_forward.gate_proj",
    "mlp.up": "feed_forward.up_proj",
    "mlp.down": "feed_forward.down_proj",
    "moe.router": "feed_forward.router",
    "moe.shared.gate": "feed_forward.shared_expert.gate_proj",
    "moe.shared.up": "feed_forward.shared_expert.up_proj",
    "moe.shared.down": "feed_forward.shared_expert.down_proj",
}
GGUF_PARTS = {part: name for part, name in llama.GGUF_PARTS.items() if part not in ("attn.q_norm", "attn.k_norm")} | {
    "moe.router": "ffn_gate_inp",
    "moe.shared.gate": "ffn_gate_shexp",
    "moe.shared.up": "ffn_up_shexp",
    "moe.shared.down": "ffn_down_shexp",
}
# What GGUF files leave unsaid because all published models have it, but for the norm of heads, which Scout has and
# Maverick has not: by the number of experts.
CHUNK, NO_ROTATION_EVERY, GROWTH = 8192, 4, QueryGrowth(8192, 0.1)
HEADS_NORMED = {16: True, 128: False}


def spec_from_config(config: Config, name: str) -> ModelSpec:
    """The spec of the text part that a Hugging Face `config.json` describes."""
    config.only("quantization_config", why="quantised safetensors are not read; use the original of the model")
    config.only("is_encoder_decoder", False)
    tied = config.get("tie_word_embeddings", bool, False)
    if config.get("model_type", str) == "llama4_text":
        spec = _text(config, name, tied)
        config.refuse_unread(HARMLESS)
        return spec
    inner = Config(config.get("text_config", dict), f"'text_config' of {config.where}")
    inner.only("model_type", "llama4_text")
    inner.only("quantization_config")
    spec = _text(inner, name, inner.get("tie_word_embeddings", bool, tied))
    inner.refuse_unread(HARMLESS)
    config.refuse_unread((*HARMLESS, *HARMLESS_AROUND))
    return spec


def _text(config: Config, name: str, tied_head: bool) -> ModelSpec:
    config.only("hidden_act", *ACTIVATIONS)
    config.only("cross_attention_config")
    config.only("cross_attention_layers")
    activation = ACTIVATIONS[config.get("hidden_act", str, "silu")]
    n_layers = config.size("num_hidden_layers", most=MOST_LAYERS)
    near, far = _attentions(config)
    turning, sparse = _turning_layers(config, n_layers), _sparse_layers(config, n_layers)
    _check_layer_types(config, turning, near)
    norm = NormSpec("rms", config.get("rms_norm_eps", float, 1e-5))
    expert = FeedForwardSpec(config.size("intermediate_size"), activation, gated=True)
    dense = FeedForwardSpec(config.size("intermediate_size_mlp", 16384), activation, gated=True)
    router = _router(config.size("num_experts_per_tok", 1))
    experts = ExpertsSpec(config.size("num_local_experts", 16), expert, router, shared=expert)
    layers = (
        LayerSpec(near if turns else far, experts if i in sparse else dense, norm) for i, turns in enumerate(turning)
    )
    return ModelSpec(
        name,
        config.size("vocab_size"),
        config.size("hidden_size"),
        tuple(layers),
        final_norm=norm,
        tied_head=tied_head,
        context_length=config.optional_size("max_position_embeddings"),
    )


def _attentions(config: Config) -> tuple[AttentionSpec, AttentionSpec]:
    """The attention of layers with rotary positions, and of those without."""
    d_model, n_heads = config.size("hidden_size"), config.size("num_attention_heads")
    bias = config.get("attention_bias", bool, False)
    d_head = config.optional_size("head_dim") or head_width(config, d_model, n_heads)
    shared: dict[str, Any] = {
        "n_heads": n_heads,
        "n_kv_heads": config.size("num_key_value_heads", 8),
        "d_head": d_head,
        "qkv_bias": bias,
        "out_bias": bias,
    }
    normed = config.get("use_qk_norm", bool, True)
    near = AttentionSpec(
        **shared,
        rotary=rotary(config, d_head, default_base=500_000.0, pairing="adjacent"),
        chunk=config.optional_size("attention_chunk_size"),
        qk_norm=NormSpec("rms", config.get("rms_norm_eps", float, 1e-5), gain=False) if normed else None,
        norm_after_rotary=normed,
    )
    growth = QueryGrowth(config.size("floor_scale", 8192), config.get("attn_scale", float, 0.1))
    # Scout's first configuration says 4 for true.
    tuned = config.optional("attn_temperature_tuning", object)
    config.only("attn_temperature_tuning", True, False, 4)
    return near, AttentionSpec(**shared, growth=growth if tuned is None or tuned else None)


def _router(n_active: int) -> RouterSpec:
    return RouterSpec(n_active, "sigmoid", renormalise=False, gate_input=True)


def _turning_layers(config: Config, n_layers: int) -> list[bool]:
    """Which layers have rotary positions: `no_rope_layers` has a 1 for each of them (and not for the others)."""
    every = config.size("no_rope_layer_interval", 4)
    stated = config.optional("no_rope_layers", list)
    if not stated:  # an empty list, as published, means the interval
        return [(i + 1) % every != 0 for i in range(n_layers)]
    if len(stated) < n_layers or any(value not in (0, 1) for value in stated):
        raise CutawayError(
            f"'no_rope_layers' is {stated} in {config.where}; it must hold 0 or 1 for each of {n_layers} layers."
        )
    return [bool(value) for value in stated[:n_layers]]


def _sparse_layers(config: Config, n_layers: int) -> set[int]:
    """The layers with experts: named one by one, or every so many."""
    every = config.size("interleave_moe_layer_step", 1)
    stated = config.optional("moe_layers", list)
    if stated is None:
        return set(range(every - 1, n_layers, every))
    if any(type(value) is not int or not 0 <= value < n_layers for value in stated):
        raise CutawayError(
            f"'moe_layers' is {stated} in {config.where}; it must hold numbers from 0 to {n_layers - 1}."
        )
    return set(stated)


def _check_layer_types(config: Config, turning: list[bool], near: AttentionSpec) -> None:
    """`layer_types` says again which layers see only their chunk; anything else would be another model."""
    stated = config.optional("layer_types", list)
    chunked = "full_attention" if near.chunk is None else "chunked_attention"
    expected = [chunked if turns else "full_attention" for turns in turning]
    if stated is not None and stated != expected:
        raise CutawayError(
            f"'layer_types' in {config.where} is not what 'no_rope_layers' and 'attention_chunk_size' say: layers with "
            "rotary positions see their chunk, those without see everything."
        )


def sources(spec: ModelSpec, tensors: Tensors) -> dict[str, Source]:
    """Our names → the tensors of a Hugging Face checkpoint, of the text part alone or of the whole."""
    before = next((p for p in ("language_model.model.", "model.language_model.", "model.") if _begins(tensors, p)), "")
    head = "language_model.lm_head" if before == "language_model.model." else "lm_head"
    whole = {"embed.tokens": f"{before}embed_tokens", "final.norm": f"{before}norm", "head": head}
    layers = f"{before}layers."

    def expert(layer: int, number: int, part: str) -> Source:
        block = f"{layers}{layer}.feed_forward.experts."
        if part == "down":
            return Source(f"{block}down_proj", lambda stack: _turned(stack, number, 0, 1))
        return Source(f"{block}gate_up_proj", lambda stack: _turned(stack, number, int(part == "up"), 2))

    return named(spec, whole, PARTS, layers) | expert_sources(spec, expert)


def _begins(tensors: Mapping[str, Weight], prefix: str) -> bool:
    return any(name.startswith(f"{prefix}layers.") for name in tensors)


def _turned(stack: Weight, number: int, part: int, parts: int) -> Weight:
    """Part `part` of `parts` of an expert stored `[d_in, parts · d_out]`, one row per output: its numbers move once."""
    matrix = stack.expert(number)
    width = matrix.shape[1] // parts
    return transposed_columns(matrix, part * width, (part + 1) * width)


def spec_from_gguf(config: Config, tensors: Tensors, name: str) -> ModelSpec:
    """The spec that the metadata of a GGUF file describes (keys without their "llama4.").

    Raises CutawayError for other numbers of experts than those of the published models: what such files leave
    unsaid could not be known.
    """
    n_experts = config.size("expert_count")
    config.only("expert_count", *HEADS_NORMED, why="whether heads are normed is known of the published models alone")
    config.only("attention.sliding_window", CHUNK, why="files of the published models name no other chunk")
    config.only("expert_gating_func", 2)
    d_model, n_heads = config.size("embedding_length"), config.size("attention.head_count")
    d_head = config.size("attention.key_length", d_model // n_heads)
    config.only("attention.value_length", d_head)
    config.only("rope.dimension_count", d_head)
    eps = decimal(config.get("attention.layer_norm_rms_epsilon", float))
    shared = AttentionSpec(n_heads, config.size("attention.head_count_kv", n_heads), d_head)
    near = replace(
        shared,
        rotary=gguf_rotary(config, tensors, d_head, pairing="adjacent"),
        chunk=CHUNK,
        qk_norm=NormSpec("rms", eps, gain=False) if HEADS_NORMED[n_experts] else None,
        norm_after_rotary=HEADS_NORMED[n_experts],
    )
    far = replace(shared, growth=GROWTH)
    expert = FeedForwardSpec(config.size("expert_feed_forward_length"), "silu", gated=True)
    experts = ExpertsSpec(n_experts, expert, _router(config.size("expert_used_count")), shared=expert)
    dense = FeedForwardSpec(config.size("feed_forward_length"), "silu", gated=True)
    every, norm = config.size("interleave_moe_layer_step"), NormSpec("rms", eps)
    layers = (
        LayerSpec(far if i % NO_ROTATION_EVERY == 0 else near, experts if i % every == 0 else dense, norm)
        for i in range(1, config.size("block_count", most=MOST_LAYERS) + 1)
    )
    spec = ModelSpec(
        name,
        tensors["token_embd.weight"].shape[0],
        d_model,
        tuple(layers),
        final_norm=norm,
        tied_head="output.weight" not in tensors,
        context_length=config.optional_size("context_length"),
    )
    config.refuse_unread(GGUF_HARMLESS)
    return spec


def gguf_sources(spec: ModelSpec, tensors: Tensors) -> dict[str, Source]:
    """Our names → the tensors of a GGUF file: q and k in their own order, experts turned already."""
    whole = {"embed.tokens": "token_embd", "final.norm": "output_norm", "head": "output"}
    return named(spec, whole, GGUF_PARTS, "blk.") | expert_sources(spec, gguf_experts(tensors))
