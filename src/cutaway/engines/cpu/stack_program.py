"""Consecutive layers as one program: each written by itself, then joined, with a value that many share set once."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from operator import is_
from typing import Any, NamedTuple
from weakref import ref

import numpy as np

from cutaway.engines.cpu.kernel import place
from cutaway.engines.cpu.layer_phases import LayerPhases
from cutaway.engines.cpu.phases import EndingPhases
from cutaway.engines.cpu.program import Program
from cutaway.engines.protocol import Ending
from cutaway.spec import AttentionSpec, LayerSpec, RotarySpec

_OF_A_RULE = (
    "seen",
    "start",
    "first",
    "last",
    "growth",
    "dots parts",
    "rows parts",
    "mix parts",
)  # of each segment, the same in all layers that attend alike; set before every run


class Kept(NamedTuple):
    """An array that a layer shows, or hands to the next layer, which shows it."""

    layer: int
    name: str
    shape: tuple[int, ...]


class StackProgram:
    """Layers over segments of these lengths, and what follows the last of them where an ending is given.

    `shown` says of each layer which points are to be shown: `kept` are their arrays, without patterns, which hang on
    the segments. Other arrays lie in a scratch: `buffers` names them, with how many numbers. `attentions` and
    `rotaries` are those that occur, each once; `rules` says which of `attentions` is that of each layer.
    """

    def __init__(
        self,
        engine: Any,
        specs: Sequence[LayerSpec],
        weights: Sequence[Mapping[str, Any]],
        lengths: Sequence[int],
        shown: Sequence[frozenset[str]],
        ending: Ending | None,
    ) -> None:
        self.lengths, self.shown = lengths, shown
        self.layers = [LayerPhases(engine, spec, parts, lengths) for spec, parts in zip(specs, weights, strict=True)]
        self.ending = None if ending is None else EndingPhases(engine, ending, sum(lengths))
        self.attentions: list[AttentionSpec] = list(dict.fromkeys(spec.attention for spec in specs))
        self.rules = [self.attentions.index(spec.attention) for spec in specs]
        self.rotaries: list[RotarySpec] = list(dict.fromkeys(a.rotary for a in self.attentions if a.rotary is not None))
        self.kept = list(self._kept())
        self._own = {(one.layer, one.name) for one in self.kept}
        self.buffers = self._buffers()
        self.bound = -1  # to which state of the scratch
        self._of = tuple(specs), _parts_of(weights), _parts_of_ending(ending)
        parts = [(layer.phases, self._named(index)) for index, layer in enumerate(self.layers)]
        if self.ending is not None:
            parts.append((self.ending.phases, {"x": "resid_post"}))
        phases, named = zip(*((phase, names) for part, names in parts for phase in part), strict=True)
        self._program = Program(phases, named)
        angles = [f"{name} {index}" for index in range(len(self.rotaries)) for name in ("cosines", "sines")]
        arrays = [f"{one.name} of layer {one.layer}" for one in self.kept]
        self._segments = [SegmentPlaces(self, self._program, index) for index in range(len(lengths))]
        of_segments = chain.from_iterable(segment.names for segment in self._segments)
        self._scratch = self._program.words_of(list(self.buffers))
        self._given = self._program.words_of(
            ["x", "resid_post", "final.norm", "logits", *angles, *arrays, *of_segments]
        )

    def is_of(self, specs: Sequence[LayerSpec], weights: Sequence[Mapping[str, Any]], ending: Ending | None) -> bool:
        """Whether this is the program of these very layers: of the same weights an edited run has other specs."""
        own_specs, own_parts, own_ending = self._of
        parts, end = _parts_of(weights), _parts_of_ending(ending)
        return (
            len(parts) == len(own_parts)
            and all(map(is_, specs, own_specs))
            and all(map(is_, parts, own_parts))
            and all(map(is_, end, own_ending))
        )

    def bind(self, places: Sequence[int], state: int) -> None:
        """From now on the scratch of `buffers` lies at these places."""
        self.bound = -1  # until all are set: whoever interrupts this must not leave a place behind
        self._scratch.set(places)
        self.bound = state

    def run(self, given: Sequence[int], of_segments: Iterable[Sequence[Any]]) -> None:
        """All of it. `given` are the places of x, of the stream that comes out, of `final.norm` and of the logits (0
        where they are not wanted), of each rotation's cosines and sines, then of the arrays of `kept`; `of_segments`
        is what the segments' `numbers` gave.
        """
        self._given.set(np.concatenate([given, *chain.from_iterable(of_segments)]))
        self._program.run()

    def segment(self, index: int, room: Any, first: int) -> "SegmentPlaces":
        """The places of a segment whose keys and values lie in `room`, of our first layer at `first`."""
        places = self._segments[index]
        if not places.are_in(room, first):
            places.move(room, first)
        return places

    def _kept(self) -> Iterator[Kept]:
        """The arrays of their own. The stream that comes out is not among them: it always is one."""
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            names = {layer.same_as.get(name, name) for name in self.shown[index]} & layer.shapes.keys()
            if index < last and "resid_pre" in self.shown[index + 1]:
                names.add("resid_post")
            for name, shape in layer.shapes.items():
                if name in names and (name, index) != ("resid_post", last):
                    yield Kept(index, name, shape)

    def _buffers(self) -> dict[str, int]:
        """Numbers of each array that lies between the steps; layers use them one after another."""
        sizes: dict[str, int] = {}
        for layer in (*self.layers, *(() if self.ending is None else (self.ending,))):
            for name, size in (*((name, prod(shape)) for name, shape in layer.shapes.items()), *layer.scratch.items()):
                sizes[name] = max(sizes.get(name, 0), size)
        stream = sizes.pop("resid_post")
        sizes |= {f"stream {side}": stream for side in range(min(2, len(self.layers) - 1))}
        return {name: size for name, size in sizes.items() if name not in ("final.norm", "logits")}

    def _stream(self, index: int) -> str:
        """By which name the stream goes that comes out of a layer."""
        if index == len(self.layers) - 1:
            return "resid_post"
        return f"resid_post of layer {index}" if (index, "resid_post") in self._own else f"stream {index % 2}"

    def _named(self, index: int) -> dict[str, str]:
        """By which names a layer's places go in the whole."""
        layer = self.layers[index]
        named = {name: f"{name} of layer {index}" for name in layer.shapes if (index, name) in self._own}
        named |= {"x": self._stream(index - 1) if index else "x", "resid_post": self._stream(index)}
        rule, rotary = self.rules[index], layer.spec.attention.rotary
        if rotary is not None:
            turn = self.rotaries.index(rotary)
            named |= {name: f"{name} {turn}" for name in ("cosines", "sines")}
        for segment in range(len(self.lengths)):
            named |= {f"{name} {segment}": f"{name} {segment} of layer {index}" for name in _OF_A_LAYER}
            named |= {f"{name} {segment}": f"{name} {segment} of rule {rule}" for name in _OF_A_RULE}
            if "attn.pattern" in self.shown[index]:
                named[f"scores {segment}"] = f"scores {segment} of layer {index}"
        return named


class SegmentPlaces:
    """A segment's places in a program: those of its stored keys and values, and those that every run sets anew.

    Nothing here keeps a cache alive: whoever has finished with a text gets its memory back.
    """

    def __init__(self, stack: StackProgram, program: Program, index: int) -> None:
        self._in: tuple[Any, int] = (lambda: None, 0)
        self._count = len(stack.layers)
        layers = range(self._count)

        def of_each_layer(*names: str) -> list[str]:
            return [f"{name} {index} of layer {layer}" for name in names for layer in layers]

        self._arrays, self._heads = (program.words_of(of_each_layer(*names)) for names in _IN_A_ROOM)
        self._places, self._steps = np.zeros((2, 2 * self._count), np.int64)
        self.scratch = f"scores {index}"  # the name of that for the scores of one layer after another
        self.looking = [layer for layer in layers if "attn.pattern" in stack.shown[layer]]
        rules = [f"{name} {index} of rule {rule}" for rule in range(len(stack.attentions)) for name in _OF_A_RULE]
        patterns = [f"{self.scratch} of layer {layer}" for layer in self.looking]
        self.names = (self.scratch, *rules, *patterns, *of_each_layer(*_NEW))  # of what `numbers` gives

    def are_in(self, room: Any, first: int) -> bool:
        """Whether these are the places in this very room."""
        return self._in[0]() is room and self._in[1] == first

    def move(self, room: Any, first: int) -> None:
        """From now on keys and values lie in this room."""
        self._in = (lambda: None, 0)  # until all are set: whoever interrupts this must not leave a place behind
        arrays = room.arrays[first : first + self._count]
        both = [pair[side] for side in range(2) for pair in arrays]
        self._places[:] = [place(array) for array in both]
        self._steps[:] = [array.strides[1] for array in both]
        self._arrays.set(self._places)
        self._heads.set([array.strides[0] for array in both])
        self._in = (ref(room), first)

    def numbers(
        self, position: int, scratch: int, rules: Sequence[int], patterns: Iterable[int]
    ) -> tuple[Sequence[int], np.ndarray]:
        """What is set before every run, in the order of `names`: where scores are worked out, what each of the stack's
        `attentions` goes by (as _OF_A_RULE has it), where the patterns of the layers of `looking` go, and where the new
        keys and values do.
        """
        return (scratch, *rules, *patterns), self._places + position * self._steps


def _parts_of(weights: Sequence[Mapping[str, Any]]) -> list[Any]:
    """All parts of all layers, one after another."""
    return list(chain.from_iterable(parts.values() for parts in weights))


def _parts_of_ending(ending: Ending | None) -> tuple[Any, ...]:
    """What an ending is made of."""
    return (None,) * 4 if ending is None else (ending.norm, ending.gain, ending.head.weight, ending.head.bias)


_IN_A_ROOM = (("keys", "values"), ("key head", "value head"))
_NEW = ("new key", "new value")
_OF_A_LAYER = (*_IN_A_ROOM[0], *_IN_A_ROOM[1], *_NEW)  # of each segment in each layer
