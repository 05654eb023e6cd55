"""A model's parameters as torch holds them: a tree of modules, named as in the spec, that the stages read from.

The module of a layer is what its stages get for `weights`: `weights["attn.q"]` is the module that owns the
parameters `weight` and `bias`, and reads as the protocol's `Linear` and `Gain` do. Nothing keeps a parameter
aside: each is looked up when it is used, so that whatever replaces it (an optimiser's new tensor, the gathered
shards of `fully_shard`) is what the stages compute with.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from cutaway.engines.weights import Weight
from cutaway.progress import progress

UNPACKED = 1 << 22  # numbers that are unpacked at a time: what stands in memory beside the finished tensor


class Held(nn.Module):
    """The parameters below one name. Calling it calls a stage with them."""

    def forward(self, stage: Callable[..., Any], *rest: Any) -> Any:
        return stage(self, *rest)

    def through(self, stage: Callable[..., Any], *rest: Any) -> Any:
        """stage(these weights, …), as a call of this module: its hooks see what goes in and what comes out."""
        return self(stage, *rest)

    def __getitem__(self, name: str) -> Any:
        """The part or the parameter with this name below here; KeyError where there is none."""
        found: Any = self
        for step in name.split("."):
            found = getattr(found, step, None)
            if found is None:
                raise KeyError(name)
        return found

    def get(self, name: str, default: Any = None) -> Any:
        """The same, and `default` where there is none."""
        try:
            return self[name]
        except KeyError:
            return default


def hold(stored: Mapping[str, Weight], dtype: torch.dtype, device: torch.device) -> Held:
    """The weights unpacked to tensors, each once, as parameters that ask for no gradient until somebody turns it on."""
    root = Held()
    with progress("Unpacking weights", len(stored), "tensors", after=1.0) as advance:
        for name, weight in stored.items():
            *owners, role = name.split(".")
            part = root
            for step in owners:
                if step not in part._modules:
                    part.add_module(step, Held())
                part = part.get_submodule(step)
            part.register_parameter(role, nn.Parameter(unpacked(weight, dtype, device), requires_grad=False))
            if role in ("weight", "gain") and name.removesuffix(role) + "bias" not in stored:
                part.register_parameter("bias", None)
            advance(1)
    return root


def unpacked(weight: Weight, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A stored weight as a tensor of its own shape, some rows at a time; numbers of type `dtype` keep every bit."""
    tensor = torch.empty(weight.shape, dtype=dtype)
    rows = tensor.view(-1, weight.shape[-1])
    step = max(1, UNPACKED // weight.shape[-1])
    exact = np.float64 if dtype == torch.float64 or weight.kind == "F64" else np.float32
    for start in range(0, len(rows), step):
        rows[start : start + step] = torch.tensor(weight.dequantise(exact, start, min(start + step, len(rows))))
    return tensor.to(device)
