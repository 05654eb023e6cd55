"""The two ways of the cpu engine through a layer, fused and by stages, held against each other bit for bit."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from cutaway.engines.cpu.engine import CpuEngine
from cutaway.engines.layout import Layout
from cutaway.engines.weights import Weight
from cutaway.forward.cache import KVCache
from cutaway.forward.parameters import Parameters
from cutaway.forward.transformer import Pass, transformer
from cutaway.points import Point, points_of
from cutaway.spec import FeedForwardSpec, LayerSpec, ModelSpec
from cutaway.trace.capture.recorder import Recorder

MOST_ROWS = 32  # of a fused layer
NOT_SHOWN = frozenset({"attn.dots", "attn.scores", "attn.masked", "attn.head_out"})  # what makes a layer go by stages
Seen = dict[Any, np.ndarray]


class Poisoned(CpuEngine):
    """The cpu engine; what it has not written yet is not a number, so that whoever reads it is found out."""

    def empty(self, shape: Sequence[int]) -> np.ndarray:
        return np.full(shape, np.nan, np.float32)


class ByStages(Poisoned):
    """The same kernels, called by the stages only."""

    stackable = None  # type: ignore[assignment]
    attend = None  # type: ignore[assignment]


class Side:
    """One way: an engine, the weights in its hands, and a cache for each sequence."""

    def __init__(self, engine: CpuEngine, spec: ModelSpec, weights: Mapping[str, Weight], sequences: int = 1) -> None:
        self.engine, self.spec = engine, spec
        self.parameters = Parameters(spec, weights, engine)
        self.caches = [KVCache(spec, engine) for _ in range(sequences)] if spec.causal else []

    def run(
        self, ids: Sequence[np.ndarray], points: Iterable[Point], slots: Sequence[int] | None = None
    ) -> tuple[Seen, Pass]:
        """Everything that one pass shows and leaves; the sequences go on from the caches in these slots, if any."""
        for scratch, _ in self.engine._stacks._scratch.values():
            scratch.fill(np.nan)
        caches = None if slots is None else [self.caches[slot] for slot in slots]
        if caches is not None:
            ids = [cache.due(part) for cache, part in zip(caches, ids, strict=True)]
        layout = Layout.of(map(len, ids), None if caches is None else [cache.length for cache in caches])
        recorder = Recorder(self.engine, layout, points)
        rows = range(layout.rows)
        ran = transformer(self.engine, self.spec, self.parameters, ids, caches=caches, tap=recorder, rows=rows)
        seen: Seen = {"final": ran.final} if ran.logits is None else {"final": ran.final, "logits": ran.logits}
        for point, value in recorder.kept.items():
            for index, part in value.items() if isinstance(value, dict) else ((None, value),):
                seen[str(point), index] = part
        for cache in caches or ():
            for layer in range(self.spec.n_layers):
                for name, kept in zip(("keys", "values"), cache.reserve(layer, cache.length), strict=True):
                    seen[name, layer, self.caches.index(cache)] = kept[:, : cache.length].copy()
        return seen, ran


def can_fuse(layer: LayerSpec) -> bool:
    return layer.attention.latent is None and isinstance(layer.feed_forward, FeedForwardSpec)


def showable(spec: ModelSpec) -> list[Point]:
    """The points of a model that need no stages."""
    return [point for point in points_of(spec) if point.name not in NOT_SHOWN]


def assert_same_bits(found: Seen, expected: Seen) -> None:
    assert found.keys() == expected.keys()
    differing = [key for key, value in expected.items() if not same_bits(found[key], value)]
    assert not differing, differing


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.dtype != np.float32:
        return np.array_equal(one, other)
    return np.array_equal(*(np.ascontiguousarray(side).view(np.uint32) for side in (one, other)))


def assert_both_ways_agree(
    spec: ModelSpec, weights: Mapping[str, Weight], passes: Sequence[Sequence[np.ndarray]], slots: Sequence[int] | None
) -> None:
    """Pass after pass, fused unseen, fused with everything shown, and by stages: the same bits, by the way it says.

    With `slots`, sequence i of a pass goes on from cache `slots[i]`; else nothing is cached.
    """
    count = 0 if slots is None else max(slots) + 1
    unseen, shown, stages = (Side(kind(), spec, weights, count) for kind in (Poisoned, Poisoned, ByStages))
    for ids in passes:
        expected, by_stages = stages.run(ids, showable(spec), slots)
        few = by_stages.layout.rows <= MOST_ROWS
        fused = frozenset(i for i, layer in enumerate(spec.layers) if few and can_fuse(layer))
        found, looking = shown.run(ids, showable(spec), slots)
        plain, alone = unseen.run(ids, (), slots)
        assert (alone.fused, looking.fused, by_stages.fused) == (fused, fused, frozenset())
        assert all(np.isfinite(value).all() for value in plain.values())
        assert_same_bits(found, expected)
        assert_same_bits(plain, {key: value for key, value in expected.items() if key in plain})
