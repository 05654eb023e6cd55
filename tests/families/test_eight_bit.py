"""Models as DeepSeek-V3 and Qwen3 publish them: 8-bit floats with a scale for every 128 × 128 block."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compared import EXACT, SINGLE, deviation, prompt
from doubled import built, saved, shown
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Qwen3Config, Qwen3ForCausalLM

import cutaway
from cutaway.errors import CutawayError

SETTINGS: dict[str, Any] = {
    **{"vocab_size": 67, "hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 128},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 128},
    **{"q_lora_rank": 128, "qk_rope_head_dim": 8, "qk_nope_head_dim": 24, "v_head_dim": 32, "n_routed_experts": 4},
    **{"num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
QUANTISED = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def quantised(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """8-bit numbers, their scales, and what they are worth: each scale times its numbers, rounded once."""
    d_out, d_in = matrix.shape
    scales = torch.empty(-(-d_out // 128), -(-d_in // 128))
    codes = torch.empty(d_out, d_in, dtype=torch.float8_e4m3fn)
    worth = torch.empty(d_out, d_in)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            here = slice(i * 128, (i + 1) * 128), slice(j * 128, (j + 1) * 128)
            scales[i, j] = matrix[here].abs().max() / 448
            codes[here] = (matrix[here] / scales[i, j]).to(torch.float8_e4m3fn)
            worth[here] = codes[here].float() * scales[i, j]
    return codes, scales, worth


def publish(kind: Any, config: Any, folder: Path) -> tuple[Path, Any]:
    """The folder, laid out as these models are published, and the float64 model of exactly its numbers."""
    model = built(kind, config)
    saved(model, folder, torch.float32)
    stored, worth = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if "proj" in name:
            stored[name], stored[name + "_scale_inv"], worth[name] = quantised(tensor)
        else:
            stored[name] = worth[name] = tensor
    save_file(worth, folder / "model.safetensors")
    reference = kind.from_pretrained(folder, attn_implementation="eager", dtype=torch.float64)
    reference.config._experts_implementation = "eager"
    reference.model.rotary_emb = model.model.rotary_emb  # its angles are worked out in float64
    save_file(stored, folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": QUANTISED}))
    return folder, reference.to(torch.float64).eval()


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    return publish(DeepseekV3ForCausalLM, DeepseekV3Config(**SETTINGS), tmp_path_factory.mktemp("fp8"))


def assert_same(model: cutaway.Model, reference: Any, length: int, within: float) -> None:
    ids = prompt(67, length)
    expected = shown(reference, ids)
    trace = model.trace(ids, points=[*expected])
    off = {name: deviation(trace[name], value) for name, value in expected.items()}
    assert max(off.values()) < within, {name: value for name, value in off.items() if not value < within}


def test_logits_and_streams_are_those_of_the_same_numbers(published: tuple[Path, Any]) -> None:
    folder, reference = published
    for engine, dtype, within in (("numpy", "float64", EXACT), ("cpu", None, SINGLE)):
        model = cutaway.load(folder, engine=engine, dtype=dtype)
        stored = model.parameters.stored
        assert stored["layers.1.moe.experts.3.down.weight"].kind == "F8_E4M3_128"
        assert stored["layers.0.attn.kv_down.weight"].shape == (128, 256)
        for length in (1, 70):
            assert_same(model, reference, length, within)


def test_a_llama_like_model_is_read_as_well(tmp_path: Path) -> None:
    sizes = {"vocab_size": 67, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 64}
    config = Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    folder, reference = publish(Qwen3ForCausalLM, config, tmp_path)
    for engine, dtype, within in (("numpy", "float64", EXACT), ("cpu", None, SINGLE)):
        model = cutaway.load(folder, engine=engine, dtype=dtype)
        assert model.parameters.stored["layers.1.mlp.down.weight"].kind == "F8_E4M3_128"
        assert_same(model, reference, 70, within)


def test_a_matrix_that_two_weights_share_is_laid_out_once(published: tuple[Path, Any]) -> None:
    stored = cutaway.load(published[0]).parameters.stored
    assert np.shares_memory(stored["layers.0.attn.k.weight"].rows, stored["layers.0.attn.v.weight"].rows)
    assert np.shares_memory(
        stored["layers.0.attn.kv_down.weight"].rows.base, stored["layers.0.attn.k_shared.weight"].rows
    )
    weight = stored["layers.0.mlp.gate.weight"]
    assert weight.nbytes == 384 * 256 // 128 * 132


def test_8_bit_numbers_without_their_scales_are_refused(published: tuple[Path, Any], tmp_path: Path) -> None:
    name = "model.layers.0.mlp.gate_proj.weight"
    tensors = load_file(published[0] / "model.safetensors")
    (tmp_path / "config.json").write_text((published[0] / "config.json").read_text())
    scales = tensors.pop(name + "_scale_inv")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CutawayError, match=r"mlp\.gate_proj\.weight' is stored as F8_E4M3, which cannot"):
        cutaway.load(tmp_path)
    save_file(tensors | {name + "_scale_inv": scales[:2]}, tmp_path / "model.safetensors")
    with pytest.raises(CutawayError, match=r"_scale_inv has shape \[2, 2\].*\[3, 2\]"):
        cutaway.load(tmp_path)


def test_scales_without_a_matrix_are_refused_as_left_over(published: tuple[Path, Any], tmp_path: Path) -> None:
    tensors = load_file(published[0] / "model.safetensors")
    (tmp_path / "config.json").write_text((published[0] / "config.json").read_text())
    save_file(tensors | {"model.norm.weight_scale_inv": torch.ones(1, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(CutawayError, match=r"model\.norm\.weight_scale_inv"):
        cutaway.load(tmp_path)


def test_a_row_of_no_whole_blocks_is_refused_with_the_reason(tmp_path: Path) -> None:
    settings = SETTINGS | {"moe_intermediate_size": 96}
    model = built(DeepseekV3ForCausalLM, DeepseekV3Config(**settings))
    folder = saved(model, tmp_path, torch.float32)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.0.down_proj.weight"
    tensors[name], tensors[name + "_scale_inv"], _ = quantised(tensors[name])
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CutawayError, match=r"rows of 96 8-bit numbers; only whole blocks of 128"):
        cutaway.load(folder)
