"""Llama and what is built like it: pre-RMSNorm, rotary positions, grouped queries, SwiGLU (Touvron et al. 2023).

GGUF files of this family hold the rows of q and k in another order (pairs side by side); it is undone here.
"""

from collections.abc import Callable, Mapping

import numpy as np

from cutaway.checkpoints.families.config import MOST_LAYERS, Config, decimal
from cutaway.checkpoints.families.names import Source
from cutaway.checkpoints.stored import Tensors, quoted
from cutaway.engines.weights import Weight
from cutaway.errors import CutawayError
from cutaway.spec import Activation, ModelSpec
from cutaway.spec.catalog import llama_like

MODEL_TYPES = ("llama",)
GGUF_ARCHITECTURES = ("llama",)
HARMLESS = ("pretraining_tp", "is_llama_config", "mlp_dropout")  # pretraining_tp only splits the same sums
IGNORED = (r".*\.rotary_emb\.inv_freq",)  # the rotary frequencies, stored as a buffer: worked out from the base
GGUF_HARMLESS = ("vocab_size", "rope.scaling.original_context_length", "rope.scaling.finetuned")
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
_PARTS = {  # ours → (Hugging Face, GGUF)
    "attn.q": ("self_attn.q_proj", "attn_q"),
    "attn.k": ("self_attn.k_proj", "attn_k"),
    "attn.v": ("self_attn.v_proj", "attn_v"),
    "attn.o": ("self_attn.o_proj", "attn_output"),
    "mlp.gate": ("mlp.gate_proj", "ffn_gate"),
    "mlp.up": ("mlp.up_proj", "ffn_up"),
    "mlp.down": ("mlp.down_proj", "ffn_down"),
}
_NORMS = {"attn.norm": ("input_layernorm", "attn_norm"), "mlp.norm": ("post_attention_layernorm", "ffn_norm")}


def spec_from_config(config: Config, name: str) -> ModelSpec:
    """The spec that a Hugging Face `config.json` describes."""
    d_model, n_heads = config.size("hidden_size"), config.size("num_attention_heads")
    d_head = config.optional_size("head_dim")
    if d_head is None and d_model % n_heads:
        raise CutawayError(
            f"hidden_size = {d_model} in {config.where} cannot be split into {n_heads} equal heads; give 'head_dim'."
        )
    config.only("hidden_act", *ACTIVATIONS)
    config.only("is_encoder_decoder", False)
    config.only("add_cross_attention", False)
    config.only("rope_interleaved", False, why="the rows of q and k would stand in another order")
    config.only("quantization_config", why="quantised safetensors are not read; use a GGUF file of the model")
    bias = config.get("attention_bias", bool, False)
    spec = llama_like(
        name,
        vocab_size=config.size("vocab_size"),
        d_model=d_model,
        n_layers=config.size("num_hidden_layers", most=MOST_LAYERS),
        n_heads=n_heads,
        n_kv_heads=config.size("num_key_value_heads", n_heads),
        d_ff=config.size("intermediate_size"),
        d_head=d_head,
        eps=config.get("rms_norm_eps", float, 1e-6),
        rope_base=_rope_base(config),
        activation=ACTIVATIONS[config.get("hidden_act", str, "silu")],
        tied_head=config.get("tie_word_embeddings", bool, False),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=config.get("mlp_bias", bool, False),
        context_length=config.optional_size("max_position_embeddings"),
    )
    config.refuse_unread(HARMLESS)
    return spec


def _rope_base(config: Config) -> float:
    """The rotary base, from either spelling; any scaling of the angles is refused by its name."""
    base = config.get("rope_theta", float, 10_000.0)
    for key in ("rope_parameters", "rope_scaling"):
        rope: Mapping = config.optional(key, dict) or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        unknown = [str(k) for k, v in rope.items() if k not in ("rope_type", "type", "rope_theta") and v is not None]
        if kind != "default" or unknown:
            raise CutawayError(
                f"{key!r} in {config.where} asks for rotary scaling {quoted(kind)} "
                f"({', '.join(unknown[:5]) or 'no settings'}), "
                "which cannot be computed yet; only plain rotary positions can."
            )
        base = Config(rope, f"{key!r} of {config.where}").get("rope_theta", float, base)
    return base


def sources(spec: ModelSpec, tensors: Tensors) -> dict[str, Source]:
    """Our names → the tensors of a Hugging Face checkpoint."""
    prefix = "model." if any(name.startswith("model.") for name in tensors) else ""
    return _named(spec, 0, f"{prefix}embed_tokens", f"{prefix}norm", "lm_head", f"{prefix}layers.")


def spec_from_gguf(config: Config, tensors: Tensors, name: str) -> ModelSpec:
    """The spec that the metadata of a GGUF file describes (keys without their "llama.")."""
    vocab_size = tensors["token_embd.weight"].shape[0]
    config.only("rope.scaling.type", "none", why="rotary scaling cannot be computed yet")
    config.only("expert_count", 0, why="mixtures of experts cannot be computed yet")
    config.only("expert_used_count", 0)
    if "rope_freqs.weight" in tensors:
        raise CutawayError(
            f"{config.where}: the file scales its rotary angles (tensor rope_freqs.weight, as Llama 3.1 does), "
            "which cannot be computed yet."
        )
    d_model, n_heads = config.size("embedding_length"), config.size("attention.head_count")
    d_head = config.size("attention.key_length", d_model // n_heads)
    config.only("attention.value_length", d_head, why="keys and values must be of one width here")
    config.only("rope.dimension_count", d_head, why="the order of the rows pairs the coordinates of whole heads")
    spec = llama_like(
        name,
        vocab_size=vocab_size,
        d_model=d_model,
        n_layers=config.size("block_count", most=MOST_LAYERS),
        n_heads=n_heads,
        n_kv_heads=config.size("attention.head_count_kv", n_heads),
        d_ff=config.size("feed_forward_length"),
        d_head=d_head,
        eps=decimal(config.get("attention.layer_norm_rms_epsilon", float)),
        rope_base=decimal(config.get("rope.freq_base", float, 10_000.0)),
        tied_head="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        out_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        context_length=config.optional_size("context_length"),
    )
    config.refuse_unread(GGUF_HARMLESS)
    return spec


def gguf_sources(spec: ModelSpec, tensors: Tensors) -> dict[str, Source]:
    """Our names → the tensors of a GGUF file, q and k back in the order of the original."""
    names = _named(spec, 1, "token_embd", "output_norm", "output", "blk.")
    for i, layer in enumerate(spec.layers):
        attention = layer.attention
        for part, heads in (("attn.q", attention.n_heads), ("attn.k", attention.n_kv_heads)):
            for role in ("weight", "bias") if attention.qkv_bias else ("weight",):
                ours = f"layers.{i}.{part}.{role}"
                names[ours] = Source(names[ours].name, unpermuted(heads, attention.d_head))
    return names


def unpermuted(heads: int, d_head: int) -> Callable[[Weight], Weight]:
    """The rows of q or k of that many heads back in their order, which is worked out only where they are that many.

    Until then `heads` is but a claim of the file: a billion would fill the memory with an order of nothing.
    """

    def change(weight: Weight) -> Weight:
        if weight.shape[0] != heads * d_head:
            raise CutawayError(f"it has {weight.shape[0]} rows, but {heads} heads of {d_head} make {heads * d_head}.")
        return weight.reorder(rows_from_gguf(heads, d_head))

    return change


def rows_from_gguf(heads: int, d_head: int) -> np.ndarray:
    """Where the file holds each row of q or k: GGUF stores coordinate s · d_head/2 + j of a head at 2j + s."""
    stored = np.arange(heads * d_head).reshape(heads, d_head // 2, 2)
    return stored.swapaxes(1, 2).ravel()


def _named(spec: ModelSpec, column: int, embed: str, norm: str, head: str, layers: str) -> dict[str, Source]:
    names = {"embed.tokens": Source(f"{embed}.weight"), "final.norm.gain": Source(f"{norm}.weight")}
    if not spec.tied_head:
        names["head.weight"] = Source(f"{head}.weight")
    for i, layer in enumerate(spec.layers):
        ours, theirs = f"layers.{i}.", f"{layers}{i}."
        for part, both in _NORMS.items():
            names[f"{ours}{part}.gain"] = Source(f"{theirs}{both[column]}.weight")
        biases = {
            "attn.o": layer.attention.out_bias,
            **dict.fromkeys(("attn.q", "attn.k", "attn.v"), layer.attention.qkv_bias),
        }
        for part, both in _PARTS.items():
            names[f"{ours}{part}.weight"] = Source(f"{theirs}{both[column]}.weight")
            if biases.get(part, layer.feed_forward.bias):
                names[f"{ours}{part}.bias"] = Source(f"{theirs}{both[column]}.bias")
    return names
