"""GGUF files of DeepSeek's models, as llama.cpp's converter lays them out now, and as it did before 2025."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from compared import EXACT, SINGLE, deviation, prompt
from doubled import built, shown
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

import cutaway
from cutaway.errors import CutawayError

QTYPE = gguf.GGMLQuantizationType
GATING = {"deepseek_v2": gguf.ExpertGatingFuncType.SOFTMAX, "deepseek_v3": gguf.ExpertGatingFuncType.SIGMOID}
SIZES: dict[str, Any] = {
    **{"vocab_size": 50, "hidden_size": 96, "intermediate_size": 128, "moe_intermediate_size": 32},
    **{"num_hidden_layers": 3, "num_attention_heads": 3, "num_key_value_heads": 3, "kv_lora_rank": 32},
    **{"q_lora_rank": 64, "qk_rope_head_dim": 8, "qk_nope_head_dim": 32, "v_head_dim": 64, "n_routed_experts": 8},
    **{"num_experts_per_tok": 3, "first_k_dense_replace": 1, "max_position_embeddings": 160},
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 40}
NAMES = {
    **{"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"},
    **{"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q"},
    **{"self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b"},
    **{"self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm"},
    **{"self_attn.kv_b_proj": "attn_kv_b", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate"},
    **{"mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp"},
    **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}


def third(**more: Any) -> Any:
    rope = YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}
    settings = SIZES | {"n_group": 4, "topk_group": 2, "rope_parameters": rope} | more
    return built(DeepseekV3ForCausalLM, DeepseekV3Config(**settings))


def second(**more: Any) -> Any:
    settings = SIZES | {"q_lora_rank": None, "n_group": 2, "topk_group": 1, "topk_method": "group_limited_greedy"}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    return built(DeepseekV2ForCausalLM, DeepseekV2Config(**(settings | rope | {"routed_scaling_factor": 2.0} | more)))


def write(path: Path, model: Any, kind: QTYPE, *, absorbed: bool = True, leave_out: tuple[str, ...] = ()) -> Path:
    """Write `model`, then put into it the numbers that the file now holds. `absorbed` files split keys and values."""
    config = model.config
    writer = gguf.GGUFWriter(path, "deepseek2")
    _metadata(writer, config, absorbed, leave_out)
    heads, nope = config.num_attention_heads, config.qk_nope_head_dim

    def add(name: str, values: torch.Tensor) -> torch.Tensor:
        array = np.ascontiguousarray(values.float().numpy())
        plain = array.ndim == 1 or "ffn_gate_inp" in name
        stored = gguf.quants.quantize(array, QTYPE.F32 if plain else kind)
        writer.add_tensor(name, stored, raw_dtype=QTYPE.F32 if plain else kind)
        again = gguf.quants.dequantize(stored, QTYPE.F32 if plain else kind)
        return torch.from_numpy(again.reshape(array.shape).astype(np.float64))

    with torch.no_grad():
        tensors = dict(model.named_parameters())
        tensors |= {name: value for name, value in model.named_buffers() if name.endswith("correction_bias")}
        for name, value in tensors.items():
            owner, _, role = name.rpartition(".")
            layer = f"blk.{name.split('.')[2]}." if ".layers." in name else ""
            part = owner.split(".", 3)[3] if layer else owner
            if role == "e_score_correction_bias":
                value.copy_(add(f"{layer}exp_probs_b.bias", value))
            elif role == "gate_up_proj":
                both = zip(value.chunk(2, dim=1), ("gate", "up"), strict=True)
                value.copy_(torch.cat([add(f"{layer}ffn_{half}_exps.weight", rows) for rows, half in both], dim=1))
            elif role == "down_proj":
                value.copy_(add(f"{layer}ffn_down_exps.weight", value))
            elif part == "self_attn.kv_b_proj" and absorbed:
                each = value.view(heads, -1, value.shape[-1])
                keys = add(f"{layer}attn_k_b.weight", each[:, :nope].transpose(1, 2)).transpose(1, 2)
                values = add(f"{layer}attn_v_b.weight", each[:, nope:])
                value.copy_(torch.cat([keys, values], dim=1).reshape(value.shape))
            else:
                value.copy_(add(f"{layer}{NAMES[part]}.{role}", value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _metadata(writer: gguf.GGUFWriter, config: Any, absorbed: bool, leave_out: tuple[str, ...]) -> None:
    nope, rope, rank = config.qk_nope_head_dim, config.qk_rope_head_dim, config.kv_lora_rank
    scaling = config.rope_parameters
    stated = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads,
        "head_count_kv": 1 if absorbed else config.num_attention_heads,
        "rope_freq_base": scaling["rope_theta"],
        "layer_norm_rms_eps": config.rms_norm_eps,
        "expert_used_count": config.num_experts_per_tok,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
        "expert_gating_func": GATING[config.model_type],
        "file_type": 0,
        "leading_dense_block_count": config.first_k_dense_replace,
        "vocab_size": config.vocab_size,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": rank,
        "key_length": rank + rope if absorbed else nope + rope,
        "value_length": rank if absorbed else config.v_head_dim,
        "key_length_mla": nope + rope if absorbed else None,
        "value_length_mla": config.v_head_dim if absorbed else None,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_count": config.n_routed_experts,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_weights_norm": config.norm_topk_prob or None,
        "rope_dimension_count": rope,
    }
    if scaling["rope_type"] == "yarn":
        stated |= {
            "rope_scaling_type": gguf.RopeScalingType.YARN,
            "rope_scaling_factor": scaling["factor"],
            "rope_scaling_orig_ctx_len": scaling["original_max_position_embeddings"],
            "rope_scaling_yarn_log_mul": 0.1 * scaling["mscale_all_dim"],
        }
    for name, value in stated.items():
        if value is not None and name not in leave_out:
            getattr(writer, f"add_{name}")(value)


def assert_same(path: Path, model: Any) -> cutaway.Model:
    """Streams and logits in float64, and those of the cpu engine, which keeps the blocks as they are."""
    ids = prompt(50, 100)
    expected = shown(model, ids)
    loaded = cutaway.load(path, engine="numpy", dtype="float64")
    for one, within in ((loaded, EXACT), (cutaway.load(path, engine="cpu"), SINGLE)):
        trace = one.trace(ids, points=[*expected])
        off = {name: deviation(trace[name], value) for name, value in expected.items()}
        assert max(off.values()) < within, {name: value for name, value in off.items() if not value < within}
    return loaded


@pytest.mark.parametrize("kind", ("F32", "F16", "BF16", "Q8_0", "Q5_1"))
@pytest.mark.parametrize("absorbed", (True, False), ids=("split", "fused"))
def test_v3(kind: str, absorbed: bool, tmp_path: Path) -> None:
    model = third()
    loaded = assert_same(write(tmp_path / "tiny.gguf", model, QTYPE[kind], absorbed=absorbed), model)
    stored = loaded.parameters.stored
    # What lies in the mapped file cannot be written to; only keys that were turned are our own copy.
    assert stored["layers.0.attn.k.weight"].rows.flags.writeable == absorbed
    assert not stored["layers.0.attn.v.weight"].rows.flags.writeable
    if kind == "Q8_0":  # blocks run along rows: the turned keys have none, nothing else loses them
        assert stored["layers.0.attn.k.weight"].kind == ("F32" if absorbed else "Q8_0")
        assert stored["layers.0.attn.v.weight"].kind == "Q8_0"
        assert stored["layers.1.moe.experts.7.down.weight"].kind == "Q8_0"


@pytest.mark.parametrize("absorbed", (True, False), ids=("split", "fused"))
def test_v2(absorbed: bool, tmp_path: Path) -> None:
    model = second()
    assert_same(write(tmp_path / "tiny.gguf", model, QTYPE.F32, absorbed=absorbed), model)


def test_a_file_without_its_router_s_groups_is_read_where_a_published_model_tells_and_else_refused(
    tmp_path: Path,
) -> None:
    groups = ("expert_group_count", "expert_group_used_count")
    with pytest.raises(CutawayError, match=r"in how many groups the 8 experts stand.*convert the model again"):
        cutaway.load(write(tmp_path / "tiny.gguf", third(), QTYPE.F32, leave_out=groups))
    # 27 layers of 64 experts: DeepSeek-V2-Lite, whose gating is not stated either.
    light = {"num_hidden_layers": 27, "n_routed_experts": 64, "hidden_size": 48, "moe_intermediate_size": 4}
    model = second(n_group=1, topk_group=1, topk_method="greedy", **light, v_head_dim=8, first_k_dense_replace=26)
    path = write(tmp_path / "light.gguf", model, QTYPE.F32, absorbed=False, leave_out=(*groups, "expert_gating_func"))
    assert_same(path, model)


@pytest.mark.parametrize("key", ("expert_group_scale", "attention.sliding_window", "logit_scale"))
def test_settings_that_would_change_the_pass_are_refused_by_name(key: str, tmp_path: Path) -> None:
    class Writer(gguf.GGUFWriter):
        def write_header_to_file(self, path: Path | None = None) -> None:
            self.add_uint32(f"deepseek2.{key}", 3)
            super().write_header_to_file(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFWriter", Writer)
        path = write(tmp_path / "tiny.gguf", third(), QTYPE.F32)
    with pytest.raises(CutawayError, match=key):
        cutaway.load(path)
