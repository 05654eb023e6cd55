"""The engine protocol: the few array operations that the stages of the forward pass are written in.

A stage says *what* is computed; an engine computes it. Arrays are the engine's own (NumPy's for `numpy` and
`cpu`); besides these functions stages use only `+`, `*`, slicing, `reshape` and `swapaxes`, which every
array library spells alike. What is said to be done in place is done so where that is cheap; stages go on with what
is returned. Shapes are in the symbols of the design: T rows of all packed sequences, H query
heads, H_kv key/value heads, R query rows of one attention block, S keys that it sees.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from cutaway.engines.layout import Layout
from cutaway.engines.weights import Weight
from cutaway.spec import AttentionSpec, NormSpec, RotarySpec

Array = Any  # the engine's own array type


class Precision(Protocol):
    """What an engine computes in: one of NumPy's dtypes, or what says the same of a type that NumPy lacks."""

    @property
    def name(self) -> str: ...

    @property
    def itemsize(self) -> int: ...


@dataclass(frozen=True, eq=False)
class LowRank:
    """What an adapter adds to a projection of x: scale · (x downᵀ) upᵀ, with `down` `[r, d_in]`, `up` `[d_out, r]`.

    With a `gain` `[d_out]` each row of the whole changed matrix is so many times as long: g ∘ (x Wᵀ + scale · …) takes
    the place of x Wᵀ. (DoRA, Liu et al. 2024)
    `told`, where given, hears of every product how many numbers of each row it changed, `int [T]`, and d_out.
    """

    down: Weight
    up: Weight
    scale: float = 1.0
    gain: np.ndarray | None = None
    told: Callable[[np.ndarray, int], None] | None = None


@dataclass(frozen=True, eq=False)
class Linear:
    """A projection: a stored matrix `[d_out, d_in]` and, where the model has one, its bias `[d_out]`.

    `added` is what adapters add to it in one run (`engines.low_rank`).
    """

    weight: Weight
    bias: Array | None = None
    added: tuple[LowRank, ...] = ()


@dataclass(frozen=True, eq=False)
class Gain:
    """The learned scale of a norm `[d]` and, for LayerNorm, its shift `[d]`."""

    gain: Array
    bias: Array | None = None


@dataclass(frozen=True, eq=False)
class Scoring:
    """How the dot products of some query rows become scores, and which keys those rows may see.

    A score is dot · scale (· growth[r]), bent below `cap` where there is one; row r sees the keys
    `first[r] <= key < last[r]`, int64 `[R]` each.
    """

    scale: float
    first: np.ndarray
    last: np.ndarray
    growth: np.ndarray | None = None
    cap: float | None = None


class Attended(NamedTuple):
    """One segment's share in fused layers: `length` rows, the first at `position`; what they see, by which rule.

    `room.arrays[layer]` are the layer's keys and values, `[H_kv, room, width]` each. They hold `position` tokens
    already, and have room for those of the rows. A room keeps its arrays; more room is another.
    """

    length: int
    position: int
    room: Any
    rule: Callable[[AttentionSpec], Scoring]


@dataclass(frozen=True, eq=False)
class Ending:
    """What follows the last layer for every row: the norm, where there is one, and the projection to the vocabulary."""

    norm: NormSpec | None
    gain: Gain | None
    head: Linear


class Stacked(NamedTuple):
    """What fused layers give: the stream `[T, d]`; where an `Ending` was run with them, what it made of the stream,
    `[T, d]` and `[T, V]`.
    """

    x: Array
    final: Array | None = None
    logits: Array | None = None


Turns = Mapping[RotarySpec, tuple[Array, Array]]  # cosines and sines [T, dims / 2]


class Engine(Protocol):
    """What every engine offers. Nothing here knows a model's name.

    Five more operations are optional; stages ask whether an engine has them:

    - `hold(stored)` takes all weights of a model and gives back what the stages find them in, in place of the
      stored `Linear`s and `Gain`s: parts by name, which have the same attributes (torch's parameters).
    - `attend(q, keys, values, scoring)` is all of attention at once, scores unseen; `[H, R, d_value]`, or None where
      it declines.
    - `square(point, q, keys, scoring, begun)` is one of the T × T points of a whole sequence, `[H, R, S]`: `attn.dots`
      and `attn.scores` of every pair, `attn.masked` or `attn.pattern`. `begun` are others of them that are there.
    - `linear_of_part(x, linear, first)` is the product of rows that are x `[T, n]` from column `first` on and 0
      elsewhere, without a bias; None where it declines.
    - `stack(first, specs, weights, x, turns, attended, taps, ending)` is consecutive layers at once, the first of
      them layer `first`, and after the last layer the ending, where one is given: `[T, d]` → `Stacked`. It puts new
      keys and values where `attended` says, and when all is done it shows the layers' taps what they want.
      How many it would take of the layers to come `stackable(specs, layout, taps)` says.

    Three things may be said of an engine, all left out by most: `differentiable`, that its arrays remember how they
    were made; `bitwise`, False where a row's last bits hang on what is computed and looked at beside it; and
    `tokens_per_pass`, how many tokens of many texts it best computes together.
    """

    name: str
    note: str | None  # what people should know about why this engine was chosen; mostly None

    @property
    def dtype(self) -> Precision: ...

    def array(self, values: np.ndarray) -> Array:
        """Floats from NumPy, in the engine's own dtype and type."""

    def numpy(self, values: Array) -> np.ndarray:
        """Back to NumPy, in the engine's dtype, or in a wider one that holds its numbers exactly."""

    def empty(self, shape: Sequence[int]) -> Array:
        """An array to be written into."""

    def copy(self, values: Array) -> Array:
        """A copy that later in-place work leaves alone."""

    def embed(self, weight: Weight, ids: np.ndarray) -> Array:
        """Rows of an embedding matrix: ids `[T]` → `[T, d]`."""

    def linear(self, x: Array, linear: Linear, layout: Layout) -> Array:
        """x W (+ b): `[T, d_in]` → `[T, d_out]`, each of the layout's row blocks by itself.

        And what adapters add to this projection, where they do (`engines.low_rank.with_added`).
        """

    def layer_norm(self, x: Array, gain: Gain, eps: float) -> Array:
        """(x − mean) / √(variance + eps) · gain + bias over the last axis. (Ba et al. 2016)"""

    def rms_norm(self, x: Array, gain: Gain, eps: float) -> Array:
        """x / √(mean of squares + eps) · gain over the last axis. (Zhang & Sennrich 2019)"""

    def activate(self, x: Array, kind: str, times: Array | None = None) -> Array:
        """The non-linearity `kind`, one of spec.ACTIVATIONS, "sigmoid" or "tanh": each element, in a new array.

        Where `times` is given, each result times its element.
        """

    def rotate(self, x: Array, cosines: Array, sines: Array, pairing: str) -> Array:
        """Turn pairs of coordinates of `[H, T, d_head]` by the angles of `[T, dims / 2]`; the rest passes.

        pairing "halves" pairs coordinate i with i + dims/2, "adjacent" pairs 2i with 2i + 1.
        (Su et al. 2021)
        """

    def dots(self, q: Array, k: Array) -> Array:
        """q kᵀ: `[H, R, d_head]` with `[H_kv, S, d_head]` → `[H, R, S]`; H / H_kv queries share a key head."""

    def scale(self, dots: Array, factor: float) -> Array:
        """dots · factor, in place."""

    def cap(self, x: Array, limit: float) -> Array:
        """limit · tanh(x / limit), in place: values bend so that none passes the limit. (Gemma 2)"""

    def mask(self, scores: Array, first: np.ndarray, last: np.ndarray) -> Array:
        """Set to −∞, in place, every key outside `first[r] <= key < last[r]` of query row r."""

    def softmax(self, masked: Array) -> Array:
        """Rows to weights that sum to 1, in place; −∞ becomes exactly 0."""

    def mix(self, pattern: Array, v: Array) -> Array:
        """pattern v: `[H, R, S]` with `[H_kv, S, d_head]` → `[H, R, d_head]`."""
