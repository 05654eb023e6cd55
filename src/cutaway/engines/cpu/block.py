"""One layer as a program of kernels: what the stages of `forward` compute, with the same bits, and no Python between.

It serves few rows, where a kernel takes less time than the Python that calls it; so it also takes care to do little
itself. What somebody wants to see is written into an array of its own; everything else into a scratch that all layers
share. It is a second writing of the layer, and so it is tested against the stages, for every family and every point.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from cutaway.engines.cpu import attend
from cutaway.engines.cpu.kernel import place
from cutaway.engines.cpu.layer_program import LayerProgram
from cutaway.engines.cpu.processor import LANES, TILE_LEFT
from cutaway.engines.cpu.threads import own_turn
from cutaway.engines.protocol import Attended, Scoring
from cutaway.points import Tap
from cutaway.spec import FeedForwardSpec, LayerSpec

MOST_PROGRAMS = 64  # of a layer, one for each lengths of segments: a running batch has many
MOST_ROWS = 32  # beyond, kernels take so long that what Python adds is lost among them
UNSHOWN = frozenset({"attn.dots", "attn.scores", "attn.masked", "attn.head_out"})  # what it makes no array of

Turn = tuple[np.ndarray, np.ndarray]  # cosines and sines [T, dims / 2]


def can_run(spec: LayerSpec, rows: int, tap: Tap) -> bool:
    """Whether a layer of this kind can be run here with this many rows, and shows what is wanted."""
    return (
        rows <= MOST_ROWS
        and spec.attention.latent is None
        and isinstance(spec.feed_forward, FeedForwardSpec)
        and not tap.altered
        and not tap.shown & UNSHOWN
    )


class _Rule:
    """A segment's `Scoring` as kernels read it: where its arrays lie, and the first key that any row sees."""

    def __init__(self, scoring: Scoring, end: int) -> None:
        self.of = scoring
        first, last = (np.clip(side, 0, end).astype(np.int64) for side in (scoring.first, scoring.last))
        growth = None if scoring.growth is None else np.ascontiguousarray(scoring.growth, np.float32)
        self.start = int(first.min()) // LANES * LANES
        self.first, self.last, self.growth = place(first), place(last), 0 if growth is None else place(growth)
        self._alive = (first, last, growth)
        self._parts: tuple[tuple[int, int], tuple[int, int, int]] = ((0, 0), (0, 0, 0))

    def parts(self, scores: int, width: int, seen: int) -> tuple[int, int, int]:
        """In how many parts dots, weights and mixes of so many scores are done; mostly asked for the same again."""
        if self._parts[0] != (scores, width):
            products = attend.attention_parts(scores * width)
            parts = (min(products, -(-seen // TILE_LEFT)), attend.attention_parts(scores * LANES), products)
            self._parts = ((scores, width), parts)
        return self._parts[1]


class Layers:
    """The programs of an engine's layers, and the scratch that they share. Safe to use from several threads."""

    def __init__(self) -> None:
        self._scratch: dict[str, tuple[np.ndarray, int]] = {}  # with where it lies
        self._moved = 0  # how often a part of the scratch has moved
        self._rules: dict[int, _Rule] = {}  # by segment; all layers of a pass have the same, or few
        self._turn: tuple[Turn | None, int, int] = (None, 0, 0)
        self._last: tuple[np.ndarray | None, int] = (None, 0)  # the stream that the layer before has given, and where

    def run(
        self,
        engine: Any,
        spec: LayerSpec,
        weights: Mapping[str, Any],
        x: np.ndarray,
        turn: Turn | None,
        attended: Sequence[Attended],
        tap: Tap,
    ) -> np.ndarray:
        """`[T, d]` → `[T, d]`: the layer's output; new keys and values are written into each segment's arrays."""
        lengths = tuple(part.length for part in attended)
        out = np.empty(x.shape, np.float32)
        with own_turn():
            program = self._program(engine, spec, weights, lengths)
            shown = {}
            if tap.shown:
                shown = {name: np.empty(program.shapes[name], np.float32) for name in program.arrays_for(tap.shown)}
            if x is self._last[0]:
                program.set("x", self._last[1])
            else:
                x = np.ascontiguousarray(x, np.float32)
                program.set("x", place(x))
            self._last = (out, place(out))
            program.set("resid_post", self._last[1])
            if turn is not None:
                self._set_turn(program, turn)
            patterns = [
                self._set_segment(program, index, part, "attn.pattern" in tap.shown)
                for index, part in enumerate(attended)
            ]
            self._set_buffers(program, shown)
            program.run()
        if tap.shown:
            self._show(program, x, {**shown, "resid_post": out}, patterns, tap)
        return out

    def _program(
        self, engine: Any, spec: LayerSpec, weights: Mapping[str, Any], lengths: tuple[int, ...]
    ) -> LayerProgram:
        """The layer's program for segments of these lengths; of too many the oldest goes."""
        prepared: dict[Any, LayerProgram] = weights.prepared  # type: ignore[attr-defined]
        program = prepared.get(lengths)
        if program is None or not program.is_of(spec, weights):
            program = prepared[lengths] = LayerProgram(engine, spec, weights, lengths)
            while len(prepared) > MOST_PROGRAMS:
                del prepared[next(iter(prepared))]
        return program

    def _set_buffers(self, program: LayerProgram, shown: dict[str, np.ndarray]) -> None:
        """Where each part of the layer goes: what is shown into its array, the rest into the scratch."""
        if program.bound == self._moved and not shown:
            return
        program.bound = -1  # until all are set: whoever interrupts this must not leave a place behind
        sizes = {name: prod(shape) for name, shape in program.shapes.items()} | program.scratch
        for name, size in sizes.items():
            if name != "resid_post":
                program.set(name, place(shown[name]) if name in shown else self._place_of_room(name, size))
        program.bound = -1 if shown else self._moved

    def _set_turn(self, program: LayerProgram, turn: Turn) -> None:
        if turn is not self._turn[0]:
            self._turn = (turn, place(turn[0]), place(turn[1]))
        program.set("cosines", self._turn[1])
        program.set("sines", self._turn[2])

    def _set_segment(self, program: LayerProgram, index: int, part: Attended, wanted: bool) -> np.ndarray | None:
        """Where a segment's keys, values and scores lie, and by which rule; its pattern's array where it is wanted."""
        end = part.position + part.length
        rule = self._rules.get(index)
        if rule is None or rule.of is not part.scoring:
            rule = self._rules[index] = _Rule(part.scoring, end)
        heads, width = program.spec.attention.n_heads, program.spec.attention.d_head
        size = heads * part.length * end
        pattern = None
        if wanted:
            pattern = np.empty((heads, part.length, end), np.float32)
            pattern[:, :, : rule.start] = 0.0
        places = program.cached(index, part.keys, part.values)
        scores = place(pattern) if pattern is not None else self._place_of_room(places.scores, size)
        places.set_all(
            places.keys + part.position * places.key_step,
            places.values + part.position * places.value_step,
            end,
            rule.start,
            scores,
            rule.first,
            rule.last,
            rule.growth,
            *rule.parts(size, width, end - rule.start),
        )
        return pattern

    def _place_of_room(self, name: str, size: int) -> int:
        """Where a float32 scratch lies, kept from call to call; what it holds is arbitrary."""
        kept = self._scratch.get(name)
        if kept is None or kept[0].size < size:
            self._moved += 1  # before the old one goes
            room = np.empty(max(size, 2 * (0 if kept is None else kept[0].size)), np.float32)
            kept = self._scratch[name] = (room, place(room))
        return kept[1]

    def _show(
        self,
        program: LayerProgram,
        x: np.ndarray,
        shown: dict[str, np.ndarray],
        patterns: Sequence[np.ndarray | None],
        tap: Tap,
    ) -> None:
        """Hand what is wanted to the tap, in the order of the pass."""
        for name in program.order:
            if name not in tap.shown:
                continue
            if name == "attn.pattern":
                for index, pattern in enumerate(patterns):
                    tap.rows(name, pattern, index, 0)
            else:
                value = x if name == "resid_pre" else shown[program.same_as.get(name, name)]
                tap(name, value.swapaxes(0, 1) if value.ndim == 3 else value)
