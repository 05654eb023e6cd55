"""Tiny models of `transformers` with every float32 place in float64: norms, angles, softmax, routers.

`transformers` names float32 in many places of these families. While `doubled` lasts, every torch function that is
asked for float32 gives float64, so that what is left between the two sides is the rounding of float64.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compared import deviation
from torch.overrides import TorchFunctionMode

import cutaway
from cutaway.forward.cache import KVCache
from cutaway.forward.transformer import transformer

Made = Callable[..., tuple[Path, Any]]  # its folder, and the float64 model of the saved numbers

# Modules of a layer → our points, and which of several returned values it is.
INSIDE = {
    "": ("resid_post", 0),
    "input_layernorm": ("attn.norm", 0),
    "self_attn.q_a_layernorm": ("attn.q_latent", 0),
    "self_attn.kv_a_layernorm": ("attn.kv_latent", 0),
    "self_attn.o_proj": ("attn.raw", 0),
    "post_attention_layernorm": ("mlp.norm", 0),
    "mlp.gate": ("moe.router_logits", 0),
    "mlp.shared_experts": ("moe.shared_out", 0),
    "mlp": ("mlp.out", 0),
    "feed_forward.router": ("moe.router_logits", 1),
    "feed_forward.shared_expert": ("moe.shared_out", 0),
    "feed_forward": ("mlp.out", 0),
}


class doubled(TorchFunctionMode):
    """float64 wherever float32 is asked for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wide = [torch.float64 if value is torch.float32 else value for value in args]
        named = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        if func is torch.Tensor.float:
            return args[0].double()
        if func in (torch.ones_like, torch.zeros_like, torch.empty_like) and args[0].dtype == torch.float32:
            named.setdefault("dtype", torch.float64)
        return func(*wide, **named)


def built(kind: Any, config: Any, seed: int = 0) -> Any:
    """The model in float64, random in all its parameters and in the routers' corrections."""
    torch.manual_seed(seed)
    config._attn_implementation = config._experts_implementation = "eager"
    with doubled():
        model = kind(config)  # so that the rotary angles are worked out in float64
    model = model.to(torch.float64).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(1.0, 0.4)
            else:
                parameter.normal_(0.0, 0.5 if parameter.dim() == 1 else 1.2 * parameter.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(-0.6, 0.5)  # most biased scores are negative
    return model


def saved(model: Any, folder: Path, dtype: torch.dtype = torch.float64, **options: Any) -> Path:
    """The model's folder; with another dtype the model takes over the numbers as they were rounded."""
    if dtype is not torch.float64:
        with torch.no_grad():
            for value in (*model.parameters(), *model.buffers()):
                if not value.is_inference() and value.dtype == torch.float64 and not _rotary(model, value):
                    value.copy_(value.to(dtype))
        kept = {name: value.clone() for name, value in model.named_buffers()}
        model.to(dtype).save_pretrained(folder, **options)
        model.to(torch.float64)
        for name, value in model.named_buffers():
            value.copy_(kept[name])
        return folder
    model.save_pretrained(folder, **options)
    return folder


def kept(reference: Callable[[str], Any], folders: pytest.TempPathFactory) -> Made:
    """`made(case, dtype)`: what `reference` builds is built and saved once for each dtype."""
    known: dict[tuple[str, torch.dtype], tuple[Path, Any]] = {}

    def make(case: str, dtype: torch.dtype = torch.float64) -> tuple[Path, Any]:
        if (case, dtype) not in known:
            model = reference(case)
            known[case, dtype] = saved(model, folders.mktemp("tiny"), dtype), model
        return known[case, dtype]

    return make


def _rotary(model: Any, value: torch.Tensor) -> bool:
    return any(value is buffer for name, buffer in model.named_buffers() if "inv_freq" in name)


def shown(model: Any, ids: Sequence[int], left_pads: int = 0) -> dict[str, np.ndarray]:
    """What `transformers` computes, under our addresses: streams, patterns, latents, router logits, logits and more.

    With `left_pads`, of a batch in which so many pads stand before the sequence: the sequence's own rows.
    """
    points: dict[str, np.ndarray] = {}
    text = model.model.language_model if hasattr(model.model, "language_model") else model.model
    hooks = [
        _keep(module, points, f"layers.{i}.{point}", left_pads, part)
        for i, layer in enumerate(text.layers)
        for name, (point, part) in INSIDE.items()
        if (module := dict(layer.named_modules()).get(name)) is not None
    ]
    rows = [0] * left_pads + list(ids)
    mask = torch.tensor([[0] * left_pads + [1] * len(ids)])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    try:
        with torch.no_grad(), doubled():
            out = model(
                torch.tensor([rows]),
                attention_mask=mask,
                position_ids=positions,
                output_hidden_states=True,
                output_attentions=True,
                use_cache=False,
            )
    finally:
        for hook in hooks:
            hook.remove()
    points["embed.out"] = out.hidden_states[0][0, left_pads:].numpy()
    assert len(out.attentions) == len(text.layers)
    for i, pattern in enumerate(out.attentions):
        points[f"layers.{i}.attn.pattern"] = pattern[0, :, left_pads:, left_pads:].numpy()
    points["logits"] = out.logits[0, left_pads:].numpy()
    assert all(value.dtype == np.float64 for value in points.values()), {k: v.dtype for k, v in points.items()}
    return points


def _keep(module: torch.nn.Module, points: dict[str, np.ndarray], name: str, first: int, part: int) -> Any:
    def hook(_: Any, __: Any, returned: Any) -> None:
        value = returned[part] if isinstance(returned, tuple) else returned
        points[name] = value.detach().reshape(-1, value.shape[-1])[first:].numpy().copy()

    return module.register_forward_hook(hook)


def assert_cached_is_whole(model: cutaway.Model, prompt: Sequence[int], sizes: Sequence[int], within: float) -> KVCache:
    """A prompt in pieces of these sizes from one cache, which is returned, gives what it gives in one pass."""
    ids = np.array(prompt)
    whole = model.trace(ids).logits
    cache, done = KVCache(model.spec, model.engine), 0
    for size in sizes:
        piece = ids[done : done + size]
        ran = transformer(model.engine, model.spec, model.parameters, [piece], caches=[cache], rows=range(size))
        assert deviation(model.engine.numpy(ran.logits), whole[done : done + size]) < within
        done += size
    assert cache.length == done == len(ids)
    return cache
