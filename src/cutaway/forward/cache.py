"""The keys and values that a pass leaves behind, so that the next token need not work them out again (chapter 15.3)."""

from collections.abc import Sequence

import numpy as np

from cutaway.engines.protocol import Array, Engine
from cutaway.errors import CutawayError
from cutaway.forward.positions import settled
from cutaway.spec import AttentionSpec, ModelSpec

GROWTH = 256  # tokens that a cache is enlarged by


class KVCache:
    """One sequence's keys and values: for every layer `[H_kv, capacity, d_head]`, of which `length` tokens are valid.

    Keys are kept as they enter the dot product, that is, after rotation; `ids` are those tokens. A pass that fails
    half-way leaves them as they were, and what it wrote beyond is written over by the next.
    """

    def __init__(self, spec: ModelSpec, engine: Engine) -> None:
        if not spec.causal:
            raise CutawayError(
                f"{spec.name} attends in both directions: every new token changes all earlier rows, so nothing "
                "can be cached; trace it without a cache."
            )
        self._engine = engine
        self._shapes = [_shapes(layer.attention) for layer in spec.layers]
        self._rotaries = {layer.attention.rotary for layer in spec.layers if layer.attention.rotary is not None}
        self._stored: list[tuple[Array, Array] | None] = [None] * spec.n_layers
        self.ids: list[int] = []

    @property
    def length(self) -> int:
        """How many tokens are valid."""
        return len(self.ids)

    def due(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """What has to run for `ids` to follow: they alone, or the whole sequence where nothing stored is of use.

        That is so where a rotary scaling looks at the length of the sequence and the new tokens change what it sees:
        then every earlier row is another, and what is stored is dropped.
        """
        if self.settled(self.length + len(ids)):
            return np.asarray(ids)
        whole = np.concatenate([self.ids, ids])
        self.ids = []
        return whole

    def refuse_unsettled(self, tokens: int) -> None:
        """Raise CutawayError where `tokens` more would make what is stored wrong (see `due`)."""
        if not self.settled(self.length + tokens):
            raise CutawayError(
                f"The rotary angles of a sequence of {self.length + tokens} tokens are others than those of the "
                f"{self.length} in the cache; run what `due` gives."
            )

    def settled(self, length: int) -> bool:
        """Whether what is stored holds in a sequence of `length` tokens too."""
        return self.length == 0 or all(settled(rotary, self.length, length) for rotary in self._rotaries)

    def append(self, layer: int, position: int, keys: Array, values: Array) -> tuple[Array, Array]:
        """Store `[H_kv, T, width]` of each at `position` and return all keys and values up to there."""
        if position != self.length:
            raise CutawayError(f"The cache holds {self.length} tokens; rows at position {position} do not follow them.")
        end = position + keys.shape[1]
        all_keys, all_values = self.reserve(layer, end)
        all_keys[:, position:end] = keys
        all_values[:, position:end] = values
        return all_keys[:, :end], all_values[:, :end]

    def reserve(self, layer: int, tokens: int) -> tuple[Array, Array]:
        """The layer's whole arrays `[H_kv, room, width]`, with room for so many tokens; those held stand first."""
        room = self._stored[layer] = self._room(layer, tokens)
        return room

    def advance(self, ids: Sequence[int] | np.ndarray) -> None:
        """Count these tokens as valid: all layers have stored them."""
        self.ids.extend(map(int, ids))

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens; all of them where the angles of a shorter sequence are others.

        Raises CutawayError for a length that the cache does not have.
        """
        if not 0 <= length <= self.length:
            raise CutawayError(f"The cache holds {self.length} tokens; it cannot be cut to {length}.")
        if all(settled(rotary, self.length, length) for rotary in self._rotaries):
            del self.ids[length:]
        else:
            self.ids = []

    @property
    def nbytes(self) -> int:
        """Bytes that the valid tokens take."""
        values = sum(heads * width for both in self._shapes for heads, width in both)
        return self.length * values * self._engine.dtype.itemsize

    def _room(self, layer: int, end: int) -> tuple[Array, Array]:
        """The layer's arrays, enlarged where `end` tokens do not fit."""
        stored = self._stored[layer]
        if stored is not None and stored[0].shape[1] >= end:
            return stored
        grown = 0 if stored is None else stored[0].shape[1] * 2
        capacity = max(grown, -(-end // GROWTH) * GROWTH)
        keys, values = (self._engine.empty((heads, capacity, width)) for heads, width in self._shapes[layer])
        if stored is not None:
            keys[:, : self.length], values[:, : self.length] = (part[:, : self.length] for part in stored)
        return keys, values


def _shapes(attention: AttentionSpec) -> tuple[tuple[int, int], tuple[int, int]]:
    """(heads, width) of the two arrays that a layer stores: keys and values, or the latent and the shared key."""
    latent = attention.latent
    if latent is not None:
        return (1, latent.kv_rank), (1, latent.d_rope)
    return (attention.n_kv_heads, attention.d_head), (attention.n_kv_heads, attention.value_width)
