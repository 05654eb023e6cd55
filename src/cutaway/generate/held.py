"""What a batch has read before: the caches of sequences that ended, and prompts for those who wait with the same."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cutaway.forward.cache import KVCache
from cutaway.generate.passes import shared_prefix
from cutaway.generate.response import Request, ScoredToken

WORTH_REUSING = 16  # tokens that a prompt shares with an earlier sequence


@dataclass(frozen=True, eq=False)
class ReadPrompt:
    """A prompt that was read, for those with the same one who wait: its rows, and the logits `[1, V]` after it."""

    request: Request
    cache: KVCache
    logits: np.ndarray
    scored: list[ScoredToken]


class Held:
    """Prompts that were read for others, and the `retained` caches of the sequences that ended last."""

    def __init__(self, retained: int) -> None:
        self._retained = retained
        self._caches: deque[KVCache] = deque(maxlen=retained)
        self.prompts: list[ReadPrompt] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all their keys and values."""
        return sum(cache.nbytes for cache in (*self._caches, *(prompt.cache for prompt in self.prompts)))

    def keep(self, cache: KVCache) -> None:
        """Hold on to the cache of a sequence that ended; the oldest goes where they are too many."""
        if self._retained:
            self._caches.append(cache)

    def take(self, request: Request) -> KVCache | None:
        """The cache that shares most with a prompt, which is its own from now on; None where that is too little."""
        if request.score_prompt or request.edits:  # their rows are those of runs without edits
            return None
        shared = [shared_prefix(cache.ids, request.ids) for cache in self._caches]
        if not shared or max(shared) < WORTH_REUSING:
            return None
        best = self._caches[int(np.argmax(shared))]
        self._caches.remove(best)
        return best

    def prompt(self, request: Request) -> ReadPrompt | None:
        """The prompt of `request`, where it was read before."""
        return next((read for read in self.prompts if read.request.reads_like(request)), None)

    def forget(self, waiting: Sequence[Request]) -> None:
        """Let go of prompts that none of those who wait has."""
        self.prompts = [read for read in self.prompts if any(map(read.request.reads_like, waiting))]
