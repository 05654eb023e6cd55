"""The model as generation sees it: sequences of ids go in where their caches end, rows of logits come out."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np

from cutaway.engines.layout import CHUNK
from cutaway.engines.protocol import Engine
from cutaway.errors import CutawayError
from cutaway.forward.cache import KVCache
from cutaway.forward.layers_shown import layers_shown
from cutaway.forward.parameters import Parameters
from cutaway.forward.positions import settled
from cutaway.forward.transformer import transformer
from cutaway.points import Tap
from cutaway.spec import DynamicScaling, ModelSpec
from cutaway.trace.finite import first_nonfinite


@dataclass(frozen=True, eq=False)
class Work:
    """One sequence's part of a pass: `ids` follow what its cache holds; the logits of the last `rows` are wanted."""

    cache: KVCache
    ids: Sequence[int]
    rows: int


class Passes:
    """A model's forward passes over packed sequences, each with its cache."""

    def __init__(self, engine: Engine, spec: ModelSpec, parameters: Parameters) -> None:
        self.spec = spec
        self._engine = engine
        self._parameters = parameters
        self._rotaries = {layer.attention.rotary for layer in spec.layers if layer.attention.rotary is not None}

    @property
    def dtype(self) -> str:
        """The type of the numbers that caches hold."""
        return self._engine.dtype.name

    def cache(self) -> KVCache:
        """A new, empty cache. Raises CutawayError for a model that cannot have one."""
        return KVCache(self.spec, self._engine)

    def run(self, work: Sequence[Work], *, shown: bool = False) -> list[np.ndarray]:
        """One pass for all of them; for each its rows of logits, `[rows, V]`. `shown` draws a bar over the layers.

        Every sequence gets what it would get alone, bit for bit. Raises CutawayError where the logits are no
        numbers, with the place in the pass where they ceased to be.
        """
        due = [part.cache.due(part.ids) for part in work]
        ends = np.cumsum([len(ids) for ids in due]).tolist()
        asked = [row for part, end in zip(work, ends, strict=True) for row in range(end - part.rows, end)]
        watching: AbstractContextManager[Tap | None] = layers_shown(self.spec) if shown else nullcontext()
        with watching as tap:
            ran = transformer(
                self._engine,
                self.spec,
                self._parameters,
                due,
                caches=[part.cache for part in work],
                tap=tap,
                rows=asked,
            )
        logits = self._engine.numpy(ran.logits)
        if not np.isfinite(logits).all():
            row = int(np.flatnonzero(~np.isfinite(logits).all(axis=1))[0])
            self._refuse(next(part for part, end in zip(work, ends, strict=True) if asked[row] < end).cache.ids)
        return np.split(logits, np.cumsum([part.rows for part in work])[:-1])

    @property
    def may_shorten(self) -> bool:
        """Whether a sequence may be made shorter again: not where the angles of all rows hang on its length."""
        return not any(isinstance(rotary.scaling, DynamicScaling) for rotary in self._rotaries)

    def chunk(self, position: int, length: int, most: int) -> int:
        """How many of `length` ids that follow `position` to run at once, at most `most` where that can be.

        Chunks end at absolute multiples of CHUNK, so that rows are multiplied in the same company as in one pass; 0
        where `most` reaches to none. A sequence whose angles hang on its length is run whole.
        """
        if length <= most:
            return length
        taken = (position + most) // CHUNK * CHUNK - position
        whole = position + length
        if any(not settled(rotary, position + taken, whole) for rotary in self._rotaries):
            return length
        return max(0, taken)

    def _refuse(self, ids: Sequence[int]) -> None:
        where = first_nonfinite(self._engine, self.spec, self._parameters, ids, None)
        raise CutawayError(f"{self.spec.name} computes no usable numbers: {where}")


def reuse(cache: KVCache, ids: Sequence[int]) -> int:
    """Shorten `cache` to what it shares with `ids`, so that only the rest has to run; returns the length that stays.

    At least the last of `ids` is left to run, since its row has to be computed for the next token.
    """
    shared = shared_prefix(cache.ids, ids[:-1])
    if shared < cache.length:
        cache.truncate(shared)
    return cache.length


def shared_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many of the first tokens are the same in both."""
    most = min(len(one), len(other))
    differing = np.flatnonzero(np.asarray(one[:most]) != np.asarray(other[:most]))
    return int(differing[0]) if len(differing) else most
