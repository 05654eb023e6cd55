"""Gemma 3: Gemma 2 with normed heads in place of the cap on scores, two rotary tables, and five layers with a window
to one without (Gemma team 2025). Of a checkpoint that sees images too, the text part is loaded.
"""

from dataclasses import replace
from typing import Any

from cutaway.checkpoints.families import gemma2
from cutaway.checkpoints.families.config import MOST_LAYERS, Config, decimal
from cutaway.checkpoints.families.gemma2 import as_stored, gguf_sources, sources
from cutaway.checkpoints.families.rope import rotary
from cutaway.checkpoints.families.windows import FULL, SLIDING
from cutaway.checkpoints.stored import Tensors
from cutaway.spec import ModelSpec, NormSpec, RotarySpec

__all__ = [
    "GGUF_ARCHITECTURES",
    "GGUF_HARMLESS",
    "HARMLESS",
    "IGNORED",
    "LEFT_OUT",
    "MODEL_TYPES",
    "as_stored",
    "gguf_sources",
    "sources",
    "spec_from_config",
    "spec_from_gguf",
]

MODEL_TYPES = ("gemma3", "gemma3_text")
GGUF_ARCHITECTURES = ("gemma3",)
HARMLESS = gemma2.HARMLESS
IGNORED = gemma2.IGNORED
LEFT_OUT = {r"(model\.)?(vision_tower|multi_modal_projector)\..*": "its vision tower"}
GGUF_HARMLESS = gemma2.GGUF_HARMLESS
# Beside `text_config`: what only images need.
_FOR_IMAGES = (
    "boi_token_index",
    "eoi_token_index",
    "image_token_index",
    "boi_token_id",
    "eoi_token_id",
    "image_token_id",
    "mm_tokens_per_image",
    "vision_config",
)
_LOCAL_BASE, _GLOBAL_BASE = 10_000.0, 1_000_000.0
_EVERY = 6  # of six layers, one sees everything
_27B_LAYERS = 62


def spec_from_config(config: Config, name: str) -> ModelSpec:
    """The spec that a Hugging Face `config.json` describes; of one with a vision tower, its text part's."""
    if config.get("model_type", str) == "gemma3_text":
        return _spec_of_text(config, name)
    tied = config.get("tie_word_embeddings", bool, True)
    dtype = config.optional("dtype", str) or config.optional("torch_dtype", str)
    inherited = {"tie_word_embeddings": tied, "dtype": dtype}
    text = Config(inherited | config.get("text_config", dict), f"'text_config' in {config.where}")
    text.only("model_type", "gemma3_text")
    text.only("tie_word_embeddings", tied, why="the configuration around it says so")
    config.refuse_unread((*HARMLESS, *_FOR_IMAGES))
    return _spec_of_text(text, name)


def _spec_of_text(config: Config, name: str) -> ModelSpec:
    config.only("attn_logit_softcapping", why="no Gemma 3 caps its scores, and transformers passes over the key")
    norm = NormSpec("rms", config.get("rms_norm_eps", float, 1e-6))
    attention = replace(gemma2.attention_from_config(config), qk_norm=norm)
    local, everywhere = _rotations(config, attention.d_head)
    every = config.size("sliding_window_pattern", config.size("_sliding_window_pattern", _EVERY))
    attentions = [
        replace(attention, rotary=everywhere if window is None else local, window=window)
        for window in gemma2.windows_from_config(config, every)
    ]
    cap = config.optional("final_logit_softcapping", float)
    spec = gemma2.model_from_config(config, name, config.size("vocab_size", 262_208), attentions, cap)
    config.refuse_unread(HARMLESS)
    return spec


def _rotations(config: Config, d_head: int) -> tuple[RotarySpec, RotarySpec]:
    """How the layers with a window turn, and how those without: in the old spelling, or for each kind by itself."""
    bases = config.get("rope_local_base_freq", float, _LOCAL_BASE), config.get("rope_theta", float, _GLOBAL_BASE)
    kinds = Config(config.optional("rope_parameters", dict) or {}, f"'rope_parameters' in {config.where}")
    local: dict[str, Any] = kinds.optional(SLIDING, dict) or {}
    everywhere: dict[str, Any] = kinds.optional(FULL, dict) or {}
    kinds.refuse_unread()
    everywhere = everywhere | (config.optional("rope_scaling", dict) or {})
    return (
        rotary(config, d_head, default_base=bases[0], parameters=local),
        rotary(config, d_head, default_base=bases[1], parameters=everywhere),
    )


def spec_from_gguf(config: Config, tensors: Tensors, name: str) -> ModelSpec:
    """The spec that the metadata of a GGUF file describes (keys without their "gemma3.")."""
    norm = NormSpec("rms", decimal(config.get("attention.layer_norm_rms_epsilon", float)))
    far = replace(gemma2.attention_from_gguf(config, tensors, _27B_LAYERS), qk_norm=norm)
    local = RotarySpec(decimal(config.get("rope.freq_base_swa", float, _LOCAL_BASE)), far.d_head)
    window = config.optional_size("attention.sliding_window")
    near = far if window is None else replace(far, rotary=local, window=window)  # else all layers are of one kind
    every = config.size("attention.sliding_window_pattern", _EVERY)
    attentions = [near if (i + 1) % every else far for i in range(config.size("block_count", most=MOST_LAYERS))]
    cap = config.optional("final_logit_softcapping", float)
    spec = gemma2.model_from_gguf(config, tensors, name, attentions, decimal(cap) if cap else None)
    config.refuse_unread(GGUF_HARMLESS)
    return spec
