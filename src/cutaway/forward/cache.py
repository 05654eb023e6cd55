"""The keys and values that a pass leaves behind, so that the next token need not work them out again (chapter 15.3)."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cutaway.engines.protocol import Array, Engine
from cutaway.errors import CutawayError
from cutaway.forward.positions import settled
from cutaway.spec import AttentionSpec, ModelSpec

GROWTH = 256  # tokens that a cache is enlarged by


@dataclass(frozen=True)
class HeldLayer:
    """What one layer of a cache holds: `rows`, one for each token, of `values` numbers each.

    Of them the next token sees `in_reach`: all, but for a sliding window or a chunk. `nbytes` are those of the rows,
    `reserved` those of the arrays that they stand in, which have room for more.
    """

    layer: int
    kind: str
    values: int
    rows: int
    in_reach: int
    nbytes: int
    reserved: int


class Room:
    """Where every layer's keys and values lie: `arrays[layer]`, `[H_kv, room, width]` of each, for `tokens` tokens.

    Whoever needs more room makes another.
    """

    def __init__(self, arrays: Sequence[tuple[Array, Array]], tokens: int) -> None:
        self.arrays, self.tokens = arrays, tokens

    @classmethod
    def of(cls, spec: ModelSpec, engine: Engine, tokens: int) -> "Room":
        """Room for so many tokens of a sequence that is not cached."""
        return cls([_empty(engine, _shapes(layer.attention), tokens) for layer in spec.layers], tokens)


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
        self._engine, self._spec = engine, spec
        self._shapes = [_shapes(layer.attention) for layer in spec.layers]
        self._rotaries = spec.rotaries
        self._held = Room([_empty(engine, shapes, 0) for shapes in self._shapes], 0)
        self.ids: list[int] = []
        self._model: weakref.ref[Any] | None = None  # whose passes filled it
        self._user: object = None

    def __repr__(self) -> str:
        return f"<KVCache of {self._spec.name}: {self.length:,} tokens, {self.nbytes:,} of {self.reserved:,} bytes>"

    @property
    def length(self) -> int:
        """How many tokens are valid."""
        return len(self.ids)

    @property
    def room(self) -> int:
        """How many tokens fit before the arrays have to grow."""
        return self._held.tokens

    @property
    def layers(self) -> tuple[HeldLayer, ...]:
        """What each layer holds."""
        return held_layers(self._spec, self.length, self.room, self._engine.dtype.itemsize)

    def refuse_foreign(self, model: object, spec: ModelSpec, engine: Engine) -> None:
        """Raise CutawayError where this cache cannot hold what a model computes, or holds what another has computed.

        `model` is whatever is one and the same in all passes of one model.
        """
        if self._spec is not spec and self._spec != spec:
            raise CutawayError(f"The cache was made for {self._spec.name}, not for {spec.name}; make one for it.")
        if (self._engine.name, self._engine.dtype) != (engine.name, engine.dtype):
            raise CutawayError(
                f"The cache was made on the {self._engine.name} engine in {self._engine.dtype.name}, the model runs on "
                f"the {engine.name} engine in {engine.dtype.name}; make one for it."
            )
        if self.length and self._model is not None and self._model() is not model:
            raise CutawayError(
                f"The cache holds keys and values of another {spec.name}, loaded by itself, whose weights may differ; "
                "make a new one."
            )

    def claim(self, model: object, user: object) -> None:
        """From now on the passes of `user` fill it, and nobody else's."""
        self._model, self._user = weakref.ref(model), user

    def refuse_others(self, user: object) -> None:
        """Raise CutawayError where somebody else took it over meanwhile: its rows are no longer those of `user`."""
        if self._user is not user:
            raise CutawayError("Another response took this cache over; one that goes on needs a cache of its own.")

    def fork(self) -> "KVCache":
        """Another cache that holds the same rows, to go on from them in another way: copied, not computed."""
        other = KVCache(self._spec, self._engine)
        for stored, copied in zip(self._held.arrays, other.make_room(self.length).arrays, strict=True):
            for mine, its in zip(stored, copied, strict=True):
                its[:, : self.length] = mine[:, : self.length]
        other.ids = list(self.ids)  # once there are rows for them
        return other

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
        return self.make_room(tokens).arrays[layer]

    def make_room(self, tokens: int) -> Room:
        """All layers' arrays, with room for so many tokens; those held stand first."""
        if self._held.tokens < tokens:
            capacity = max(2 * self._held.tokens, -(-tokens // GROWTH) * GROWTH)
            arrays = list(self._held.arrays)
            self._held = Room(arrays, self._held.tokens)  # good whatever happens: each layer has that much at least
            for layer, shapes in enumerate(self._shapes):  # so only one layer is there twice
                larger = _empty(self._engine, shapes, capacity)
                for before, after in zip(arrays[layer], larger, strict=True):
                    after[:, : self.length] = before[:, : self.length]
                arrays[layer] = larger
            self._held = Room(arrays, capacity)
        return self._held

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
        return self.length * self.row_bytes

    @property
    def reserved(self) -> int:
        """Bytes of the arrays, with the room that is still free in them."""
        return self.room * self.row_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes that one token takes in all layers."""
        values = sum(heads * width for both in self._shapes for heads, width in both)
        return values * self._engine.dtype.itemsize


def _empty(engine: Engine, shapes: tuple[tuple[int, int], tuple[int, int]], tokens: int) -> tuple[Array, Array]:
    one, other = (engine.empty((heads, tokens, width)) for heads, width in shapes)
    return one, other


def held_layers(spec: ModelSpec, rows: int, room: int, itemsize: int) -> tuple[HeldLayer, ...]:
    """What the layers of a cache of `rows` tokens hold, with room for `room`; numbers of `itemsize` bytes."""
    held = []
    for index, layer in enumerate(spec.layers):
        attention = layer.attention
        values = attention.cached_values
        kind = "keys and values" if attention.latent is None else "latents and one shared key"
        kind += f", window of {attention.window:,}" if attention.window is not None else ""
        kind += f", chunks of {attention.chunk:,}" if attention.chunk is not None else ""
        # The next token is one of those that it sees; a window and a chunk count it.
        seen = min(rows + 1, attention.window or rows + 1, rows % attention.chunk + 1 if attention.chunk else rows + 1)
        size = values * itemsize
        held.append(HeldLayer(index, kind, values, rows, seen - 1, rows * size, room * size))
    return tuple(held)


def _shapes(attention: AttentionSpec) -> tuple[tuple[int, int], tuple[int, int]]:
    """(heads, width) of the two arrays that a layer stores: keys and values, or the latent and the shared key."""
    latent = attention.latent
    if latent is not None:
        return (1, latent.kv_rank), (1, latent.d_rope)
    return (attention.n_kv_heads, attention.d_head), (attention.n_kv_heads, attention.value_width)
