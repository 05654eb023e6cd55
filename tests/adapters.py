"""LoRA adapters as PEFT writes them, made by hand for any model whose modules have names of Hugging Face."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

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


def write_adapter(folder: Path, tensors: Mapping[str, np.ndarray], **config: Any) -> Path:
    """The folder with these tensors under PEFT's names, and a configuration with these settings changed."""
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


def of_tiny_llama(layers: tuple[int, ...] = (0, 1), **more: Any) -> dict[str, np.ndarray]:
    """Tensors for q_proj and down_proj of the tiny Llama of `tiny_models`, in these layers."""
    tensors: dict[str, np.ndarray] = {}
    for layer in layers:
        tensors |= pair(f"model.layers.{layer}.self_attn.q_proj", 8, 8, **more)
        tensors |= pair(f"model.layers.{layer}.mlp.down_proj", 8, 12, **more)
    return tensors
