"""Qwen3 with experts: Qwen3's normed heads, and in most layers a router before many narrow feed-forwards (2025)."""

from cutaway.checkpoints.families import llama
from cutaway.checkpoints.families.config import Config, decimal
from cutaway.checkpoints.families.llama import unpermuted_sources as gguf_sources
from cutaway.checkpoints.families.mixtures import (
    expert_sources,
    hugging_face_experts,
    with_experts,
    with_gguf_experts,
)
from cutaway.checkpoints.families.names import Source
from cutaway.checkpoints.stored import Tensors, quoted
from cutaway.errors import CutawayError
from cutaway.spec import ModelSpec, NormSpec, RouterSpec

__all__ = [
    "GGUF_ARCHITECTURES",
    "GGUF_HARMLESS",
    "HARMLESS",
    "IGNORED",
    "MODEL_TYPES",
    "gguf_sources",
    "sources",
    "spec_from_config",
    "spec_from_gguf",
]

MODEL_TYPES = ("qwen3_moe",)
GGUF_ARCHITECTURES = ("qwen3moe",)
# The first two act in training only; the third tells which layers have a window, where there are windows.
HARMLESS = ("output_router_logits", "router_aux_loss_coef", "max_window_layers")
IGNORED = llama.IGNORED
GGUF_HARMLESS = llama.GGUF_HARMLESS
_EXPERT_PARTS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_PARTS = llama.PARTS | {"moe.router": "mlp.gate"}


def spec_from_config(config: Config, name: str) -> ModelSpec:
    """The spec that a Hugging Face `config.json` describes."""
    if config.get("use_sliding_window", bool, False):
        raise CutawayError(
            f"'use_sliding_window' is true in {config.where}; no published model of this architecture has windows, "
            "and what its layers would see is not settled, so it is refused."
        )
    config.optional("sliding_window", int)  # the width of windows that are switched off
    bias = config.get("attention_bias", bool, False)
    qk_norm = NormSpec("rms", config.get("rms_norm_eps", float, 1e-6))
    spec = llama.llama_spec(config, name, default_kv_heads=4, qkv_bias=bias, out_bias=bias, qk_norm=qk_norm)
    n_experts = config.size("num_experts", config.size("num_local_experts", 128))
    router = RouterSpec(config.size("num_experts_per_tok", 8), renormalise=config.get("norm_topk_prob", bool, False))
    every, listed = config.size("decoder_sparse_step", 1), _listed(config)
    dense = [i for i in range(spec.n_layers) if i in listed or (i + 1) % every]
    d_ff = config.size("moe_intermediate_size", 768)
    config.refuse_unread(HARMLESS)
    return with_experts(spec, n_experts, router, d_ff, dense)


def _listed(config: Config) -> list[int]:
    """The layers that keep a plain feed-forward."""
    layers = config.get("mlp_only_layers", list, [])
    for layer in layers:
        if type(layer) is not int:
            raise CutawayError(
                f"'mlp_only_layers' holds {quoted(layer)} in {config.where}; it must list layers by number."
            )
    return layers


def sources(spec: ModelSpec, tensors: Tensors) -> dict[str, Source]:
    """Our names → the tensors of a Hugging Face checkpoint, in the published layout or in that of transformers 5."""
    prefix = "model." if any(name.startswith("model.") for name in tensors) else ""
    layers = f"{prefix}layers."
    experts = hugging_face_experts(
        tensors,
        f"{layers}{{layer}}.mlp.experts.{{expert}}.{{part}}.weight",
        _EXPERT_PARTS,
        f"{layers}{{layer}}.mlp.experts",
    )
    whole = {"embed.tokens": f"{prefix}embed_tokens", "final.norm": f"{prefix}norm", "head": "lm_head"}
    return llama.named(spec, whole, _PARTS, layers) | expert_sources(spec, experts)


def spec_from_gguf(config: Config, tensors: Tensors, name: str) -> ModelSpec:
    """The spec that the metadata of a GGUF file describes (keys without their "qwen3moe."): every layer has experts."""
    qk_norm = NormSpec("rms", decimal(config.get("attention.layer_norm_rms_epsilon", float)))
    spec = llama.llama_gguf_spec(config, tensors, name, qk_norm=qk_norm, mlp_bias=False)
    config.size("expert_feed_forward_length")  # it is needed here: `feed_forward_length` is that of no layer
    spec = with_gguf_experts(config, spec)
    config.refuse_unread(GGUF_HARMLESS)
    return spec
