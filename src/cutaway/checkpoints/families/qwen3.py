"""Qwen3: Llama whose heads' queries and keys are normed before they turn, and may be wider than d/H (Yang et al. 2025).

GGUF keeps the rows of q and k as they are.
"""

from cutaway.checkpoints.families import llama
from cutaway.checkpoints.families.config import Config, decimal
from cutaway.checkpoints.families.llama import sources
from cutaway.checkpoints.families.llama import unpermuted_sources as gguf_sources
from cutaway.checkpoints.families.qwen2 import windowed
from cutaway.checkpoints.stored import Tensors
from cutaway.spec import ModelSpec, NormSpec

__all__ = [
    "GGUF_ARCHITECTURES",
    "GGUF_HARMLESS",
    "IGNORED",
    "MODEL_TYPES",
    "gguf_sources",
    "sources",
    "spec_from_config",
    "spec_from_gguf",
]

MODEL_TYPES = ("qwen3",)
GGUF_ARCHITECTURES = ("qwen3",)
IGNORED = llama.IGNORED
GGUF_HARMLESS = llama.GGUF_HARMLESS


def spec_from_config(config: Config, name: str) -> ModelSpec:
    """The spec that a Hugging Face `config.json` describes."""
    bias = config.get("attention_bias", bool, False)
    norm = NormSpec("rms", config.get("rms_norm_eps", float, 1e-6))
    spec = llama.llama_spec(
        config, name, default_kv_heads=32, default_d_head=128, qkv_bias=bias, out_bias=bias, qk_norm=norm
    )
    spec = windowed(config, spec)
    config.refuse_unread()
    return spec


def spec_from_gguf(config: Config, tensors: Tensors, name: str) -> ModelSpec:
    """The spec that the metadata of a GGUF file describes (keys without their "qwen3.")."""
    norm = NormSpec("rms", decimal(config.get("attention.layer_norm_rms_epsilon", float)))
    spec = llama.llama_gguf_spec(config, tensors, name, qk_norm=norm)
    config.refuse_unread(GGUF_HARMLESS)
    return spec
