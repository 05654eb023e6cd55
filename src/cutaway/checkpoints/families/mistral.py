"""Mistral: Llama with a window in every layer, or, since v0.3, with none (Jiang et al. 2023).

GGUF files of it name the architecture "llama" and are read there.
"""

from cutaway.checkpoints.families import llama
from cutaway.checkpoints.families.config import Config
from cutaway.checkpoints.families.llama import sources
from cutaway.spec import ModelSpec

__all__ = ["GGUF_ARCHITECTURES", "IGNORED", "MODEL_TYPES", "sources", "spec_from_config"]

MODEL_TYPES = ("mistral",)
GGUF_ARCHITECTURES: tuple[str, ...] = ()
IGNORED = llama.BUFFERS
_WINDOW = 4096  # the first Mistral's, and what an absent key means; null means none


def spec_from_config(config: Config, name: str) -> ModelSpec:
    """The spec that a Hugging Face `config.json` describes."""
    window = None if config.is_null("sliding_window") else config.size("sliding_window", _WINDOW)
    config.only("attention_bias", False)
    config.only("mlp_bias", False)
    spec = llama.llama_spec(config, name, default_kv_heads=8, window=window)
    config.refuse_unread()
    return spec
