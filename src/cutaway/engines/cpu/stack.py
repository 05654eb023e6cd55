"""Layers as a program of kernels: what the stages of `forward` compute, with the same bits, and no Python between.

It serves few rows, where a kernel takes less time than the Python that calls it; so it also takes care to do little
itself. Layers are run at one go, up to the logits where all are; what lies between their steps is in a scratch that
all share, and points that are to be shown are written into arrays of their own, shown when all is done. It is a second
writing of the layer, and so it is tested against the stages, for every family and every point.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cutaway.engines.cpu import attend
from cutaway.engines.cpu.kernel import place
from cutaway.engines.cpu.memory import empty
from cutaway.engines.cpu.processor import LANES, TILE_LEFT
from cutaway.engines.cpu.stack_program import StackProgram
from cutaway.engines.cpu.threads import own_turn
from cutaway.engines.layout import Layout
from cutaway.engines.protocol import Attended, Ending, Stacked, Turns
from cutaway.points import Tap
from cutaway.spec import AttentionSpec, FeedForwardSpec, LayerSpec

MOST_PROGRAMS = 64  # that begin with one layer, one for each lengths of segments and points shown: a batch has many
MOST_ROWS = 32  # beyond, kernels take so long that what Python adds is lost among them
MOST_SHOWN = 1 << 18  # numbers of the arrays that wait to be shown (1 MB), where that is more than one layer's
UNSHOWN = frozenset({"attn.dots", "attn.scores", "attn.masked", "attn.head_out"})  # what it makes no array of


def at_one_go(specs: Sequence[LayerSpec], layout: Layout, taps: Sequence[Tap]) -> int:
    """How many layers, from the first on, make one program: those of a kind that can be run here, nobody alters them
    and what is to be shown has an array.

    Where many show much they are halved: a number that changed with every token would be a new program each time.
    """
    if layout.rows > MOST_ROWS:
        return 0
    count = 0
    for spec, tap in zip(specs, taps, strict=True):
        latent, feed_forward = spec.attention.latent, spec.feed_forward
        if latent is not None or not isinstance(feed_forward, FeedForwardSpec) or tap.altered or tap.shown & UNSHOWN:
            break
        count += 1
    shown = [tap.shown for tap in taps[:count]]
    if any(shown):
        sizes = [_shown_numbers(spec, layout, names) for spec, names in zip(specs[:count], shown, strict=True)]
        while count > 1 and sum(sizes[:count]) > MOST_SHOWN:
            count = (count + 1) // 2
    return count


def _shown_numbers(spec: LayerSpec, layout: Layout, shown: frozenset[str]) -> int:
    """Of the arrays that a layer shows, about."""
    attention, feed_forward = spec.attention, spec.feed_forward
    assert isinstance(feed_forward, FeedForwardSpec)  # `at_one_go` has seen to it
    widest = max(feed_forward.d_ff, attention.n_heads * max(attention.d_head, attention.value_width))
    numbers = layout.rows * widest * len(shown)
    if "attn.pattern" in shown:
        numbers += attention.n_heads * sum(segment.length * segment.end for segment in layout.segments)
    return numbers


class _Rule:
    """How a segment's rows attend in the layers of one kind, as kernels read it.

    `numbers` are what its places in a program are set to, `start` the first key that any row sees, from a multiple of
    sixteen on, `scores` how many numbers there are.
    """

    def __init__(self, spec: AttentionSpec, part: Attended) -> None:
        scoring, end = part.rule(spec), part.position + part.length
        first, last = attend.seen_keys(scoring, end)
        growth = None if scoring.growth is None else np.ascontiguousarray(scoring.growth, np.float32)
        self._alive = (first, last, growth)
        self.start = int(first[0] if len(first) == 1 else first.min()) // LANES * LANES
        self.scores = spec.n_heads * part.length * end
        work = self.scores * spec.d_head
        parts = (
            min(attend.attention_parts(work), -(-(end - self.start) // TILE_LEFT)),
            attend.attention_parts(self.scores * LANES),
            attend.mix_parts(work, spec.n_kv_heads, part.length, spec.d_head),
        )
        arrays = (place(first), place(last), 0 if growth is None else place(growth))
        self.numbers = (end, self.start, *arrays, *parts)


class _Segment(NamedTuple):
    """What is a segment's in a run: what its places are set to, the arrays of the patterns that are to be shown, and
    the rules, whose arrays have to be there until the run is over.
    """

    numbers: Sequence[Any]
    patterns: Sequence[np.ndarray]
    rules: Sequence[_Rule]


class Stacks:
    """The programs of an engine's layers, and the scratch that they share. Safe to use from several threads."""

    def __init__(self) -> None:
        self._scratch: dict[str, tuple[np.ndarray, int]] = {}  # with where it lies
        self._moved = 0  # how often a part of the scratch has moved

    def run(
        self,
        engine: Any,
        first: int,
        specs: Sequence[LayerSpec],
        weights: Sequence[Mapping[str, Any]],
        x: np.ndarray,
        turns: Turns,
        attended: Sequence[Attended],
        taps: Sequence[Tap],
        ending: Ending | None,
    ) -> Stacked:
        """x `[T, d]` → what these layers, the first of them layer `first`, make of the stream, and the ending of that.

        New keys and values are written into each segment's room.
        """
        lengths, shown = tuple(part.length for part in attended), tuple(tap.shown for tap in taps)
        x = np.ascontiguousarray(x, np.float32)
        out, final, logits = empty(x.shape), None, None
        if ending is not None:
            final = out if ending.norm is None else empty(x.shape)
            logits = empty((len(x), ending.head.weight.shape[0]))
        with own_turn():
            program = self._program(engine, specs, weights, lengths, shown, ending)
            kept = [empty(one.shape) for one in program.kept]
            given = [place(x), place(out), *(0 if array is None else place(array) for array in (final, logits))]
            for rotary in program.rotaries:
                given += map(place, turns[rotary])
            given += map(place, kept)
            segments = [self._segment(program, index, part, first) for index, part in enumerate(attended)]
            self._set_buffers(program)
            program.run(given, [segment.numbers for segment in segments])
        if any(shown):
            _show(program, x, out, kept, [segment.patterns for segment in segments], taps)
        return Stacked(out, final, logits)

    def _program(
        self,
        engine: Any,
        specs: Sequence[LayerSpec],
        weights: Sequence[Mapping[str, Any]],
        lengths: tuple[int, ...],
        shown: tuple[frozenset[str], ...],
        ending: Ending | None,
    ) -> StackProgram:
        """The program of these layers for segments of these lengths; of too many the oldest goes."""
        prepared: dict[Any, StackProgram] = weights[0].prepared  # type: ignore[attr-defined]
        key = (lengths, shown, ending is None)
        program = prepared.get(key)
        if program is None or not program.is_of(specs, weights, ending):
            program = prepared[key] = StackProgram(engine, specs, weights, lengths, shown, ending)
            while len(prepared) > MOST_PROGRAMS:
                del prepared[next(iter(prepared))]
        return program

    def _set_buffers(self, program: StackProgram) -> None:
        """Where each part of the layers goes that is not shown."""
        if program.bound != self._moved:
            places = [self._place_of_room(name, size) for name, size in program.buffers.items()]
            program.bind(places, self._moved)

    def _segment(self, program: StackProgram, index: int, part: Attended, first: int) -> "_Segment":
        """What is a segment's in a run."""
        end = part.position + part.length
        places = program.segment(index, part.room, first)
        rules = [_Rule(spec, part) for spec in program.attentions]
        patterns = []
        for layer in places.looking:
            pattern = empty((program.layers[layer].spec.attention.n_heads, part.length, end))
            pattern[:, :, : rules[program.rules[layer]].start] = 0.0
            patterns.append(pattern)
        scratch = self._place_of_room(places.scratch, max(rule.scores for rule in rules))
        numbers = [number for rule in rules for number in rule.numbers]
        return _Segment(places.numbers(part.position, scratch, numbers, map(place, patterns)), patterns, rules)

    def _place_of_room(self, name: str, size: int) -> int:
        """Where a float32 scratch lies, kept from call to call; what it holds is arbitrary."""
        kept = self._scratch.get(name)
        if kept is None or kept[0].size < size:
            self._moved += 1  # before the old one goes
            room = empty((max(size, 2 * (0 if kept is None else kept[0].size)),))
            kept = self._scratch[name] = (room, place(room))
        return kept[1]


def _show(
    program: StackProgram,
    x: np.ndarray,
    out: np.ndarray,
    kept: Sequence[np.ndarray],
    patterns: Sequence[Sequence[np.ndarray]],
    taps: Sequence[Tap],
) -> None:
    """Hand what is wanted to the taps, in the order of the pass."""
    arrays = {(one.layer, one.name): array for one, array in zip(program.kept, kept, strict=True)}
    arrays |= {(-1, "resid_post"): x, (len(taps) - 1, "resid_post"): out}
    of_segments: list[Iterator[np.ndarray]] = list(map(iter, patterns))
    for index, (layer, tap) in enumerate(zip(program.layers, taps, strict=True)):
        for name in layer.order if tap.shown else ():
            if name not in tap.shown:
                continue
            if name == "attn.pattern":
                for segment, own in enumerate(of_segments):
                    tap.rows(name, next(own), segment, 0)
                continue
            before = (index - 1, "resid_post") if name == "resid_pre" else (index, layer.same_as.get(name, name))
            value = arrays[before]
            tap(name, value.swapaxes(0, 1) if value.ndim == 3 else value)
