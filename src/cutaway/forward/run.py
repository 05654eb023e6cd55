"""What all stages of one pass share: the engine, the layout of the rows, the caches, the rotations."""

from collections.abc import Sequence
from dataclasses import dataclass

from cutaway.engines.layout import Layout
from cutaway.engines.protocol import Array, Engine
from cutaway.forward.cache import KVCache
from cutaway.forward.positions import rotation
from cutaway.spec import ModelSpec, RotarySpec


@dataclass(frozen=True, eq=False)
class Run:
    """`caches` holds one per slot, or None where nothing is cached; `rotations` the cosines and sines `[T, dims/2]`."""

    engine: Engine
    layout: Layout
    caches: Sequence[KVCache] | None
    rotations: dict[RotarySpec, tuple[Array, Array]]

    @classmethod
    def of(cls, engine: Engine, spec: ModelSpec, layout: Layout, caches: Sequence[KVCache] | None = None) -> "Run":
        kinds = {layer.attention.rotary for layer in spec.layers if layer.attention.rotary is not None}
        return cls(engine, layout, caches, {kind: rotation(engine, kind, layout) for kind in kinds})
