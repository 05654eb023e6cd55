"""DeepSeek-V2 and V3 compute what `transformers` computes, and what DeepSeek's own code does where the two differ."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compared import SINGLE, assert_shown, assert_verified, exact, prompt
from doubled import Made, assert_cached_is_whole, built, kept, saved, shown
from safetensors.torch import load_file, save_file
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

import cutaway
from cutaway.errors import CutawayError
from cutaway.forward.experts import choose
from cutaway.spec import ExpertsSpec, RouterSpec

KINDS = {2: (DeepseekV2Config, DeepseekV2ForCausalLM), 3: (DeepseekV3Config, DeepseekV3ForCausalLM)}
SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 24,
    "intermediate_size": 40,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 10,
    "q_lora_rank": 14,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 8,
    "v_head_dim": 5,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 400,
}


def yarn(over: float = 1.0, under: float = 1.0, **more: Any) -> dict[str, Any]:
    """Angles stretched fourfold past 40 positions."""
    stretched = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 40}
    return {"rope_parameters": stretched | {"mscale": over, "mscale_all_dim": under} | more}


def plain(base: float = 1e4) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": base}}


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "v3 groups, stretched angles": (3, {"n_group": 4, "topk_group": 2, **yarn()}),
    "v3 no query latent, biases, angles that grow": (
        3,
        {"q_lora_rank": None, "n_group": 2, "topk_group": 1, "attention_bias": True, "rms_norm_eps": 1e-3}
        | yarn(1.3, 0.6, beta_fast=8, beta_slow=2),
    ),
    "v3 all layers sparse, halves, tied": (
        3,
        {"first_k_dense_replace": 0, "n_group": 3, "topk_group": 2, "rope_interleave": False}
        | {"tie_word_embeddings": True, "n_shared_experts": 3, "num_experts_per_tok": 5, **plain(100.0)},
    ),
    "v3 not renormalised, one group": (
        3,
        {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.7, **plain()},
    ),
    "v2 best groups by one expert": (
        2,
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 3.0}
        | yarn(0.707, 0.707),
    ),
    "v2 light: greedy, no query latent": (
        2,
        {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "n_shared_experts": 2, "mlp_bias": True}
        | {"attention_bias": True, **yarn(0.707, 0.707)},
    ),
    "v2 dense at first, bare angles": (2, {"first_k_dense_replace": 2, "rms_norm_eps": 1e-2, **plain(500.0)}),
}
LENGTHS = (1, 5, 64, 65, 321)
NAMES = tuple(CASES)
every_case = pytest.mark.parametrize("case", CASES)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """`made(case, dtype)` → its folder, and the float64 model of the saved numbers."""
    return kept(reference, tmp_path_factory)


def reference(case: str, **more: Any) -> Any:
    generation, settings = CASES[case]
    config, model = KINDS[generation]
    return built(model, config(**(SIZES | settings | more)), seed=len(case))


@every_case
def test_streams_patterns_and_logits_are_those_of_transformers(case: str, made: Made) -> None:
    folder, other = made(case)
    model = exact(folder)
    stored = sum(p.numel() for p in other.parameters())
    stored += sum(b.numel() for name, b in other.named_buffers() if name.endswith("correction_bias"))
    assert model.spec.count().total == stored
    for length in LENGTHS:
        ids = prompt(67, length)
        assert_shown(model, shown(other, ids), ids)


@every_case
def test_the_cpu_engine_computes_the_same_in_single_precision(case: str, made: Made) -> None:
    folder, other = made(case, torch.float32)
    model = cutaway.load(folder, engine="cpu")
    for length in (1, 70, 321):
        ids = prompt(67, length)
        assert_shown(model, shown(other, ids), ids, SINGLE)


@every_case
def test_the_identities_hold(case: str, made: Made) -> None:
    assert_verified(exact(made(case)[0]))


@pytest.mark.parametrize("case", (NAMES[0], NAMES[4]))
def test_pads_on_the_left_change_nothing(case: str, made: Made) -> None:
    folder, other = made(case)
    ids = prompt(67, 50)
    assert_shown(exact(folder), shown(other, ids, left_pads=7), ids)


@pytest.mark.parametrize(
    ("engine", "dtype", "within"), (("numpy", "float64", 1e-12), ("numpy", "float32", 1e-5), ("cpu", "float32", 1e-5))
)
@pytest.mark.parametrize("case", NAMES[:2])
def test_the_cache_holds_latents_and_decoding_from_it_gives_the_whole_pass(
    case: str, engine: str, dtype: str, within: float, made: Made
) -> None:
    model = cutaway.load(made(case, torch.float32)[0], engine=engine, dtype=dtype)
    sizes, done = (5, 1, 60, 1, 70, 1, 1, 11), 150
    cache = assert_cached_is_whole(model, prompt(67, done), sizes, within)
    # A token leaves a latent and one shared key in each layer, not keys and values of four heads.
    assert cache.nbytes == done * 3 * (10 + 6) * np.dtype(dtype).itemsize
    assert cache.nbytes == model.spec.count().kv_bytes(done, np.dtype(dtype).itemsize)
    assert cache.nbytes < done * 3 * 4 * (8 + 6 + 5) * np.dtype(dtype).itemsize / 4


def test_fused_tensors_are_read_where_they_lie(made: Made) -> None:
    model = exact(made(NAMES[0])[0])
    stored = model.parameters.stored
    for one, other in (("kv_down", "k_shared"), ("k", "v")):
        first, second = stored[f"layers.1.attn.{one}.weight"], stored[f"layers.1.attn.{other}.weight"]
        assert not first.rows.flags.owndata and not first.rows.flags.writeable  # the mapped file
        assert not second.rows.flags.owndata and not second.rows.flags.writeable
    assert np.shares_memory(stored["layers.1.attn.k.weight"].rows, stored["layers.1.attn.v.weight"].rows)


def by_hand(router: RouterSpec, scores: np.ndarray, correction: np.ndarray) -> tuple[list[list[int]], np.ndarray]:
    """The reference's own formula, token by token: biased scores choose, losing groups are out, bare scores weigh."""
    chosen, gates = [], []
    for row in scores:
        groups = np.split(np.arange(len(row)), router.n_groups)
        worth = [np.sort((row + correction)[group])[-2:].sum() for group in groups]
        best = np.argsort(worth)[-router.top_groups :]
        running = np.concatenate([groups[g] for g in best])
        ids = running[np.argsort(-(row + correction)[running])][: router.n_active]
        chosen.append(sorted(ids.tolist()))
        gates.append(np.sort(row[ids] / (row[ids].sum() + 1e-20) * router.scale))
    return chosen, np.array(gates)


def test_losing_groups_are_out_also_where_the_winners_biased_scores_are_negative(made: Made) -> None:
    """A mask of 0.0 in the place of −∞, as some ports have it, would choose among the losers here."""
    folder, _ = made(NAMES[0])
    model = exact(folder)
    trace = model.trace(prompt(67, 200), points=["layers.1.moe.*"])
    spec = model.spec.layers[1].feed_forward
    assert isinstance(spec, ExpertsSpec) and spec.router.n_groups == 4
    correction = np.asarray(model.parameters.layers[1]["moe.correction"])
    scores = trace["layers.1.moe.scores"]
    chosen, gates = by_hand(spec.router, scores, correction)
    assert [sorted(row) for row in trace["layers.1.moe.chosen"].astype(int).tolist()] == chosen
    assert np.allclose(np.sort(trace["layers.1.moe.gates"], axis=-1), gates, rtol=1e-12)
    biased = np.take_along_axis(scores + correction, np.array(chosen), axis=-1)
    assert (biased.min(-1) < 0).mean() > 0.2  # where 0.0 would have won
    assert (np.take_along_axis(scores, np.array(chosen), axis=-1) > 0).all()


def test_the_correction_chooses_and_is_not_in_the_gates(made: Made) -> None:
    model = exact(made(NAMES[3])[0])
    trace = model.trace(prompt(67, 60), points=["layers.2.moe.*"])
    chosen = trace["layers.2.moe.chosen"].astype(int)
    bare = np.take_along_axis(trace["layers.2.moe.scores"], chosen, axis=-1)
    assert np.allclose(trace["layers.2.moe.gates"], bare * 1.7, rtol=1e-12)
    unbiased = np.argsort(-trace["layers.2.moe.scores"], axis=-1)[:, :3]
    assert (np.sort(unbiased) != np.sort(chosen)).any()


def test_experts_whose_scores_round_to_one_are_told_apart_by_their_logits() -> None:
    logits = np.array([[20.0, 30.0, 25.0, -1.0]], np.float32)
    scores = (1 / (1 + np.exp(-logits))).astype(np.float32)
    assert (scores[0, :3] == 1).all()
    assert choose(RouterSpec(2, "sigmoid"), scores, None, logits).tolist() == [[1, 2]]
    assert choose(RouterSpec(1, "sigmoid"), scores, None, np.zeros((1, 4))).tolist() == [[0]]


def test_v2_scales_its_gates_or_makes_them_sum_to_one(tmp_path: Path) -> None:
    """DeepSeek's code does one or the other; `transformers` never renormalises. No published model asks for it."""
    folder = edited(reference(NAMES[4]), tmp_path, norm_topk_prob=True)
    gates = exact(folder).trace(prompt(67, 30), points=["layers.1.moe.gates"])["layers.1.moe.gates"]
    assert np.allclose(gates.sum(-1), 1)


def test_sparse_layers_may_be_every_other(tmp_path: Path) -> None:
    """`moe_layer_freq`, which `transformers` does not read: a layer is sparse past the dense ones, at a multiple."""
    folder = tmp_path / "config.json"
    settings = json.loads(KINDS[3][0](**(SIZES | CASES[NAMES[0]][1] | {"num_hidden_layers": 6})).to_json_string())
    folder.write_text(json.dumps(settings | {"moe_layer_freq": 2}))
    from cutaway.checkpoints.load import spec_from_config_file

    layers = spec_from_config_file(folder).layers
    assert [isinstance(layer.feed_forward, ExpertsSpec) for layer in layers] == [False, False, True, False, True, False]


def edited(model: Any, folder: Path, **settings: Any) -> Path:
    """The model's folder with other settings in its config.json; None takes one out."""
    saved(model, folder)
    path = folder / "config.json"
    values = json.loads(path.read_text()) | settings
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return folder


def test_the_published_configuration_is_the_catalogs() -> None:
    """DeepSeek-V3's own config.json, key for key as it was published."""
    from cutaway.checkpoints.families import deepseek
    from cutaway.checkpoints.families.config import Config
    from cutaway.spec.catalog import catalog_spec

    rope = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
    published = {
        **{"architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0},
        **{"auto_map": {}, "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3},
        **{"hidden_act": "silu", "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432},
        **{"kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v3"},
        **{"moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256},
        **{"n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8},
        **{"num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536},
        **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000},
        "quantization_config": {
            **{"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"},
            "weight_block_size": [128, 128],
        },
        "rope_scaling": rope | {"original_max_position_embeddings": 4096, "type": "yarn"},
        **{"routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 4},
        **{"topk_method": "noaux_tc", "torch_dtype": "bfloat16", "transformers_version": "4.33.1", "use_cache": True},
        **{"v_head_dim": 128, "vocab_size": 129280},
    }
    spec = deepseek.spec_from_config(Config(published, "config.json"), "deepseek-v3")
    assert spec == catalog_spec("deepseek-v3")
    assert spec.layers[0].attention.score_scale == pytest.approx(0.135234, abs=1e-6)


def test_the_layer_that_guesses_further_is_left_out_and_said_so(tmp_path: Path) -> None:
    model = reference(NAMES[0])
    folder = saved(model, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    extra = {
        name.replace("layers.2.", "layers.3."): value.clone() for name, value in tensors.items() if "layers.2." in name
    }
    extra |= {f"model.layers.3.{name}.weight": torch.ones(24) for name in ("enorm", "hnorm", "shared_head.norm")}
    save_file(tensors | extra | {"model.layers.3.eh_proj.weight": torch.ones(24, 48)}, folder / "model.safetensors")
    ids = prompt(67, 20)
    loaded = exact(folder)
    assert_shown(loaded, shown(model, ids), ids)
    assert f"the layer that guesses the token after the next ({len(extra) + 1} tensors) is left out" in loaded.origin
    save_file(tensors | extra, folder / "model.safetensors")  # a usual layer
    with pytest.raises(CutawayError, match=r"layers\.3\."):
        exact(folder)


@pytest.mark.parametrize(
    ("settings", "message"),
    (
        ({"topk_method": "greedy"}, "'topk_method' is 'greedy'.*'noaux_tc'"),
        ({"scoring_func": "softmax"}, "'scoring_func' is 'softmax'"),
        ({"num_key_value_heads": 2}, "'num_key_value_heads' is 2"),
        ({"index_topk": 2048}, "'index_topk'"),
        ({"head_dim": 14}, "'head_dim' is 14"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "'quant_method' is 'gptq'"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64], "fmt": "e4m3"}},
            r"'weight_block_size' is \[64, 64\]",
        ),
        ({"n_group": 5}, "n_groups"),
        ({"kv_lora_rank": 9}, "rows|shape"),
    ),
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_computed_is_refused_by_its_name(
    settings: dict[str, Any], message: str, made: Made, tmp_path: Path
) -> None:
    folder, _ = made(NAMES[0])
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    values = json.loads((folder / "config.json").read_text()) | settings
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CutawayError, match=message):
        exact(tmp_path)
