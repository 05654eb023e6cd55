"""The keys and values that a pass leaves behind, so that the next token need not work them out again (chapter 15.3)."""

from cutaway.engines.protocol import Array, Engine
from cutaway.errors import CutawayError
from cutaway.spec import ModelSpec

GROWTH = 256  # tokens that a cache is enlarged by


class KVCache:
    """One sequence's keys and values: for every layer `[H_kv, capacity, d_head]`, of which `length` tokens are valid.

    Keys are kept as they enter the dot product, that is, after rotation. A pass that fails half-way
    leaves `length` as it was, and what it wrote beyond is written over by the next.
    """

    def __init__(self, spec: ModelSpec, engine: Engine) -> None:
        if not spec.causal:
            raise CutawayError(
                f"{spec.name} attends in both directions: every new token changes all earlier rows, so nothing "
                "can be cached; trace it without a cache."
            )
        self._engine = engine
        self._shapes = [(layer.attention.n_kv_heads, layer.attention.d_head) for layer in spec.layers]
        self._keys: list[Array | None] = [None] * spec.n_layers
        self._values: list[Array | None] = [None] * spec.n_layers
        self.length = 0

    def append(self, layer: int, position: int, keys: Array, values: Array) -> tuple[Array, Array]:
        """Store `[H_kv, T, d_head]` at `position` and return all keys and values up to there."""
        if position != self.length:
            raise CutawayError(f"The cache holds {self.length} tokens; rows at position {position} do not follow them.")
        end = position + keys.shape[1]
        all_keys = self._keys[layer] = self._room(self._keys[layer], layer, end)
        all_values = self._values[layer] = self._room(self._values[layer], layer, end)
        all_keys[:, position:end] = keys
        all_values[:, position:end] = values
        return all_keys[:, :end], all_values[:, :end]

    def advance(self, tokens: int) -> None:
        """Count `tokens` more as valid: all layers have stored them."""
        self.length += tokens

    @property
    def nbytes(self) -> int:
        """Bytes that the valid tokens take."""
        values = sum(2 * heads * d_head for heads, d_head in self._shapes)
        return self.length * values * self._engine.dtype.itemsize

    def _room(self, stored: Array | None, layer: int, end: int) -> Array:
        if stored is not None and stored.shape[1] >= end:
            return stored
        heads, d_head = self._shapes[layer]
        grown = 0 if stored is None else stored.shape[1] * 2
        larger = self._engine.empty((heads, max(grown, -(-end // GROWTH) * GROWTH), d_head))
        if stored is not None:
            larger[:, : self.length] = stored[:, : self.length]
        return larger
