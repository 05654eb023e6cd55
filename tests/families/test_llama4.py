"""The text part of Llama 4 computes what `transformers` computes: alone, and out of a checkpoint with images."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compared import SINGLE, assert_shown, assert_verified, exact, prompt
from doubled import Made, assert_cached_is_whole, built, kept, saved, shown
from transformers import Llama4Config, Llama4ForCausalLM, Llama4ForConditionalGeneration, Llama4TextConfig

import cutaway
from cutaway.errors import CutawayError
from cutaway.spec import ExpertsSpec, FeedForwardSpec

SIZES: dict[str, Any] = {
    **{"vocab_size": 67, "hidden_size": 24, "intermediate_size": 20, "intermediate_size_mlp": 28},
    **{"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    **{"num_local_experts": 4, "attention_chunk_size": 16, "floor_scale": 8, "attn_scale": 0.3},
    **{"max_position_embeddings": 512, "pad_token_id": 0},
}


def llama3(**more: Any) -> dict[str, Any]:
    scaled = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 40}
    return {"rope_parameters": scaled | {"low_freq_factor": 1.0, "high_freq_factor": 4.0} | more}


def plain(base: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": base}}


CASES: dict[str, dict[str, Any]] = {
    "like Scout": llama3(),
    "like Maverick: every other layer sparse, heads not normed": {
        **{"interleave_moe_layer_step": 2, "use_qk_norm": False, "num_key_value_heads": 1},
        **plain(1e4),
    },
    "frequencies cut and not blended, three experts a token, biases, tied": {
        **{"num_experts_per_tok": 3, "attention_bias": True, "tie_word_embeddings": True, "rms_norm_eps": 1e-2},
        **llama3(high_freq_factor=1.0),
    },
    "layers named one by one, no growth": {
        **{"no_rope_layers": [0, 1, 0, 1], "moe_layers": [0, 3], "attn_temperature_tuning": False},
        **{"attention_chunk_size": 100, "head_dim": 10, **plain(37.0)},
    },
    "no chunks, all layers turn, all dense": {
        **{"attention_chunk_size": None, "no_rope_layers": [1, 1, 1, 1], "moe_layers": [], **plain(5e5)},
    },
    "every third layer without positions": {"no_rope_layer_interval": 3, "attention_chunk_size": 5, **plain(1e3)},
}
NAMES = tuple(CASES)
LENGTHS = (1, 5, 16, 17, 64, 65, 321)
every_case = pytest.mark.parametrize("case", CASES)


def reference(case: str) -> Any:
    return built(Llama4ForCausalLM, Llama4TextConfig(**(SIZES | CASES[case])), seed=len(case))


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """`made(case, dtype)` → its folder, and the float64 model of the saved numbers."""
    return kept(reference, tmp_path_factory)


@every_case
def test_streams_patterns_and_logits_are_those_of_transformers(case: str, made: Made) -> None:
    folder, other = made(case)
    model = exact(folder)
    assert model.spec.count().total == sum(p.numel() for p in other.parameters())
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


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_experts_stored_one_row_per_input_are_turned_at_every_precision(dtype: torch.dtype, made: Made) -> None:
    folder, other = made(NAMES[0], dtype)
    model, ids = exact(folder), prompt(67, 40)
    assert_shown(model, shown(other, ids), ids)
    stored = model.parameters.stored
    kinds = {stored[f"layers.0.moe.experts.0.{part}.weight"].kind for part in ("gate", "up", "down")}
    assert kinds == {stored["layers.0.attn.q.weight"].kind} == {"BF16" if dtype is torch.bfloat16 else "F16"}
    assert sum(w.nbytes for name, w in stored.items() if ".experts." in name) == 4 * 4 * 3 * 20 * 24 * 2  # once


@pytest.mark.parametrize(
    ("engine", "dtype", "within"), (("numpy", "float64", 1e-12), ("numpy", "float32", 1e-5), ("cpu", "float32", 1e-5))
)
@pytest.mark.parametrize("case", (NAMES[0], NAMES[3]))
def test_decoding_from_the_cache_gives_the_whole_pass(
    case: str, engine: str, dtype: str, within: float, made: Made
) -> None:
    model = cutaway.load(made(case, torch.float32)[0], engine=engine, dtype=dtype)
    sizes = (5, 1, 9, 1, 1, 60, 1, 70, 1, 1)
    assert_cached_is_whole(model, prompt(67, 150), sizes, within)


def test_pads_on_the_left_change_nothing(made: Made) -> None:
    """Where queries do not grow: `transformers` lets them grow by their column, pads counted, and not by position."""
    folder, other = made(NAMES[3])
    ids = prompt(67, 130)  # past its chunk of 100
    assert_shown(exact(folder), shown(other, ids, left_pads=7), ids)


def test_queries_grow_with_the_position_counted_in_the_sequence_itself(made: Made) -> None:
    """The formula by hand: × 1 + 0.3 ln(1 + ⌊(position + 1) / 8⌋) on layers without rotary positions."""
    model, ids = exact(made(NAMES[0])[0]), prompt(67, 40)
    trace = model.trace(ids, points=["layers.3.attn.*"])
    q, k = trace["layers.3.attn.q"], np.repeat(trace["layers.3.attn.k"], 2, axis=0)
    growth = 1 + 0.3 * np.log1p((np.arange(40) + 1) // 8)
    scores = (q * growth[:, None]) @ k.swapaxes(1, 2) / np.sqrt(8)
    seen = np.tril(np.ones((40, 40), bool))
    assert np.allclose(trace["layers.3.attn.scores"][:, seen], scores[:, seen], rtol=1e-12)


def test_a_token_sees_its_chunk_only_and_its_gate_multiplies_what_the_expert_reads(made: Made) -> None:
    model = exact(made(NAMES[0])[0])
    trace = model.trace(prompt(67, 40), points=["layers.0.*"])
    seen = trace["layers.0.attn.pattern"] > 0
    rows, keys = np.indices((40, 40))
    assert np.array_equal(seen[0], (keys <= rows) & (keys // 16 == rows // 16))
    chosen = trace["layers.0.moe.chosen"].astype(int)[:, 0]
    gates, read = trace["layers.0.moe.gates"], trace["layers.0.mlp.norm"]
    stored = model.parameters.stored
    for row in (0, 17, 39):
        gate, up, down = (
            stored[f"layers.0.moe.experts.{chosen[row]}.{part}.weight"].dequantise(np.float64)
            for part in ("gate", "up", "down")
        )
        x = read[row] * gates[row, 0]
        inner = gate @ x
        assert np.allclose(trace["layers.0.moe.expert_out"][row, 0], down @ (inner / (1 + np.exp(-inner)) * (up @ x)))


@pytest.mark.filterwarnings("ignore:Casting complex values")  # the tower's own angles, which nobody needs
def test_of_a_checkpoint_with_images_the_text_part_is_loaded_and_that_is_said(tmp_path: Path) -> None:
    vision = {
        **{"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64},
        **{"vision_output_dim": 20, "image_size": 28, "patch_size": 14, "projector_input_dim": 8},
        **{"projector_output_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    }
    config = Llama4Config(text_config=SIZES | CASES[NAMES[1]], vision_config=vision)
    config.text_config._attn_implementation = config.text_config._experts_implementation = "eager"
    whole = built(Llama4ForConditionalGeneration, config)
    model, ids = exact(saved(whole, tmp_path)), prompt(67, 70)
    assert_shown(model, shown(whole.language_model, ids), ids)
    assert "its vision tower" in model.origin and "left out" in model.origin


def test_the_published_configuration_is_the_catalogs() -> None:
    """Scout's own text_config, key for key as it was published with its old spelling of rotary settings."""
    from cutaway.checkpoints.families import llama4
    from cutaway.checkpoints.families.config import Config
    from cutaway.spec.catalog import catalog_spec

    rope = {"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0, "rope_type": "llama3"}
    text = {
        **{"_attn_implementation_autoset": True, "attention_bias": False, "attention_chunk_size": 8192},
        **{"attention_dropout": 0.0, "bos_token_id": 200000, "cross_attention_config": None},
        **{"cross_attention_layers": None, "eos_token_id": [200001, 200007, 200008], "for_llm_compressor": False},
        **{"head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02},
        **{"interleave_moe_layer_step": 1, "intermediate_size": 8192, "intermediate_size_mlp": 16384},
        **{"max_position_embeddings": 10485760, "model_type": "llama4_text", "no_rope_layers": []},
        **{"num_attention_heads": 40, "num_experts_per_tok": 1, "num_hidden_layers": 48, "num_key_value_heads": 8},
        **{"num_local_experts": 16, "output_router_logits": False, "pad_token_id": 200018, "rms_norm_eps": 1e-05},
        "rope_scaling": rope | {"original_max_position_embeddings": 8192},
        **{"rope_theta": 500000.0, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0},
        **{"torch_dtype": "bfloat16", "use_cache": True, "use_qk_norm": True, "vocab_size": 202048},
    }
    whole = {
        **{"architectures": ["Llama4ForConditionalGeneration"], "boi_token_index": 200080, "eoi_token_index": 200081},
        **{"image_token_index": 200092, "model_type": "llama4", "text_config": text, "torch_dtype": "bfloat16"},
        **{"transformers_version": "4.51.0.dev0", "vision_config": {"model_type": "llama4_vision_model"}},
    }
    spec = llama4.spec_from_config(Config(whole, "config.json"), "llama-4-scout")
    assert spec == catalog_spec("llama-4-scout")


def test_layers_may_each_be_of_their_own_kind(made: Made) -> None:
    layers = exact(made(NAMES[3])[0]).spec.layers
    assert [layer.attention.rotary is not None for layer in layers] == [False, True, False, True]
    assert [layer.attention.chunk for layer in layers] == [None, 100, None, 100]
    kinds = [type(layer.feed_forward) for layer in layers]
    assert kinds == [ExpertsSpec, FeedForwardSpec, FeedForwardSpec, ExpertsSpec]
    assert [isinstance(x, FeedForwardSpec) and x.d_ff for x in (layer.feed_forward for layer in layers)][1] == 28


@pytest.mark.parametrize(
    ("settings", "message"),
    (
        ({"no_rope_layers": [1, 1]}, r"'no_rope_layers' is \[1, 1\]"),
        ({"moe_layers": [0, 4]}, r"'moe_layers' is \[0, 4\]"),
        ({"layer_types": ["full_attention"] * 4}, "'layer_types'"),
        ({"attn_temperature_tuning": 7}, "'attn_temperature_tuning' is 7"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "'quantization_config'"),
        ({"router_z_weight": 1.0}, "'router_z_weight'"),
        ({"num_local_experts": 5}, "shape|experts"),
        ({"intermediate_size": 19}, "shape"),
    ),
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_computed_is_refused_by_its_name(
    settings: dict[str, Any], message: str, made: Made, tmp_path: Path
) -> None:
    folder, _ = made(NAMES[0])
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text()) | settings
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CutawayError, match=message):
        exact(tmp_path)
