"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values only (Yang et al. 2024).

Some of its layers can have a window, though no published configuration switches that on. GGUF keeps the rows of
q and k as they are.
"""

from cutaway.checkpoints.families import llama
from cutaway.checkpoints.families.config import Config
from cutaway.checkpoints.families.llama import sources
from cutaway.checkpoints.families.llama import unpermuted_sources as gguf_sources
from cutaway.checkpoints.families.windows import SLIDING, layer_types, with_windows
from cutaway.checkpoints.stored import Tensors
from cutaway.errors import CutawayError
from cutaway.spec import ModelSpec

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

MODEL_TYPES = ("qwen2",)
GGUF_ARCHITECTURES = ("qwen2",)
IGNORED = llama.IGNORED
GGUF_HARMLESS = llama.GGUF_HARMLESS


def spec_from_config(config: Config, name: str) -> ModelSpec:
    """The spec that a Hugging Face `config.json` describes."""
    config.only("use_mrope", False)
    spec = llama.llama_spec(config, name, default_kv_heads=32, qkv_bias=True)
    spec = windowed(config, spec)
    config.refuse_unread()
    return spec


def windowed(config: Config, spec: ModelSpec) -> ModelSpec:
    """The spec with Qwen's windows, where they are switched on: listed by layer, or in all past a certain one."""
    width = None if config.is_null("sliding_window") else config.size("sliding_window", 4096)
    kinds = layer_types(config, spec.n_layers)
    first = config.get("max_window_layers", int, 28)
    if not config.get("use_sliding_window", bool, False):
        width = None
    if kinds is None:
        return with_windows(spec, [width if i >= first else None for i in range(spec.n_layers)])
    if width is None and SLIDING in kinds:
        raise CutawayError(
            f"'layer_types' in {config.where} gives layer {kinds.index(SLIDING)} a window, but 'use_sliding_window' "
            "and 'sliding_window' name none."
        )
    return with_windows(spec, [width if kind == SLIDING else None for kind in kinds])


def spec_from_gguf(config: Config, tensors: Tensors, name: str) -> ModelSpec:
    """The spec that the metadata of a GGUF file describes (keys without their "qwen2.")."""
    spec = llama.llama_gguf_spec(config, tensors, name, qkv_bias=True)
    config.refuse_unread(GGUF_HARMLESS)
    return spec
