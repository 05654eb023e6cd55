"""GGUF files of BERT, GPT-NeoX and Phi, laid out as llama.cpp's converter lays them out, give the same numbers.

The names come from the `gguf` package's own map. The converter keeps vectors in float32, puts all of q before k
and v in GPT-NeoX's fused tensor, and leaves out BERT's pooler and heads.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from compared import SINGLE, prompt
from streams import assert_same, built
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)

import cutaway
from cutaway.errors import CutawayError

QTYPE = gguf.GGMLQuantizationType
SIZES = {"vocab_size": 61, "num_hidden_layers": 2, "max_position_embeddings": 200, "intermediate_size": 256}
HEADS = {"hidden_size": 64, "num_attention_heads": 4}


def fused_by_part(name: str, values: np.ndarray, config: Any) -> np.ndarray:
    if "query_key_value" not in name:
        return values
    return values.reshape(config.num_attention_heads, 3, -1, *values.shape[1:]).swapaxes(0, 1).reshape(values.shape)


def fused_by_head(name: str, values: np.ndarray, config: Any) -> np.ndarray:
    if "query_key_value" not in name:
        return values
    return values.reshape(3, config.num_attention_heads, -1, *values.shape[1:]).swapaxes(0, 1).reshape(values.shape)


def left_out(name: str) -> bool:
    return "pooler" in name or name.startswith("cls.")


def known_to_the_map(name: str, config: Any) -> str:
    if config.model_type == "bert":
        return name.removeprefix("bert.")
    return name.replace("lm_head", "embed_out") if config.model_type == "gpt_neox" else name


def write(
    path: Path,
    model: Any,
    kind: QTYPE,
    more: Callable[[gguf.GGUFWriter], None] | None = None,
    fuse: bool = False,
) -> Path:
    """Write `model`, matrices as `kind`, then put into it the numbers that the file now holds."""
    config = model.config
    arch = {"bert": "BERT", "gpt_neox": "GPTNEOX", "phi": "PHI2"}[config.model_type]
    arch = gguf.MODEL_ARCH[arch]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_file_type(0)
    if config.model_type == "bert":
        writer.add_causal_attention(False)
        writer.add_pooling_type(gguf.PoolingType.MEAN)
    else:
        part = config.rope_parameters["partial_rotary_factor"]
        writer.add_rope_dimension_count(int(part * config.hidden_size // config.num_attention_heads))
    if config.model_type == "gpt_neox":
        writer.add_parallel_residual(config.use_parallel_residual)
    if config.model_type == "phi":
        writer.add_head_count_kv(config.num_key_value_heads)
    if more is not None:
        more(writer)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    fused: dict[str, list[np.ndarray]] = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if left_out(name):
                continue
            theirs = names.get_name(known_to_the_map(name, config), try_suffixes=(".weight", ".bias"))
            assert theirs is not None, name
            stored = np.ascontiguousarray(fused_by_part(name, parameter.float().numpy(), config))
            of = (
                kind if stored.ndim == 2 and theirs not in ("position_embd.weight", "token_types.weight") else QTYPE.F32
            )
            data = gguf.quants.quantize(stored, of)
            again = gguf.quants.dequantize(data, of).reshape(stored.shape)
            parameter.copy_(torch.from_numpy(fused_by_head(name, again, config).copy()))
            part = next((f".attn_{letter}." for letter in "qkv" if f".attn_{letter}." in theirs), None)
            if fuse and part:
                fused.setdefault(theirs.replace(part, ".attn_qkv."), []).append(data)
                continue
            writer.add_tensor(theirs, data, raw_dtype=None if of in (QTYPE.F32, QTYPE.F16) else of)
    for theirs, three in fused.items():
        of = kind if theirs.endswith("weight") else QTYPE.F32
        writer.add_tensor(theirs, np.concatenate(three), raw_dtype=None if of in (QTYPE.F32, QTYPE.F16) else of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def rope(part: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": part}}


MODELS: dict[str, Callable[[], Any]] = {
    "bert": lambda: built(BertModel, BertConfig(**SIZES, **HEADS, type_vocab_size=2), 1),
    "bert with a head": lambda: built(BertForMaskedLM, BertConfig(**SIZES, **HEADS), 2),
    "neox": lambda: built(GPTNeoXForCausalLM, GPTNeoXConfig(**SIZES, **HEADS), 3),
    "neox, one after the other": lambda: built(
        GPTNeoXForCausalLM,
        GPTNeoXConfig(**SIZES, **HEADS, use_parallel_residual=False, **rope(0.5), attention_bias=False),
        4,
    ),
    "phi": lambda: built(PhiForCausalLM, PhiConfig(**SIZES, **HEADS, **rope(0.5)), 5),
}


def assert_file_computes(path: Path, reference: Any) -> None:
    """Streams, patterns and, where the file has a head, logits: in float64, and on the file's own blocks."""
    ids, but = prompt(61, 81), [name for name in ("logits", "pooler.out") if reference.config.model_type == "bert"]
    exact = cutaway.load(path, engine="numpy", dtype="float64")
    assert exact.spec.headless == (reference.config.model_type == "bert")
    assert_same(exact, reference, ids, but=but)
    assert_same(cutaway.load(path, engine="cpu"), reference, ids, SINGLE, but=but)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", ("F32", "F16", "Q8_0", "Q4_1"))
def test_a_file_gives_the_numbers_of_transformers(name: str, kind: str, tmp_path: Path) -> None:
    reference = MODELS[name]()
    assert_file_computes(write(tmp_path / "tiny.gguf", reference, QTYPE[kind]), reference)


def test_sentence_kinds_are_read_from_a_file_too(tmp_path: Path) -> None:
    reference = MODELS["bert"]()
    model = cutaway.load(write(tmp_path / "tiny.gguf", reference, QTYPE.F32), engine="numpy", dtype="float64")
    assert_same(model, reference, prompt(61, 30), types=[0] * 11 + [1] * 19, but=["pooler.out"])


def test_the_first_phi_2_files_hold_q_k_and_v_as_one_tensor(tmp_path: Path) -> None:
    reference = MODELS["phi"]()
    path = write(tmp_path / "tiny.gguf", reference, QTYPE.Q8_0, fuse=True)
    assert "blk.0.attn_qkv.weight" in [tensor.name for tensor in gguf.GGUFReader(path).tensors]
    assert_file_computes(path, reference)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    (
        ("bert", "attention.causal", True),
        ("bert", "attention.head_count_kv", 2),
        ("neox", "rope.scaling.type", "yarn"),
        ("neox", "attention.sliding_window", 64),
        ("phi", "rope.scaling.type", "linear"),
        ("phi", "logit_scale", 0.5),
    ),
)
def test_settings_that_would_change_the_pass_are_refused_by_name(
    name: str, key: str, value: object, tmp_path: Path
) -> None:
    architecture = {"bert": "bert", "neox": "gptneox", "phi": "phi2"}[name]

    def more(writer: gguf.GGUFWriter) -> None:
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        writer.kv_data[0].pop(f"{architecture}.{key}", None)
        add[type(value)](f"{architecture}.{key}", value)

    with pytest.raises(CutawayError, match=key.replace(".", r"\.")):
        cutaway.load(write(tmp_path / "tiny.gguf", MODELS[name](), QTYPE.F32, more))
