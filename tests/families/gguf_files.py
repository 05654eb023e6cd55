"""The tiny models as GGUF files, laid out as llama.cpp's converter lays them out.

It writes q and k of Llama with the two halves of each head's rows interleaved, turns GPT-2's matrices to
one row per output, keeps vectors in float32, and names everything its own way.
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

QTYPE = gguf.GGMLQuantizationType
# Where the float16 scales stand in a block of the types that `gguf` cannot write, and a size for each.
SCALES = {
    QTYPE.Q2_K: {80: 0.004, 82: 0.006},
    QTYPE.Q3_K: {108: 0.002},
    QTYPE.Q4_K: {0: 0.0003, 2: 0.002},
    QTYPE.Q5_K: {0: 0.0002, 2: 0.003},
    QTYPE.Q6_K: {208: 0.00005},
}
_LLAMA = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GPT2 = {
    "transformer.wte.weight": "token_embd.weight",
    "transformer.wpe.weight": "position_embd.weight",
    "transformer.ln_f.weight": "output_norm.weight",
    "transformer.ln_f.bias": "output_norm.bias",
    "lm_head.weight": "output.weight",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}


def write_gguf(
    path: Path,
    model: Any,
    kinds: dict[str, QTYPE],
    *,
    head_too: bool = False,
    leave_out: tuple[str, ...] = (),
    **more: Any,
) -> Path:
    """Write `model`, then put into it the numbers that the file now holds.

    `kinds` gives the type of matrices by a part of their GGUF name; "" for all others. With `head_too` a
    tied head is written as well, as old converters did. `more` are further metadata (numbers).
    """
    config = model.config
    family = config.model_type
    writer = gguf.GGUFWriter(path, family)
    _metadata(writer, config, leave_out)
    for key, value in more.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{family}.{key.replace('__', '.')}", value)
    names = _LLAMA if family == "llama" else _GPT2
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            ours = _named(name, names)
            stored = _to_file(ours, parameter.float().numpy(), config)
            kind = _kind(ours, stored, kinds)
            data = random_blocks(stored, kind) if kind in SCALES else gguf.quants.quantize(stored, kind)
            _add(writer, ours, data, kind)
            if head_too and ours == "token_embd.weight":
                _add(writer, "output.weight", data, kind)
            again = gguf.quants.dequantize(data, kind).reshape(stored.shape)
            parameter.copy_(torch.from_numpy(_from_file(ours, again, config).copy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_blocks(stored: np.ndarray, kind: QTYPE) -> np.ndarray:
    """Blocks of a type that the `gguf` package can read but not write: random bits under scales of a useful size."""
    weights, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    shape = (*stored.shape[:-1], stored.shape[-1] // weights, n_bytes)
    blocks = np.random.default_rng(n_bytes).integers(0, 256, shape, dtype=np.uint8)
    for place, scale in SCALES[kind].items():
        blocks[..., place : place + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    return blocks.reshape(*stored.shape[:-1], -1)


def _add(writer: gguf.GGUFWriter, name: str, data: np.ndarray, kind: QTYPE) -> None:
    plain = kind in (QTYPE.F32, QTYPE.F16)
    writer.add_tensor(name, data, raw_dtype=None if plain else kind)


def _metadata(writer: gguf.GGUFWriter, config: Any, leave_out: tuple[str, ...]) -> None:
    writer.add_name("tiny")
    if config.model_type == "gpt2":
        writer.add_block_count(config.n_layer)
        writer.add_context_length(config.n_positions)
        writer.add_embedding_length(config.n_embd)
        writer.add_feed_forward_length(config.n_inner or 4 * config.n_embd)
        writer.add_head_count(config.n_head)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        writer.add_file_type(0)
        return
    settings = {
        "block_count": (writer.add_block_count, config.num_hidden_layers),
        "context_length": (writer.add_context_length, config.max_position_embeddings),
        "embedding_length": (writer.add_embedding_length, config.hidden_size),
        "feed_forward_length": (writer.add_feed_forward_length, config.intermediate_size),
        "head_count": (writer.add_head_count, config.num_attention_heads),
        "head_count_kv": (writer.add_head_count_kv, config.num_key_value_heads),
        "freq_base": (writer.add_rope_freq_base, config.rope_parameters["rope_theta"]),
        "eps": (writer.add_layer_norm_rms_eps, config.rms_norm_eps),
        "vocab_size": (writer.add_vocab_size, config.vocab_size),
        "dimension_count": (writer.add_rope_dimension_count, config.head_dim),
        "key_length": (writer.add_key_length, config.head_dim),
        "value_length": (writer.add_value_length, config.head_dim),
    }
    for name, (add, value) in settings.items():
        if name not in leave_out:
            add(value)
    writer.add_file_type(0)


def _named(name: str, names: dict[str, str]) -> str:
    """The GGUF name of a parameter of `transformers`."""
    if name in names:
        return names[name]
    _, layer, rest = name.removeprefix("model.").removeprefix("transformer.").split(".", 2)
    part, _, role = rest.rpartition(".")
    return f"blk.{layer}.{names[part]}.{role}"


def _kind(name: str, stored: np.ndarray, kinds: dict[str, QTYPE]) -> QTYPE:
    if stored.ndim == 1 or name == "position_embd.weight":
        return QTYPE.F32
    return next(kind for part, kind in kinds.items() if part in name)


def _heads(name: str, config: Any) -> int | None:
    """How many heads a tensor of Llama has whose rows are interleaved; None where they are not."""
    if config.model_type != "llama" or not (".attn_q." in name or ".attn_k." in name):
        return None
    return config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads


def _turned(name: str, array: np.ndarray, config: Any) -> bool:
    return config.model_type == "gpt2" and name.startswith("blk.") and array.ndim == 2


def _to_file(name: str, array: np.ndarray, config: Any) -> np.ndarray:
    if _turned(name, array, config):
        array = array.T
    if heads := _heads(name, config):
        array = array.reshape(heads, 2, len(array) // heads // 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
    return np.ascontiguousarray(array)


def _from_file(name: str, array: np.ndarray, config: Any) -> np.ndarray:
    if heads := _heads(name, config):
        array = array.reshape(heads, len(array) // heads // 2, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
    return array.T if _turned(name, array, config) else array
