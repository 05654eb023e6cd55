"""GGUF files of Llama 4, as llama.cpp's converter lays them out."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from compared import EXACT, SINGLE, deviation, prompt
from doubled import built, shown
from transformers import Llama4ForCausalLM, Llama4TextConfig

import cutaway
from cutaway.errors import CutawayError
from cutaway.spec import QueryGrowth

QTYPE = gguf.GGMLQuantizationType
SIZES: dict[str, Any] = {
    **{"vocab_size": 50, "hidden_size": 64, "intermediate_size": 32, "intermediate_size_mlp": 96},
    **{"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    **{"num_local_experts": 16, "max_position_embeddings": 512, "pad_token_id": 0},
}
NAMES = {
    **{"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"},
    **{"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output"},
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    **{f"feed_forward.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    "feed_forward.router": "ffn_gate_inp",
}


def model_of(**more: Any) -> Any:
    return built(Llama4ForCausalLM, Llama4TextConfig(**(SIZES | more)))


def write(path: Path, model: Any, kind: QTYPE, **more: int) -> Path:
    """Write `model`, then put into it the numbers that the file now holds."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama4")
    rope = config.rope_parameters
    stated = {
        **{"block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings},
        **{"embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size_mlp},
        **{"head_count": config.num_attention_heads, "head_count_kv": config.num_key_value_heads},
        **{"rope_freq_base": rope["rope_theta"], "layer_norm_rms_eps": config.rms_norm_eps},
        **{"expert_count": config.num_local_experts, "expert_used_count": config.num_experts_per_tok},
        **{"key_length": config.head_dim, "value_length": config.head_dim, "rope_dimension_count": config.head_dim},
        **{"vocab_size": config.vocab_size, "interleave_moe_layer_step": config.interleave_moe_layer_step},
        **{"expert_feed_forward_length": config.intermediate_size, "file_type": 0},
    }
    for name, value in (stated | more).items():
        getattr(writer, f"add_{name}")(value)
    if rope["rope_type"] == "llama3":  # each pair's factor, as Llama 3.1 has them
        plain = float(rope["rope_theta"]) ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
        factors = plain / model.model.rotary_emb.inv_freq.numpy()
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))

    def add(name: str, values: torch.Tensor) -> torch.Tensor:
        array = np.ascontiguousarray(values.float().numpy())
        used = QTYPE.F32 if array.ndim == 1 or "ffn_gate_inp" in name else kind
        stored = gguf.quants.quantize(array, used)
        writer.add_tensor(name, stored, raw_dtype=used)
        return torch.from_numpy(gguf.quants.dequantize(stored, used).reshape(array.shape).astype(np.float64))

    with torch.no_grad():
        for name, value in model.named_parameters():
            owner, _, role = name.rpartition(".")
            layer = f"blk.{name.split('.')[2]}." if ".layers." in name else ""
            part = owner.split(".", 3)[3] if layer else owner
            if role == "gate_up_proj":
                halves = zip(value.transpose(1, 2).chunk(2, dim=1), ("gate", "up"), strict=True)
                back = torch.cat([add(f"{layer}ffn_{half}_exps.weight", rows) for rows, half in halves], dim=1)
                value.copy_(back.transpose(1, 2))
            elif role == "down_proj":
                value.copy_(add(f"{layer}ffn_down_exps.weight", value.transpose(1, 2)).transpose(1, 2))
            else:
                value.copy_(add(f"{layer}{NAMES[part]}.{role}", value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", ("F32", "BF16", "Q8_0"))
@pytest.mark.parametrize(
    "settings",
    (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {"num_local_experts": 128, "use_qk_norm": False, "interleave_moe_layer_step": 2, "num_hidden_layers": 5},
    ),
    ids=("like Scout", "like Maverick"),
)
def test_streams_and_logits_are_those_of_transformers(settings: dict[str, Any], kind: str, tmp_path: Path) -> None:
    model = model_of(**settings)
    path, ids = write(tmp_path / "tiny.gguf", model, QTYPE[kind]), prompt(50, 70)
    expected = shown(model, ids)
    for engine, dtype, within in (("numpy", "float64", EXACT), ("cpu", None, SINGLE)):
        loaded = cutaway.load(path, engine=engine, dtype=dtype)
        trace = loaded.trace(ids, points=[*expected])
        off = {name: deviation(trace[name], value) for name, value in expected.items()}
        assert max(off.values()) < within, {name: value for name, value in off.items() if not value < within}
        attention = [layer.attention for layer in loaded.spec.layers]
        assert [a.chunk for a in attention[:4]] == [8192, 8192, 8192, None]
        assert attention[3].growth == QueryGrowth(8192, 0.1)
        assert attention[3].rotary is None


def test_stretched_angles_come_from_the_files_own_factors(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 40}
    model = model_of(rope_parameters=rope | {"low_freq_factor": 1.0, "high_freq_factor": 4.0})
    path, ids = write(tmp_path / "tiny.gguf", model, QTYPE.F32), prompt(50, 120)
    logits = cutaway.load(path, engine="numpy", dtype="float64").trace(ids).logits
    assert deviation(logits, shown(model, ids)["logits"]) < 1e-6  # the factors are stored in single precision


@pytest.mark.parametrize(
    ("more", "message"),
    (({"expert_count": 8}, "'expert_count' is 8"), ({"sliding_window": 0}, "'attention.sliding_window' is 0")),
)
def test_what_only_the_published_models_tell_is_not_guessed_of_others(
    more: dict[str, int], message: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "tiny.gguf", model_of(), QTYPE.F32, **more)
    with pytest.raises(CutawayError, match=message):
        cutaway.load(path)
