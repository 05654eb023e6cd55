"""Attention's two products and what stands between them.

The kernels serve the stages, which show scores and pattern, and the fused forms, which do not: each number is worked
out by the same function in both, so that looking changes no bit. Where a window hides the first keys, the fused forms
leave them out, from a multiple of sixteen on: what is left out would have added exact zeros, lane by lane.
"""

from functools import cache

import numpy as np

from cutaway.engines.cpu.kernel import Kernel, place
from cutaway.engines.cpu.processor import MIX_STEP
from cutaway.engines.cpu.threads import thread_count
from cutaway.engines.protocol import Scoring

_PARALLEL_FROM = 1 << 14  # weights of the pattern times d_head
_MOST_PARTS = 1 << 10  # of one segment: 32 of them in a phase stay within what the pool can count
_SCRATCH = 1 << 16  # numbers of a block's scores: they stay in the second-level cache


@cache
def kernels() -> dict[str, Kernel]:
    """All of them; each compiles at its first use."""
    return {
        "dots": Kernel("attend.dots_kernel", "q" * 13),
        "weights": Kernel("attend.weights_kernel", "q" * 8 + "dd"),
        "mix": Kernel("attend.mix_kernel", "q" * 13),
        "square": Kernel("attend.square_kernel", "q" * 15 + "dd" + "q" * 4),
        "attend": Kernel("attend.attend_kernel", "q" * 20 + "dd" + "q" * 3),
    }


def attention_parts(work: int) -> int:
    """Parts of a kernel of so many products: one where waking another thread costs more than it saves."""
    return min(4 * thread_count(), _MOST_PARTS, max(thread_count(), work >> 18)) if work >= _PARALLEL_FROM else 1


def mix_parts(work: int, key_heads: int, rows: int, width: int) -> int:
    """Parts of a mix of so many products: of a single row, as many as leave each the same share of its stretches."""
    most, threads = attention_parts(work), thread_count()
    if rows > 1 or most < threads:
        return most
    stretches = key_heads * -(-width // MIX_STEP)
    return max((parts for parts in range(threads, most + 1, threads) if stretches % parts == 0), default=most)


def seen_keys(scoring: Scoring, end: int) -> tuple[np.ndarray, np.ndarray]:
    """The first key that each row sees and the one after its last, among `end` keys: int64 `[rows]` each."""
    sides = (np.minimum(np.maximum(side, 0), end) for side in (scoring.first, scoring.last))
    first, last = (side.astype(np.int64, copy=False) for side in sides)
    return first, last


def dots(q: np.ndarray, k: np.ndarray, out: np.ndarray) -> None:
    """q kᵀ; the last axis of q and k is contiguous, the others may lie anywhere."""
    heads, rows, width = q.shape
    key_heads, keys, _ = k.shape
    kernels()["dots"](
        *(place(q), *q.strides[:2], place(k), *k.strides[:2], place(out)),
        *(heads, key_heads, rows, keys, width, 0),
        parts=attention_parts(out.size * width),
    )


def mix(pattern: np.ndarray, v: np.ndarray, out: np.ndarray) -> None:
    """pattern v; pattern is contiguous, and so is the last axis of v and out."""
    heads, rows, keys = pattern.shape
    key_heads, _, width = v.shape
    kernels()["mix"](
        *(place(pattern), place(v), *v.strides[:2], place(out), *out.strides[:2]),
        *(heads, key_heads, rows, keys, width, 0),
        parts=mix_parts(pattern.size * width, key_heads, rows, width),
    )


def square(
    steps: int,
    q: np.ndarray,
    k: np.ndarray,
    scale: float,
    first: np.ndarray,
    last: np.ndarray,
    cap: float,
    growth: np.ndarray | None,
    out: np.ndarray,
    begun: np.ndarray | None = None,
    done: int = 0,
) -> None:
    """The point of ROW_BLOCKS `steps` steps from q kᵀ: `[H, R, S]` in contiguous `out`; the rest as in `attend`.

    Where `begun` is given it is the point of the first `done` steps, from which it goes on.
    """
    heads, rows, width = q.shape
    block, _, parts = _blocks(heads, rows, k.shape[1])
    kernels()["square"](
        *(place(q), *q.strides[:2], place(k), *k.strides[:2], place(out), heads, len(k), rows, width, k.shape[1]),
        *(place(first), place(last), 0 if growth is None else place(growth), scale, cap),
        *(steps, 0 if begun is None else place(begun), done, block),
        parts=parts,
    )


def attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale: float,
    first: np.ndarray,
    last: np.ndarray,
    cap: float,
    growth: np.ndarray | None,
    out: np.ndarray,
    scratch: np.ndarray,
) -> None:
    """softmax of the scaled, grown, capped and masked q kᵀ, times v; arrays as in `dots` and `mix`.

    `first`, `last` int64 `[rows]`: which keys each row sees; `cap` 0: none. `scratch` has `attend_scratch` numbers.
    """
    heads, rows, width = q.shape
    block, size, parts = _blocks(heads, rows, k.shape[1])
    kernels()["attend"](
        *(place(q), *q.strides[:2], place(k), *k.strides[:2], place(v), *v.strides[:2]),
        *(place(out), *out.strides[:2], heads, len(k), rows, width, v.shape[2]),
        *(place(first), place(last), 0 if growth is None else place(growth)),
        *(scale, cap, block, place(scratch), size),
        parts=parts,
    )


def attend_scratch(heads: int, rows: int, keys: int) -> int:
    """How many float32 `attend` needs for its scores."""
    _, size, _ = _blocks(heads, rows, keys)
    return size * thread_count()


def _blocks(heads: int, rows: int, keys: int) -> tuple[int, int, int]:
    """Rows of a block, numbers of its scores, and in how many parts the blocks are done."""
    block = min(rows, max(12, min(60, _SCRATCH // max(keys, 1) // 12 * 12)))
    items = heads * -(-rows // block)
    return block, block * keys, min(items, 8 * thread_count())
