"""The engine for CPUs: compiled kernels for whatever takes time; float32."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from cutaway.engines.blocks import BLOCKS
from cutaway.engines.cpu import attend, elementwise
from cutaway.engines.cpu.kernel import place
from cutaway.engines.cpu.memory import empty, keep_freed_memory
from cutaway.engines.cpu.processor import LANES
from cutaway.engines.cpu.products import FEW, few_rows, many_rows, many_rows_scratch, parts_of
from cutaway.engines.cpu.stack import Stacks, at_one_go
from cutaway.engines.cpu.threads import thread_count
from cutaway.engines.layout import Layout
from cutaway.engines.low_rank import with_added
from cutaway.engines.numpy import ACTIVATIONS as REFERENCE
from cutaway.engines.protocol import Attended, Ending, Gain, Linear, Scoring, Stacked, Turns
from cutaway.engines.weights import Weight
from cutaway.errors import CutawayError
from cutaway.points import ROW_BLOCKS, Tap
from cutaway.spec import ACTIVATIONS, LayerSpec


class CpuEngine:
    """float32; a weight stays in its file's own form and is unpacked only while it is multiplied.

    Safe to use from several Python threads: their kernels take turns. A row's result has the same bits
    whatever else is computed with it, and however many threads compute.
    """

    name = "cpu"
    note: str | None = None
    tokens_per_pass = 512  # of 64 to 2,048 the quickest, by a third: what lies between two steps stays in the caches

    def __init__(self, dtype: str | np.dtype | type | None = None) -> None:
        self.dtype = np.dtype(dtype or "float32")
        if self.dtype != np.float32:
            raise CutawayError(f"The cpu engine computes in float32, not in {self.dtype}; the numpy engine can.")
        thread_count()  # a wrong CUTAWAY_THREADS is told now
        keep_freed_memory()
        self._local = threading.local()  # each Python thread's scratch
        self._stored: WeakKeyDictionary[Weight, _Stored] = WeakKeyDictionary()
        self._stacks = Stacks()

    def array(self, values: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(values, dtype=np.float32)

    def numpy(self, values: np.ndarray) -> np.ndarray:
        return values

    def empty(self, shape: Sequence[int]) -> np.ndarray:
        return empty(shape)

    def copy(self, values: np.ndarray) -> np.ndarray:
        return values.copy()

    def embed(self, weight: Weight, ids: np.ndarray) -> np.ndarray:
        return weight.take(ids, np.float32)

    def linear(self, x: np.ndarray, linear: Linear, layout: Layout) -> np.ndarray:
        weight = linear.weight
        if len(weight.shape) != 2:
            raise CutawayError(f"A projection's weight is [d_out, d_in], not {list(weight.shape)}.")
        d_out, d_in = weight.shape
        if x.shape[1:] != (d_in,) or layout.rows != len(x):
            raise CutawayError(
                f"x is {list(x.shape)}; a weight [{d_out}, {d_in}] in a layout of {layout.rows} rows needs "
                f"[{layout.rows}, {d_in}]."
            )
        y = self._product(self.array(x), weight.kind, self.stored_at(weight), d_out)
        if linear.bias is not None:
            y += linear.bias
        return with_added(self, y, x, linear, layout) if linear.added else y

    def linear_of_part(self, x: np.ndarray, linear: Linear, first: int) -> np.ndarray | None:
        """The product of rows that are x `[T, n]` from column `first` on and 0 elsewhere, with the bits of the whole.

        Only where these columns can be read by themselves and the sixteen sums of a dot product stay as they are; no
        bias.
        """
        weight, n = linear.weight, x.shape[1]
        block = BLOCKS[weight.kind]
        inside = 0 <= first <= first + n <= weight.shape[1]
        _expect(inside, f"From column {first} on x must lie in rows of {weight.shape[1]}", x)
        if linear.added or first % LANES or first % block.weights or n % block.weights:
            return None
        rows, row_bytes, order = self.stored_at(weight)
        stored = (rows + first // block.weights * block.bytes, row_bytes, order)
        return self._product(self.array(x), weight.kind, stored, weight.shape[0])

    def _product(self, x: np.ndarray, kind: str, stored: tuple[int, int, int], d_out: int) -> np.ndarray:
        """`[T, d_in]` → `[T, d_out]`; `stored` is where the weight lies (`stored_at`)."""
        n_x, d_in = x.shape
        y = empty((n_x, d_out))
        if not n_x:  # where rows are missing the kernels take the last one again, so there has to be one
            return y
        parts = parts_of(d_out, d_in, n_x)
        given = (*stored, d_out, d_in, place(x), n_x, place(y))
        if n_x <= FEW:
            few_rows(kind)(*given, parts=parts)
        else:
            size = many_rows_scratch(d_in, n_x)
            many_rows(kind)(*given, place(self._scratch("rows", thread_count() * size)), size, parts=parts)
        return y

    def layer_norm(self, x: np.ndarray, gain: Gain, eps: float) -> np.ndarray:
        return self._norm(x, gain, eps, centre=True)

    def rms_norm(self, x: np.ndarray, gain: Gain, eps: float) -> np.ndarray:
        return self._norm(x, gain, eps, centre=False)

    def _norm(self, x: np.ndarray, gain: Gain, eps: float, centre: bool) -> np.ndarray:
        x, scale = self.array(x), self.array(gain.gain)
        _expect(x.shape[-1:] == scale.shape, "A norm has one gain for each coordinate", x, scale)
        out = empty(x.shape)
        bias = None if gain.bias is None else self.array(gain.bias)
        if bias is not None:
            _expect(bias.shape == scale.shape, "A norm has one shift for each coordinate", scale, bias)
        elementwise.norm(x, scale, bias, eps, centre, out)
        return out

    def activate(self, x: np.ndarray, kind: str, times: np.ndarray | None = None) -> np.ndarray:
        x, times = self.array(x), None if times is None else self.array(times)
        if times is not None:
            _expect(x.shape == times.shape, "Each element has one that it is multiplied with", x, times)
        if kind not in ACTIVATIONS:  # "sigmoid", "tanh": used on a few numbers per token only
            active = REFERENCE[kind](x)
            return active if times is None else active * times
        out = empty(x.shape)
        elementwise.activate(x, out, kind, times)
        return out

    def rotate(self, x: np.ndarray, cosines: np.ndarray, sines: np.ndarray, pairing: str) -> np.ndarray:
        x, cosines, sines = _rows_contiguous(x), self.array(cosines), self.array(sines)
        fits = cosines.shape == sines.shape == (x.shape[1], cosines.shape[-1])
        _expect(
            fits and 2 * cosines.shape[-1] <= x.shape[2], "There is one angle for each row and pair", x, cosines, sines
        )
        out = empty(x.shape)
        elementwise.rotate(x, cosines, sines, pairing == "adjacent", out)
        return out

    def dots(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        _expect(len(q) % len(k) == 0 and q.shape[2] == k.shape[2], "Each key head serves as many query heads", q, k)
        out = empty((*q.shape[:2], k.shape[1]))
        attend.dots(_rows_contiguous(q), _rows_contiguous(k), out)
        return out

    def scale(self, dots: np.ndarray, factor: float) -> np.ndarray:
        dots *= np.float32(factor)
        return dots

    def cap(self, x: np.ndarray, limit: float) -> np.ndarray:
        whole = np.ascontiguousarray(x)
        elementwise.cap(whole, limit)
        return _back(whole, x)

    def mask(self, scores: np.ndarray, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        whole = np.ascontiguousarray(scores)
        first, last = np.ascontiguousarray(first, np.int64), np.ascontiguousarray(last, np.int64)
        _expect(
            first.shape == last.shape == (scores.shape[1],),
            "Each query row sees one range of keys",
            scores,
            first,
            last,
        )
        elementwise.mask(whole, first, last)
        return _back(whole, scores)

    def softmax(self, masked: np.ndarray) -> np.ndarray:
        whole = np.ascontiguousarray(masked)
        elementwise.softmax(whole)
        return _back(whole, masked)

    def mix(self, pattern: np.ndarray, v: np.ndarray) -> np.ndarray:
        fits = len(pattern) % len(v) == 0 and pattern.shape[2] == v.shape[1]
        _expect(fits, "There is one weight of a pattern for each value", pattern, v)
        out = empty((*pattern.shape[:2], v.shape[2]))
        attend.mix(self.array(pattern), _rows_contiguous(v), out)
        return out

    def square(
        self,
        point: str,
        q: np.ndarray,
        keys: np.ndarray,
        scoring: Scoring,
        begun: Mapping[str, np.ndarray] | None = None,
    ) -> np.ndarray:
        """One of the T × T points whole, with the bits of the stages, from the last before it that has `begun`."""
        first, last, growth = self._rule(q, keys, keys, scoring)
        out = empty((*q.shape[:2], keys.shape[1]))
        q, keys = map(_rows_contiguous, (q, keys))
        steps = ROW_BLOCKS.index(point)
        done = max((done for done in range(steps) if ROW_BLOCKS[done] in (begun or {})), default=0)
        other = (begun or {}).get(ROW_BLOCKS[done])
        if other is not None:
            other = self.array(other)
            _expect(other.shape == out.shape, "An earlier point has the shape of a later one", other, out)
        attend.square(steps, q, keys, scoring.scale, first, last, scoring.cap or 0.0, growth, out, other, done)
        return out

    def attend(self, q: np.ndarray, keys: np.ndarray, values: np.ndarray, scoring: Scoring) -> np.ndarray:
        """All of attention, with the bits of the stages: `[H, R, d_head]` … → `[H, R, d_value]`."""
        n_heads, rows, _ = q.shape
        first, last, growth = self._rule(q, keys, values, scoring)
        out = empty((rows, n_heads, values.shape[2])).swapaxes(0, 1)  # as the heads are joined
        scratch = self._scratch("scores", attend.attend_scratch(n_heads, rows, keys.shape[1]))
        q, keys, values = map(_rows_contiguous, (q, keys, values))
        attend.attend(q, keys, values, scoring.scale, first, last, scoring.cap or 0.0, growth, out, scratch)
        return out

    def _rule(
        self, q: np.ndarray, keys: np.ndarray, values: np.ndarray, scoring: Scoring
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Which keys each row sees (`attend.seen_keys`), and how its scores have grown."""
        fits = len(q) % len(keys) == 0 and q.shape[2] == keys.shape[2] and keys.shape[:2] == values.shape[:2]
        _expect(fits, "Each key head serves as many query heads, and each key has a value", q, keys, values)
        first, last = attend.seen_keys(scoring, keys.shape[1])
        _expect(first.shape == last.shape == q.shape[1:2], "Each query row sees one range of keys", q, first, last)
        return first, last, None if scoring.growth is None else self.array(scoring.growth)

    def stackable(self, specs: Sequence[LayerSpec], layout: Layout, taps: Sequence[Tap]) -> int:
        """How many layers, from the first of these on, `stack` takes at once; 0 where it does not serve the first."""
        return at_one_go(specs, layout, taps)

    def stack(
        self,
        first: int,
        specs: Sequence[LayerSpec],
        weights: Sequence[Mapping[str, Any]],
        x: np.ndarray,
        turns: Turns,
        attended: Sequence[Attended],
        taps: Sequence[Tap],
        ending: Ending | None,
    ) -> Stacked:
        """Whole layers of few rows, and what follows the last, with the bits of the stages."""
        return self._stacks.run(self, first, specs, weights, x, turns, attended, taps, ending)

    def stored_at(self, weight: Weight) -> tuple[int, int, int]:
        """Where a weight lies: the address of its rows, the bytes from row to row, the address of its order or 0."""
        stored = self._stored.get(weight)
        if stored is None:  # of two threads that come here at once the first one's stays, and with it its memory
            stored = self._stored.setdefault(weight, _Stored(weight))
        return stored.place

    def _scratch(self, use: str, size: int) -> np.ndarray:
        """A float32 scratch of this Python thread, kept from call to call; what it holds is arbitrary."""
        kept: np.ndarray | None = getattr(self._local, use, None)
        if kept is None or kept.size < size:
            kept = empty((size,))
            setattr(self._local, use, kept)
        return kept[:size]


class _Stored:
    """Where a weight lies, as its kernels are given it: `place` is the address of its rows, the bytes from row
    to row, and the address of its order or 0. Kernels check no index; Weight has checked the order.
    """

    def __init__(self, weight: Weight) -> None:
        rows, order = weight.rows, weight.order
        if rows.shape[1] > 1 and rows.strides[1] != 1:
            rows = np.ascontiguousarray(rows)
        if order is not None:
            order = np.ascontiguousarray(order, np.int64)
        self._alive = (rows, order)
        self.place = (place(rows), rows.strides[0], 0 if order is None else place(order))


def _expect(holds: bool, what: str, *arrays: np.ndarray) -> None:
    """Kernels check no bounds: a caller's mistake is told here instead of reading beyond an array."""
    if not holds:
        shapes = " and ".join(str(list(array.shape)) for array in arrays)
        raise CutawayError(f"{what}; the shapes here are {shapes}.")


def _rows_contiguous(x: np.ndarray) -> np.ndarray:
    """x itself where the numbers of a row lie side by side, else a copy."""
    if x.dtype == np.float32 and (x.shape[-1] == 1 or x.strides[-1] == 4):
        return x
    return np.ascontiguousarray(x, np.float32)


def _back(whole: np.ndarray, given: np.ndarray) -> np.ndarray:
    """What was worked out in a contiguous copy, put where it was asked for."""
    if whole is not given:
        given[...] = whole
    return given
