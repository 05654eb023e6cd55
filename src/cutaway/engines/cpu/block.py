"""One layer as a program of kernels: what the stages of `forward` compute, with the same bits, and no Python between.

It serves few rows, where a kernel takes less time than the Python that calls it. What somebody wants to see is written
into an array of its own; everything else into a scratch that all layers share. It is a second writing of the layer,
and so it is tested against the stages, for every family and every point.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cutaway.engines.cpu import attend
from cutaway.engines.cpu.compiling import place
from cutaway.engines.cpu.layer_program import LayerProgram
from cutaway.engines.cpu.sums import TILE_LEFT
from cutaway.engines.cpu.vectors import LANES
from cutaway.engines.protocol import Attended
from cutaway.points import Tap
from cutaway.spec import FeedForwardSpec, LayerSpec

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


class Layers:
    """The programs of an engine's layers, and the scratch that they share. Safe to use from several threads."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._scratch: dict[str, np.ndarray] = {}
        self._lock = threading.Lock()

    def run(
        self,
        spec: LayerSpec,
        weights: Mapping[str, Any],
        x: np.ndarray,
        turn: Turn | None,
        attended: Sequence[Attended],
        tap: Tap,
    ) -> np.ndarray:
        """`[T, d]` → `[T, d]`: the layer's output; new keys and values are written into each segment's arrays."""
        lengths = tuple(part.length for part in attended)
        prepared: dict[Any, LayerProgram] = weights.prepared  # type: ignore[attr-defined]
        program = prepared.get(lengths)
        if program is None or not program.is_of(spec, weights):
            program = prepared[lengths] = LayerProgram(self._engine, spec, weights, lengths)
        x = np.ascontiguousarray(x, np.float32)
        shown: dict[str, np.ndarray] = {"resid_post": np.empty_like(x)}
        with self._lock:
            wanted = {program.same_as.get(name, name) for name in tap.shown}
            for name, shape in program.shapes.items():
                if name in wanted and name not in shown:
                    shown[name] = np.empty(shape, np.float32)
            self._set_places(program, x, shown, turn, attended, tap)
            program.run()
        self._show(program, x, shown, tap)
        return shown["resid_post"]

    def _set_places(
        self,
        program: LayerProgram,
        x: np.ndarray,
        shown: dict[str, np.ndarray],
        turn: Turn | None,
        attended: Sequence[Attended],
        tap: Tap,
    ) -> None:
        program.set("x", place(x))
        for name, shape in program.shapes.items():
            target = shown.get(name)
            program.set(name, place(target if target is not None else self._room(name, int(np.prod(shape)))))
        for name, size in program.scratch.items():
            program.set(name, place(self._room(name, size)))
        if turn is not None:
            program.set("cosines", place(turn[0]))
            program.set("sines", place(turn[1]))
        attention = program.spec.attention
        for index, part in enumerate(attended):
            scoring, end = part.scoring, part.position + part.length
            first, last = (np.clip(side, 0, end).astype(np.int64) for side in (scoring.first, scoring.last))
            start = int(first.min()) // LANES * LANES
            size = attention.n_heads * part.length * end
            if "attn.pattern" in tap.shown:
                scores = np.empty((attention.n_heads, part.length, end), np.float32)
                scores[:, :, :start] = 0.0
                shown[f"pattern {index}"] = scores
            else:
                scores = self._room(f"scores {index}", size)
            keys, values = part.keys, part.values
            growth = None if scoring.growth is None else self._engine.array(scoring.growth)
            program.keep(index, (first, last, growth))
            work = size * attention.d_head
            for name, value in (
                ("new key", place(keys) + part.position * keys.strides[1]),
                ("new value", place(values) + part.position * values.strides[1]),
                ("keys", place(keys)),
                ("values", place(values)),
                ("key head", keys.strides[0]),
                ("value head", values.strides[0]),
                ("seen", end),
                ("start", start),
                ("scores", place(scores)),
                ("first", place(first)),
                ("last", place(last)),
                ("growth", 0 if growth is None else place(growth)),
                ("dots parts", min(attend.attention_parts(work), -(-(end - start) // TILE_LEFT))),
                ("rows parts", attend.attention_parts(size * LANES)),
                ("mix parts", attend.attention_parts(work)),
            ):
                program.set(f"{name} {index}", value)

    def _room(self, name: str, size: int) -> np.ndarray:
        """A float32 scratch, kept from call to call; what it holds is arbitrary."""
        kept = self._scratch.get(name)
        if kept is None or kept.size < size:
            kept = self._scratch[name] = np.empty(max(size, 2 * (0 if kept is None else kept.size)), np.float32)
        return kept

    def _show(self, program: LayerProgram, x: np.ndarray, shown: dict[str, np.ndarray], tap: Tap) -> None:
        """Hand what is wanted to the tap, in the order of the pass."""
        if not tap.shown:
            return
        patterns = [value for name, value in shown.items() if name.startswith("pattern ")]
        for name in program.order:
            if name == "attn.pattern":
                for index, pattern in enumerate(patterns):
                    tap.rows(name, pattern, index, 0)
            elif name == "resid_pre":
                tap(name, x)
            elif name in tap.shown:
                value = shown[program.same_as.get(name, name)]
                tap(name, value.swapaxes(0, 1) if value.ndim == 3 else value)
