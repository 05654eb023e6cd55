"""Dot products whose sums always run in one order: 32 lanes, then the lanes in pairs.

Several products at once read each row of either side fewer times, and give exactly the bits of one alone.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from cutaway.engines.cpu.vectors import ADDRESS, I8, I64, fma, lane_sum, load, load_some, operation

SUM_LANES = 32  # two vectors, so that their additions overlap


def _dots(n_left: int, n_right: int) -> Callable[..., list[list[Any]]]:
    """Emit the dot products of all pairs of rows, each over `length` floats."""
    wide = ir.VectorType(ir.FloatType(), SUM_LANES)
    pairs = [(i, j) for i in range(n_left) for j in range(n_right)]

    def emit(builder: Any, left: Any, left_step: Any, right: Any, right_step: Any, length: Any) -> list[list[Any]]:
        lefts = [builder.gep(left, [builder.mul(left_step, I64(i))]) for i in range(n_left)]
        rights = [builder.gep(right, [builder.mul(right_step, I64(j))]) for j in range(n_right)]
        zeros = ir.Constant(wide, [0.0] * SUM_LANES)
        sums = {pair: cgutils.alloca_once_value(builder, zeros) for pair in pairs}

        def add(a: list[Any], b: list[Any]) -> None:
            for i, j in pairs:
                builder.store(fma(builder, a[i], b[j], builder.load(sums[i, j])), sums[i, j])

        with cgutils.for_range(builder, builder.lshr(length, I64(5))) as loop:
            offset = builder.shl(loop.index, I64(7))  # 32 floats of 4 bytes
            add(
                [load(builder, builder.gep(row, [offset]), wide) for row in lefts],
                [load(builder, builder.gep(row, [offset]), wide) for row in rights],
            )
        rest = builder.and_(length, I64(31))
        with builder.if_then(builder.icmp_signed(">", rest, I64(0)), likely=False):
            offset = builder.shl(builder.sub(length, rest), I64(2))
            add(
                [load_some(builder, builder.gep(row, [offset]), rest, wide) for row in lefts],
                [load_some(builder, builder.gep(row, [offset]), rest, wide) for row in rights],
            )
        return [[lane_sum(builder, builder.load(sums[i, j])) for j in range(n_right)] for i in range(n_left)]

    return emit


@operation(types.float32, ADDRESS, ADDRESS, types.int64)
def dot(builder: Any, left: Any, right: Any, length: Any) -> Any:
    """The dot product of two rows of `length` floats."""
    return _dots(1, 1)(builder, left, I64(0), right, I64(0), length)[0][0]


@operation(types.void, ADDRESS, types.int64, ADDRESS, types.int64, types.int64, ADDRESS, types.int64, types.int64)
def dots_2x4(
    builder: Any,
    left: Any,
    left_step: Any,
    right: Any,
    right_step: Any,
    length: Any,
    out: Any,
    left_out: Any,
    right_out: Any,
) -> Any:
    """Two rows with four: eight dot products, each with exactly the bits of `dot`.

    Steps are bytes from row to row. The product of left row i and right row j is stored at
    out + i · left_out + j · right_out.
    """
    totals = _dots(2, 4)(builder, left, left_step, right, right_step, length)
    single = ir.FloatType().as_pointer()
    for i, row in enumerate(totals):
        for j, value in enumerate(row):
            offset = builder.add(builder.mul(left_out, I64(i)), builder.mul(right_out, I64(j)))
            builder.store(value, builder.bitcast(builder.gep(out, [offset]), single), align=4)
    return ir.Constant(I8.as_pointer(), None)
