"""The operations of the forward pass on torch's tensors: any device, four precisions, gradients."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.nn import functional

from cutaway.engines.layout import Layout
from cutaway.engines.low_rank import with_added
from cutaway.engines.protocol import Gain, Linear, Scoring
from cutaway.engines.torch.attend import attend
from cutaway.engines.torch.devices import device_of, precision_of
from cutaway.engines.torch.held import Held, hold, unpacked
from cutaway.engines.weights import Weight
from cutaway.errors import CutawayError

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


class TorchEngine:
    """float64, float32, bfloat16 or float16 on one device; norms and softmax are summed in float32 at least.

    Weights are unpacked once, at load, into parameters (`hold`). Every operation makes a new tensor, so that
    gradients flow through all of them. A product is one call for all rows: a sequence gets the same numbers in any
    company and from a cache to rounding, not bit for bit. With `fused`, attention that nobody looks into is one
    operation, which rounds differently from the stages too.
    """

    note: str | None = None
    differentiable = True
    bitwise = False

    def __init__(self, dtype: Any = None, device: str | None = None, *, fused: bool = True) -> None:
        self.device = device_of(device)
        self.dtype, self.torch_dtype = precision_of(dtype)
        if self.device.type == "mps" and self.torch_dtype == torch.float64:
            raise CutawayError("Apple's GPUs have no float64; use engine='torch:cpu', or float32.")
        self.name = f"torch:{self.device}"
        self.fused = fused
        self._summed = self.torch_dtype if self.torch_dtype == torch.float64 else torch.float32
        self._unpacked: WeakKeyDictionary[Weight, torch.Tensor] = WeakKeyDictionary()

    def hold(self, stored: Mapping[str, Weight]) -> Held:
        """A model's weights as the parameters of a tree of modules, named as in the spec."""
        return hold(stored, self.torch_dtype, self.device)

    def array(self, values: Any) -> torch.Tensor:
        if isinstance(values, torch.Tensor):
            return values.to(self.device, self.torch_dtype)
        return torch.tensor(np.asarray(values)).to(self.torch_dtype).to(self.device)

    def numpy(self, values: torch.Tensor | np.ndarray) -> np.ndarray:
        """Back to NumPy; the 16-bit precisions as float32, which holds each of their numbers exactly."""
        if isinstance(values, np.ndarray):  # whole numbers were never anywhere else
            return values
        values = values.detach()
        if values.dtype in (torch.bfloat16, torch.float16):
            values = values.float()
        return values.cpu().numpy()

    def empty(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=self.torch_dtype, device=self.device)

    def copy(self, values: torch.Tensor | np.ndarray) -> torch.Tensor | np.ndarray:
        return values.clone() if isinstance(values, torch.Tensor) else values.copy()  # whole numbers stay in NumPy

    def embed(self, weight: Weight | torch.Tensor, ids: np.ndarray) -> torch.Tensor:
        chosen, table = np.asarray(ids, np.int64), self._matrix(weight)
        outside = chosen[(chosen < 0) | (chosen >= len(table))]
        if outside.size:
            raise CutawayError(f"Row {outside[0]} was asked for; the weight has {len(table)} rows, counted from 0.")
        return functional.embedding(torch.tensor(chosen, device=self.device), table)

    def linear(self, x: torch.Tensor, linear: Linear, layout: Layout) -> torch.Tensor:
        y = functional.linear(x, self._matrix(linear.weight), linear.bias)
        # The modules that hold a model's own parameters have nothing added to them.
        return with_added(self, y, x, linear, layout) if getattr(linear, "added", ()) else y

    def layer_norm(self, x: torch.Tensor, gain: Gain, eps: float) -> torch.Tensor:
        x = x.to(self._summed)
        normed = functional.layer_norm(x, x.shape[-1:], eps=eps)
        return self._scaled(_never_zeros(normed, x.detach().var(-1, correction=0, keepdim=True)), gain)

    def rms_norm(self, x: torch.Tensor, gain: Gain, eps: float) -> torch.Tensor:
        x = x.to(self._summed)
        normed = functional.rms_norm(x, x.shape[-1:], eps=eps)
        return self._scaled(_never_zeros(normed, x.detach().square().mean(-1, keepdim=True)), gain)

    def _scaled(self, normed: torch.Tensor, gain: Gain) -> torch.Tensor:
        """Gain and shift are applied before the rounding to the engine's own precision."""
        scaled = normed * gain.gain
        return (scaled if gain.bias is None else scaled + gain.bias).to(self.torch_dtype)

    def activate(self, x: torch.Tensor, kind: str, times: torch.Tensor | None = None) -> torch.Tensor:
        active = ACTIVATIONS[kind](x)
        return active if times is None else active * times

    def rotate(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, pairing: str) -> torch.Tensor:
        dims = 2 * cosines.shape[-1]
        turning, rest = x[..., :dims], x[..., dims:]
        if pairing == "halves":
            one, other = turning[..., : dims // 2], turning[..., dims // 2 :]
            turned = torch.cat((one * cosines - other * sines, other * cosines + one * sines), dim=-1)
        else:
            one, other = turning[..., 0::2], turning[..., 1::2]
            turned = torch.stack((one * cosines - other * sines, other * cosines + one * sines), dim=-1).flatten(-2)
        return turned if not rest.shape[-1] else torch.cat((turned, rest), dim=-1)

    def dots(self, q: torch.Tensor | np.ndarray, k: torch.Tensor | np.ndarray) -> torch.Tensor:
        q, k = self.array(q), self.array(k)  # those that a trace kept may stand in NumPy
        n_heads, n_rows, d_head = q.shape
        grouped = q.reshape(len(k), -1, d_head)  # [H_kv, H/H_kv · R, d_head]: query heads beside their key head
        return (grouped @ k.swapaxes(1, 2)).reshape(n_heads, n_rows, k.shape[1])

    def scale(self, dots: torch.Tensor, factor: float) -> torch.Tensor:
        return dots * factor

    def cap(self, x: torch.Tensor, limit: float) -> torch.Tensor:
        return torch.tanh(x / limit) * limit

    def mask(self, scores: torch.Tensor, first: np.ndarray, last: np.ndarray) -> torch.Tensor:
        keys = np.arange(scores.shape[-1])
        hidden = (keys < first[:, None]) | (keys >= last[:, None])  # [R, S]
        return scores.masked_fill(torch.tensor(hidden, device=self.device), -torch.inf)

    def softmax(self, masked: torch.Tensor) -> torch.Tensor:
        return torch.softmax(masked, dim=-1, dtype=self._summed).to(self.torch_dtype)

    def mix(self, pattern: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        n_heads, n_rows, n_keys = pattern.shape
        grouped = pattern.reshape(len(v), -1, n_keys)
        return (grouped @ v).reshape(n_heads, n_rows, v.shape[2])

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scoring: Scoring,
    ) -> torch.Tensor | None:
        """All of attention in one operation; None for scores that it cannot make, or where stages were asked for."""
        if not self.fused or scoring.cap is not None or scoring.growth is not None:
            return None
        return attend(q, keys, values, scoring.scale, scoring.first, scoring.last)

    def _matrix(self, weight: Weight | torch.Tensor) -> torch.Tensor:
        """A parameter as it is; a stored weight that nobody holds, unpacked at its first use and kept."""
        if isinstance(weight, torch.Tensor):
            return weight
        kept = self._unpacked.get(weight)
        if kept is None:
            kept = self._unpacked[weight] = unpacked(weight, self.torch_dtype, self.device)
        return kept


def _never_zeros(normed: torch.Tensor, mean_square: torch.Tensor) -> torch.Tensor:
    """NaN for rows whose squares leave the precision: divided by infinity they would be zeros, and that a lie."""
    return torch.add(normed, mean_square, alpha=0)  # 0 · ∞ is NaN; one kernel, and nothing waits for the device
