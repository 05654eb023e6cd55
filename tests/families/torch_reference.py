"""The same computation by `transformers`: tiny random models, and every intermediate that both sides have.

Even in a float64 model `transformers` works out RMSNorm, the rotary angles and Llama's softmax in float32,
which alone costs about 7e-8. `lifted` raises these three places to float64 for as long as it lasts.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

Made = Callable[..., tuple[Path, Any]]  # the fixture `made`: its folder, and the float64 model of the saved numbers


@dataclass(frozen=True)
class Case:
    """One tiny model: its family, what makes it worth a test, and the settings of its configuration."""

    name: str
    family: str
    settings: dict[str, Any]

    def build(self, dtype: torch.dtype = torch.float64) -> Any:
        """The model, random in all its parameters (`transformers` starts biases at 0 and gains at 1)."""
        torch.manual_seed(sum(map(ord, self.name)))
        config, model = {"gpt2": (GPT2Config, GPT2LMHeadModel), "llama": (LlamaConfig, LlamaForCausalLM)}[self.family]
        built = model(config(bos_token_id=1, eos_token_id=2, attn_implementation="eager", **self.settings))
        built = built.to(torch.float64).eval()
        with torch.no_grad():
            for parameter in built.parameters():
                parameter.normal_(0.0, 1.0 if parameter.dim() == 1 else 1.5 * parameter.shape[-1] ** -0.5)
        return built.to(dtype)


def saved(model: Any, folder: Path, **options: Any) -> Path:
    """The model as `save_pretrained` writes it. As in life, it is loaded again from this folder by both sides."""
    model.save_pretrained(folder, **options)
    return folder


@contextmanager
def lifted() -> Iterator[None]:
    """RMSNorm, rotary angles and softmax of `transformers` in the precision of the model, not in float32."""
    softmax = torch.nn.functional.softmax

    def rms_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    def rotary(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dims = 2 * self.inv_freq.shape[0]
        exponents = torch.arange(0, dims, 2, dtype=torch.float64) / dims
        angles = position_ids[..., None].double() * float(self.config.rope_parameters["rope_theta"]) ** -exponents
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    def in_own_precision(x: torch.Tensor, dim: int | None = None, dtype: Any = None, **rest: Any) -> torch.Tensor:
        return softmax(x, dim=dim, **rest)

    with (
        mock.patch.object(modeling_llama.LlamaRMSNorm, "forward", rms_norm),
        mock.patch.object(modeling_llama.LlamaRotaryEmbedding, "forward", rotary),
        mock.patch.object(torch.nn.functional, "softmax", in_own_precision),
    ):
        yield


def run(model: Any, ids: Sequence[int]) -> dict[str, np.ndarray]:
    """Every intermediate that `transformers` shares with us, under our address and in our shape."""
    points: dict[str, np.ndarray] = {}
    watch = {"gpt2": _watch_gpt2, "llama": _watch_llama}[model.config.model_type]
    hooks = list(watch(model, points))
    try:
        with torch.no_grad():
            out = model(torch.tensor([list(ids)]), output_hidden_states=True, output_attentions=True, use_cache=True)
    finally:
        for hook in hooks:
            hook.remove()
    cache = out["cache"] if "cache" in out else out["past_key_values"]
    turned = "k_rot" if model.config.model_type == "llama" else "k"
    n_layers = model.config.num_hidden_layers
    assert len(out.attentions) == n_layers
    for i in range(n_layers):
        points[f"layers.{i}.attn.pattern"] = out.attentions[i][0].numpy()
        points[f"layers.{i}.attn.{turned}"] = cache.layers[i].keys[0].numpy()
        points[f"layers.{i}.attn.v"] = cache.layers[i].values[0].numpy()
        points[f"layers.{i}.resid_pre"] = out.hidden_states[i][0].numpy()
    points["embed.out"] = out.hidden_states[0][0].numpy()
    points["final.norm"] = out.hidden_states[-1][0].numpy()
    points["logits"] = out.logits[0].numpy()
    return points


def _watch_llama(model: Any, points: dict[str, np.ndarray]) -> Iterator[Any]:
    keep = partial(_keep, points)
    yield keep(model.model.embed_tokens, output="embed.tokens")
    for i, layer in enumerate(model.model.layers):
        at, heads = f"layers.{i}.", model.config.num_attention_heads
        attention, mlp = layer.self_attn, layer.mlp
        yield keep(layer, output=f"{at}resid_post")
        yield keep(layer.input_layernorm, output=f"{at}attn.norm")
        yield keep(attention.q_proj, output=f"{at}attn.q", change=partial(_heads, heads))
        yield keep(attention.k_proj, output=f"{at}attn.k", change=partial(_heads, model.config.num_key_value_heads))
        yield keep(attention.o_proj, entry=f"{at}attn.z", change=partial(_heads, heads))
        yield keep(attention.o_proj, output=f"{at}attn.raw")
        yield keep(attention.o_proj, output=f"{at}attn.out")
        yield keep(layer.post_attention_layernorm, entry=f"{at}resid_mid")
        yield keep(layer.post_attention_layernorm, output=f"{at}mlp.norm")
        yield keep(mlp.gate_proj, output=f"{at}mlp.gate")
        yield keep(mlp.up_proj, output=f"{at}mlp.up")
        yield keep(mlp.down_proj, entry=f"{at}mlp.act")
        yield keep(mlp.down_proj, output=f"{at}mlp.raw")
        yield keep(mlp, output=f"{at}mlp.out")


def _watch_gpt2(model: Any, points: dict[str, np.ndarray]) -> Iterator[Any]:
    keep = partial(_keep, points)
    yield keep(model.transformer.wte, output="embed.tokens")
    yield keep(model.transformer.wpe, output="embed.positions")
    for i, layer in enumerate(model.transformer.h):
        at, heads = f"layers.{i}.", model.config.n_head
        yield keep(layer, output=f"{at}resid_post")
        yield keep(layer.ln_1, output=f"{at}attn.norm")
        yield keep(
            layer.attn.c_attn, output=f"{at}attn.q", change=lambda x, h=heads: _heads(h, x[:, : x.shape[1] // 3])
        )
        yield keep(layer.attn.c_proj, entry=f"{at}attn.z", change=partial(_heads, heads))
        yield keep(layer.attn.c_proj, output=f"{at}attn.raw")
        yield keep(layer.attn.c_proj, output=f"{at}attn.out")
        yield keep(layer.ln_2, entry=f"{at}resid_mid")
        yield keep(layer.ln_2, output=f"{at}mlp.norm")
        yield keep(layer.mlp.c_fc, output=f"{at}mlp.up")
        yield keep(layer.mlp.c_proj, entry=f"{at}mlp.act")
        yield keep(layer.mlp.c_proj, output=f"{at}mlp.raw")
        yield keep(layer.mlp, output=f"{at}mlp.out")


def _keep(
    points: dict[str, np.ndarray],
    module: torch.nn.Module,
    *,
    output: str = "",
    entry: str = "",
    change: Callable[[np.ndarray], np.ndarray] = lambda x: x,
) -> Any:
    """A hook that keeps what a module returns, or what it is given, under this name."""

    def hook(_: torch.nn.Module, given: Any, returned: Any) -> None:
        value = given[0] if entry else returned
        value = value[0] if isinstance(value, tuple) else value
        points[entry or output] = change(value.detach().reshape(-1, value.shape[-1]).numpy().copy())

    return module.register_forward_hook(hook)


def _heads(n_heads: int, x: np.ndarray) -> np.ndarray:
    """`[T, n_heads · d_head]` → `[n_heads, T, d_head]`."""
    return x.reshape(len(x), n_heads, -1).swapaxes(0, 1)
