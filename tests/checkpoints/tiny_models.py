"""Whole, tiny checkpoints to break: a Llama folder, a GPT-2 folder and a Llama GGUF, of a few hundred numbers each."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

Tensors = dict[str, np.ndarray]

LLAMA_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
GPT2_CONFIG: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 11,
    "n_embd": 8,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 16,
    "n_inner": 12,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
}
GGUF_METADATA: dict[str, Any] = {
    "llama.block_count": 2,
    "llama.context_length": 64,
    "llama.embedding_length": 8,
    "llama.feed_forward_length": 12,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.key_length": 2,
    "llama.attention.value_length": 2,
    "llama.rope.dimension_count": 2,
    "llama.rope.freq_base": 10000.0,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


def random_tensors(shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
    rng = np.random.default_rng(7)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def llama_tensors() -> Tensors:
    shapes = {"model.embed_tokens.weight": (11, 8), "model.norm.weight": (8,), "lm_head.weight": (11, 8)}
    for i in range(2):
        at = f"model.layers.{i}."
        shapes |= {f"{at}{norm}.weight": (8,) for norm in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{at}self_attn.{part}_proj.weight": (8 if part in "qo" else 4, 8) for part in "qkvo"}
        shapes |= {f"{at}mlp.gate_proj.weight": (12, 8), f"{at}mlp.up_proj.weight": (12, 8)}
        shapes |= {f"{at}mlp.down_proj.weight": (8, 12)}
    return random_tensors(shapes)


def gpt2_tensors() -> Tensors:
    shapes = {"wte.weight": (11, 8), "wpe.weight": (16, 8), "ln_f.weight": (8,), "ln_f.bias": (8,)}
    for i in range(2):
        for part, (inputs, outputs) in {
            "attn.c_attn": (8, 24),
            "attn.c_proj": (8, 8),
            "mlp.c_fc": (8, 12),
            "mlp.c_proj": (12, 8),
        }.items():
            shapes |= {f"h.{i}.{part}.weight": (inputs, outputs), f"h.{i}.{part}.bias": (outputs,)}
        for norm in ("ln_1", "ln_2"):
            shapes |= {f"h.{i}.{norm}.weight": (8,), f"h.{i}.{norm}.bias": (8,)}
    return random_tensors({f"transformer.{name}": shape for name, shape in shapes.items()})


def gguf_tensors() -> Tensors:
    shapes = {"token_embd.weight": (11, 8), "output_norm.weight": (8,), "output.weight": (11, 8)}
    for i in range(2):
        at = f"blk.{i}."
        shapes |= {f"{at}attn_norm.weight": (8,), f"{at}ffn_norm.weight": (8,)}
        shapes |= {f"{at}attn_q.weight": (8, 8), f"{at}attn_output.weight": (8, 8)}
        shapes |= {f"{at}attn_k.weight": (4, 8), f"{at}attn_v.weight": (4, 8)}
        shapes |= {f"{at}ffn_gate.weight": (12, 8), f"{at}ffn_up.weight": (12, 8), f"{at}ffn_down.weight": (8, 12)}
    return random_tensors(shapes)


def write_folder(folder: Path, config: object, tensors: Tensors) -> Path:
    """A model's folder; `config` is written as JSON, or as it is where it is text."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config), "utf-8")
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any] = GGUF_METADATA,
    tensors: Tensors | None = None,
    architecture: str = "llama",
    kinds: Mapping[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
) -> Path:
    """A GGUF file; whole numbers are written as uint32 (signed, or 64 bits wide, where they must be)."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            (writer.add_int64 if value < 0 else writer.add_uint64 if value >= 2**32 else writer.add_uint32)(key, value)
        elif isinstance(value, float):
            (writer.add_float64 if 1e38 < abs(value) < np.inf else writer.add_float32)(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, array in (gguf_tensors() if tensors is None else tensors).items():
        if kinds is None or name not in kinds:
            writer.add_tensor(name, array)
    for name, (data, kind) in (kinds or {}).items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
