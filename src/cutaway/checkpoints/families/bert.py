"""BERT: an encoder that reads in both directions, its norms after the sums (Devlin et al. 2018).

Sentence encoders are saved as the bare model, with or without its pooler; the original checkpoints carry the
masked-language-model head too. GGUF files hold the bare encoder.
"""

from dataclasses import replace

from cutaway.checkpoints.families.config import MOST_LAYERS, Config, decimal, even_heads, refuse_encoder_and_quantised
from cutaway.checkpoints.families.names import Source, layer_norm, linear, same_bytes
from cutaway.checkpoints.stored import Tensors
from cutaway.errors import CutawayError
from cutaway.spec import (
    Activation,
    AttentionSpec,
    FeedForwardSpec,
    HeadTransformSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
    PositionsSpec,
)

MODEL_TYPES = ("bert",)
GGUF_ARCHITECTURES = ("bert",)
HARMLESS = (
    *("attention_probs_dropout_prob", "hidden_dropout_prob", "directionality", "gradient_checkpointing"),
    *("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head", "pooler_type"),
)
IGNORED = (
    r"(bert\.)?embeddings\.(position_ids|token_type_ids)",  # 0, 1, 2, … and zeros, stored as buffers
    r"cls\.predictions\.bias",  # the head's bias under its other name: see `_head_bias`
)
LEFT_OUT = {r"cls\.seq_relationship\..*": "its head for the next sentence"}
GGUF_HARMLESS = ("vocab_size", "pooling_type")  # how its users make one vector of many; the pass has no part in it
STORED_HEAD = "cls.predictions.decoder.weight"
ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
_WITH_HEAD = {"BertForMaskedLM", "BertForPreTraining"}
_PARTS = {  # ours → (Hugging Face, GGUF)
    "attn.q": ("attention.self.query", "attn_q"),
    "attn.k": ("attention.self.key", "attn_k"),
    "attn.v": ("attention.self.value", "attn_v"),
    "attn.o": ("attention.output.dense", "attn_output"),
    "mlp.up": ("intermediate.dense", "ffn_up"),
    "mlp.down": ("output.dense", "ffn_down"),
}
_NORMS = {
    "attn.norm": ("attention.output.LayerNorm", "attn_output_norm"),
    "mlp.norm": ("output.LayerNorm", "layer_output_norm"),
}


def spec_from_config(config: Config, name: str) -> ModelSpec:
    """The spec that a Hugging Face `config.json` describes; a checkpoint's tensors have the last word (`as_stored`)."""
    config.only("hidden_act", *ACTIVATIONS)
    config.only("position_embedding_type", "absolute", why="relative keys would change every score")
    config.only("is_decoder", False, why="BERT reads in both directions here")
    refuse_encoder_and_quantised(config)
    named = set(map(str, config.get("architectures", list, [])))
    spec = _bert(
        config,
        name,
        vocab_size=config.size("vocab_size"),
        d_model=config.size("hidden_size"),
        n_layers=config.size("num_hidden_layers", most=MOST_LAYERS),
        n_heads=config.size("num_attention_heads"),
        d_ff=config.size("intermediate_size"),
        n_max=config.size("max_position_embeddings"),
        types=config.size("type_vocab_size", 2),
        activation=ACTIVATIONS[config.get("hidden_act", str, "gelu")],
        eps=config.get("layer_norm_eps", float, 1e-12),
    )
    tied = config.get("tie_word_embeddings", bool, True)
    config.refuse_unread(HARMLESS)
    return _with_ends(spec, head=bool(named & _WITH_HEAD), tied=tied, pooler=not named & {"BertForMaskedLM"})


def as_stored(spec: ModelSpec, tensors: Tensors) -> ModelSpec:
    """With the pooler if the checkpoint holds one, and with the head if it holds one or `architectures` promises it."""
    head = not spec.headless or any(name.startswith("cls.predictions.") for name in tensors)
    pooler = any(name.endswith("pooler.dense.weight") for name in tensors)
    return _with_ends(spec, head=head, tied=spec.tied_head, pooler=pooler)


def _with_ends(spec: ModelSpec, *, head: bool, tied: bool, pooler: bool) -> ModelSpec:
    """The encoder with what may stand on it: the masked-LM head, and the pooler."""
    transform = None
    if head and spec.embed_norm is not None and isinstance(spec.layers[0].feed_forward, FeedForwardSpec):
        transform = HeadTransformSpec(spec.layers[0].feed_forward.activation, spec.embed_norm)
    return replace(spec, headless=not head, tied_head=tied, head_bias=head, head_transform=transform, pooler=pooler)


def _bert(
    config: Config,
    name: str,
    *,
    vocab_size: int,
    d_model: int,
    n_layers: int,
    n_heads: int,
    d_ff: int,
    n_max: int,
    types: int,
    eps: float,
    activation: Activation = "gelu",
) -> ModelSpec:
    d_head = even_heads(config, d_model, n_heads)
    norm = NormSpec("layer", eps, bias=True)
    attention = AttentionSpec(n_heads, n_heads, d_head, causal=False, qkv_bias=True, out_bias=True)
    layer = LayerSpec(attention, FeedForwardSpec(d_ff, activation, bias=True), norm, placement="post")
    return ModelSpec(
        name,
        vocab_size,
        d_model,
        (layer,) * n_layers,
        PositionsSpec("learned", n_max),
        embed_norm=norm,
        token_types=types,
        context_length=n_max,
        headless=True,
    )


def sources(spec: ModelSpec, tensors: Tensors) -> dict[str, Source]:
    """Our names → the tensors of a Hugging Face checkpoint."""
    prefix = "bert." if any(name.startswith("bert.") for name in tensors) else ""
    names = {
        "embed.tokens": Source(f"{prefix}embeddings.word_embeddings.weight"),
        "embed.positions": Source(f"{prefix}embeddings.position_embeddings.weight"),
        "embed.types": Source(f"{prefix}embeddings.token_type_embeddings.weight"),
        **_norm("embed.norm", f"{prefix}embeddings.LayerNorm", tensors),
        **_layers(spec, tensors, 0, f"{prefix}encoder.layer."),
    }
    if spec.pooler:
        names |= linear("pooler", f"{prefix}pooler.dense", bias=True)
    if spec.headless:
        return names
    names |= linear("head.transform", "cls.predictions.transform.dense", bias=True)
    names |= _norm("head.norm", "cls.predictions.transform.LayerNorm", tensors)
    names["head.bias"] = Source(_head_bias(spec, tensors))
    if not spec.tied_head:
        names["head.weight"] = Source(STORED_HEAD)
    return names


def _head_bias(spec: ModelSpec, tensors: Tensors) -> str:
    """The head's bias goes by two names. A file may hold both: alike where the head is tied; else the decoder's is it.

    (`transformers` ties the two biases along with the matrix, and only then.)
    """
    usual, decoders = "cls.predictions.bias", "cls.predictions.decoder.bias"
    if decoders not in tensors:
        return usual
    if spec.tied_head and usual in tensors and not same_bytes(tensors[usual], tensors[decoders]):
        raise CutawayError(f"{tensors.source} holds two biases for the head that differ: {usual} and {decoders}.")
    return decoders


def spec_from_gguf(config: Config, tensors: Tensors, name: str) -> ModelSpec:
    """The spec that the metadata of a GGUF file describes (keys without their "bert.").

    Its activation is not recorded: it is the exact GELU that BERT was made with.
    """
    config.only("attention.causal", False, why="BERT reads in both directions here")
    n_heads = config.size("attention.head_count")
    config.only("attention.head_count_kv", n_heads)
    spec = _bert(
        config,
        name,
        vocab_size=tensors["token_embd.weight"].shape[0],
        d_model=config.size("embedding_length"),
        n_layers=config.size("block_count", most=MOST_LAYERS),
        n_heads=n_heads,
        d_ff=config.size("feed_forward_length"),
        n_max=config.size("context_length"),
        types=tensors["token_types.weight"].shape[0],
        eps=decimal(config.get("attention.layer_norm_epsilon", float)),
    )
    config.refuse_unread(GGUF_HARMLESS)
    return spec


def gguf_sources(spec: ModelSpec, tensors: Tensors) -> dict[str, Source]:
    """Our names → the tensors of a GGUF file."""
    return {
        "embed.tokens": Source("token_embd.weight"),
        "embed.positions": Source("position_embd.weight"),
        "embed.types": Source("token_types.weight"),
        **_norm("embed.norm", "token_embd_norm", tensors),
        **_layers(spec, tensors, 1, "blk."),
    }


def _layers(spec: ModelSpec, tensors: Tensors, column: int, layers: str) -> dict[str, Source]:
    names: dict[str, Source] = {}
    for i in range(spec.n_layers):
        ours, theirs = f"layers.{i}.", f"{layers}{i}."
        for part, both in _PARTS.items():
            names |= linear(f"{ours}{part}", f"{theirs}{both[column]}", bias=True)
        for part, both in _NORMS.items():
            names |= _norm(f"{ours}{part}", f"{theirs}{both[column]}", tensors)
    return names


def _norm(ours: str, theirs: str, tensors: Tensors) -> dict[str, Source]:
    """A LayerNorm's two vectors; checkpoints converted from TensorFlow call them gamma and beta."""
    if f"{theirs}.gamma" in tensors:
        return {f"{ours}.gain": Source(f"{theirs}.gamma"), f"{ours}.bias": Source(f"{theirs}.beta")}
    return layer_norm(ours, theirs)
