"""Attention of few query rows over the keys and values of a cache, read where they lie.

One query at a time: its dot products in the one order of `sums.dot`, its mix key after key. So a row's
bits depend on its own inputs and on how many keys it sees.
"""

from functools import cache

import numpy as np

from cutaway.engines.cpu.arithmetic import (
    everywhere,
    floats_upto,
    fused,
    put_upto,
)
from cutaway.engines.cpu.compiling import Kernel, place
from cutaway.engines.cpu.sums import dot
from cutaway.engines.cpu.threads import thread_count
from cutaway.engines.cpu.vectors import LANES, address, arguments, float_at, put_one

_PARALLEL_FROM = 1 << 14  # weights of the pattern times d_head


def _dots(given: int, part: int, parts: int) -> None:
    # q: [heads, rows, width], k: [key heads, keys, width], with steps in bytes over their first two axes
    q, q_head, q_row, k, k_head, k_row, out, heads, key_heads, rows, keys, width = arguments(given, 12)
    shared = heads // key_heads
    first, stop = keys * part // parts, keys * (part + 1) // parts
    for key_head in range(key_heads):
        for key in range(first, stop):
            its_key = address(k) + (key_head * k_head + key * k_row)
            for head in range(key_head * shared, (key_head + 1) * shared):
                for row in range(rows):
                    query = address(q) + (head * q_head + row * q_row)
                    put_one(address(out) + ((head * rows + row) * keys + key) * 4, dot(query, its_key, width))


def _mix(given: int, part: int, parts: int) -> None:
    # pattern: [heads, rows, keys]; v: [key heads, keys, width], with steps in bytes over its first two axes
    pattern, v, v_head, v_row, out, heads, key_heads, rows, keys, width = arguments(given, 10)
    shared = heads // key_heads
    todo = heads * rows
    for item in range(todo * part // parts, todo * (part + 1) // parts):
        values = address(v) + item // rows // shared * v_head
        weights = address(pattern) + item * keys * 4
        target = address(out) + item * width * 4
        # Four vectors at a time: 64 coordinates whose sums run independently.
        for at in range(0, width, 4 * LANES):
            a = b = c = d = everywhere(np.float32(0))
            left = width - at
            for key in range(keys):
                weight = everywhere(float_at(weights + key * 4))
                here = values + (key * v_row + at * 4)
                a = fused(weight, floats_upto(here, left), a)
                if left > LANES:
                    b = fused(weight, floats_upto(here + 4 * LANES, left - LANES), b)
                if left > 2 * LANES:
                    c = fused(weight, floats_upto(here + 8 * LANES, left - 2 * LANES), c)
                if left > 3 * LANES:
                    d = fused(weight, floats_upto(here + 12 * LANES, left - 3 * LANES), d)
            there = target + at * 4
            put_upto(there, a, left)
            if left > LANES:
                put_upto(there + 4 * LANES, b, left - LANES)
            if left > 2 * LANES:
                put_upto(there + 8 * LANES, c, left - 2 * LANES)
            if left > 3 * LANES:
                put_upto(there + 12 * LANES, d, left - 3 * LANES)


@cache
def _kernels() -> tuple[Kernel, Kernel]:
    return Kernel(_dots, "attention scores", "q" * 12), Kernel(_mix, "attention's mix", "q" * 10)


def dots(q: np.ndarray, k: np.ndarray, out: np.ndarray) -> None:
    """q kᵀ for few rows; the last axis of q and k is contiguous, the others may lie anywhere."""
    heads, rows, width = q.shape
    key_heads, keys, _ = k.shape
    parts = thread_count() if out.size * width >= _PARALLEL_FROM else 1
    _kernels()[0](
        *(place(q), q.strides[0], q.strides[1], place(k), k.strides[0], k.strides[1], place(out)),
        *(heads, key_heads, rows, keys, width),
        parts=parts,
    )


def mix(pattern: np.ndarray, v: np.ndarray, out: np.ndarray) -> None:
    """pattern v for few rows; pattern is contiguous, and so is the last axis of v."""
    heads, rows, keys = pattern.shape
    key_heads, _, width = v.shape
    parts = thread_count() if pattern.size * width >= _PARALLEL_FROM else 1
    _kernels()[1](
        *(place(pattern), place(v), v.strides[0], v.strides[1], place(out)),
        *(heads, key_heads, rows, keys, width),
        parts=parts,
    )
