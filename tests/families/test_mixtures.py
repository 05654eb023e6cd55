"""Mixtral and Qwen3-MoE compute what `transformers` computes: routers, gates, each expert's output, and the rest."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compared import EXACT, SINGLE, prompt
from decoder_cases import MIXTURES, mixtral, qwen_moe
from decoders import (
    Tiny,
    assert_same,
    edited,
    reloaded,
    write_gguf,
)
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import cutaway
from cutaway.checkpoints.load import spec_of
from cutaway.errors import CutawayError
from cutaway.spec import ExpertsSpec, FeedForwardSpec, RouterSpec
from cutaway.spec.catalog import catalog_spec


@pytest.mark.parametrize("case", MIXTURES, ids=lambda case: case.name)
def test_the_fused_layout_of_transformers_5_is_the_same_model(case: Tiny, made_tiny: Any) -> None:
    published, fused = made_tiny(case)[0], made_tiny(case, save_original_format=False)[0]
    with safe_open(fused / "model.safetensors", "np") as file:
        assert any(name.endswith("mlp.experts.gate_up_proj") for name in file.keys())  # noqa: SIM118
    ids = prompt(61, 40)
    for engine in ("numpy", "cpu"):
        one, other = (cutaway.load(folder, engine=engine).trace(ids).logits for folder in (published, fused))
        assert np.array_equal(one, other)


def test_experts_are_read_where_they_lie_and_not_copied(made_tiny: Any) -> None:
    for options in ({}, {"save_original_format": False}):
        stored = cutaway.load(made_tiny(MIXTURES[0], **options)[0]).parameters.stored
        for name, weight in stored.items():
            if ".experts." in name:
                assert not weight.rows.flags.owndata and weight.order is None, name
    two = (stored[f"layers.0.moe.experts.1.{part}.weight"].rows for part in ("gate", "up"))
    addresses = [rows.__array_interface__["data"][0] for rows in two]
    assert addresses[1] - addresses[0] == 14 * 24 * 8  # gate's rows, then up's, in one tensor of the file


def _company(model: cutaway.Model) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    from cutaway.forward.transformer import transformer

    sequences = [np.array(prompt(model.spec.vocab_size, n, seed)) for seed, n in enumerate((5, 300, 1, 65))]
    ran = transformer(model.engine, model.spec, model.parameters, sequences, rows=range(371))
    parts = np.split(model.engine.numpy(ran.logits), np.cumsum([5, 300, 1]))
    for sequence, part in zip(sequences, parts, strict=True):
        yield part, model.trace(sequence).logits


@pytest.mark.parametrize(("engine", "dtype"), (("numpy", "float64"), ("cpu", "float32")))
@pytest.mark.parametrize("case", (MIXTURES[0], MIXTURES[6]), ids=lambda case: case.name)
def test_company_changes_no_bit_whoever_else_is_sent_to_an_expert(
    case: Tiny, engine: str, dtype: str, made_tiny: Any
) -> None:
    for together, alone in _company(cutaway.load(made_tiny(case)[0], engine=engine, dtype=dtype)):
        assert np.array_equal(together, alone)


@pytest.mark.parametrize("engine", ("numpy", "cpu"))
def test_among_equal_scores_the_lowest_expert_is_chosen(engine: str, made_tiny: Any, tmp_path: Path) -> None:
    """Rows 1, 3 and 6 of the router are one row, and rows 2 and 5: their scores are equal to the last bit."""
    folder = edited(made_tiny(MIXTURES[0])[0], tmp_path / "tied")
    tensors = load_file(folder / "model.safetensors")
    for layer in range(2):
        rows = tensors[f"model.layers.{layer}.block_sparse_moe.gate.weight"]
        rows[3] = rows[6] = rows[1]
        rows[5] = rows[2]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    trace = cutaway.load(folder, engine=engine).trace(prompt(61, 120), points=["layers.*.moe.*"])
    tied = 0
    for layer in range(2):
        scores, chosen = (trace[f"layers.{layer}.moe.{name}"] for name in ("scores", "chosen"))
        assert np.array_equal(scores[:, 1], scores[:, 3]) and np.array_equal(scores[:, 2], scores[:, 5])
        for row, (first, second) in zip(scores, chosen, strict=True):
            expected = sorted(range(8), key=lambda e: (-row[e], e))[:2]
            assert [first, second] == expected
            tied += row[first] == row[second]
    assert tied > 20


def test_what_qwen_leaves_out_is_what_transformers_takes_for_it(made_tiny: Any, tmp_path: Path) -> None:
    folder = edited(
        made_tiny(MIXTURES[4])[0], tmp_path / "less", num_local_experts=..., num_experts=6, norm_topk_prob=...,
        mlp_only_layers=..., decoder_sparse_step=..., max_window_layers=28,
    )  # fmt: skip
    mixture = cutaway.load(folder).spec.layers[0].feed_forward
    assert mixture == ExpertsSpec(6, FeedForwardSpec(10, "silu", gated=True), RouterSpec(3, renormalise=False))


MIXTRAL_8X7B = {
    "model_type": "mixtral", "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 4096, "vocab_size": 32000,
    "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32, "num_experts_per_tok": 2,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": False,
    "rms_norm_eps": 1e-05, "rope_theta": 1e6, "router_aux_loss_coef": 0.02, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
}  # fmt: skip
QWEN3_235B_A22B = {
    "model_type": "qwen3_moe", "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 12288, "max_position_embeddings": 40960,
    "max_window_layers": 94, "mlp_only_layers": [], "moe_intermediate_size": 1536, "norm_topk_prob": True,
    "num_attention_heads": 64, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 94,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0,
    "sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "config", "total"),
    (
        ("mixtral-8x7b", MIXTRAL_8X7B, 46_702_792_704),
        ("qwen3-235b-a22b", QWEN3_235B_A22B, 235_093_634_560),
    ),
)
def test_published_configurations_are_those_of_the_catalog(
    name: str, config: dict[str, Any], total: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = spec_of(tmp_path)
    assert replace(spec, name=name) == catalog_spec(name)
    assert spec.count().total == total


@pytest.mark.parametrize(
    ("case", "changes", "named"),
    (
        (MIXTURES[0], {"num_experts_per_tok": 9}, "n_active"),
        (MIXTURES[0], {"num_local_experts": 9}, r"experts\.8\.w1"),
        (MIXTURES[0], {"num_local_experts": 7}, r"experts\.7\.w"),
        (MIXTURES[0], {"num_local_experts": 2**31 - 1}, "experts in all layers"),
        (MIXTURES[4], {"num_local_experts": 40_000, "num_hidden_layers": 10_000}, "experts in all layers"),
        (MIXTURES[0], {"hidden_act": "xielu"}, "hidden_act"),
        (MIXTURES[0], {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size"),
        (MIXTURES[0], {"attention_bias": True}, "attention_bias"),
        (MIXTURES[4], {"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window"),
        (MIXTURES[4], {"mlp_only_layers": ["one"]}, "mlp_only_layers"),
        (MIXTURES[4], {"n_group": 2}, "n_group"),
    ),
    ids=lambda value: value.name if isinstance(value, Tiny) else str(value),
)
def test_what_is_not_computed_is_refused_by_name(
    case: Tiny, changes: dict[str, Any], named: str, made_tiny: Any, tmp_path: Path
) -> None:
    folder = edited(made_tiny(case)[0], tmp_path / "changed", **changes)
    with pytest.raises(CutawayError, match=named):
        cutaway.load(folder)


GGUF_NAMES = {  # as llama.cpp's converter writes them
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
}


def _gguf_tensors(model: Any, *, permuted: bool, separate: bool = False) -> dict[str, np.ndarray]:
    """The converter's layout: stacks of experts (one by one in early files); Mixtral's q and k with rows in pairs."""
    config = model.config
    tensors = {}
    for name, parameter in model.named_parameters():
        array = parameter.detach().numpy().astype(np.float32)
        whole = {
            "model.embed_tokens.weight": "token_embd.weight",
            "model.norm.weight": "output_norm.weight",
            "lm_head.weight": "output.weight",
        }
        if name in whole:
            tensors[whole[name]] = array
            continue
        _, _, layer, rest = name.split(".", 3)
        at = f"blk.{layer}."
        if rest.startswith("mlp.experts."):
            half = (
                config.moe_intermediate_size if hasattr(config, "moe_intermediate_size") else config.intermediate_size
            )
            stacks = {"down": array} if rest.endswith("down_proj") else {"gate": array[:, :half], "up": array[:, half:]}
            for part, stack in stacks.items():
                if separate:
                    tensors |= {f"{at}ffn_{part}.{e}.weight": matrix for e, matrix in enumerate(stack)}
                else:
                    tensors[f"{at}ffn_{part}_exps.weight"] = stack
            continue
        theirs = GGUF_NAMES[rest.removesuffix(".weight")]
        if permuted and theirs in ("attn_q", "attn_k"):
            heads = config.num_attention_heads if theirs == "attn_q" else config.num_key_value_heads
            array = array.reshape(heads, 2, len(array) // heads // 2, -1).swapaxes(1, 2).reshape(array.shape)
        tensors[f"{at}{theirs}.weight"] = array
    return tensors


def _gguf_settings(config: Any) -> dict[str, Any]:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "expert_count": config.num_local_experts,
        "expert_used_count": config.num_experts_per_tok,
    }


def _gguf(tiny: Tiny, folder: Path, **how: bool) -> tuple[Path, Any]:
    model = tiny.build().float()
    settings = _gguf_settings(model.config)
    mixtral = tiny.architecture == "mixtral"
    if mixtral:
        settings |= {"rope.dimension_count": settings["attention.key_length"], "vocab_size": 61}
    else:
        settings |= {"expert_feed_forward_length": model.config.moe_intermediate_size}
    tensors = _gguf_tensors(model, permuted=mixtral, **how)
    path = write_gguf(folder / "tiny.gguf", "llama" if mixtral else "qwen3moe", settings, tensors)
    model.save_pretrained(folder / "saved")
    return path, reloaded(folder / "saved")


GGUF_CASES: tuple[tuple[Tiny, dict[str, bool]], ...] = (
    (mixtral("gguf", num_local_experts=8), {}),
    (mixtral("early gguf, wide heads", num_local_experts=3, head_dim=10), {"separate": True}),
    (qwen_moe("gguf", norm_topk_prob=True, head_dim=8), {}),
)


@pytest.mark.parametrize(("case", "how"), GGUF_CASES, ids=lambda value: getattr(value, "name", ""))
def test_gguf_files(case: Tiny, how: dict[str, bool], tmp_path: Path) -> None:
    path, reference = _gguf(case, tmp_path, **how)
    ids = prompt(61, 130)
    assert_same(cutaway.load(path, engine="numpy", dtype="float64"), reference, ids, EXACT)
    assert_same(cutaway.load(path, engine="cpu"), reference, ids, SINGLE)


def test_a_gguf_file_and_the_folder_that_it_was_made_of_are_one_model(tmp_path: Path) -> None:
    path, _ = _gguf(GGUF_CASES[0][0], tmp_path)
    one, other = (cutaway.load(place, engine="numpy", dtype="float64") for place in (path, tmp_path / "saved"))
    assert replace(one.spec, name="") == replace(other.spec, name="")
    assert np.array_equal(one.trace(prompt(61, 70)).logits, other.trace(prompt(61, 70)).logits)


@pytest.mark.parametrize(
    ("more", "named"),
    (
        ({"expert_gating_func": 2}, "expert_gating_func"),
        ({"expert_weights_norm": False}, "expert_weights_norm"),
        ({"expert_weights_scale": 2.5}, "expert_weights_scale"),
        ({"expert_shared_count": 1}, "expert_shared_count"),
        ({"expert_group_count": 4}, "expert_group_count"),
        ({"expert_used_count": 9}, "n_active"),
        ({"expert_count": 7}, "ffn_gate_inp"),
    ),
    ids=lambda value: str(value),
)
def test_routers_of_another_kind_are_refused_by_name(more: dict[str, Any], named: str, tmp_path: Path) -> None:
    model = GGUF_CASES[0][0].build()
    settings = _gguf_settings(model.config) | more
    path = write_gguf(tmp_path / "tiny.gguf", "llama", settings, _gguf_tensors(model, permuted=True))
    with pytest.raises(CutawayError, match=named):
        cutaway.load(path)
