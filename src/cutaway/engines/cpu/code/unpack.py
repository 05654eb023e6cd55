"""Stored rows to float32, and dot products that read the stored row itself.

The generators of `stored.py` are put to two uses. `unpack_row` writes a row's weights out, for a product with many
rows of x, which reads them again and again. `stored_dots` multiplies them as they come, for a product with few: there
the weights' bytes, read once, are all that counts, so the bytes to come are also fetched ahead.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from cutaway.engines.blocks import BLOCKS
from cutaway.engines.cpu.code.formats import ONE, VECTORS, block_of
from cutaway.engines.cpu.code.stored import Stored
from cutaway.engines.cpu.code.sums import joined, lane_sums
from cutaway.engines.cpu.code.vectors import (
    ADDRESS,
    AHEAD,
    FLOAT_LANES,
    I8,
    I64,
    LINE,
    fetch,
    fma,
    lanes,
    load,
    load_some,
    operation,
)
from cutaway.engines.cpu.processor import FEW, LANES, MOST_SUMS, PASS_LANES, has


@operation(types.void, ADDRESS, ADDRESS, types.int64, types.int64, constants=1)
def unpack_row(builder: Any, kind: str, row: Any, out: Any, width: Any, step: Any) -> Any:
    """The `width` weights stored at `row` as float32 at `out`, sixteen and, `step` bytes on, the next sixteen.

    The kind is a constant of the kernel. Where they do not follow one another, the last sixteen are filled up with
    zeros.
    """
    weights, size = block_of(kind)

    def put(at: Any, value: Any) -> None:
        builder.store(value, builder.bitcast(builder.gep(out, [at]), value.type.as_pointer()), align=4)

    with cgutils.for_range(builder, builder.udiv(width, I64(weights))) as loop:
        block = Stored(builder, builder.gep(row, [builder.mul(loop.index, I64(size))]))
        target = builder.mul(builder.mul(loop.index, I64(weights // LANES)), step)
        for i, vector in enumerate(VECTORS[kind](block)):
            put(builder.add(target, builder.mul(step, I64(i))), vector)
    if BLOCKS[kind].weights == 1:
        tail = builder.mul(builder.udiv(width, I64(LANES)), step)
        more = builder.icmp_signed(">", builder.and_(width, I64(LANES - 1)), I64(0))
        with builder.if_then(builder.and_(more, builder.icmp_signed("!=", step, I64(4 * LANES)))):
            put(tail, ir.Constant(FLOAT_LANES, [0.0] * LANES))
        for index, stored in _left_over(builder, kind, row, width):
            put(builder.add(tail, builder.mul(builder.and_(index, I64(LANES - 1)), I64(4))), stored)
    return ir.Constant(I8.as_pointer(), None)


@operation(ADDRESS, types.int64, types.int64, types.int64, types.int64)
def stored_row(builder: Any, rows: Any, row_bytes: Any, order: Any, row: Any) -> Any:
    """Where the stored bytes of weight row `row` lie; `order` is the address of a permutation, or 0."""
    return _stored_row(builder, rows, row_bytes, order, row)


def _stored_row(builder: Any, rows: Any, row_bytes: Any, order: Any, row: Any) -> Any:
    there = cgutils.alloca_once(builder, I64)
    builder.store(row, there)
    with builder.if_then(builder.icmp_signed("!=", order, I64(0))):
        places = builder.inttoptr(order, I64.as_pointer())
        builder.store(builder.load(builder.gep(places, [row])), there)
    first = builder.inttoptr(rows, I8.as_pointer())
    return builder.gep(first, [builder.mul(row_bytes, builder.load(there))])


_W = types.int64


@operation(types.void, _W, _W, _W, _W, _W, ADDRESS, _W, _W, ADDRESS, _W, constants=1)
def stored_dots(builder: Any, kind: str, *given: Any) -> Any:
    """Stored rows `begin` to `stop` times 1 to FEW rows of x, each dot product with the bits of `sums.dot`.

    The kind is a constant. Arguments: the weight's rows, its bytes from row to row, its order or 0, `begin`, `stop`;
    the first row of x, how many rows there are, their width; where the results of row 0 of the weight go, and the
    bytes from one row of results to the next.
    """
    *weight, begin, stop, x, n_x, width, out, out_step = given
    for n_right in range(1, FEW + 1):
        with builder.if_then(builder.icmp_signed("==", n_x, I64(n_right))):
            most = _left_at_once(n_right)
            groups = builder.sdiv(builder.sub(stop, begin), I64(most))
            with cgutils.for_range(builder, groups) as loop:
                first = builder.add(begin, builder.mul(loop.index, I64(most)))
                _few_dots(builder, kind, most, n_right, weight, first, x, width, out, out_step)
            if most > 1:
                rest = builder.add(begin, builder.mul(groups, I64(most)))
                with cgutils.for_range(builder, builder.sub(stop, rest)) as loop:
                    first = builder.add(rest, loop.index)
                    _few_dots(builder, kind, 1, n_right, weight, first, x, width, out, out_step)
    return ir.Constant(I8.as_pointer(), None)


def _left_at_once(n_right: int) -> int:
    """Stored rows read side by side: enough sums at once to keep the processor busy, no more than its registers."""
    if has("avx512f"):
        return 4 if n_right <= 5 else 2
    return 2 if n_right <= 4 else 1


def _lanes_at_once(n_right: int) -> int:
    """Lanes that are summed in one pass over a stored row: all, where the registers hold that many sums."""
    registers = n_right * _left_at_once(n_right) * (LANES // PASS_LANES)
    return LANES if registers <= MOST_SUMS else PASS_LANES


def _few_dots(
    builder: Any,
    kind: str,
    n_left: int,
    n_right: int,
    weight: list[Any],
    first: Any,
    x: Any,
    width: Any,
    out: Any,
    out_step: Any,
) -> None:
    """Emit the dot products of `n_left` stored rows with `n_right` rows of x."""
    weights, size = block_of(kind)
    stored, row_bytes, order = weight
    rows = [_stored_row(builder, stored, row_bytes, order, builder.add(first, I64(i))) for i in range(n_left)]
    step = builder.mul(width, I64(4))
    xs = [builder.gep(x, [builder.mul(I64(j), step)]) for j in range(n_right)]
    lanes_at_once = _lanes_at_once(n_right)
    lane_kind = ir.VectorType(ir.FloatType(), lanes_at_once)
    parts: list[list[list[Any]]] = [[[] for _ in xs] for _ in rows]  # of each pair's sums, a pass's lanes each
    for first_lane in range(0, LANES, lanes_at_once):
        zeros = ir.Constant(lane_kind, [0.0] * lanes_at_once)
        sums = [[cgutils.alloca_once(builder, lane_kind) for _ in xs] for _ in rows]
        for place in (place for row in sums for place in row):
            builder.store(zeros, place)

        with cgutils.for_range(builder, builder.udiv(width, I64(weights))) as loop:
            begin = builder.mul(loop.index, I64(4 * weights))
            for i, row in enumerate(rows):  # one after another: side by side, their vectors would not fit the registers
                place = builder.gep(row, [builder.mul(loop.index, I64(size))])
                for ahead in range(AHEAD, AHEAD + size, LINE) if first_lane == 0 else ():
                    fetch(builder, builder.gep(place, [I64(ahead)]))
                for k, vector in enumerate(VECTORS[kind](Stored(builder, place, looks_up=True))):
                    offset = builder.add(begin, I64(4 * (LANES * k + first_lane)))
                    factors = [load(builder, builder.gep(one, [offset]), lane_kind) for one in xs]
                    _add_products(builder, vector, first_lane, factors, sums[i])
        if BLOCKS[kind].weights == 1:
            rest = builder.and_(width, I64(LANES - 1))
            offset = builder.mul(builder.add(builder.sub(width, rest), I64(first_lane)), I64(4))
            with builder.if_then(builder.icmp_signed(">", rest, I64(first_lane)), likely=False):
                here = builder.sub(rest, I64(first_lane))
                for i, row in enumerate(rows):
                    ends = [load_some(builder, builder.gep(one, [offset]), here, lane_kind) for one in xs]
                    _add_products(builder, _end_of_row(builder, kind, row, width), first_lane, ends, sums[i])
        for i, j in product(range(n_left), range(n_right)):
            parts[i][j].append(builder.load(sums[i][j]))
    for j in range(n_right):
        totals = lane_sums(builder, [joined(builder, row[j]) for row in parts])
        target = builder.gep(out, [builder.add(builder.mul(I64(j), out_step), builder.mul(first, I64(4)))])
        for i, value in enumerate(totals):
            pointer = builder.bitcast(builder.gep(target, [I64(4 * i)]), ir.FloatType().as_pointer())
            builder.store(value, pointer, align=4)


def _add_products(builder: Any, vector: Any, first_lane: int, factors: list[Any], sums: list[Any]) -> None:
    """Add some lanes of a vector, times each of the factors, to the factor's sums."""
    count = factors[0].type.count
    if count < LANES:
        vector = builder.shuffle_vector(vector, vector, lanes(list(range(first_lane, first_lane + count))))
    for factor, total in zip(factors, sums, strict=True):
        builder.store(fma(builder, vector, factor, builder.load(total)), total)


def _left_over(builder: Any, kind: str, row: Any, width: Any) -> Iterator[tuple[Any, Any]]:
    """Inside a loop that it emits: index and value of each weight after the last sixteen of a row of a plain format."""
    if BLOCKS[kind].weights > 1:
        return  # rows of blocks are whole
    first = builder.sub(width, builder.and_(width, I64(LANES - 1)))
    with cgutils.for_range(builder, builder.sub(width, first)) as loop:
        index = builder.add(first, loop.index)
        place = builder.gep(row, [builder.mul(index, I64(BLOCKS[kind].bytes))])
        yield index, ONE[kind](Stored(builder, place))


def _end_of_row(builder: Any, kind: str, row: Any, width: Any) -> Any:
    """The weights after the last sixteen of a row, and zeros."""
    place = cgutils.alloca_once_value(builder, ir.Constant(FLOAT_LANES, [0.0] * LANES))
    builder.store(ir.Constant(FLOAT_LANES, [0.0] * LANES), place)
    for index, value in _left_over(builder, kind, row, width):
        lane = builder.and_(index, I64(LANES - 1))
        single = builder.bitcast(place, ir.FloatType().as_pointer())
        builder.store(value, builder.gep(single, [lane]))
    return builder.load(place)
