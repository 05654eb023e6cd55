"""Attention over the keys and values of a cache, read where they lie, for one query row or many.

A query's dot products are summed in the one order of `sums.dot`, its mix key after key. So a row has the same bits
whether it is decoded alone or computed among a whole prompt: keys that it may not see have weight 0 and add nothing.
"""

from functools import cache

import numpy as np
from numba.extending import register_jitable

from cutaway.engines.cpu.arithmetic import (
    everywhere,
    floats_upto,
    fused,
    put_upto,
)
from cutaway.engines.cpu.compiling import Kernel, place
from cutaway.engines.cpu.sums import (
    MIX_ROWS,
    MIX_WIDTH,
    TILE_LEFT,
    dots_of_group,
    mix_tile,
)
from cutaway.engines.cpu.threads import thread_count
from cutaway.engines.cpu.vectors import LANES, address, arguments, float_at

_PARALLEL_FROM = 1 << 14  # weights of the pattern times d_head


def _dots(given: int, part: int, parts: int) -> None:
    # q: [heads, rows, width], k: [key heads, keys, width], with steps in bytes over their first two axes
    q, q_head, q_row, k, k_head, k_row, out, heads, key_heads, rows, keys, width = arguments(given, 12)
    groups = (keys + TILE_LEFT - 1) // TILE_LEFT
    first, stop = groups * part // parts * TILE_LEFT, min(groups * (part + 1) // parts * TILE_LEFT, keys)
    for head in range(heads):
        queries, target = address(q) + head * q_head, address(out) + head * rows * keys * 4
        key = first
        while key < stop:
            taken = min(TILE_LEFT, stop - key)
            its_keys = address(k) + (head // (heads // key_heads) * k_head + key * k_row)
            there = target + key * 4
            dots_of_group(its_keys, k_row, taken, queries, q_row, rows, width, there, keys * 4)
            key += taken


@register_jitable
def _mix_row(weights: int, values: int, v_row: int, keys: int, left: int, target: int) -> None:
    """Up to 64 coordinates of one row's mix, key after key."""
    a = b = c = d = everywhere(np.float32(0))  # four vectors, whose sums run independently
    for key in range(keys):
        weight = everywhere(float_at(weights + key * 4))
        here = values + key * v_row
        a = fused(weight, floats_upto(here, left), a)
        if left > LANES:
            b = fused(weight, floats_upto(here + 4 * LANES, left - LANES), b)
        if left > 2 * LANES:
            c = fused(weight, floats_upto(here + 8 * LANES, left - 2 * LANES), c)
        if left > 3 * LANES:
            d = fused(weight, floats_upto(here + 12 * LANES, left - 3 * LANES), d)
    put_upto(target, a, left)
    if left > LANES:
        put_upto(target + 4 * LANES, b, left - LANES)
    if left > 2 * LANES:
        put_upto(target + 8 * LANES, c, left - 2 * LANES)
    if left > 3 * LANES:
        put_upto(target + 12 * LANES, d, left - 3 * LANES)


def _mix(given: int, part: int, parts: int) -> None:
    # pattern: [heads, rows, keys]; v: [key heads, keys, width], with steps in bytes over its first two axes
    pattern, v, v_head, v_row, out, heads, key_heads, rows, keys, width = arguments(given, 10)
    shared, groups = heads // key_heads, (rows + MIX_ROWS - 1) // MIX_ROWS
    todo = heads * groups
    for item in range(todo * part // parts, todo * (part + 1) // parts):
        head, first = item // groups, item % groups * MIX_ROWS
        taken = min(MIX_ROWS, rows - first)
        weights = address(pattern) + (head * rows + first) * keys * 4
        target = address(out) + (head * rows + first) * width * 4
        for at in range(0, width, MIX_WIDTH):
            values, left = address(v) + (head // shared * v_head + at * 4), width - at
            if taken == MIX_ROWS and left >= MIX_WIDTH:
                mix_tile(weights, keys * 4, values, v_row, keys, target + at * 4, width * 4)
            else:
                for i in range(taken):
                    _mix_row(weights + i * keys * 4, values, v_row, keys, left, target + (i * width + at) * 4)


@cache
def _kernels() -> tuple[Kernel, Kernel]:
    return Kernel(_dots, "attention scores", "q" * 12), Kernel(_mix, "attention's mix", "q" * 10)


def _parts(work: int) -> int:
    """Parts of a kernel of so many products: one where waking another thread costs more than it saves."""
    return min(4 * thread_count(), max(thread_count(), work >> 18)) if work >= _PARALLEL_FROM else 1


def dots(q: np.ndarray, k: np.ndarray, out: np.ndarray) -> None:
    """q kᵀ; the last axis of q and k is contiguous, the others may lie anywhere."""
    heads, rows, width = q.shape
    key_heads, keys, _ = k.shape
    _kernels()[0](
        *(place(q), q.strides[0], q.strides[1], place(k), k.strides[0], k.strides[1], place(out)),
        *(heads, key_heads, rows, keys, width),
        parts=_parts(out.size * width),
    )


def mix(pattern: np.ndarray, v: np.ndarray, out: np.ndarray) -> None:
    """pattern v; pattern is contiguous, and so is the last axis of v."""
    heads, rows, keys = pattern.shape
    key_heads, _, width = v.shape
    _kernels()[1](
        *(place(pattern), place(v), v.strides[0], v.strides[1], place(out)),
        *(heads, key_heads, rows, keys, width),
        parts=_parts(pattern.size * width),
    )
