"""GPT-2: pre-LayerNorm, learned positions, one fused QKV, biases everywhere, a tied head (Radford et al. 2019).

Hugging Face stores its matrices one row per *input* (its Conv1D), so they are turned; GGUF has turned them.
"""

from cutaway.checkpoints.families.config import MOST_LAYERS, Config, decimal
from cutaway.checkpoints.families.names import Source, third, transposed, transposed_third
from cutaway.checkpoints.stored import Tensors
from cutaway.errors import CutawayError
from cutaway.spec import Activation, ModelSpec
from cutaway.spec.builders import gpt2_like

MODEL_TYPES = ("gpt2",)
GGUF_ARCHITECTURES = ("gpt2",)
HARMLESS = ("n_ctx", "reorder_and_upcast_attn", "_num_labels", "n_special", "output_past", "predict_special_tokens")
IGNORED = (r".*\.attn\.(bias|masked_bias)",)  # the causal mask, stored as a buffer: no weights
GGUF_HARMLESS = ("vocab_size", "rope.dimension_count")
ACTIVATIONS: dict[str, Activation] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
}


def spec_from_config(config: Config, name: str) -> ModelSpec:
    """The spec that a Hugging Face `config.json` describes."""
    activation = config.get("activation_function", str, "gelu_new")
    config.only("activation_function", *ACTIVATIONS)
    config.only("add_cross_attention", False, why="it would need an encoder")
    config.only("is_encoder_decoder", False)
    d_model, n_heads = config.size("n_embd"), config.size("n_head")
    if d_model % n_heads:
        raise CutawayError(f"n_embd = {d_model} in {config.where} cannot be split into n_head = {n_heads} equal heads.")
    scaled = config.get("scale_attn_weights", bool, True)
    spec = gpt2_like(
        name,
        vocab_size=config.size("vocab_size"),
        d_model=d_model,
        n_layers=config.size("n_layer", most=MOST_LAYERS),
        n_heads=n_heads,
        n_max=config.size("n_positions"),
        d_ff=config.optional_size("n_inner"),
        activation=ACTIVATIONS[activation],
        eps=config.get("layer_norm_epsilon", float, 1e-5),
        tied_head=config.get("tie_word_embeddings", bool, True),
        scale=None if scaled else 1.0,
    )
    if config.get("scale_attn_by_inverse_layer_idx", bool, False):
        spec = _scaled_by_depth(spec)
    config.refuse_unread(HARMLESS)
    return spec


def _scaled_by_depth(spec: ModelSpec) -> ModelSpec:
    """Scores of layer i divided by i + 1 as well (the Mistral project's GPT-2s): one more row of data per layer."""
    from dataclasses import replace

    layers = tuple(
        replace(layer, attention=replace(layer.attention, scale=layer.attention.score_scale / (i + 1)))
        for i, layer in enumerate(spec.layers)
    )
    return replace(spec, layers=layers)


def sources(spec: ModelSpec, tensors: Tensors) -> dict[str, Source]:
    """Our names → the tensors of a Hugging Face checkpoint."""
    prefix = "transformer." if any(name.startswith("transformer.") for name in tensors) else ""
    names = {
        "embed.tokens": Source(f"{prefix}wte.weight"),
        "embed.positions": Source(f"{prefix}wpe.weight"),
        "final.norm.gain": Source(f"{prefix}ln_f.weight"),
        "final.norm.bias": Source(f"{prefix}ln_f.bias"),
    }
    if not spec.tied_head:
        names["head.weight"] = Source("lm_head.weight")
    for i in range(spec.n_layers):
        ours, theirs = f"layers.{i}.", f"{prefix}h.{i}."
        for part, index in (("q", 0), ("k", 1), ("v", 2)):
            names[f"{ours}attn.{part}.weight"] = Source(f"{theirs}attn.c_attn.weight", transposed_third(index), True)
            names[f"{ours}attn.{part}.bias"] = Source(f"{theirs}attn.c_attn.bias", third(index))
        for mine, other in (("attn.o", "attn.c_proj"), ("mlp.up", "mlp.c_fc"), ("mlp.down", "mlp.c_proj")):
            names[f"{ours}{mine}.weight"] = Source(f"{theirs}{other}.weight", transposed, True)
            names[f"{ours}{mine}.bias"] = Source(f"{theirs}{other}.bias")
        for mine, other in (("attn.norm", "ln_1"), ("mlp.norm", "ln_2")):
            names[f"{ours}{mine}.gain"] = Source(f"{theirs}{other}.weight")
            names[f"{ours}{mine}.bias"] = Source(f"{theirs}{other}.bias")
    return names


def spec_from_gguf(config: Config, tensors: Tensors, name: str) -> ModelSpec:
    """The spec that the metadata of a GGUF file describes (keys without their "gpt2.")."""
    vocab_size = tensors["token_embd.weight"].shape[0]
    spec = gpt2_like(
        name,
        vocab_size=vocab_size,
        d_model=config.size("embedding_length"),
        n_layers=config.size("block_count", most=MOST_LAYERS),
        n_heads=config.size("attention.head_count"),
        n_max=config.size("context_length"),
        d_ff=config.size("feed_forward_length"),
        eps=decimal(config.get("attention.layer_norm_epsilon", float)),
        tied_head="output.weight" not in tensors,
    )
    config.only("attention.head_count_kv", spec.layers[0].attention.n_heads)
    config.refuse_unread(GGUF_HARMLESS)
    return spec


def gguf_sources(spec: ModelSpec, tensors: Tensors) -> dict[str, Source]:
    """Our names → the tensors of a GGUF file."""
    names = {
        "embed.tokens": Source("token_embd.weight"),
        "embed.positions": Source("position_embd.weight"),
        "final.norm.gain": Source("output_norm.weight"),
        "final.norm.bias": Source("output_norm.bias"),
    }
    if not spec.tied_head:
        names["head.weight"] = Source("output.weight")
    for i in range(spec.n_layers):
        ours, theirs = f"layers.{i}.", f"blk.{i}."
        for role in ("weight", "bias"):
            for part, index in (("q", 0), ("k", 1), ("v", 2)):
                names[f"{ours}attn.{part}.{role}"] = Source(f"{theirs}attn_qkv.{role}", third(index))
            for mine, other in (("attn.o", "attn_output"), ("mlp.up", "ffn_up"), ("mlp.down", "ffn_down")):
                names[f"{ours}{mine}.{role}"] = Source(f"{theirs}{other}.{role}")
        for mine, other in (("attn.norm", "attn_norm"), ("mlp.norm", "ffn_norm")):
            names[f"{ours}{mine}.gain"] = Source(f"{theirs}{other}.weight")
            names[f"{ours}{mine}.bias"] = Source(f"{theirs}{other}.bias")
    return names
