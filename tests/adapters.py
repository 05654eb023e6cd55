"""LoRA adapters as PEFT writes them, made by hand, and random models whose matrices have names of Hugging Face."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from cutaway.checkpoints.families import family_of
from cutaway.checkpoints.load import Checkpoint
from cutaway.checkpoints.sources import Location
from cutaway.checkpoints.stored import Tensors
from cutaway.engines import make_engine
from cutaway.model import Model
from cutaway.spec import ExpertsSpec, ModelSpec, RouterSpec
from random_models import LLAMA, random_weights, with_layers

CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": None,
    "bias": "none",
    "inference_mode": True,
    "r": 2,
    "lora_alpha": 3,
    "target_modules": ["q_proj", "down_proj"],
}
EXPERTS = with_layers(LLAMA, feed_forward=ExpertsSpec(4, LLAMA.layers[0].feed_forward, RouterSpec(2)))


def adaptable(spec: ModelSpec = LLAMA, engine: str = "numpy", dtype: str = "float64", family: str = "llama") -> Model:
    """A model with random weights that knows what its matrices are called in Hugging Face's models of a family."""
    where = Location(Path("somewhere"), "folder", spec.name, "made for a test")
    known = family_of(family, "a test", "MODEL_TYPES")
    return Model(Checkpoint(spec, random_weights(spec, dtype=dtype), None, where, known), make_engine(engine, dtype))


def write_llama(folder: Path) -> Path:
    """`random_models.LLAMA` as a Hugging Face folder."""
    folder.mkdir()
    attention, feed_forward = LLAMA.layers[0].attention, LLAMA.layers[0].feed_forward
    config = {
        "model_type": "llama",
        "vocab_size": LLAMA.vocab_size,
        "hidden_size": LLAMA.d_model,
        "intermediate_size": feed_forward.d_ff,
        "num_hidden_layers": LLAMA.n_layers,
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads,
        "head_dim": attention.d_head,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    names = family_of("llama", "a test", "MODEL_TYPES").sources(LLAMA, Tensors(folder, {}, {}))
    weights = {name: weight.dequantise(np.float32) for name, weight in random_weights(LLAMA, dtype="float32").items()}
    save_file({source.name: weights[ours] for ours, source in names.items()}, folder / "model.safetensors")
    return folder


def write_adapter(folder: Path, tensors: Mapping[str, np.ndarray], **config: Any) -> Path:
    """The folder with these tensors under PEFT's names, and a configuration with these settings; ... leaves one out."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {f"base_model.model.{name}": array for name, array in tensors.items()}, folder / "adapter_model.safetensors"
    )
    values = {key: value for key, value in (CONFIG | config).items() if value is not ...}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder


def pair(module: str, d_out: int, d_in: int, rank: int = 2, seed: int = 0, size: float = 0.5) -> dict[str, np.ndarray]:
    """lora_A and lora_B of one module, random."""
    random = np.random.default_rng([seed, *module.encode()])
    return {
        f"{module}.lora_A.weight": (size * random.standard_normal((rank, d_in))).astype(np.float32),
        f"{module}.lora_B.weight": (size * random.standard_normal((d_out, rank))).astype(np.float32),
    }


def of_llama(layers: tuple[int, ...] = (0, 1), **more: Any) -> dict[str, np.ndarray]:
    """Tensors for q_proj and down_proj of `random_models.LLAMA`, in these layers."""
    tensors: dict[str, np.ndarray] = {}
    for layer in layers:
        tensors |= pair(f"model.layers.{layer}.self_attn.q_proj", 24, 12, **more)
        tensors |= pair(f"model.layers.{layer}.mlp.down_proj", 12, 20, **more)
    return tensors


def with_magnitudes(tensors: Mapping[str, np.ndarray], seed: int = 0) -> dict[str, np.ndarray]:
    """The same, and for each module the lengths of its rows, random, as DoRA has them."""
    random, named = np.random.default_rng(seed), dict(tensors)
    for name, up in tensors.items():
        if name.endswith(".lora_B.weight"):
            module = name.removesuffix(".lora_B.weight")
            named[f"{module}.lora_magnitude_vector"] = random.standard_normal(len(up)).astype(np.float32)
    return named


def of_experts() -> dict[str, np.ndarray]:
    """Tensors for w1 and w2 of every expert of `EXPERTS`, as Mixtral calls them."""
    tensors: dict[str, np.ndarray] = {}
    for layer in range(2):
        for expert in range(4):
            at = f"model.layers.{layer}.block_sparse_moe.experts.{expert}"
            tensors |= pair(f"{at}.w1", 20, 12) | pair(f"{at}.w2", 12, 20)
    return tensors


def without_head(spec: ModelSpec) -> ModelSpec:
    """The spec with its embedding for a head."""
    return replace(spec, tied_head=True)
