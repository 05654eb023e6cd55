"""GGUF files of Llama with scaled angles, Mistral, Qwen2, Qwen3 and Phi-3, laid out as llama.cpp's converter does."""

from dataclasses import replace
from math import pi
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from compared import SINGLE, assert_verified, deviation, prompt
from decoders import Tiny, assert_same
from gguf_files import QTYPE
from llama_like import MISTRAL, PHI3, QWEN2, QWEN3, SCALED, llama_like_lifted, unfused

import cutaway
from cutaway.checkpoints.families.config import decimal
from cutaway.errors import CutawayError

WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "phi3": "phi3"}


def write(path: Path, model: Any, kind: QTYPE = QTYPE.F32, **more: Any) -> Path:
    """The file; `model` then has the numbers that are in it, its rotary settings included."""
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (_settings(config) | more).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{architecture}.{key}", value)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            part, _, role = name.rpartition(".")
            if part not in WHOLE:
                _, _, layer, part = part.split(".", 3)
            theirs = WHOLE.get(part) or f"blk.{layer}.{PARTS[part]}"
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
            n_heads = heads.get(theirs.rpartition(".")[2]) if architecture == "llama" else None
            stored = _sides_swapped(parameter.numpy().astype(np.float32), n_heads, 2)
            this = kind if stored.ndim == 2 else QTYPE.F32
            data = gguf.quants.quantize(np.ascontiguousarray(stored), this)
            writer.add_tensor(f"{theirs}.{role}", data, raw_dtype=None if this == QTYPE.F32 else this)
            again = gguf.quants.dequantize(data, this).reshape(stored.shape)
            width = stored.shape[0] // n_heads // 2 if n_heads else 2
            parameter.copy_(torch.from_numpy(_sides_swapped(again, n_heads, width).astype(np.float64)))
    for name, array in _rope_tensors(config).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _sides_swapped(rows: np.ndarray, n_heads: int | None, sides: int) -> np.ndarray:
    """Row s · w + j of each head, of `sides` · w rows, at j · sides + s."""
    if n_heads is None:
        return rows
    split = rows.reshape(n_heads, sides, rows.shape[0] // n_heads // sides, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def _settings(config: Any) -> dict[str, Any]:
    d_head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    settings = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": d_head,
        "attention.value_length": d_head,
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(d_head * rope.get("partial_rotary_factor", 1.0)),
    }
    if rope["rope_type"] in ("linear", "yarn"):
        settings |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] in ("yarn", "longrope"):
        settings["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if rope["rope_type"] == "longrope":
        settings["rope.scaling.attn_factor"] = _attention_factor(config)
    if config.model_type == "phi3":
        settings["attention.sliding_window"] = config.sliding_window or 0
    return settings


def _attention_factor(config: Any) -> float:
    rope = config.rope_parameters
    if "attention_factor" not in rope:
        original = rope["original_max_position_embeddings"]
        stretch = np.log(config.max_position_embeddings / original) / np.log(original)
        rope["attention_factor"] = decimal(np.sqrt(1 + stretch))
    return float(rope["attention_factor"])


def _rope_tensors(config: Any) -> dict[str, np.ndarray]:
    """The factors that the converter works out, in float32; `config` is then one that states these very numbers."""
    rope = config.rope_parameters
    if rope["rope_type"] == "longrope":
        short, long = (np.array(rope[key], np.float32) for key in ("short_factor", "long_factor"))
        rope |= {"short_factor": short.tolist(), "long_factor": long.tolist()}
        return {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
    if rope["rope_type"] != "llama3":
        return {}
    d_head = config.head_dim
    turns = rope["original_max_position_embeddings"] * rope["rope_theta"] ** -(np.arange(0, d_head, 2) / d_head)
    kept = (turns / (2 * pi) - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
    factors = 1 / (np.clip(kept, 0, 1) + (1 - np.clip(kept, 0, 1)) / rope["factor"])
    single = factors.astype(np.float32)
    assert single.min() == 1.0 and len(set(single.tolist())) > 1
    same = {key: single.tolist() for key in ("short_factor", "long_factor")}
    config.rope_parameters = {
        "rope_theta": rope["rope_theta"],
        "rope_type": "longrope",
        "attention_factor": 1.0,
        "original_max_position_embeddings": 64,
        **same,
    }
    return {"rope_freqs.weight": single}


GGUFS = (*SCALED[:3], SCALED[4], MISTRAL[1], *QWEN2[:2], *QWEN3[:3], *PHI3)


@pytest.mark.parametrize("tiny", GGUFS, ids=lambda tiny: tiny.name)
def test_files_compute_what_transformers_computes_with_their_numbers(tiny: Tiny, tmp_path: Path) -> None:
    _, reference = replace(tiny, dtype=torch.float32).save(tmp_path / "folder")
    path = write(tmp_path / "tiny.gguf", reference)
    assert cutaway.load(path).spec.tied_head == reference.config.tie_word_embeddings
    reference = unfused(reference)
    with llama_like_lifted():
        for length in (17, 70, 273):
            assert_same(cutaway.load(path, engine="numpy", dtype="float64"), reference, prompt(67, length))
        assert_same(cutaway.load(path, engine="cpu"), reference, prompt(67, 273), SINGLE)


@pytest.mark.parametrize("tiny", SCALED[:2], ids=lambda tiny: tiny.name)
def test_the_factors_of_a_file_are_llama_3s_scaling(tiny: Tiny, tmp_path: Path) -> None:
    """The file holds them in float32; the folder says the scaling in words. The two are one model."""
    folder, reference = replace(tiny, dtype=torch.float32).save(tmp_path / "folder")
    path = write(tmp_path / "tiny.gguf", reference)
    ids = prompt(67, 273)
    one, other = (cutaway.load(p, engine="numpy", dtype="float64").trace(ids).logits for p in (path, folder))
    assert 0 < deviation(one, other) < 1e-4


WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize("tiny", (MISTRAL[1], QWEN2[1], QWEN3[1], PHI3[0]), ids=lambda tiny: tiny.name)
@pytest.mark.parametrize("kind", ("Q8_0", "Q4_1"))
def test_quantised_files(tiny: Tiny, kind: str, tmp_path: Path) -> None:
    more = {"head_dim": 24} if tiny.architecture == "qwen3" else {}  # heads of 24 make rows of three blocks
    wide = replace(tiny, settings=tiny.settings | WIDE | more)
    _, reference = replace(wide, dtype=torch.float32).save(tmp_path / "folder")
    path = write(tmp_path / "tiny.gguf", reference, QTYPE[kind])
    reference = unfused(reference)
    with llama_like_lifted():
        assert_same(cutaway.load(path, engine="numpy", dtype="float64"), reference, prompt(67, 65))
        assert_same(cutaway.load(path, engine="cpu"), reference, prompt(67, 65), SINGLE)
    assert_verified(cutaway.load(path, engine="cpu"))


@pytest.mark.parametrize(
    ("tiny", "more", "named"),
    (
        (QWEN2[0], {"attention.sliding_window": 64}, "sliding_window"),
        (QWEN3[0], {"attention.scale": 0.5}, "attention.scale"),
        (PHI3[0], {"feed_forward_length": 30}, "ffn_up"),
        (PHI3[1], {"rope.dimension_count": 4}, "2 pairs"),
        (SCALED[0], {"rope.dimension_count": 8}, "rope_freqs"),
        (MISTRAL[1], {"rope.scaling.type": "dynamic"}, "'dynamic'"),
    ),
    ids=lambda value: value.name if isinstance(value, Tiny) else "",
)
def test_what_cannot_be_computed_is_refused_by_name(
    tiny: Tiny, more: dict[str, Any], named: str, tmp_path: Path
) -> None:
    _, reference = replace(tiny, dtype=torch.float32).save(tmp_path / "folder")
    with pytest.raises(CutawayError, match=named):
        cutaway.load(write(tmp_path / "tiny.gguf", reference, **more))
