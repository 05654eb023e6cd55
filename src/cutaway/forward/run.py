"""What all stages of one pass share: the engine, the layout of the rows, the caches, the rotations."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cutaway.engines.layout import Layout
from cutaway.engines.protocol import Array, Engine
from cutaway.forward.cache import KVCache
from cutaway.forward.positions import rotation
from cutaway.spec import ModelSpec, RotarySpec

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Run:
    """`caches` holds one per slot, or None where nothing is cached; `rotations` the cosines and sines `[T, dims/2]`.

    `fused` collects the layers that the engine ran in one operation.
    """

    engine: Engine
    layout: Layout
    caches: Sequence[KVCache] | None
    rotations: dict[RotarySpec, tuple[Array, Array]]
    fused: set[int] = field(default_factory=set)
    _remembered: dict[Any, Any] = field(default_factory=dict)

    def remembered(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` gives, worked out once in a pass."""
        if key not in self._remembered:
            self._remembered[key] = make()
        return self._remembered[key]

    @classmethod
    def of(cls, engine: Engine, spec: ModelSpec, layout: Layout, caches: Sequence[KVCache] | None = None) -> "Run":
        return cls(engine, layout, caches, {kind: rotation(engine, kind, layout) for kind in spec.rotaries})
