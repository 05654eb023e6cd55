"""Layers as a program of kernels: what the stages of `forward` compute, with the same bits, and no Python between.

It serves few rows, where a kernel takes less time than the Python that calls it; so it also takes care to do little
itself. Layers that nobody looks into are run at one go, and what lies between their steps is in a scratch that all
share; a layer whose points are to be shown is run by itself, and they are written into arrays of their own. It is a
second writing of the layer, and so it is tested against the stages, for every family and every point.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cutaway.engines.cpu import attend
from cutaway.engines.cpu.kernel import place
from cutaway.engines.cpu.layer_program import LayerProgram
from cutaway.engines.cpu.memory import empty
from cutaway.engines.cpu.processor import LANES, TILE_LEFT
from cutaway.engines.cpu.stack_program import StackProgram
from cutaway.engines.cpu.threads import own_turn
from cutaway.engines.protocol import Attended, Scoring, Turns
from cutaway.points import Tap
from cutaway.spec import AttentionSpec, FeedForwardSpec, LayerSpec

MOST_PROGRAMS = 64  # that begin with one layer, one for each lengths of segments: a running batch has many
MOST_ROWS = 32  # beyond, kernels take so long that what Python adds is lost among them
MOST_RULES = 64  # of segments and kinds of attention, kept for the layers to come
UNSHOWN = frozenset({"attn.dots", "attn.scores", "attn.masked", "attn.head_out"})  # what it makes no array of


def can_run(spec: LayerSpec, rows: int, tap: Tap) -> bool:
    """Whether a layer of this kind can be run here with this many rows, and shows what is wanted."""
    return (
        rows <= MOST_ROWS
        and spec.attention.latent is None
        and isinstance(spec.feed_forward, FeedForwardSpec)
        and not tap.altered
        and not tap.shown & UNSHOWN
    )


def at_one_go(specs: Sequence[LayerSpec], rows: int, taps: Sequence[Tap]) -> int:
    """How many layers, from the first on, make one program: one that is looked into, or those up to the next such."""
    count = 0
    for spec, tap in zip(specs, taps, strict=True):
        if not can_run(spec, rows, tap) or (tap.shown and count > 0):
            break
        count += 1
        if tap.shown:
            break
    return count


class _Rule:
    """A segment's `Scoring` as kernels read it: where its arrays lie, and the first key that any row sees."""

    def __init__(self, scoring: Scoring, end: int) -> None:
        self.of = scoring
        first, last = attend.seen_keys(scoring, end)
        growth = None if scoring.growth is None else np.ascontiguousarray(scoring.growth, np.float32)
        self.start = int(first.min()) // LANES * LANES
        self.first, self.last, self.growth = place(first), place(last), 0 if growth is None else place(growth)
        self._alive = (first, last, growth)
        self._parts: tuple[tuple[int, int], tuple[int, int, int]] = ((0, 0), (0, 0, 0))

    def parts(self, spec: AttentionSpec, rows: int, scores: int, seen: int) -> tuple[int, int, int]:
        """In how many parts dots, weights and mixes of so many scores are done; mostly asked for the same again."""
        if self._parts[0] != (spec.d_head, scores):
            work = scores * spec.d_head
            self._parts = (
                (spec.d_head, scores),
                (
                    min(attend.attention_parts(work), -(-seen // TILE_LEFT)),
                    attend.attention_parts(scores * LANES),
                    attend.mix_parts(work, spec.n_kv_heads, rows, spec.d_head),
                ),
            )
        return self._parts[1]


class Stacks:
    """The programs of an engine's layers, and the scratch that they share. Safe to use from several threads."""

    def __init__(self) -> None:
        self._scratch: dict[str, tuple[np.ndarray, int]] = {}  # with where it lies
        self._moved = 0  # how often a part of the scratch has moved
        self._rules: dict[int, _Rule] = {}  # by the identity of what they are made of

    def run(
        self,
        engine: Any,
        first: int,
        specs: Sequence[LayerSpec],
        weights: Sequence[Mapping[str, Any]],
        x: np.ndarray,
        turns: Turns,
        attended: Sequence[Attended],
        tap: Tap,
    ) -> np.ndarray:
        """`[T, d]` → `[T, d]`: what these layers, the first of them layer `first`, make of the stream.

        New keys and values are written into each segment's room. The tap is that of the only layer, or of none.
        """
        lengths = tuple(part.length for part in attended)
        x, out = np.ascontiguousarray(x, np.float32), empty(x.shape)
        with own_turn():
            program = self._program(engine, specs, weights, lengths)
            shown = {}
            if tap.shown:
                shapes = program.layers[0].shapes
                shown = {name: empty(shapes[name]) for name in _arrays_for(program.layers[0], tap.shown)}
            program.set("x", place(x))
            program.set("resid_post", place(out))
            for index, rotary in enumerate(program.rotaries):
                for name, angles in zip(("cosines", "sines"), turns[rotary], strict=True):
                    program.set(f"{name} {index}", place(angles))
            patterns = [
                self._set_segment(program, index, part, first, "attn.pattern" in tap.shown)
                for index, part in enumerate(attended)
            ]
            self._set_buffers(program, shown)
            program.run()
        if tap.shown:
            _show(program.layers[0], x, {**shown, "resid_post": out}, patterns, tap)
        return out

    def _program(
        self, engine: Any, specs: Sequence[LayerSpec], weights: Sequence[Mapping[str, Any]], lengths: tuple[int, ...]
    ) -> StackProgram:
        """The program of these layers for segments of these lengths; of too many the oldest goes."""
        prepared: dict[Any, StackProgram] = weights[0].prepared  # type: ignore[attr-defined]
        key = (len(weights), lengths)
        program = prepared.get(key)
        if program is None or not program.is_of(specs, weights):
            program = prepared[key] = StackProgram(engine, specs, weights, lengths)
            while len(prepared) > MOST_PROGRAMS:
                del prepared[next(iter(prepared))]
        return program

    def _set_buffers(self, program: StackProgram, shown: dict[str, np.ndarray]) -> None:
        """Where each part of the layers goes: what is shown into its array, the rest into the scratch."""
        names = frozenset(shown)
        if program.bound != (self._moved, names):
            program.bound = None  # until all are set: whoever interrupts this must not leave a place behind
            for name, size in program.buffers.items():
                if name not in names:
                    program.set(name, self._place_of_room(name, size))
            program.bound = self._moved, names
        for name, array in shown.items():
            program.set(name, place(array))

    def _set_segment(
        self, program: StackProgram, index: int, part: Attended, first: int, wanted: bool
    ) -> np.ndarray | None:
        """Where a segment's keys, values and scores lie, and by which rule; its pattern's array where it is wanted."""
        end = part.position + part.length
        places = program.segment(index, part.room, first)
        places.set_position(part.position)
        scores = max(spec.n_heads for spec in program.attentions) * part.length * end
        pattern, target = None, self._place_of_room(places.scores, scores)
        for number, spec in enumerate(program.attentions):
            rule, size = self._rule(part.rule(spec), end), spec.n_heads * part.length * end
            if wanted:
                pattern = empty((spec.n_heads, part.length, end))
                pattern[:, :, : rule.start] = 0.0
                target = place(pattern)
            parts = rule.parts(spec, part.length, size, end - rule.start)
            places.set_rule(number, end, rule.start, target, rule.first, rule.last, rule.growth, *parts)
        return pattern

    def _rule(self, scoring: Scoring, end: int) -> _Rule:
        """What it was made into for the layer before, mostly."""
        rule = self._rules.get(id(scoring))
        if rule is None or rule.of is not scoring:
            while len(self._rules) >= MOST_RULES:
                del self._rules[next(iter(self._rules))]
            rule = self._rules[id(scoring)] = _Rule(scoring, end)
        return rule

    def _place_of_room(self, name: str, size: int) -> int:
        """Where a float32 scratch lies, kept from call to call; what it holds is arbitrary."""
        kept = self._scratch.get(name)
        if kept is None or kept[0].size < size:
            self._moved += 1  # before the old one goes
            room = empty((max(size, 2 * (0 if kept is None else kept[0].size)),))
            kept = self._scratch[name] = (room, place(room))
        return kept[1]


def _arrays_for(layer: LayerProgram, shown: frozenset[str]) -> set[str]:
    """Which buffers must be arrays of their own where these points are to be shown; the output always is."""
    return {layer.same_as.get(name, name) for name in shown} & layer.shapes.keys() - {"resid_post"}


def _show(
    layer: LayerProgram,
    x: np.ndarray,
    shown: dict[str, np.ndarray],
    patterns: Sequence[np.ndarray | None],
    tap: Tap,
) -> None:
    """Hand what is wanted to the tap, in the order of the pass."""
    for name in layer.order:
        if name not in tap.shown:
            continue
        if name == "attn.pattern":
            for index, pattern in enumerate(patterns):
                tap.rows(name, pattern, index, 0)
        else:
            value = x if name == "resid_pre" else shown[layer.same_as.get(name, name)]
            tap(name, value.swapaxes(0, 1) if value.ndim == 3 else value)
