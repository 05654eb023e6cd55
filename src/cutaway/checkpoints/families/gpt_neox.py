"""GPT-NeoX and Pythia: attention and feed-forward side by side, a quarter of each head turned (Black et al. 2022).

Hugging Face stores q, k and v as one matrix, head by head: `[H, 3, d_head]` rows. GGUF puts all of q first,
then k, then v.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np

from cutaway.checkpoints.families.config import MOST_LAYERS, Config, decimal, even_heads, refuse_encoder_and_quantised
from cutaway.checkpoints.families.names import Source, layer_norm, linear, third
from cutaway.checkpoints.families.rope import rotary, rotated
from cutaway.checkpoints.stored import Tensors
from cutaway.engines.weights import Weight
from cutaway.errors import CutawayError
from cutaway.spec import Activation, AttentionSpec, FeedForwardSpec, LayerSpec, ModelSpec, NormSpec, RotarySpec

MODEL_TYPES = ("gpt_neox",)
GGUF_ARCHITECTURES = ("gptneox",)
HARMLESS = (
    *("attention_probs_dropout_prob", "hidden_dropout", "hidden_dropout_prob", "custom_pipelines"),
    "is_decoder",  # it is one in either case
)
IGNORED = (r".*\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",)  # mask and frequencies, stored as buffers
GGUF_HARMLESS = ("vocab_size",)
STORED_HEAD = "embed_out.weight"
ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",  # the 20B model's: the same sum, its constant written out
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
}
_PARTS = {  # ours → (Hugging Face, GGUF)
    "attn.o": ("attention.dense", "attn_output"),
    "mlp.up": ("mlp.dense_h_to_4h", "ffn_up"),
    "mlp.down": ("mlp.dense_4h_to_h", "ffn_down"),
}
_NORMS = {"attn.norm": ("input_layernorm", "attn_norm"), "mlp.norm": ("post_attention_layernorm", "ffn_norm")}


def spec_from_config(config: Config, name: str) -> ModelSpec:
    """The spec that a Hugging Face `config.json` describes."""
    config.only("hidden_act", *ACTIVATIONS)
    refuse_encoder_and_quantised(config)
    d_head = even_heads(config, config.size("hidden_size"), config.size("num_attention_heads"))
    dims = rotated(config, d_head, 0.25, key="rotary_pct")
    base = config.get("rotary_emb_base", float, 10_000.0)
    config.only("partial_rotary_factor", config.get("rotary_pct", float, 0.25), why="'rotary_pct' says otherwise")
    config.only("rope_theta", base, why="'rotary_emb_base' says otherwise")
    spec = _neox(
        name,
        rotary(config, dims, default_base=base, d_head=d_head),
        vocab_size=config.size("vocab_size"),
        d_model=config.size("hidden_size"),
        n_layers=config.size("num_hidden_layers", most=MOST_LAYERS),
        n_heads=config.size("num_attention_heads"),
        d_ff=config.size("intermediate_size"),
        activation=ACTIVATIONS[config.get("hidden_act", str, "gelu")],
        eps=config.get("layer_norm_eps", float, 1e-5),
        parallel=config.get("use_parallel_residual", bool, True),
        bias=config.get("attention_bias", bool, True),
        tied_head=config.get("tie_word_embeddings", bool, False),
        context_length=config.optional_size("max_position_embeddings"),
    )
    config.refuse_unread(HARMLESS)
    return spec


def _neox(
    name: str,
    rotary: RotarySpec,
    *,
    vocab_size: int,
    d_model: int,
    n_layers: int,
    n_heads: int,
    d_ff: int,
    activation: Activation,
    eps: float,
    parallel: bool,
    bias: bool,
    tied_head: bool,
    context_length: int | None,
) -> ModelSpec:
    norm = NormSpec("layer", eps, bias=True)
    attention = AttentionSpec(n_heads, n_heads, d_model // n_heads, rotary=rotary, qkv_bias=bias, out_bias=bias)
    layer = LayerSpec(attention, FeedForwardSpec(d_ff, activation, bias=True), norm, parallel=parallel)
    return ModelSpec(
        name,
        vocab_size,
        d_model,
        (layer,) * n_layers,
        final_norm=norm,
        tied_head=tied_head,
        context_length=context_length,
    )


def sources(spec: ModelSpec, tensors: Tensors) -> dict[str, Source]:
    """Our names → the tensors of a Hugging Face checkpoint."""
    prefix = "gpt_neox." if any(name.startswith("gpt_neox.") for name in tensors) else ""
    n_heads = spec.layers[0].attention.n_heads
    names = _named(spec, 0, f"{prefix}embed_in", f"{prefix}final_layer_norm", f"{prefix}layers.")
    if not spec.tied_head:
        names["head.weight"] = Source(STORED_HEAD)
    for role, part, ours, theirs in _fused(spec, f"{prefix}layers.{{}}.attention.query_key_value"):
        names[f"{ours}.{role}"] = Source(f"{theirs}.{role}", partial(_interleaved, n_heads, part))
    return names


def _interleaved(n_heads: int, part: int, weight: Weight) -> Weight:
    """q, k or v (part 0, 1, 2) out of rows that go head by head, each head's q, k and v one after another."""
    outputs = weight.shape[0]
    if outputs % (3 * n_heads):
        raise CutawayError(
            f"q, k and v of {n_heads} heads are stored as one tensor of {outputs} outputs, which are no whole heads."
        )
    return weight.reorder(np.arange(outputs).reshape(n_heads, 3, -1)[:, part].ravel())


def spec_from_gguf(config: Config, tensors: Tensors, name: str) -> ModelSpec:
    """The spec that the metadata of a GGUF file describes (keys without their "gptneox.").

    Neither the activation nor the rotary base is recorded: they are Pythia's, the exact GELU and 10,000.
    (GPT-NeoX-20B was trained with the tanh form: its own safetensors say so.)
    """
    d_model, n_heads = config.size("embedding_length"), config.size("attention.head_count")
    d_head = even_heads(config, d_model, n_heads)
    config.only("attention.head_count_kv", n_heads)
    config.only("rope.scaling.type", "none", why="GPT-NeoX turns by plain angles")
    base = decimal(config.get("rope.freq_base", float, 10_000.0))
    spec = _neox(
        name,
        RotarySpec(base, config.size("rope.dimension_count", d_head)),
        vocab_size=tensors["token_embd.weight"].shape[0],
        d_model=d_model,
        n_layers=config.size("block_count", most=MOST_LAYERS),
        n_heads=n_heads,
        d_ff=config.size("feed_forward_length"),
        activation="gelu",
        eps=decimal(config.get("attention.layer_norm_epsilon", float)),
        parallel=config.get("use_parallel_residual", bool, True),
        bias="blk.0.attn_qkv.bias" in tensors,
        tied_head="output.weight" not in tensors,
        context_length=config.optional_size("context_length"),
    )
    config.refuse_unread(GGUF_HARMLESS)
    return spec


def gguf_sources(spec: ModelSpec, tensors: Tensors) -> dict[str, Source]:
    """Our names → the tensors of a GGUF file."""
    names = _named(spec, 1, "token_embd", "output_norm", "blk.")
    if not spec.tied_head:
        names["head.weight"] = Source("output.weight")
    for role, part, ours, theirs in _fused(spec, "blk.{}.attn_qkv"):
        names[f"{ours}.{role}"] = Source(f"{theirs}.{role}", third(part))
    return names


def _named(spec: ModelSpec, column: int, embed: str, norm: str, layers: str) -> dict[str, Source]:
    """Everything but the head and the fused q, k and v."""
    names = {"embed.tokens": Source(f"{embed}.weight"), **layer_norm("final.norm", norm)}
    for i, layer in enumerate(spec.layers):
        ours, theirs = f"layers.{i}.", f"{layers}{i}."
        for mine, both in _PARTS.items():
            bias = mine != "attn.o" or layer.attention.out_bias
            names |= linear(f"{ours}{mine}", f"{theirs}{both[column]}", bias=bias)
        for mine, both in _NORMS.items():
            names |= layer_norm(f"{ours}{mine}", f"{theirs}{both[column]}")
    return names


def _fused(spec: ModelSpec, tensor: str) -> Iterator[tuple[str, int, str, str]]:
    """(role, part, our name, the fused tensor's name without the role) for q, k and v of every layer."""
    for i, layer in enumerate(spec.layers):
        for role in ("weight", "bias") if layer.attention.qkv_bias else ("weight",):
            for part, letter in enumerate("qkv"):
                yield role, part, f"layers.{i}.attn.{letter}", tensor.format(i)
