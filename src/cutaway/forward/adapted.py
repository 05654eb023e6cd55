"""Weights with what adapters add to them in one run: the same stored matrices, and two narrow ones beside some."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cutaway.engines.protocol import Array, Linear, LowRank

Added = Mapping[str, Sequence[LowRank]]  # what is added to each projection, by its name ("layers.3.attn.q")


class AdaptedParts:
    """The weights below one name as the stages read them, with something added to some of the projections.

    `of` are those without, in whichever form the engine has them: what they hold is looked up when it is used.
    """

    def __init__(self, of: Any, added: Added) -> None:
        self._of = of
        self._added = {name: tuple(parts) for name, parts in added.items()}

    def __getitem__(self, name: str) -> Any:
        part = self._of[name]
        return part if name not in self._added else Linear(part.weight, part.bias, self._added[name])

    def get(self, name: str, default: Any = None) -> Any:
        """The part with this name, and `default` where there is none."""
        part = self._of.get(name)
        if part is None:
            return default
        return part if name not in self._added else self[name]

    def through(self, stage: Callable[..., Array], *rest: Any) -> Array:
        """stage(these weights, …), as a call of what holds them: its hooks see what goes in and what comes out."""
        return self._of.through(lambda _, *inner: stage(self, *inner), *rest)


def by_layer(added: Added) -> tuple[dict[int, dict[str, Sequence[LowRank]]], dict[str, Sequence[LowRank]]]:
    """What is added inside each layer, by the names inside it, and outside of all."""
    inside: dict[int, dict[str, Sequence[LowRank]]] = {}
    outside: dict[str, Sequence[LowRank]] = {}
    for name, parts in added.items():
        if name.startswith("layers."):
            _, number, part = name.split(".", 2)
            inside.setdefault(int(number), {})[part] = parts
        else:
            outside[name] = parts
    return inside, outside
