"""Tiny models of the Llama-like families, and the places where `transformers` computes them in float32, lifted."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from decoders import Tiny
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.phi3 import modeling_phi3
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3


def _tiny(name: str, family: str, **settings: Any) -> Tiny:
    usual = {"vocab_size": 67, "num_hidden_layers": 2, "intermediate_size": 40, "max_position_embeddings": 512}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    return Tiny(name, family, usual | ends | settings)


def _heads(hidden: int, query: int, key: int, **more: Any) -> dict[str, Any]:
    return {"hidden_size": hidden, "num_attention_heads": query, "num_key_value_heads": key, **more}


def _rope(kind: str, base: float = 10_000.0, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": base, **more}}


def _llama3(factor: float, original: int) -> dict[str, Any]:
    ends = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return _rope("llama3", 500.0, factor=factor, original_max_position_embeddings=original, **ends)


def _long(pairs: int, original: int, **more: Any) -> dict[str, Any]:
    short = [1.0 + 0.05 * i for i in range(pairs)]
    long = [1.0 + 1.7 * i for i in range(pairs)]
    stretched = _rope("longrope", short_factor=short, long_factor=long, **more)
    return {"original_max_position_embeddings": original, **stretched}


SCALED = (
    _tiny("llama 3.1", "llama", **_heads(64, 4, 2), **_llama3(8.0, 64)),
    _tiny("llama 3.2, tied", "llama", **_heads(36, 6, 2, head_dim=14), **_llama3(32.0, 40), tie_word_embeddings=True),
    _tiny("llama linear", "llama", **_heads(24, 4, 1), **_rope("linear", factor=2.5)),
    _tiny("llama dynamic", "llama", **_heads(40, 4, 2), **_rope("dynamic", factor=3.0), max_position_embeddings=48),
    _tiny("llama yarn", "llama", **_heads(64, 2, 1), **_rope("yarn", factor=8.0, original_max_position_embeddings=32)),
    _tiny("llama yarn with everything", "llama", **_heads(48, 3, 3, head_dim=20),
          **_rope("yarn", 100.0, factor=16.0, original_max_position_embeddings=20, beta_fast=8.0, beta_slow=0.5,
                  mscale=0.707, mscale_all_dim=1.2, truncate=False)),
)  # fmt: skip
MISTRAL = (
    _tiny("mistral 0.1", "mistral", **_heads(24, 6, 2), sliding_window=7),
    _tiny("mistral 0.3", "mistral", **_heads(24, 4, 2), **_rope("default", 1e6), sliding_window=None),
    _tiny("mistral that sees itself alone", "mistral", **_heads(40, 4, 1, head_dim=6), sliding_window=1),
    _tiny("mistral with a wide window", "mistral", **_heads(24, 3, 3), sliding_window=65, tie_word_embeddings=True,
          num_hidden_layers=3),
)  # fmt: skip
QWEN2 = (
    _tiny("qwen2", "qwen2", **_heads(28, 14, 2), **_rope("default", 1e6), tie_word_embeddings=True),
    _tiny("qwen2 yarn", "qwen2", **_heads(32, 2, 1),
          **_rope("yarn", 1e6, factor=4.0, original_max_position_embeddings=50)),
    _tiny("qwen2 windows in the last layers", "qwen2", **_heads(24, 4, 2), num_hidden_layers=3,
          use_sliding_window=True, sliding_window=9, max_window_layers=1),
    _tiny("qwen2 windows by list", "qwen2", **_heads(30, 5, 1), num_hidden_layers=3, use_sliding_window=True,
          sliding_window=64, layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
)  # fmt: skip
QWEN3 = (
    _tiny("qwen3", "qwen3", **_heads(20, 4, 2, head_dim=12), **_rope("default", 1e6), tie_word_embeddings=True),
    _tiny("qwen3 with biases", "qwen3", **_heads(48, 6, 1, head_dim=4), attention_bias=True, rms_norm_eps=1e-2),
    _tiny("qwen3 yarn", "qwen3", **_heads(24, 4, 4, head_dim=16),
          **_rope("yarn", 1e6, factor=4.0, original_max_position_embeddings=50)),
    _tiny("qwen3 windows", "qwen3", **_heads(24, 3, 1, head_dim=10), num_hidden_layers=3, use_sliding_window=True,
          sliding_window=17, max_window_layers=2),
)  # fmt: skip
PHI3 = (
    _tiny("phi3 4k", "phi3", **_heads(24, 4, 4), sliding_window=13),
    _tiny("phi3 128k", "phi3", **_heads(24, 4, 2), **_long(3, 40), max_position_embeddings=400),
    _tiny("phi4 mini", "phi3", **_heads(48, 6, 2), **_long(3, 64, partial_rotary_factor=0.75), tie_word_embeddings=True,
          sliding_window=300),
    _tiny("phi3 with its own attention factor", "phi3", **_heads(64, 2, 1), **_long(16, 30, attention_factor=1.3)),
    _tiny("phi3 half turned", "phi3", **_heads(32, 4, 1), **_rope("default", partial_rotary_factor=0.5),
          rms_norm_eps=1e-3),
)  # fmt: skip
EVERY = SCALED + MISTRAL + QWEN2 + QWEN3 + PHI3
_MODULES = {
    "Llama": modeling_llama,
    "Mistral": modeling_mistral,
    "Qwen2": modeling_qwen2,
    "Qwen3": modeling_qwen3,
    "Phi3": modeling_phi3,
}


@contextmanager
def float64_only() -> Iterator[None]:
    """Where `transformers` asks for float32, it gets float64."""
    with ExitStack() as stack:
        for name in ("float", "float32"):
            stack.enter_context(mock.patch.object(torch, name, torch.float64))
        stack.enter_context(mock.patch.object(torch.Tensor, "float", torch.Tensor.double))
        yield


def rotary(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Angles by the functions of `transformers` itself, for a sequence of this length."""
    kind = self.config.rope_parameters["rope_type"]
    length = int(position_ids.max()) + 1
    with float64_only():
        if kind == "default":
            frequencies, magnitude = self.compute_default_rope_parameters(self.config, device="cpu")
        else:
            frequencies, magnitude = ROPE_INIT_FUNCTIONS[kind](self.config, "cpu", seq_len=length)
    angles = position_ids[..., None].double() * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return (angles.cos() * magnitude).to(x.dtype), (angles.sin() * magnitude).to(x.dtype)


def _rms_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


@contextmanager
def llama_like_lifted() -> Iterator[None]:
    """Norms and rotary angles of these families in the precision of the model; softmax is `decoders.lifted`'s."""
    with ExitStack() as stack:
        for name, module in _MODULES.items():
            stack.enter_context(mock.patch.object(getattr(module, f"{name}RMSNorm"), "forward", _rms_norm))
            stack.enter_context(mock.patch.object(getattr(module, f"{name}RotaryEmbedding"), "forward", rotary))
        yield


class _SideBySide(nn.Module):
    """Several projections of the same rows, their outputs joined: a fused matrix that shows its parts."""

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)


def unfused(model: Any) -> Any:
    """A model of `transformers` with fused projections, computing the same with one module for each part."""
    config = model.config
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        if not hasattr(attention, "qkv_proj"):
            return model
        query, key = config.num_attention_heads * attention.head_dim, config.num_key_value_heads * attention.head_dim
        attention.q_proj, attention.k_proj, attention.v_proj = _split(attention.qkv_proj, [query, key, key])
        attention.qkv_proj = _SideBySide([attention.q_proj, attention.k_proj, attention.v_proj])
        mlp.gate_proj, mlp.up_proj = _split(mlp.gate_up_proj, [config.intermediate_size] * 2)
        mlp.gate_up_proj = _SideBySide([mlp.gate_proj, mlp.up_proj])
    return model


def _split(fused: nn.Linear, sizes: list[int]) -> list[nn.Linear]:
    parts = []
    for rows in fused.weight.detach().split(sizes):
        part = nn.Linear(rows.shape[1], rows.shape[0], bias=False, dtype=rows.dtype)
        part.weight = nn.Parameter(rows.clone())
        parts.append(part)
    return parts
