"""Consecutive layers as one program: each written by itself, then joined, with a value that many share set once."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import is_
from typing import Any
from weakref import ref

import numpy as np

from cutaway.engines.cpu.kernel import place
from cutaway.engines.cpu.layer_program import LayerProgram
from cutaway.engines.cpu.program import Argument, Place, Program, Task
from cutaway.spec import AttentionSpec, LayerSpec, RotarySpec

_OF_A_LAYER = ("keys", "values", "key head", "value head", "new key", "new value")  # of each segment in each layer
_OF_A_RULE = (
    "seen",
    "start",
    "scores",
    "first",
    "last",
    "growth",
    "dots parts",
    "rows parts",
    "mix parts",
)  # of each segment, the same in all layers that attend alike; set before every run


class StackProgram:
    """Layers over segments of these lengths. Places that are set before a run: "x", "resid_post" (what comes out),
    each name of `buffers`; and by methods of this class, what belongs to a segment and to a rotation.

    `attentions` and `rotaries` are those that occur, each once. Points are shown by a program of one layer only.
    """

    def __init__(
        self,
        engine: Any,
        specs: Sequence[LayerSpec],
        weights: Sequence[Mapping[str, Any]],
        lengths: Sequence[int],
    ) -> None:
        self.lengths = lengths
        self.layers = [LayerProgram(engine, spec, parts, lengths) for spec, parts in zip(specs, weights, strict=True)]
        self.attentions: list[AttentionSpec] = list(dict.fromkeys(spec.attention for spec in specs))
        self.rotaries: list[RotarySpec] = list(dict.fromkeys(a.rotary for a in self.attentions if a.rotary is not None))
        self.buffers = self._buffers()
        self.bound: tuple[int, frozenset[str]] | None = None  # to which state of the scratch, and what lies elsewhere
        self._of = tuple(specs), [tuple(parts.values()) for parts in weights]
        self._program = Program([phase for index in range(len(specs)) for phase in self._phases(index)])
        self.set, self.run = self._program.set, self._program.run
        self._segments = [SegmentPlaces(self, self._program, index) for index in range(len(lengths))]

    def is_of(self, specs: Sequence[LayerSpec], weights: Sequence[Mapping[str, Any]]) -> bool:
        """Whether this is the program of these very layers: of the same weights an edited run has other specs."""
        own_specs, own_weights = self._of
        return all(map(is_, specs, own_specs)) and all(
            len(parts) == len(kept) and all(map(is_, parts.values(), kept))
            for parts, kept in zip(weights, own_weights, strict=True)
        )

    def rule(self, index: int) -> int:
        """Which of `attentions` is that of a layer."""
        return self.attentions.index(self.layers[index].spec.attention)

    def segment(self, index: int, room: Any, first: int) -> "SegmentPlaces":
        """The places of a segment whose keys and values lie in `room`, of our first layer at `first`."""
        places = self._segments[index]
        if not places.are_in(room, first):
            places.move(room, first)
        return places

    def _buffers(self) -> dict[str, int]:
        """Numbers of each array that lies between the steps; layers use them one after another."""
        sizes: dict[str, int] = {}
        for layer in self.layers:
            for name, shape in layer.shapes.items():
                sizes[name] = max(sizes.get(name, 0), int(np.prod(shape)))
            for name, size in layer.scratch.items():
                sizes[name] = max(sizes.get(name, 0), size)
        stream = sizes.pop("resid_post")
        return sizes | {f"stream {side}": stream for side in range(min(2, len(self.layers) - 1))}

    def _phases(self, index: int) -> list[list[Task]]:
        """A layer's phases, its places by their names in the whole."""
        named: dict[str, str] = {}
        if index > 0:
            named["x"] = f"stream {(index - 1) % 2}"
        if index < len(self.layers) - 1:
            named["resid_post"] = f"stream {index % 2}"
        rule, rotary = self.rule(index), self.layers[index].spec.attention.rotary
        if rotary is not None:
            turn = self.rotaries.index(rotary)
            named |= {name: f"{name} {turn}" for name in ("cosines", "sines")}
        for segment in range(len(self.lengths)):
            named |= {f"{name} {segment}": f"{name} {segment} of layer {index}" for name in _OF_A_LAYER}
            named |= {f"{name} {segment}": f"{name} {segment} of rule {rule}" for name in _OF_A_RULE}

        def argument(given: Argument) -> Argument:
            return replace(given, name=named.get(given.name, given.name)) if isinstance(given, Place) else given

        def task(given: Task) -> Task:
            parts = argument(given.parts)
            assert not isinstance(parts, float)
            return Task(given.kernel, tuple(map(argument, given.arguments)), parts)

        return [[task(part) for part in phase] for phase in self.layers[index].phases]


class SegmentPlaces:
    """A segment's places in a program: those of its stored keys and values, and those that every run sets anew.

    Nothing here keeps a cache alive: whoever has finished with a text gets its memory back.
    """

    def __init__(self, stack: StackProgram, program: Program, index: int) -> None:
        self.scores = f"scores {index}"  # the name of their scratch
        self._in: tuple[Any, int] = (lambda: None, 0)
        self._words, self._count = program.words, len(stack.layers)
        layers = range(self._count)

        def of_each_layer(name: str) -> tuple[np.ndarray, np.ndarray]:
            return _joined([program.indices(f"{name} {index} of layer {i}") for i in layers])

        self._arrays = [(of_each_layer(f"{side}s"), of_each_layer(f"{side} head")) for side in _SIDES]
        self._new = [of_each_layer(f"new {side}") for side in _SIDES]
        self._places, self._steps = np.zeros((2, 2, self._count), np.int64)
        self._rules = [
            _joined([program.indices(f"{name} {index} of rule {rule}") for name in _OF_A_RULE])
            for rule in range(len(stack.attentions))
        ]

    def are_in(self, room: Any, first: int) -> bool:
        """Whether these are the places in this very room."""
        return self._in[0]() is room and self._in[1] == first

    def move(self, room: Any, first: int) -> None:
        """From now on keys and values lie in this room."""
        self._in = (lambda: None, 0)  # until all are set: whoever interrupts this must not leave a place behind
        arrays = room.arrays[first : first + self._count]
        for side, ((where, which), (where_heads, which_heads)) in enumerate(self._arrays):
            self._places[side] = [place(pair[side]) for pair in arrays]
            self._steps[side] = [pair[side].strides[1] for pair in arrays]
            self._words[where] = self._places[side][which]
            self._words[where_heads] = np.array([pair[side].strides[0] for pair in arrays])[which_heads]
        self._in = (ref(room), first)

    def set_position(self, position: int) -> None:
        """Where the new keys and values go."""
        for side, (where, which) in enumerate(self._new):
            self._words[where] = (self._places[side] + position * self._steps[side])[which]

    def set_rule(self, rule: int, *numbers: int) -> None:
        """What is set before every run, in the order of `_OF_A_RULE`."""
        where, which = self._rules[rule]
        self._words[where] = np.array(numbers, np.int64)[which]


def _joined(indices: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """All of them one after another, and of each from which array it is."""
    return np.concatenate(indices), np.repeat(np.arange(len(indices)), [len(part) for part in indices])


_SIDES = ("key", "value")
