"""Llama and what is built like it: pre-RMSNorm, rotary positions, grouped queries, SwiGLU (Touvron et al. 2023).

GGUF files of this family hold the rows of q and k in another order (pairs side by side); it is undone here.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cutaway.checkpoints.eight_bit import check_quantisation
from cutaway.checkpoints.families import gguf_rope
from cutaway.checkpoints.families.config import MOST_LAYERS, Config, decimal
from cutaway.checkpoints.families.gguf_rope import gguf_rotary
from cutaway.checkpoints.families.mixtures import expert_sources, gguf_experts, with_gguf_experts
from cutaway.checkpoints.families.names import Source
from cutaway.checkpoints.families.rope import rotary
from cutaway.checkpoints.stored import Tensors
from cutaway.engines.weights import Weight
from cutaway.errors import CutawayError
from cutaway.spec import Activation, ModelSpec, RotarySpec, parameter_shapes
from cutaway.spec.builders import llama_like

MODEL_TYPES = ("llama",)
GGUF_ARCHITECTURES = ("llama",)
HARMLESS = ("pretraining_tp", "is_llama_config", "mlp_dropout")  # pretraining_tp only splits the same sums
BUFFERS = (r".*\.rotary_emb\.inv_freq",)  # the rotary frequencies, stored as a buffer: worked out from the base
IGNORED = (*BUFFERS, *gguf_rope.IGNORED)
GGUF_HARMLESS = ("vocab_size", "rope.scaling.finetuned")
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
# Ours → what Hugging Face and GGUF call the same part of a layer.
PARTS = {
    "attn.norm": "input_layernorm",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "attn.o": "self_attn.o_proj",
    "mlp.norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
GGUF_PARTS = {
    "attn.norm": "attn_norm",
    "attn.q": "attn_q",
    "attn.k": "attn_k",
    "attn.v": "attn_v",
    "attn.q_norm": "attn_q_norm",
    "attn.k_norm": "attn_k_norm",
    "attn.o": "attn_output",
    "mlp.norm": "ffn_norm",
    "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
    "moe.router": "ffn_gate_inp",
}


def spec_from_config(config: Config, name: str) -> ModelSpec:
    """The spec that a Hugging Face `config.json` describes."""
    config.only("rope_interleaved", False, why="the rows of q and k would stand in another order")
    bias = config.get("attention_bias", bool, False)
    mlp_bias = config.get("mlp_bias", bool, False)
    spec = llama_spec(config, name, qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias)
    config.refuse_unread(HARMLESS)
    return spec


def llama_spec(
    config: Config,
    name: str,
    *,
    default_kv_heads: int | None = None,
    default_d_head: int | None = None,
    default_eps: float = 1e-6,
    default_base: float = 10_000.0,
    rotary_dims: int | None = None,
    **more: Any,
) -> ModelSpec:
    """What all configurations of Llama-like models say in the same words; `more` goes to `llama_like` as it is.

    The defaults are what the architecture means by an absent key; key heads are by default as many as query heads.
    `rotary_dims` of each head turn, all where it is not given. The caller refuses what was not read.
    """
    d_model, n_heads = config.size("hidden_size"), config.size("num_attention_heads")
    d_head = config.optional_size("head_dim") or default_d_head or head_width(config, d_model, n_heads)
    config.only("hidden_act", *ACTIVATIONS)
    config.only("is_encoder_decoder", False)
    config.only("add_cross_attention", False)
    if (settings := config.optional("quantization_config", dict)) is not None:
        check_quantisation(settings, config.where)
    return llama_like(
        name,
        vocab_size=config.size("vocab_size"),
        d_model=d_model,
        n_layers=config.size("num_hidden_layers", most=MOST_LAYERS),
        n_heads=n_heads,
        n_kv_heads=config.size("num_key_value_heads", default_kv_heads or n_heads),
        d_ff=config.size("intermediate_size"),
        d_head=d_head,
        eps=config.get("rms_norm_eps", float, default_eps),
        activation=ACTIVATIONS[config.get("hidden_act", str, "silu")],
        tied_head=config.get("tie_word_embeddings", bool, False),
        context_length=config.optional_size("max_position_embeddings"),
        **turned(rotary(config, rotary_dims or d_head, d_head=d_head, default_base=default_base)),
        **more,
    )


def head_width(config: Config, d_model: int, n_heads: int) -> int:
    """d / H, where a configuration gives no width of its own."""
    if d_model % n_heads:
        raise CutawayError(
            f"hidden_size = {d_model} in {config.where} cannot be split into {n_heads} equal heads; give 'head_dim'."
        )
    return d_model // n_heads


def turned(spec: RotarySpec) -> dict[str, Any]:
    """Rotary positions in the words of `llama_like`."""
    return {"rope_base": spec.base, "rope_dims": spec.dims, "rope_scaling": spec.scaling}


def sources(spec: ModelSpec, tensors: Tensors) -> dict[str, Source]:
    """Our names → the tensors of a Hugging Face checkpoint."""
    prefix = "model." if any(name.startswith("model.") for name in tensors) else ""
    whole = {"embed.tokens": f"{prefix}embed_tokens", "final.norm": f"{prefix}norm", "head": "lm_head"}
    return named(spec, whole, PARTS, f"{prefix}layers.")


def spec_from_gguf(config: Config, tensors: Tensors, name: str) -> ModelSpec:
    """The spec that the metadata of a GGUF file describes (keys without their "llama.").

    Mistral's files are of this architecture too. They do not say how far its window reaches, so that, as in
    llama.cpp, every layer sees everything. With experts it is Mixtral.
    """
    spec = llama_gguf_spec(config, tensors, name)
    attention = spec.layers[0].attention
    if attention.rotary is not None and attention.rotary.dims != attention.d_head:
        raise CutawayError(
            f"'rope.dimension_count' is {attention.rotary.dims} in {config.where}; only {attention.d_head} can be "
            "computed: the order of the rows pairs the coordinates of whole heads."
        )
    if config.get("expert_count", int, 0):
        spec = with_gguf_experts(config, spec)
    else:
        config.only("expert_used_count", 0)
    config.refuse_unread(GGUF_HARMLESS)
    return spec


def llama_gguf_spec(config: Config, tensors: Tensors, name: str, **more: Any) -> ModelSpec:
    """What the metadata of all Llama-like GGUF files say in the same words; `more` goes to `llama_like` as it is.

    The caller refuses what was not read.
    """
    d_model, n_heads = config.size("embedding_length"), config.size("attention.head_count")
    d_head = config.size("attention.key_length", d_model // n_heads)
    config.only("attention.value_length", d_head, why="keys and values must be of one width here")
    dims = config.size("rope.dimension_count", d_head)
    stated = {
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "d_model": d_model,
        "n_layers": config.size("block_count", most=MOST_LAYERS),
        "n_heads": n_heads,
        "n_kv_heads": config.size("attention.head_count_kv", n_heads),
        "d_ff": config.size("feed_forward_length"),
        "d_head": d_head,
        "eps": decimal(config.get("attention.layer_norm_rms_epsilon", float)),
        "tied_head": "output.weight" not in tensors,
        "qkv_bias": "blk.0.attn_q.bias" in tensors,
        "out_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "context_length": config.optional_size("context_length"),
        **turned(gguf_rotary(config, tensors, dims)),
    }
    return llama_like(name, **(stated | more))


def gguf_sources(spec: ModelSpec, tensors: Tensors) -> dict[str, Source]:
    """Our names → the tensors of a GGUF file, q and k back in the order of the original."""
    names = unpermuted_sources(spec, tensors)
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


def unpermuted_sources(spec: ModelSpec, tensors: Tensors) -> dict[str, Source]:
    """Our names → the tensors of a GGUF file that keeps the rows of q and k as they were."""
    whole = {"embed.tokens": "token_embd", "final.norm": "output_norm", "head": "output"}
    return named(spec, whole, GGUF_PARTS, "blk.") | expert_sources(spec, gguf_experts(tensors))


def rows_from_gguf(heads: int, d_head: int) -> np.ndarray:
    """Where the file holds each row of q or k: GGUF stores coordinate s · d_head/2 + j of a head at 2j + s."""
    stored = np.arange(heads * d_head).reshape(heads, d_head // 2, 2)
    return stored.swapaxes(1, 2).ravel()


def named(spec: ModelSpec, whole: Mapping[str, str], parts: Mapping[str, str], layers: str) -> dict[str, Source]:
    """Every parameter of the spec whose part is named: in `whole` outside the layers, in `parts` inside them.

    `layers` stands before a layer's number. Gains are stored as "weight", biases as "bias".
    """
    names: dict[str, Source] = {}
    for ours in parameter_shapes(spec):
        part, _, role = ours.rpartition(".") if ours != "embed.tokens" else (ours, "", "weight")
        theirs, before = whole.get(part), ""
        if part.startswith("layers."):
            _, number, part = part.split(".", 2)
            theirs, before = parts.get(part), f"{layers}{number}."
        if theirs is not None:
            names[ours] = Source(f"{before}{theirs}.{'bias' if role == 'bias' else 'weight'}")
    return names
