"""Phi-1, 1.5 and 2: attention and feed-forward read one shared norm, side by side (Li et al. 2023).

Phi-3 is another architecture, built like Llama.
"""

from cutaway.checkpoints.families.config import MOST_LAYERS, Config, decimal, even_heads, refuse_encoder_and_quantised
from cutaway.checkpoints.families.names import Source, layer_norm, linear, third
from cutaway.checkpoints.families.rope import rotary, rotated
from cutaway.checkpoints.stored import Tensors
from cutaway.spec import Activation, AttentionSpec, FeedForwardSpec, LayerSpec, ModelSpec, NormSpec, RotarySpec

MODEL_TYPES = ("phi",)
GGUF_ARCHITECTURES = ("phi2",)
HARMLESS = ("embd_pdrop", "resid_pdrop", "is_decoder")
IGNORED = (r".*\.rotary_emb\.inv_freq",)  # the rotary frequencies, stored as a buffer
GGUF_HARMLESS = ("vocab_size",)
ACTIVATIONS: dict[str, Activation] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
}
_PARTS = {  # ours → (Hugging Face, GGUF)
    "attn.q": ("self_attn.q_proj", "attn_q"),
    "attn.k": ("self_attn.k_proj", "attn_k"),
    "attn.v": ("self_attn.v_proj", "attn_v"),
    "attn.o": ("self_attn.dense", "attn_output"),
    "mlp.up": ("mlp.fc1", "ffn_up"),
    "mlp.down": ("mlp.fc2", "ffn_down"),
}


def spec_from_config(config: Config, name: str) -> ModelSpec:
    """The spec that a Hugging Face `config.json` describes."""
    config.only("hidden_act", *ACTIVATIONS)
    refuse_encoder_and_quantised(config)
    d_model, n_heads = config.size("hidden_size"), config.size("num_attention_heads")
    d_head = even_heads(config, d_model, n_heads)
    config.only("head_dim", d_head, why="a head of Phi is its part of the width")
    eps = config.get("layer_norm_eps", float, 1e-5)
    spec = _phi(
        name,
        rotary(config, rotated(config, d_head, 0.5), d_head=d_head),
        vocab_size=config.size("vocab_size"),
        d_model=d_model,
        n_layers=config.size("num_hidden_layers", most=MOST_LAYERS),
        n_heads=n_heads,
        n_kv_heads=config.size("num_key_value_heads", n_heads),
        d_ff=config.size("intermediate_size"),
        activation=ACTIVATIONS[config.get("hidden_act", str, "gelu_new")],
        eps=eps,
        normed_heads=config.get("qk_layernorm", bool, False),
        tied_head=config.get("tie_word_embeddings", bool, False),
        context_length=config.optional_size("max_position_embeddings"),
    )
    config.refuse_unread(HARMLESS)
    return spec


def _phi(
    name: str,
    rotary: RotarySpec,
    *,
    vocab_size: int,
    d_model: int,
    n_layers: int,
    n_heads: int,
    n_kv_heads: int,
    d_ff: int,
    eps: float,
    activation: Activation = "gelu_tanh",
    normed_heads: bool = False,
    tied_head: bool = False,
    context_length: int | None = None,
) -> ModelSpec:
    norm = NormSpec("layer", eps, bias=True)
    attention = AttentionSpec(
        n_heads,
        n_kv_heads,
        d_model // n_heads,
        rotary=rotary,
        qkv_bias=True,
        out_bias=True,
        qk_norm=norm if normed_heads else None,
    )
    feed_forward = FeedForwardSpec(d_ff, activation, bias=True)
    layer = LayerSpec(attention, feed_forward, norm, parallel=True, shared_norm=True)
    return ModelSpec(
        name,
        vocab_size,
        d_model,
        (layer,) * n_layers,
        final_norm=norm,
        tied_head=tied_head,
        head_bias=True,
        context_length=context_length,
    )


def sources(spec: ModelSpec, tensors: Tensors) -> dict[str, Source]:
    """Our names → the tensors of a Hugging Face checkpoint."""
    prefix = "model." if any(name.startswith("model.") for name in tensors) else ""
    names = _named(spec, 0, f"{prefix}embed_tokens", f"{prefix}final_layernorm", f"{prefix}layers.", "input_layernorm")
    for i, layer in enumerate(spec.layers):
        if layer.attention.qk_norm is not None:
            for letter in "qk":
                names |= layer_norm(
                    f"layers.{i}.attn.{letter}_norm", f"{prefix}layers.{i}.self_attn.{letter}_layernorm"
                )
    return names | _head(spec, "lm_head")


def spec_from_gguf(config: Config, tensors: Tensors, name: str) -> ModelSpec:
    """The spec that the metadata of a GGUF file describes (keys without their "phi2.")."""
    d_model, n_heads = config.size("embedding_length"), config.size("attention.head_count")
    d_head = even_heads(config, d_model, n_heads)
    config.only("rope.scaling.type", "none", why="Phi-2 turns by plain angles")
    base = decimal(config.get("rope.freq_base", float, 10_000.0))
    spec = _phi(
        name,
        RotarySpec(base, config.size("rope.dimension_count", d_head)),
        vocab_size=tensors["token_embd.weight"].shape[0],
        d_model=d_model,
        n_layers=config.size("block_count", most=MOST_LAYERS),
        n_heads=n_heads,
        n_kv_heads=config.size("attention.head_count_kv", n_heads),
        d_ff=config.size("feed_forward_length"),
        eps=decimal(config.get("attention.layer_norm_epsilon", float)),
        tied_head="output.weight" not in tensors,
        context_length=config.optional_size("context_length"),
    )
    config.refuse_unread(GGUF_HARMLESS)
    return spec


def gguf_sources(spec: ModelSpec, tensors: Tensors) -> dict[str, Source]:
    """Our names → the tensors of a GGUF file; the earliest ones hold q, k and v as one tensor."""
    names = _named(spec, 1, "token_embd", "output_norm", "blk.", "attn_norm")
    for i in range(spec.n_layers):
        if f"blk.{i}.attn_qkv.weight" in tensors:
            for part, letter in enumerate("qkv"):
                for role in ("weight", "bias"):
                    names[f"layers.{i}.attn.{letter}.{role}"] = Source(f"blk.{i}.attn_qkv.{role}", third(part))
    return names | _head(spec, "output")


def _named(spec: ModelSpec, column: int, embed: str, norm: str, layers: str, layer_norms: str) -> dict[str, Source]:
    """Everything but the head and the norms of queries and keys."""
    names = {"embed.tokens": Source(f"{embed}.weight"), **layer_norm("final.norm", norm)}
    for i in range(spec.n_layers):
        ours, theirs = f"layers.{i}.", f"{layers}{i}."
        names |= layer_norm(f"{ours}attn.norm", f"{theirs}{layer_norms}")
        for mine, both in _PARTS.items():
            names |= linear(f"{ours}{mine}", f"{theirs}{both[column]}", bias=True)
    return names


def _head(spec: ModelSpec, theirs: str) -> dict[str, Source]:
    """A tied head has a bias of its own all the same."""
    names = linear("head", theirs, bias=True)
    return {"head.bias": names["head.bias"]} if spec.tied_head else names
