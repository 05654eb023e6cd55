"""Dot products whose sums always run in one order: sixteen lanes, then halves upon halves.

Many products at once read each row of either side fewer times, and give exactly the bits of one alone.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import register_jitable

from cutaway.engines.cpu.code.vectors import (
    ADDRESS,
    AHEAD,
    I8,
    I32,
    I64,
    LINE,
    fetch,
    fma,
    lane_sum,
    lanes,
    load,
    load_some,
    operation,
    put_one,
    splat,
)
from cutaway.engines.cpu.processor import (
    KEPT_BYTES,
    LANES,
    PASS_LANES,
    STRETCH,
    TILE_LEFT,
    TILE_RIGHT,
    WEAVES,
    padded,
)

_WIDE = ir.VectorType(ir.FloatType(), LANES)


def _sums(n_left: int, n_right: int, woven: bool = False) -> Callable[..., dict[tuple[int, int], Any]]:
    """Emit the sixteen sums of every pair of rows, each over `length` floats; they go on from those at `kept`, if any.

    Woven left rows stand sixteen numbers of each side by side, then the next sixteen of each, the last filled up with
    zeros: one address reaches them all. What is given back are the places of the sums, by left and right row.
    """
    pairs = [(i, j) for i in range(n_left) for j in range(n_right)]

    def emit(
        builder: Any,
        left: Any,
        left_step: Any,
        right: Any,
        right_step: Any,
        length: Any,
        kept: Any = None,
        resumed: Any = None,
    ) -> dict[tuple[int, int], Any]:
        between = I64(4 * LANES) if woven else left_step
        lefts = [builder.gep(left, [builder.mul(between, I64(i))]) for i in range(n_left)]
        rights = [builder.gep(right, [builder.mul(right_step, I64(j))]) for j in range(n_right)]
        zeros = ir.Constant(_WIDE, [0.0] * LANES)
        sums = {pair: cgutils.alloca_once_value(builder, zeros) for pair in pairs}
        for pair in pairs:  # also where this is emitted inside a loop
            builder.store(zeros, sums[pair])
        if resumed is not None:
            with builder.if_then(builder.icmp_signed("!=", resumed, I64(0))):
                for k, pair in enumerate(pairs):
                    builder.store(load(builder, builder.gep(kept, [I64(4 * LANES * k)]), _WIDE), sums[pair])

        def add(a: list[Any], b: list[Any], sums: dict[tuple[int, int], Any]) -> None:
            for i, j in pairs:
                builder.store(fma(builder, a[i], b[j], builder.load(sums[i, j])), sums[i, j])

        def walk(first_lane: int, width: int, into: dict[tuple[int, int], Any]) -> None:
            kind = ir.VectorType(ir.FloatType(), width)
            with cgutils.for_range(builder, builder.lshr(length, I64(4))) as loop:
                offset = builder.add(builder.shl(loop.index, I64(6)), I64(4 * first_lane))  # 16 floats of 4 bytes
                along = offset
                if woven:
                    along = builder.add(builder.mul(loop.index, I64(4 * LANES * n_left)), I64(4 * first_lane))
                add(
                    [load(builder, builder.gep(row, [along]), kind) for row in lefts],
                    [load(builder, builder.gep(row, [offset]), kind) for row in rights],
                    into,
                )

        if PASS_LANES == LANES:
            walk(0, LANES, sums)
        else:
            kind = ir.VectorType(ir.FloatType(), PASS_LANES)
            for first_lane in range(0, LANES, PASS_LANES):
                part = {}  # these lanes of the sums, where they lie among the others
                for pair, place in sums.items():
                    lane = builder.gep(builder.bitcast(place, ir.FloatType().as_pointer()), [I32(first_lane)])
                    part[pair] = cgutils.alloca_once(builder, kind)
                    builder.store(load(builder, lane, kind), part[pair])
                walk(first_lane, PASS_LANES, part)
                for pair, place in sums.items():
                    lane = builder.gep(builder.bitcast(place, ir.FloatType().as_pointer()), [I32(first_lane)])
                    builder.store(builder.load(part[pair]), builder.bitcast(lane, kind.as_pointer()), align=4)
        rest = builder.and_(length, I64(15))
        with builder.if_then(builder.icmp_signed(">", rest, I64(0)), likely=False):
            offset = builder.shl(builder.sub(length, rest), I64(2))
            if woven:
                along = builder.mul(offset, I64(n_left))
                last = [load(builder, builder.gep(row, [along]), _WIDE) for row in lefts]
            else:
                last = [load_some(builder, builder.gep(row, [offset]), rest, _WIDE) for row in lefts]
            add(
                last,
                [load_some(builder, builder.gep(row, [offset]), rest, _WIDE) for row in rights],
                sums,
            )
        return sums

    return emit


def _dots(n_left: int, n_right: int) -> Callable[..., list[list[Any]]]:
    """Emit the dot products of all pairs of rows, each over `length` floats."""

    def emit(builder: Any, *rows: Any) -> list[list[Any]]:
        sums = _sums(n_left, n_right)(builder, *rows)
        return _totals(builder, sums, n_left, n_right)

    return emit


def _totals(builder: Any, sums: dict[tuple[int, int], Any], n_left: int, n_right: int) -> list[list[Any]]:
    totals = [lane_sums(builder, [builder.load(sums[i, j]) for i in range(n_left)]) for j in range(n_right)]
    return [[totals[j][i] for j in range(n_right)] for i in range(n_left)]


def lane_sums(builder: Any, vectors: list[Any]) -> list[Any]:
    """`lane_sum` of each vector, bit for bit, with fewer instructions: a power of two of them at a time.

    Halves are added upon halves as there, but of two vectors at a time, the second's halves beside the first's.
    """
    count = min(1 << len(vectors).bit_length() - 1, LANES)
    if count < len(vectors):
        return lane_sums(builder, vectors[:count]) + lane_sums(builder, vectors[count:])
    if count == 1:
        return [lane_sum(builder, vectors[0])]
    width = LANES
    while width > count:  # each vector by itself, until all together fit one
        vectors = [_added(builder, v, v, [*range(width // 2)], [*range(width // 2, width)]) for v in vectors]
        width //= 2
    block = width
    while len(vectors) > 1:  # in every block of lanes, the sums of one vector beside those of another
        half, first, second = len(vectors) // 2, list[int](), list[int]()
        for base in range(0, width, block):
            middle, end = base + block // 2, base + block
            first += [*range(base, middle), *range(width + base, width + middle)]
            second += [*range(middle, end), *range(width + middle, width + end)]
        vectors = [_added(builder, vectors[k], vectors[k + half], first, second) for k in range(half)]
        block //= 2
    return [builder.extract_element(vectors[0], I32(place)) for place in range(count)]


def _added(builder: Any, one: Any, other: Any, first: list[int], second: list[int]) -> Any:
    """Some lanes of two vectors plus others of them."""
    return builder.fadd(
        builder.shuffle_vector(one, other, lanes(first)), builder.shuffle_vector(one, other, lanes(second))
    )


@operation(types.float32, ADDRESS, ADDRESS, types.int64)
def dot(builder: Any, left: Any, right: Any, length: Any) -> Any:
    """The dot product of two rows of `length` floats."""
    return _dots(1, 1)(builder, left, I64(0), right, I64(0), length)[0][0]


def _stored_dots(n_left: int, n_right: int) -> Any:
    """An operation: the dot products of `n_left` rows with `n_right`, each with exactly the bits of `dot`.

    Its arguments: left, its bytes from row to row, right, its bytes from row to row, length, out, and the bytes
    from result to result of the next left row and of the next right row.
    """

    @operation(types.void, ADDRESS, types.int64, ADDRESS, types.int64, types.int64, ADDRESS, types.int64, types.int64)
    def store_dots(
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
        totals = _dots(n_left, n_right)(builder, left, left_step, right, right_step, length)
        single = ir.FloatType().as_pointer()
        for i, row in enumerate(totals):
            for j, value in enumerate(row):
                offset = builder.add(builder.mul(left_out, I64(i)), builder.mul(right_out, I64(j)))
                builder.store(value, builder.bitcast(builder.gep(out, [offset]), single), align=4)
        return ir.Constant(I8.as_pointer(), None)

    return store_dots


def _stretches(n_left: int, n_right: int) -> Any:
    """An operation: a stretch of long dot products, or the whole of short ones, each with the bits of `dot`.

    Its arguments: left, its bytes from row to row where they are not woven, right, its bytes from row to row, the
    stretch's length; where the sums so far are kept, whether there are any (else they begin at zero), whether more is
    to come (then the sums are kept, not added up); out, and the bytes from result to result of the next right row.
    """
    whole = types.int64

    @operation(types.void, ADDRESS, whole, ADDRESS, whole, whole, ADDRESS, whole, whole, ADDRESS, whole)
    def stretch(builder: Any, *given: Any) -> Any:
        *rows, kept, resumed, unfinished, out, right_out = given
        sums = _sums(n_left, n_right, WEAVES)(builder, *rows, kept, resumed)
        single = ir.FloatType().as_pointer()
        with builder.if_else(builder.icmp_signed("!=", unfinished, I64(0))) as (more, done):
            with more:
                for k, place in enumerate(sums.values()):
                    target = builder.bitcast(builder.gep(kept, [I64(4 * LANES * k)]), _WIDE.as_pointer())
                    builder.store(builder.load(place), target, align=4)
            with done:
                for i, row in enumerate(_totals(builder, sums, n_left, n_right)):
                    for j, value in enumerate(row):
                        offset = builder.add(builder.mul(right_out, I64(j)), I64(4 * i))
                        builder.store(value, builder.bitcast(builder.gep(out, [offset]), single), align=4)
        return ir.Constant(I8.as_pointer(), None)

    return stretch


_tile_stretch = _stretches(TILE_LEFT, TILE_RIGHT)
_column_stretch = _stretches(TILE_LEFT, 1)


_tile_dots = _stored_dots(TILE_LEFT, TILE_RIGHT)
_column_dots = _stored_dots(TILE_LEFT, 1)


@register_jitable
def dots_of_group(
    left: int,
    left_step: int,
    n_left: int,
    right: int,
    right_step: int,
    n_right: int,
    length: int,
    out: int,
    right_out: int,
) -> None:
    """Up to TILE_LEFT rows with any number of rows: each product has the bits of `dot`.

    Steps are bytes from row to row. Results of neighbouring left rows lie side by side at `out`, those of the next
    right row `right_out` bytes on.
    """
    at = 0
    while n_left == TILE_LEFT and at < n_right:
        rights, target = right + at * right_step, out + at * right_out
        if n_right - at >= TILE_RIGHT:
            _tile_dots(left, left_step, rights, right_step, length, target, 4, right_out)
            at += TILE_RIGHT
        else:
            _column_dots(left, left_step, rights, right_step, length, target, 4, right_out)
            at += 1
    while at < n_right:
        for i in range(n_left):
            put_one(out + (at * right_out + 4 * i), dot(left + i * left_step, right + at * right_step, length))
        at += 1


padded_width = register_jitable(padded)


@register_jitable
def long_dots_of_group(
    left: int, n_left: int, right: int, n_right: int, width: int, kept: int, out: int, right_out: int
) -> None:
    """As `dots_of_group`, of right rows of any width that follow one another, taken stretch by stretch.

    Left rows are a padded row's bytes apart, or woven (WEAVES) in whole tiles, TILE_LEFT together. At `kept` there is
    room for KEPT_BYTES for each right row and each tile.
    """
    step, padded, tiles = 4 * width, 4 * padded_width(width), n_left // TILE_LEFT
    whole = tiles * TILE_LEFT
    dots_of_group(
        left + whole * padded, padded, n_left - whole, right, step, n_right, width, out + 4 * whole, right_out
    )
    stretches = (width + STRETCH - 1) // STRETCH
    length = padded_width((width + stretches - 1) // stretches)
    begin = 0
    while begin < width and tiles > 0:
        here, resumed = min(length, width - begin), begin
        unfinished = width - begin - here
        at = 0
        while at < n_right:
            rights = right + (at * step + begin * 4)
            n_here = TILE_RIGHT if n_right - at >= TILE_RIGHT else 1
            for tile in range(tiles):  # the same rows of x, now in the first-level cache, with each
                lefts = left + (tile * TILE_LEFT * padded + begin * 4 * (TILE_LEFT if WEAVES else 1))
                sums = kept + (at * tiles + tile * n_here) * KEPT_BYTES
                target = out + (at * right_out + 4 * TILE_LEFT * tile)
                if n_here == TILE_RIGHT:
                    _tile_stretch(lefts, padded, rights, step, here, sums, resumed, unfinished, target, right_out)
                else:
                    _column_stretch(lefts, padded, rights, step, here, sums, resumed, unfinished, target, right_out)
            at += n_here
        begin += here


@operation(types.void, *[ADDRESS, types.int64] * 2, types.int64, ADDRESS, types.int64, constants=2)
def mix_tile(builder: Any, n_rows: int, n_vectors: int, *given: Any) -> Any:
    """Rows of weights times values, `n_vectors` · 16 coordinates of each: Σ over keys, one key after another.

    Constants: how many rows, how many vectors. Arguments: the weights `[n_rows, keys]` and their bytes from row to
    row, the values `[keys, …]` and theirs, the number of keys, the results and their bytes from row to row.
    """
    weights, weights_step, values, values_step, keys, out, out_step = given
    zeros = ir.Constant(_WIDE, [0.0] * LANES)
    pairs = [(i, j) for i in range(n_rows) for j in range(n_vectors)]
    sums = {pair: cgutils.alloca_once_value(builder, zeros) for pair in pairs}
    for place in sums.values():
        builder.store(zeros, place)
    rows = [builder.gep(weights, [builder.mul(weights_step, I64(i))]) for i in range(n_rows)]
    with cgutils.for_range(builder, keys) as loop:
        here = builder.gep(values, [builder.mul(loop.index, values_step)])
        parts = [load(builder, builder.gep(here, [I64(4 * LANES * j)]), _WIDE) for j in range(n_vectors)]
        for ahead in range(AHEAD, AHEAD + 4 * LANES * n_vectors, LINE):
            fetch(builder, builder.gep(here, [I64(ahead)]))
        for i, row in enumerate(rows):
            single = load(builder, builder.gep(row, [builder.shl(loop.index, I64(2))]), ir.FloatType())
            weight = splat(builder, single)
            for j, part in enumerate(parts):
                builder.store(fma(builder, weight, part, builder.load(sums[i, j])), sums[i, j])
    for (i, j), pointer in sums.items():
        offset = builder.add(builder.mul(out_step, I64(i)), I64(4 * LANES * j))
        target = builder.bitcast(builder.gep(out, [offset]), _WIDE.as_pointer())
        builder.store(builder.load(pointer), target, align=4)
    return ir.Constant(I8.as_pointer(), None)
