"""Tiny models of `transformers` and what they show of a pass: every stream, every attention pattern, the logits.

`lifted` raises the places that `transformers` keeps in float32 (rotary angles, softmax) to the model's precision.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from compared import EXACT, assert_shown
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding

import cutaway


def built(kind: Any, config: Any, seed: int, **options: Any) -> Any:
    """The model in float64, random in all its parameters (`transformers` starts biases at 0 and gains at 1)."""
    torch.manual_seed(seed)
    config._attn_implementation = "eager"
    model = kind(config, **options).to(torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 1.0 if parameter.dim() == 1 else 1.5 * parameter.shape[-1] ** -0.5)
    return model


def saved(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


@contextmanager
def lifted() -> Iterator[None]:
    softmax = torch.nn.functional.softmax

    def rotary(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rope, dims = self.config.rope_parameters, 2 * self.inv_freq.shape[0]
        assert rope["rope_type"] in ("default", "linear")
        exponents = torch.arange(0, dims, 2, dtype=torch.float64) / dims
        angles = position_ids[..., None].double() * float(rope["rope_theta"]) ** -exponents / rope.get("factor", 1.0)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    def in_own_precision(x: torch.Tensor, dim: int | None = None, dtype: Any = None, **rest: Any) -> torch.Tensor:
        return softmax(x, dim=dim, **rest)

    with ExitStack() as patches:
        for kind in (GPTNeoXRotaryEmbedding, PhiRotaryEmbedding):
            patches.enter_context(mock.patch.object(kind, "forward", rotary))
        patches.enter_context(mock.patch.object(torch.nn.functional, "softmax", in_own_precision))
        yield


def shown(model: Any, ids: Sequence[int], **inputs: Any) -> dict[str, np.ndarray]:
    """What `transformers` computes for one sequence, under our addresses: streams, patterns, logits, pooler."""
    body = model.base_model
    layers = body.encoder.layer if hasattr(body, "encoder") else body.layers
    left: dict[int, torch.Tensor] = {}

    def hook(layer: int) -> Any:
        def keep(_: Any, __: Any, returned: Any) -> None:
            left[layer] = returned[0] if isinstance(returned, tuple) else returned

        return keep

    hooks = [layer.register_forward_hook(hook(i)) for i, layer in enumerate(layers)]
    try:
        with torch.no_grad(), lifted():
            out = model(torch.tensor([list(ids)]), output_hidden_states=True, output_attentions=True, **inputs)
    finally:
        for one in hooks:
            one.remove()
    points = {"embed.out": out.hidden_states[0][0].numpy()}
    assert len(out.attentions) == len(layers)
    for i, pattern in enumerate(out.attentions):
        points[f"layers.{i}.attn.pattern"] = pattern[0].numpy()
        points[f"layers.{i}.resid_post"] = left[i].reshape(len(ids), -1).numpy()
    if "logits" in out:
        points["logits"] = out.logits[0].numpy()
    if out.get("pooler_output") is not None:
        points["pooler.out"] = out.pooler_output.numpy()
    return points


def assert_same(
    model: cutaway.Model,
    reference: Any,
    ids: Sequence[int],
    within: float = EXACT,
    types: list[int] | None = None,
    but: Sequence[str] = (),
) -> None:
    """Every point that both sides show, `but` these, is the same, to `within` of its largest value."""
    expected = shown(reference, ids, **({} if types is None else {"token_type_ids": torch.tensor([types])}))
    expected = {name: value for name, value in expected.items() if name not in but}
    assert_shown(model, expected, ids, within, types)
