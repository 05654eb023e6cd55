"""Phi-3, 3.5 and 4: Llama with q, k and v stored as one matrix, gate and up as another (Abdin et al. 2024).

The long-context models divide each pair's angle by a number of its own; Phi-4-mini turns a part of each head only.
"""

from collections.abc import Callable

from cutaway.checkpoints.families import llama
from cutaway.checkpoints.families.config import Config
from cutaway.checkpoints.families.names import Source
from cutaway.checkpoints.families.rope import rotated, stated
from cutaway.checkpoints.stored import Tensors
from cutaway.engines.weights import Weight
from cutaway.errors import CutawayError
from cutaway.spec import FeedForwardSpec, ModelSpec

MODEL_TYPES = ("phi3",)
GGUF_ARCHITECTURES = ("phi3",)
HARMLESS = ("original_max_position_embeddings",)  # used where the angles are scaled, and stated elsewhere too
IGNORED = llama.IGNORED
GGUF_HARMLESS = llama.GGUF_HARMLESS


def spec_from_config(config: Config, name: str) -> ModelSpec:
    """The spec that a Hugging Face `config.json` describes."""
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        config.only(key, False)
    for key in ("full_attn_mod", "interpolate_factor"):
        config.only(key, 1)
    d_model, n_heads = config.size("hidden_size"), config.size("num_attention_heads")
    d_head = config.optional_size("head_dim") or llama.head_width(config, d_model, n_heads)
    original = "original_max_position_embeddings"
    if "short_factor" in stated(config) and original not in config and not stated(config).get(original):
        raise CutawayError(f"{config.where} scales its rotary angles and lacks {original!r}, which says from where on.")
    spec = llama.llama_spec(
        config,
        name,
        default_eps=1e-5,
        rotary_dims=rotated(config, d_head),
        window=config.optional_size("sliding_window"),
    )
    config.refuse_unread(HARMLESS)
    return spec


def sources(spec: ModelSpec, tensors: Tensors) -> dict[str, Source]:
    """Our names → the tensors of a Hugging Face checkpoint."""
    prefix = "model." if any(name.startswith("model.") for name in tensors) else ""
    return llama.sources(spec, tensors) | _apart(spec, f"{prefix}layers.", "self_attn.qkv_proj", "mlp.gate_up_proj")


def spec_from_gguf(config: Config, tensors: Tensors, name: str) -> ModelSpec:
    """The spec that the metadata of a GGUF file describes (keys without their "phi3.").

    The window that it states is kept, as the model's own code does; llama.cpp has switched it off.
    """
    window = config.get("attention.sliding_window", int, 0)  # 0 stands for none
    spec = llama.llama_gguf_spec(config, tensors, name, window=window or None)
    config.refuse_unread(GGUF_HARMLESS)
    return spec


def gguf_sources(spec: ModelSpec, tensors: Tensors) -> dict[str, Source]:
    """Our names → the tensors of a GGUF file, which keeps the fused matrices."""
    return llama.unpermuted_sources(spec, tensors) | _apart(spec, "blk.", "attn_qkv", "ffn_up")


def _apart(spec: ModelSpec, layers: str, qkv: str, gate_up: str) -> dict[str, Source]:
    """The rows of the two fused matrices: those of q, of k, of v; of the gate, and of what it gates."""
    names: dict[str, Source] = {}
    for i, layer in enumerate(spec.layers):
        attention, feed_forward = layer.attention, layer.feed_forward
        assert isinstance(feed_forward, FeedForwardSpec)
        query, key = attention.n_heads * attention.d_head, attention.n_kv_heads * attention.d_head
        for fused, parts in (
            (qkv, {"attn.q": query, "attn.k": key, "attn.v": key}),
            (gate_up, {"mlp.gate": feed_forward.d_ff, "mlp.up": feed_forward.d_ff}),
        ):
            start, total = 0, sum(parts.values())
            for part, size in parts.items():
                name = f"{layers}{i}.{fused}.weight"
                names[f"layers.{i}.{part}.weight"] = Source(name, _rows(start, start + size, total))
                start += size
    return names


def _rows(start: int, stop: int, total: int) -> Callable[[Weight], Weight]:
    def change(weight: Weight) -> Weight:
        if weight.shape[0] != total:
            raise CutawayError(f"it has {weight.shape[0]} rows; the parts stored in it make {total}.")
        return weight.row_slice(start, stop)

    return change
