"""The reference engine: the operations of the forward pass in plain NumPy, as a textbook writes them."""

import threading
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import numpy as np

from cutaway.engines.layout import Layout
from cutaway.engines.low_rank import with_added
from cutaway.engines.protocol import Gain, Linear
from cutaway.engines.weights import Weight
from cutaway.errors import CutawayError

DTYPES = ("float64", "float32")


def softmax(scores: np.ndarray) -> np.ndarray:
    """exp(x − max) / sum over the last axis, in place; the shift by the maximum changes nothing but overflow."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores


def relu(x: np.ndarray) -> np.ndarray:
    """max(0, x)"""
    return np.maximum(x, 0)


def silu(x: np.ndarray) -> np.ndarray:
    """x · sigmoid(x), also called swish. (Elfwing et al. 2017)"""
    return x / (1 + np.exp(-np.maximum(x, -80.0)))  # exp(80) still fits float32; silu(-80) is −0 anyway


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + e^−x)"""
    return 1 / (1 + np.exp(-np.maximum(x, -80.0)))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    """GPT-2's approximation of gelu. (Hendrycks & Gimpel 2016, eq. 2)"""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi).astype(x.dtype) * (x + 0.044715 * x * x * x)))


def gelu(x: np.ndarray) -> np.ndarray:
    """x · Φ(x), Φ the normal distribution function. (Hendrycks & Gimpel 2016)"""
    return 0.5 * x * (1 + erf(x / np.sqrt(2).astype(x.dtype)))


def erf(x: np.ndarray) -> np.ndarray:
    """The error function, which NumPy lacks: the C library's, element by element."""
    from math import erf as scalar_erf

    flat = np.fromiter(map(scalar_erf, x.ravel().tolist()), dtype=np.float64, count=x.size)
    return flat.reshape(x.shape).astype(x.dtype)


ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "relu": relu,
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "sigmoid": sigmoid,
    "tanh": np.tanh,
}


class NumpyEngine:
    """float64 or float32, one operation after another, no tricks.

    Weights are unpacked to floats at their first use and kept: easy to read and to check, at the price of
    memory (a model's parameter count times 8 or 4 bytes). Safe to use from several threads.
    """

    name = "numpy"
    note: str | None = None  # why this engine and not another, where the user should know

    def __init__(self, dtype: str | np.dtype | type | None = None) -> None:
        self.dtype = np.dtype(dtype or "float64")
        if self.dtype.name not in DTYPES:
            raise CutawayError(f"The numpy engine computes in {' or '.join(DTYPES)}, not in {self.dtype.name}.")
        self._floats: WeakKeyDictionary[Weight, np.ndarray] = WeakKeyDictionary()  # they go with their weight
        self._unpacking = threading.Lock()  # so that of several threads one unpacks a weight and the others wait

    def array(self, values: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(values, dtype=self.dtype)

    def numpy(self, values: np.ndarray) -> np.ndarray:
        return values

    def empty(self, shape: Sequence[int]) -> np.ndarray:
        return np.empty(shape, self.dtype)

    def copy(self, values: np.ndarray) -> np.ndarray:
        return values.copy()

    def embed(self, weight: Weight, ids: np.ndarray) -> np.ndarray:
        return weight.take(ids, self.dtype)

    def linear(self, x: np.ndarray, linear: Linear, layout: Layout) -> np.ndarray:
        w = self._matrix(linear.weight)
        y = self.empty((len(x), len(w)))
        for block in layout.blocks:
            rows = x[block.start : block.stop]
            if block.size == 0:
                for t, row in enumerate(rows, block.start):
                    y[t] = w @ row
            elif len(rows) == block.size:
                y[block.start : block.stop] = rows @ w.T
            else:
                padded = np.zeros((block.size, x.shape[1]), self.dtype)
                here = slice(block.offset, block.offset + len(rows))
                padded[here] = rows
                y[block.start : block.stop] = (padded @ w.T)[here]
        y = y if linear.bias is None else y + linear.bias
        return with_added(self, y, x, linear, layout) if linear.added else y

    def layer_norm(self, x: np.ndarray, gain: Gain, eps: float) -> np.ndarray:
        centred = x - x.mean(axis=-1, keepdims=True)
        variance = (centred * centred).mean(axis=-1, keepdims=True)
        scaled = centred / self._size(variance, eps) * gain.gain
        return scaled if gain.bias is None else scaled + gain.bias

    def rms_norm(self, x: np.ndarray, gain: Gain, eps: float) -> np.ndarray:
        mean_square = (x * x).mean(axis=-1, keepdims=True)
        scaled = x / self._size(mean_square, eps) * gain.gain
        return scaled if gain.bias is None else scaled + gain.bias

    def _size(self, mean_square: np.ndarray, eps: float) -> np.ndarray:
        """What a row is divided by. Beyond the numbers of this precision it is none: a row of zeros would be a lie."""
        size = np.sqrt(mean_square + self.dtype.type(eps))
        return np.where(np.isposinf(size), self.dtype.type(np.nan), size)

    def activate(self, x: np.ndarray, kind: str, times: np.ndarray | None = None) -> np.ndarray:
        active = ACTIVATIONS[kind](x)
        return active if times is None else active * times

    def rotate(self, x: np.ndarray, cosines: np.ndarray, sines: np.ndarray, pairing: str) -> np.ndarray:
        dims = 2 * cosines.shape[-1]
        if pairing == "halves":
            first, second = slice(0, dims // 2), slice(dims // 2, dims)
        else:
            first, second = slice(0, dims, 2), slice(1, dims, 2)
        turned = x.copy()
        turned[..., first] = x[..., first] * cosines - x[..., second] * sines
        turned[..., second] = x[..., second] * cosines + x[..., first] * sines
        return turned

    def dots(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        n_heads, n_rows, d_head = q.shape
        grouped = q.reshape(len(k), -1, d_head)  # [H_kv, H/H_kv · R, d_head]: query heads beside their key head
        return (grouped @ k.swapaxes(1, 2)).reshape(n_heads, n_rows, k.shape[1])

    def scale(self, dots: np.ndarray, factor: float) -> np.ndarray:
        dots *= self.dtype.type(factor)
        return dots

    def cap(self, x: np.ndarray, limit: float) -> np.ndarray:
        x /= self.dtype.type(limit)
        np.tanh(x, out=x)
        x *= self.dtype.type(limit)
        return x

    def mask(self, scores: np.ndarray, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        keys = np.arange(scores.shape[-1])
        hidden = (keys < first[:, None]) | (keys >= last[:, None])  # [R, S]
        scores[:, hidden] = -np.inf
        return scores

    def softmax(self, masked: np.ndarray) -> np.ndarray:
        return softmax(masked)

    def mix(self, pattern: np.ndarray, v: np.ndarray) -> np.ndarray:
        n_heads, n_rows, n_keys = pattern.shape
        grouped = pattern.reshape(len(v), -1, n_keys)
        return (grouped @ v).reshape(n_heads, n_rows, v.shape[2])

    def _matrix(self, weight: Weight) -> np.ndarray:
        kept = self._floats.get(weight)
        if kept is None:
            with self._unpacking:
                kept = self._floats.get(weight)
                if kept is None:
                    kept = self._floats[weight] = weight.dequantise(self.dtype)
        return kept
