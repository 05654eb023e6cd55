"""DeepSeek-V2 and V3: keys and values through a latent, many small experts (arXiv:2405.04434, 2412.19437).

Checkpoints fuse the latent with the shared key, and each head's keys with its values; both are taken apart on the
same bytes. V3's layer after the last, which guesses the next token but one, takes no part in a pass. Where
`transformers` and DeepSeek's own code differ, DeepSeek's code is followed.
"""

import re
from dataclasses import replace

import numpy as np

from cutaway.checkpoints.eight_bit import check_quantisation
from cutaway.checkpoints.families import gguf_rope, llama
from cutaway.checkpoints.families.config import MOST_LAYERS, Config, decimal
from cutaway.checkpoints.families.gguf_rope import gguf_rotary
from cutaway.checkpoints.families.llama import ACTIVATIONS, named
from cutaway.checkpoints.families.mixtures import expert_sources, gguf_experts, hugging_face_experts
from cutaway.checkpoints.families.names import Source, as_matrix, heads_turned
from cutaway.checkpoints.families.rope import rotary, stated
from cutaway.checkpoints.stored import Tensors
from cutaway.engines.weights import Weight
from cutaway.errors import CutawayError
from cutaway.spec import (
    AttentionSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LatentSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
    RotarySpec,
    RouterSpec,
    YarnScaling,
)

MODEL_TYPES = ("deepseek_v2", "deepseek_v3")
GGUF_ARCHITECTURES = ("deepseek2",)
HARMLESS = (
    *("aux_loss_alpha", "seq_aux", "output_router_logits", "router_aux_loss_coef"),  # they act in training only
    *("ep_size", "pretraining_tp"),  # how the same sums are spread over machines
    *("num_nextn_predict_layers", "num_mtp_layers"),  # how many layers guess further tokens
)
IGNORED = (*llama.BUFFERS, *gguf_rope.IGNORED)
GGUF_HARMLESS = ("vocab_size", "rope.scaling.finetuned", "attention.head_count_kv", "rope.scaling.yarn_log_multiplier")
LATENT_EPS = 1e-6  # of the norms of the latents, whatever the others have
# The groups of experts that published models have, by layers and experts: files of early converters do not say.
UNSAID_GROUPS = {(27, 64): (1, 1), (60, 160): (8, 3), (61, 256): (8, 4)}
PARTS = {
    "attn.norm": "input_layernorm",
    "attn.q_down": "self_attn.q_a_proj",
    "attn.q_latent_norm": "self_attn.q_a_layernorm",
    "attn.kv_latent_norm": "self_attn.kv_a_layernorm",
    "attn.o": "self_attn.o_proj",
    "mlp.norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "moe.router": "mlp.gate",
    "moe.shared.gate": "mlp.shared_experts.gate_proj",
    "moe.shared.up": "mlp.shared_experts.up_proj",
    "moe.shared.down": "mlp.shared_experts.down_proj",
}
GGUF_PARTS = {
    "attn.norm": "attn_norm",
    "attn.q_down": "attn_q_a",
    "attn.q_latent_norm": "attn_q_a_norm",
    "attn.kv_latent_norm": "attn_kv_a_norm",
    "attn.o": "attn_output",
    "mlp.norm": "ffn_norm",
    "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
    "moe.router": "ffn_gate_inp",
    "moe.shared.gate": "ffn_gate_shexp",
    "moe.shared.up": "ffn_up_shexp",
    "moe.shared.down": "ffn_down_shexp",
}


def spec_from_config(config: Config, name: str) -> ModelSpec:
    """The spec that a Hugging Face `config.json` describes."""
    config.only("hidden_act", *ACTIVATIONS)
    config.only("is_encoder_decoder", False)
    if (settings := config.optional("quantization_config", dict)) is not None:
        check_quantisation(settings, config.where)
    second = config.get("model_type", str) == "deepseek_v2"
    activation = ACTIVATIONS[config.get("hidden_act", str, "silu")]
    d_ff = config.size("moe_intermediate_size", 1407 if second else 2048)
    n_shared = config.get("n_shared_experts", int, 0)
    mlp_bias = config.get("mlp_bias", bool, False)
    bias = config.get("attention_bias", bool, False)
    experts = ExpertsSpec(
        config.size("n_routed_experts"),
        FeedForwardSpec(d_ff, activation, gated=True),
        _second_router(config) if second else _third_router(config),
        FeedForwardSpec(d_ff * n_shared, activation, gated=True, bias=mlp_bias) if n_shared > 0 else None,
    )
    turned, scale = _rotary(config, second)
    spec = _assemble(
        name,
        turned,
        scale,
        experts,
        FeedForwardSpec(config.size("intermediate_size"), activation, gated=True, bias=mlp_bias),
        vocab_size=config.size("vocab_size"),
        d_model=config.size("hidden_size"),
        n_layers=config.size("num_hidden_layers", most=MOST_LAYERS),
        n_heads=config.size("num_attention_heads"),
        widths=_widths(config),
        ranks=(config.size("kv_lora_rank"), config.optional_size("q_lora_rank")),
        eps=config.get("rms_norm_eps", float, 1e-6),
        first=config.get("first_k_dense_replace", int, 0 if second else 3),
        every=config.size("moe_layer_freq", 1),
        tied_head=config.get("tie_word_embeddings", bool, False),
        context_length=config.optional_size("max_position_embeddings"),
        bias=bias,
    )
    config.only("num_key_value_heads", spec.layers[0].attention.n_heads, why="every head has keys of its own")
    config.refuse_unread(HARMLESS)
    return spec


def _widths(config: Config) -> tuple[int, int, int]:
    """Of a head: coordinates from the latent, those that turn, and those of a value."""
    nope, rope = config.size("qk_nope_head_dim"), config.size("qk_rope_head_dim")
    config.only("head_dim", rope, why="it is how many coordinates turn")
    config.only("qk_head_dim", nope + rope)
    return nope, rope, config.size("v_head_dim")


def _rotary(config: Config, second: bool) -> tuple[RotarySpec, float | None]:
    """The turning part of a head, and the scale of its scores where stretched angles change it."""
    nope, rope, _ = _widths(config)
    halves = not second and not config.get("rope_interleave", bool, True)
    turned = rotary(config, rope, pairing="halves" if halves else "adjacent")
    weight = Config(stated(config), config.where).get("mscale_all_dim", float, 0.0)
    return turned, _score_scale(nope + rope, turned, weight)


def _score_scale(d_head: int, turned: RotarySpec, weight: float) -> float | None:
    """1/√d_head · (0.1 · weight · ln factor + 1)², or None where nothing is stretched."""
    if not isinstance(turned.scaling, YarnScaling) or weight == 0:
        return None
    return d_head**-0.5 * YarnScaling.growth(turned.scaling.factor, weight) ** 2


def _second_router(config: Config) -> RouterSpec:
    """V2: a softmax over all experts; the larger models first choose groups by their best expert."""
    config.only("scoring_func", "softmax")
    config.only("topk_method", "greedy", "group_limited_greedy")
    n_active, limited = config.size("num_experts_per_tok"), config.get("topk_method", str, "greedy") != "greedy"
    n_groups, top_groups = (config.optional_size(key) or 1 for key in ("n_group", "topk_group"))
    # DeepSeek's code scales gates only where it does not make them sum to 1.
    renormalise = config.get("norm_topk_prob", bool, False) and n_active > 1
    scale = config.get("routed_scaling_factor", float, 1.0)
    return RouterSpec(
        n_active,
        "softmax",
        renormalise=renormalise,
        scale=1.0 if renormalise else scale,
        n_groups=n_groups if limited else 1,
        top_groups=top_groups if limited else 1,
        group_best="one",
    )


def _third_router(config: Config) -> RouterSpec:
    """V3: a sigmoid for each expert, a learned bias that only chooses, groups by the sum of their best two."""
    config.only("scoring_func", "sigmoid")
    config.only("topk_method", "noaux_tc")
    return RouterSpec(
        config.size("num_experts_per_tok", 8),
        "sigmoid",
        renormalise=config.get("norm_topk_prob", bool, True),
        scale=config.get("routed_scaling_factor", float, 2.5),
        n_groups=config.size("n_group", 8),
        top_groups=config.size("topk_group", 4),
        group_best="two",
        correction=True,
    )


def _assemble(
    name: str,
    turned: RotarySpec,
    scale: float | None,
    experts: ExpertsSpec,
    dense: FeedForwardSpec,
    *,
    vocab_size: int,
    d_model: int,
    n_layers: int,
    n_heads: int,
    widths: tuple[int, int, int],
    ranks: tuple[int, int | None],
    eps: float,
    first: int,
    every: int = 1,
    tied_head: bool,
    context_length: int | None,
    bias: bool = False,
) -> ModelSpec:
    """Layers below `first` are dense, and so are those whose number `every` does not divide."""
    (nope, rope, d_value), (kv_rank, q_rank) = widths, ranks
    norm = NormSpec("rms", eps)
    attention = AttentionSpec(
        n_heads,
        n_heads,
        nope + rope,
        rotary=turned,
        scale=scale,
        qkv_bias=bias,
        out_bias=bias,
        latent=LatentSpec(kv_rank, q_rank, nope, rope, NormSpec("rms", LATENT_EPS)),
        d_value=d_value,
    )
    layers = tuple(
        LayerSpec(attention, experts if i >= first and i % every == 0 else dense, norm) for i in range(n_layers)
    )
    return ModelSpec(
        name,
        vocab_size,
        d_model,
        layers,
        final_norm=norm,
        tied_head=tied_head,
        context_length=context_length,
    )


def sources(spec: ModelSpec, tensors: Tensors) -> dict[str, Source]:
    """Our names → the tensors of a Hugging Face checkpoint."""
    prefix = "model." if any(name.startswith("model.") for name in tensors) else ""
    layers = f"{prefix}layers."
    latent = _latent(spec)
    names = named(
        spec,
        {"embed.tokens": f"{prefix}embed_tokens", "final.norm": f"{prefix}norm", "head": "lm_head"},
        PARTS | {"attn.q": "self_attn.q_proj" if latent.q_rank is None else "self_attn.q_b_proj"},
        layers,
    )
    for i in range(spec.n_layers):
        attention = f"{layers}{i}.self_attn."
        names |= _latent_and_shared(spec, i, f"{attention}kv_a_proj_with_mqa")
        names |= _keys_and_values(spec, i, f"{attention}kv_b_proj.weight")
    experts = hugging_face_experts(
        tensors,
        f"{layers}{{layer}}.mlp.experts.{{expert}}.{{part}}_proj.weight",
        {part: part for part in ("gate", "up", "down")},
        f"{layers}{{layer}}.mlp.experts",
    )
    corrections = _corrections(spec, f"{layers}{{}}.mlp.gate.e_score_correction_bias")
    return names | corrections | expert_sources(spec, experts)


def unused(spec: ModelSpec, tensors: Tensors) -> dict[str, str]:
    """Layers after the last that join the stream with an embedding, by the pattern of their tensors' names."""
    found = (re.fullmatch(r"(.*layers\.(\d+)\.)eh_proj\.weight", name) for name in tensors.names)
    what = "the layer that guesses the token after the next"
    return {re.escape(match[1]) + ".*": what for match in found if match and int(match[2]) >= spec.n_layers}


def _latent(spec: ModelSpec) -> LatentSpec:
    latent = spec.layers[0].attention.latent
    assert latent is not None  # this family's layers all have one
    return latent


def _latent_and_shared(spec: ModelSpec, layer: int, fused: str) -> dict[str, Source]:
    """The latent and the shared key, one under the other in a matrix (and its bias)."""
    latent, ours = _latent(spec), f"layers.{layer}.attn."
    rank, stop = latent.kv_rank, latent.kv_rank + latent.d_rope
    names = {}
    for role in ("weight", "bias") if spec.layers[layer].attention.qkv_bias else ("weight",):
        names[f"{ours}kv_down.{role}"] = Source(f"{fused}.{role}", lambda both: _of(both, stop).row_slice(0, rank))
        names[f"{ours}k_shared.{role}"] = Source(f"{fused}.{role}", lambda both: _of(both, stop).row_slice(rank, stop))
    return names


def _keys_and_values(spec: ModelSpec, layer: int, fused: str) -> dict[str, Source]:
    """Each head's keys over its values in one matrix: each side names its rows, and none is copied."""
    attention, latent = spec.layers[layer].attention, _latent(spec)
    rows = np.arange(attention.n_heads * (latent.d_nope + attention.value_width)).reshape(attention.n_heads, -1)
    keys, values = rows[:, : latent.d_nope].ravel(), rows[:, latent.d_nope :].ravel()
    return {
        f"layers.{layer}.attn.k.weight": Source(fused, lambda both: _of(both, rows.size).reorder(keys)),
        f"layers.{layer}.attn.v.weight": Source(fused, lambda both: _of(both, rows.size).reorder(values)),
    }


def _of(weight: Weight, rows: int) -> Weight:
    """The weight, of which so many rows were expected: a part of a larger one would be taken for the whole."""
    if weight.shape[0] != rows:
        raise CutawayError(f"It has {weight.shape[0]} rows where {rows} were expected.")
    return weight


def _corrections(spec: ModelSpec, theirs: str) -> dict[str, Source]:
    return {
        f"layers.{i}.moe.correction": Source(theirs.format(i))
        for i, layer in enumerate(spec.layers)
        if isinstance(layer.feed_forward, ExpertsSpec) and layer.feed_forward.router.correction
    }


def spec_from_gguf(config: Config, tensors: Tensors, name: str) -> ModelSpec:
    """The spec that the metadata of a GGUF file describes (keys without their "deepseek2.")."""
    for key in ("nextn_predict_layers", "expert_group_scale"):
        config.only(key, 0)
    rope, kv_rank = config.size("rope.dimension_count"), config.size("attention.kv_lora_rank")
    d_head, d_value = _gguf_widths(config, kv_rank, rope)
    if d_head <= rope:
        raise CutawayError(f"Keys of {d_head} coordinates in {config.where} have no room beside {rope} that turn.")
    turned = gguf_rotary(config, tensors, rope, pairing="adjacent")
    weight = 10 * decimal(config.get("rope.scaling.yarn_log_multiplier", float, 0.0))  # the file has a tenth of it
    if isinstance(turned.scaling, YarnScaling) and weight:
        turned = replace(turned, scaling=replace(turned.scaling, magnitude=1.0))
    n_layers, d_ff = config.size("block_count", most=MOST_LAYERS), config.size("expert_feed_forward_length")
    n_experts, n_shared = config.size("expert_count"), config.get("expert_shared_count", int, 0)
    spec = _assemble(
        name,
        turned,
        _score_scale(d_head, turned, weight),
        ExpertsSpec(
            n_experts,
            FeedForwardSpec(d_ff, "silu", gated=True),
            _gguf_router(config, n_layers, n_experts),
            FeedForwardSpec(d_ff * n_shared, "silu", gated=True) if n_shared > 0 else None,
        ),
        FeedForwardSpec(config.size("feed_forward_length"), "silu", gated=True),
        vocab_size=tensors["token_embd.weight"].shape[0],
        d_model=config.size("embedding_length"),
        n_layers=n_layers,
        n_heads=config.size("attention.head_count"),
        widths=(d_head - rope, rope, d_value),
        ranks=(kv_rank, config.optional_size("attention.q_lora_rank")),
        eps=decimal(config.get("attention.layer_norm_rms_epsilon", float)),
        first=config.get("leading_dense_block_count", int, 0),
        tied_head="output.weight" not in tensors,
        context_length=config.optional_size("context_length"),
    )
    config.refuse_unread(GGUF_HARMLESS)
    return spec


def _gguf_widths(config: Config, kv_rank: int, rope: int) -> tuple[int, int]:
    """Of a head's keys and values. Files made for the absorbed form name the latent's widths in their place."""
    if "attention.key_length_mla" not in config:
        return config.size("attention.key_length"), config.size("attention.value_length")
    config.only("attention.key_length", kv_rank + rope)
    config.only("attention.value_length", kv_rank)
    return config.size("attention.key_length_mla"), config.size("attention.value_length_mla")


def _gguf_router(config: Config, n_layers: int, n_experts: int) -> RouterSpec:
    kind = config.get("expert_gating_func", int, 1)
    config.only("expert_gating_func", 1, 2, why="1 is a softmax, 2 a sigmoid")
    groups = config.optional_size("expert_group_count"), config.optional_size("expert_group_used_count")
    n_groups, top_groups = groups if groups[0] else UNSAID_GROUPS.get((n_layers, n_experts), (None, None))
    if n_groups is None:
        raise CutawayError(
            f"{config.where} do not say in how many groups the {n_experts} experts stand ('expert_group_count', which "
            "early converters left out), and no published model tells; convert the model again with a recent llama.cpp."
        )
    return RouterSpec(
        config.size("expert_used_count"),
        "softmax" if kind == 1 else "sigmoid",
        renormalise=config.get("expert_weights_norm", bool, False),
        scale=decimal(config.get("expert_weights_scale", float, 1.0)) or 1.0,
        n_groups=n_groups,
        top_groups=top_groups or 1,
        group_best="one" if kind == 1 else "two",
        correction=kind == 2,
    )


def gguf_sources(spec: ModelSpec, tensors: Tensors) -> dict[str, Source]:
    """Our names → the tensors of a GGUF file; keys and values fused, or each by itself with the keys turned."""
    whole = {"embed.tokens": "token_embd", "final.norm": "output_norm", "head": "output"}
    parts = GGUF_PARTS | {"attn.q": "attn_q" if _latent(spec).q_rank is None else "attn_q_b"}
    names = named(spec, whole, parts, "blk.")
    for i in range(spec.n_layers):
        names |= _latent_and_shared(spec, i, f"blk.{i}.attn_kv_a_mqa")
        if f"blk.{i}.attn_kv_b.weight" in tensors:
            names |= _keys_and_values(spec, i, f"blk.{i}.attn_kv_b.weight")
        else:
            names[f"layers.{i}.attn.k.weight"] = Source(f"blk.{i}.attn_k_b.weight", heads_turned)
            names[f"layers.{i}.attn.v.weight"] = Source(f"blk.{i}.attn_v_b.weight", as_matrix)
    return names | _corrections(spec, "blk.{}.exp_probs_b.bias") | expert_sources(spec, gguf_experts(tensors))
