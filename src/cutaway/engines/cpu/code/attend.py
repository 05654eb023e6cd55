"""Attention's two products and what stands between them.

The kernels serve the stages, which show scores and pattern, and the fused forms, which do not: each number is worked
out by the same function in both, so that looking changes no bit. Where a window hides the first keys, the fused forms
leave them out, from a multiple of sixteen on: what is left out would have added exact zeros, lane by lane.
"""

import numpy as np
from numba.extending import register_jitable

from cutaway.engines.cpu.code.arithmetic import everywhere, floats_upto, fused, put_upto, times
from cutaway.engines.cpu.code.elementwise import capped, hide, softmax_row
from cutaway.engines.cpu.code.sums import dots_of_group, mix_tile
from cutaway.engines.cpu.code.vectors import address, arguments, as_float, float_at, index_at
from cutaway.engines.cpu.processor import FEW, LANES, MIX_KEYS, MIX_STEP, TILE_LEFT, has

_WIDE = has("avx512f")  # registers for four rows and four vectors at once; else for three and two


@register_jitable
def _dots_with_keys(  # type: ignore[no-untyped-def]
    queries, q_step: int, n_queries: int, keys, k_row: int, first: int, stop: int, width: int, out, out_step: int
):
    """q · k of every query row with keys `first` to `stop`; key 0's result of the first query stands at `out`."""
    key = first
    while key < stop:
        taken = min(TILE_LEFT, stop - key)
        # Where each key is used a few times only, what counts is that it arrives.
        dots_of_group(
            *(keys + key * k_row, k_row, taken, queries, q_step, n_queries, width),
            *(out + key * 4, out_step, n_queries < FEW),
        )
        key += taken


def dots_kernel(given: int, part: int, parts: int) -> None:
    # q: [heads, rows, width], k: [key heads, keys, width], with steps in bytes over their first two axes;
    # out: [heads, rows, keys]; keys before `start` are left out
    q, q_head, q_row, k, k_head, k_row, out, heads, key_heads, rows, keys, width, start = arguments(given, 13)
    groups, shared = (keys - start + TILE_LEFT - 1) // TILE_LEFT, heads // key_heads
    first = start + groups * part // parts * TILE_LEFT
    stop = min(start + groups * (part + 1) // parts * TILE_LEFT, keys)
    step = keys * 4
    if rows == 1:  # the heads that share keys are taken as the rows
        for key_head in range(key_heads):
            head = key_head * shared
            queries, target = address(q) + head * q_head, address(out) + head * step
            here = address(k) + key_head * k_head
            _dots_with_keys(queries, q_head, shared, here, k_row, first, stop, width, target, step)
    else:
        for head in range(heads):
            queries, target = address(q) + head * q_head, address(out) + head * rows * step
            here = address(k) + head // shared * k_head
            _dots_with_keys(queries, q_row, rows, here, k_row, first, stop, width, target, step)


@register_jitable
def _weigh(  # type: ignore[no-untyped-def]
    row, width: int, first: int, last: int, scale, growth, cap, done: int = 0, steps: int = 3
) -> None:
    """A row of dot products to weights, in place: scaled, grown and capped (step 1), masked (2), softmaxed (3)."""
    factor, grown = everywhere(scale), everywhere(growth)
    if done < 1 <= steps:
        for at in range(0, width, LANES):
            value = times(times(floats_upto(row + at * 4, width - at), factor), grown)
            if cap > 0:
                value = capped(value, cap)
            put_upto(row + at * 4, value, width - at)
    if done < 2 <= steps:
        hide(row, width, first, last)
    if done < 3 <= steps:
        softmax_row(row, width)


def weights_kernel(given: int, part: int, parts: int) -> None:
    # scores: [heads, rows, keys]; first, last: int64 [rows]; growth: float32 [rows], or 0
    scores, heads, rows, keys, start, first, last, growth, bits_of_scale, bits_of_cap = arguments(given, 10)
    scale, cap = as_float(bits_of_scale), as_float(bits_of_cap)
    for item in range(heads * rows * part // parts, heads * rows * (part + 1) // parts):
        row = item % rows
        grown = float_at(address(growth) + row * 4) if growth != 0 else np.float32(1)
        low, high = index_at(address(first) + row * 8) - start, index_at(address(last) + row * 8) - start
        _weigh(address(scores) + (item * keys + start) * 4, keys - start, low, high, scale, grown, cap)


@register_jitable
def _mix_row(weights, values, v_row: int, keys: int, left: int, target, resumed: int) -> None:  # type: ignore[no-untyped-def]
    """Up to 64 coordinates of one row's mix, key after key; they go on from those at `target`, if any."""
    a = b = c = d = everywhere(np.float32(0))  # four vectors, whose sums run independently
    if resumed:
        a = floats_upto(target, left)
        b = floats_upto(target + 4 * LANES, left - LANES) if left > LANES else b
        c = floats_upto(target + 8 * LANES, left - 2 * LANES) if left > 2 * LANES else c
        d = floats_upto(target + 12 * LANES, left - 3 * LANES) if left > 3 * LANES else d
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


@register_jitable
def _mix_rows(  # type: ignore[no-untyped-def]
    weights, w_step: int, n_rows: int, values, v_row: int, keys: int, width: int, out, out_step: int
):
    """`width` coordinates of the mixes of some rows: Σ over keys, one key after another, whatever stands beside.

    Of many rows, all see some keys before any sees the next: those keys' values stay in the first-level cache.
    """
    at_once = keys if n_rows < FEW else min(keys, MIX_KEYS)
    _mix_keys(weights, w_step, n_rows, values, v_row, at_once, width, out, out_step, 0)
    begin = at_once
    while begin < keys:
        some, here = weights + begin * 4, values + begin * v_row
        _mix_keys(some, w_step, n_rows, here, v_row, min(at_once, keys - begin), width, out, out_step, 1)
        begin += at_once


@register_jitable
def _mix_keys(  # type: ignore[no-untyped-def]
    weights, w_step: int, n_rows: int, values, v_row: int, keys: int, width: int, out, out_step: int, resumed: int
):
    """Some keys' part in the mixes of some rows."""
    at = 0
    while at < width:
        left, row = width - at, 0
        wide = 64 if _WIDE and left >= 64 else 32
        here = values + at * 4
        while row < n_rows:
            some, target, more = weights + row * w_step, out + (row * out_step + at * 4), n_rows - row
            if left < 32:
                _mix_row(some, here, v_row, keys, left, target, resumed)
                row += 1
            elif _WIDE and more >= 4:
                if wide == 64:
                    mix_tile(4, 4, some, w_step, here, v_row, keys, target, out_step, resumed)
                else:
                    mix_tile(4, 2, some, w_step, here, v_row, keys, target, out_step, resumed)
                row += 4
            elif more >= 3:
                mix_tile(3, 2, some, w_step, here, v_row, keys, target, out_step, resumed)
                if wide == 64:
                    mix_tile(3, 2, some, w_step, here + 128, v_row, keys, target + 128, out_step, resumed)
                row += 3
            else:
                _mix_row(some, here, v_row, keys, wide, target, resumed)
                row += 1
        at += wide


def mix_kernel(given: int, part: int, parts: int) -> None:
    # pattern: [heads, rows, keys]; v: [key heads, keys, width] and out: [heads, rows, width], with steps in bytes over
    # the first two axes; keys before `start` are left out
    pattern, v, v_head, v_row, out, out_head, out_row, heads, key_heads, rows, keys, width, start = arguments(given, 13)
    shared, step = heads // key_heads, keys * 4
    if rows == 1:  # the heads that share values are taken as the rows, and parts are stretches of coordinates
        stretches = (width + MIX_STEP - 1) // MIX_STEP
        for item in range(key_heads * stretches * part // parts, key_heads * stretches * (part + 1) // parts):
            key_head, at = item // stretches, item % stretches * MIX_STEP
            weights = address(pattern) + (key_head * shared * step + start * 4)
            values = address(v) + (key_head * v_head + start * v_row + at * 4)
            target = address(out) + (key_head * shared * out_head + at * 4)
            here = min(MIX_STEP, width - at)
            _mix_rows(weights, step, shared, values, v_row, keys - start, here, target, out_head)
    else:
        groups = (rows + 11) // 12  # a dozen rows are whole tiles
        for item in range(heads * groups * part // parts, heads * groups * (part + 1) // parts):
            head, first = item // groups, item % groups * 12
            weights = address(pattern) + ((head * rows + first) * step + start * 4)
            values = address(v) + (head // shared * v_head + start * v_row)
            target = address(out) + (head * out_head + first * out_row)
            taken = min(12, rows - first)
            _mix_rows(weights, step, taken, values, v_row, keys - start, width, target, out_row)


@register_jitable
def _keys_of_block(first, last, begin: int, taken: int):  # type: ignore[no-untyped-def]
    """The keys that any of some rows sees: the first, on a vector's edge, and how many up to the last."""
    start, stop = index_at(first + begin * 8), 0
    for row in range(begin, begin + taken):
        start, stop = min(start, index_at(first + row * 8)), max(stop, index_at(last + row * 8))
    start = max(start, 0) // LANES * LANES
    return start, stop - start


@register_jitable
def _copy_rows(source, target, step: int, rows: int, count: int) -> None:  # type: ignore[no-untyped-def]
    """The first `count` numbers of some rows, which lie `step` bytes apart here and there."""
    for row in range(rows):
        for at in range(0, count, LANES):
            here = row * step + at * 4
            put_upto(target + here, floats_upto(source + here, count - at), count - at)


@register_jitable
def _put_all(start, count: int, value) -> None:  # type: ignore[no-untyped-def]
    """`count` times the same number."""
    for at in range(0, count, LANES):
        put_upto(start + at * 4, everywhere(value), count - at)


def square_kernel(given: int, part: int, parts: int) -> None:
    # out: [heads, rows, keys], contiguous: after `steps` 0 the dot products and 1 the scores, of every row with every
    # key; after 2 the masked scores and 3 the weights, worked out where a block's rows see keys, filled in elsewhere.
    # Where `begun` is not 0, it is the same after `done` steps.
    q, q_head, q_row, k, k_head, k_row, out, heads, key_heads, rows, width, keys = arguments(given, 12)
    first, last, growth, bits_of_scale, bits_of_cap, steps, begun, done, block = arguments(given + 96, 9)
    scale, cap = as_float(bits_of_scale), as_float(bits_of_cap)
    unseen = np.float32(-np.inf) if steps == 2 else np.float32(0)
    blocks = (rows + block - 1) // block
    for item in range(part, heads * blocks, parts):
        head, begin = item % heads, (blocks - 1 - item // heads) * block  # the longest rows first
        taken, start, seen = min(block, rows - begin), 0, keys
        if steps >= 2:
            start, seen = _keys_of_block(address(first), address(last), begin, taken)
        at_first = (head * rows + begin) * keys * 4
        target = address(out) + at_first
        if begun != 0:
            _copy_rows(address(begun) + (at_first + start * 4), target + start * 4, keys * 4, taken, seen)
        else:
            queries = address(q) + (head * q_head + begin * q_row)
            its_keys = address(k) + (head // (heads // key_heads) * k_head + start * k_row)
            _dots_with_keys(queries, q_row, taken, its_keys, k_row, 0, seen, width, target + start * 4, keys * 4)
        for row in range(taken):
            here, at = target + row * keys * 4, begin + row
            grown = float_at(address(growth) + at * 4) if growth != 0 else np.float32(1)
            low, high = index_at(address(first) + at * 8) - start, index_at(address(last) + at * 8) - start
            _weigh(here + start * 4, seen, low, high, scale, grown, cap, done, steps)
            _put_all(here, start, unseen)
            _put_all(here + (start + seen) * 4, keys - start - seen, unseen)


def attend_kernel(given: int, part: int, parts: int, worker: int) -> None:
    # All of it, block by block of query rows, with scores that stand in this thread's scratch only.
    q, q_head, q_row, k, k_head, k_row, v, v_head, v_row, out, out_head, out_row = arguments(given, 12)
    heads, key_heads, rows, width, v_width, first, last, growth = arguments(given + 96, 8)
    bits_of_scale, bits_of_cap, block, scratch, scratch_size = arguments(given + 160, 5)
    scale, cap = as_float(bits_of_scale), as_float(bits_of_cap)
    scores = address(scratch) + scratch_size * worker * 4
    blocks = (rows + block - 1) // block
    for item in range(part, heads * blocks, parts):
        head, begin = item % heads, (blocks - 1 - item // heads) * block  # the longest rows first
        taken = min(block, rows - begin)
        start, seen = _keys_of_block(address(first), address(last), begin, taken)
        queries, target = (
            address(q) + (head * q_head + begin * q_row),
            address(out) + (head * out_head + begin * out_row),
        )
        here = head // (heads // key_heads)
        its_keys = address(k) + (here * k_head + start * k_row)
        _dots_with_keys(queries, q_row, taken, its_keys, k_row, 0, seen, width, scores, seen * 4)
        for row in range(taken):
            at = begin + row
            grown = float_at(address(growth) + at * 4) if growth != 0 else np.float32(1)
            low, high = index_at(address(first) + at * 8) - start, index_at(address(last) + at * 8) - start
            _weigh(scores + row * seen * 4, seen, low, high, scale, grown, cap)
        values = address(v) + (here * v_head + start * v_row)
        _mix_rows(scores, seen * 4, taken, values, v_row, seen, v_width, target, out_row)
