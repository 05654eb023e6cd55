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


_PASSES = range(0, LANES, PASS_LANES)  # a pass's first lane


def _walk(
    builder: Any,
    lefts: tuple[Any, Any, int],
    rights: tuple[Any, Any, int],
    length: Any,
    first_lane: int,
    begin_from: Callable[[int], Any] | None = None,
    fetching: bool = False,
) -> list[Any]:
    """Emit PASS_LANES of the sums of every pair of rows, each over `length` floats; right rows change fastest.

    Each side is its first row's address, the bytes from row to row (None where rows are woven), and how many rows.
    Woven rows stand sixteen numbers of each side by side, then the next sixteen of each, the last filled up with
    zeros: one address reaches them all. `begin_from` gives the sums so far. `fetching` asks for the left rows to come.
    """
    kind = ir.VectorType(ir.FloatType(), PASS_LANES)
    pairs = [(i, j) for i in range(lefts[2]) for j in range(rights[2])]
    zeros = ir.Constant(kind, [0.0] * PASS_LANES)
    sums = [cgutils.alloca_once(builder, kind) for _ in pairs]
    for k, place in enumerate(sums):
        builder.store(zeros if begin_from is None else begin_from(k), place)

    def rows(side: tuple[Any, Any, int]) -> list[Any]:
        first, step, count = side
        begin = builder.gep(first, [I64(4 * first_lane)])
        return [
            builder.gep(begin, [I64(4 * LANES * i) if step is None else builder.mul(step, I64(i))])
            for i in range(count)
        ]

    def add(a: list[Any], b: list[Any]) -> None:
        for place, (i, j) in zip(sums, pairs, strict=True):
            builder.store(fma(builder, a[i], b[j], builder.load(place)), place)

    sides = [(rows(side), 4 * LANES * (side[2] if side[1] is None else 1)) for side in (lefts, rights)]
    with cgutils.for_range(builder, builder.lshr(length, I64(4))) as loop:
        add(
            *(
                [load(builder, builder.gep(row, [builder.mul(loop.index, I64(on))]), kind) for row in side]
                for side, on in sides
            )
        )
        if fetching and first_lane == 0:  # one by one: many at once would fill what a core can wait for
            for row in sides[0][0]:
                fetch(builder, builder.gep(row, [builder.add(builder.mul(loop.index, I64(4 * LANES)), I64(AHEAD))]))
    rest = builder.and_(length, I64(LANES - 1))
    with builder.if_then(builder.icmp_signed(">", rest, I64(first_lane)), likely=False):
        here, whole = builder.sub(rest, I64(first_lane)), builder.lshr(length, I64(4))
        ends = []
        for (some, on), (_, step, _) in zip(sides, (lefts, rights), strict=True):
            places = [builder.gep(row, [builder.mul(whole, I64(on))]) for row in some]
            ends.append([load(builder, p, kind) if step is None else load_some(builder, p, here, kind) for p in places])
        add(*ends)
    return [builder.load(place) for place in sums]


def joined(builder: Any, parts: list[Any]) -> Any:
    """The sixteen sums of a pair from those of its passes."""
    while len(parts) > 1:
        width = parts[0].type.count
        both = lanes(list(range(2 * width)))
        parts = [builder.shuffle_vector(parts[i], parts[i + 1], both) for i in range(0, len(parts), 2)]
    return parts[0]


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
    parts = [_walk(builder, (left, I64(0), 1), (right, I64(0), 1), length, first)[0] for first in _PASSES]
    return lane_sum(builder, joined(builder, parts))


def _tile(n_left: int, n_right: int, woven: bool = False, in_stretches: bool = False, fetching: bool = False) -> Any:
    """An operation: the dot products of `n_left` rows with `n_right`, each with exactly the bits of `dot`.

    Its arguments: left, its bytes from row to row where they are not woven, right, its bytes from row to row, the
    length; out, and the bytes from result to result of the next right row (those of the next left row lie beside one
    another). In stretches also: where the sums so far are kept, whether there are any (else they begin at zero), and
    whether more is to come (then the sums are kept, not added up).

    It is a function of its own, which is called: that way all registers are its own.
    """
    pointer, whole = I8.as_pointer(), I64
    given = [pointer, whole, pointer, whole, whole, pointer, whole, *([pointer, whole, whole] if in_stretches else [])]
    kind = "_woven" * woven + "_stretch" * in_stretches + "_fetching" * fetching
    name = f"cutaway_tile_{n_left}_{n_right}{kind}"

    def function(module: Any) -> Any:
        found = module.globals.get(name)
        if found is None:
            found = ir.Function(module, ir.FunctionType(ir.VoidType(), given), name)
            found.linkage = "internal"
            found.attributes.add("noinline")
            found.attributes.add("nounwind")
            builder = ir.IRBuilder(found.append_basic_block("entry"))
            _emit_tile(builder, found.args, n_left, n_right, woven, fetching)
        return found

    kinds = [ADDRESS if kind is pointer else types.int64 for kind in given]

    @operation(types.void, *kinds)
    def tile(builder: Any, *values: Any) -> Any:
        builder.call(function(builder.module), values)
        return ir.Constant(pointer, None)

    return tile


def _emit_tile(builder: Any, given: Any, n_left: int, n_right: int, woven: bool, fetching: bool) -> None:
    left, left_step, right, right_step, length, out, right_out, *stretch = given
    lefts, rights = (left, None if woven else left_step, n_left), (right, right_step, n_right)
    kind = ir.VectorType(ir.FloatType(), PASS_LANES)
    count = n_left * n_right

    def slot(base: Any, first: int, k: int) -> Any:
        return builder.gep(base, [I64(4 * (k * LANES + first))])

    def put(base: Any, first: int, sums: list[Any]) -> None:
        for k, value in enumerate(sums):
            builder.store(value, builder.bitcast(slot(base, first, k), kind.as_pointer()), align=4)

    room = builder.alloca(_WIDE, count)
    room.align = 4 * LANES
    here, keeps = builder.bitcast(room, I8.as_pointer()), None
    begin_from: Any = None
    if stretch:
        kept, resumed, unfinished = stretch
        resumed, keeps = (builder.icmp_signed("!=", flag, I64(0)) for flag in (resumed, unfinished))
        here = builder.select(keeps, kept, here)
    for first in _PASSES:
        if stretch:
            start = [cgutils.alloca_once_value(builder, ir.Constant(kind, [0.0] * PASS_LANES)) for _ in range(count)]
            with builder.if_then(resumed):
                for k, place in enumerate(start):
                    builder.store(load(builder, slot(kept, first, k), kind), place)
            values = [builder.load(place) for place in start]
            begin_from = values.__getitem__
        sums = _walk(builder, lefts, rights, length, first, begin_from, fetching)
        if first != _PASSES[-1]:
            put(here, first, sums)
    if keeps is not None:
        with builder.if_then(keeps):
            put(kept, _PASSES[-1], sums)
            builder.ret_void()
    wide = [
        joined(builder, [*(load(builder, slot(here, first, k), kind) for first in _PASSES[:-1]), value])
        for k, value in enumerate(sums)
    ]
    single = ir.FloatType().as_pointer()
    for j in range(n_right):
        for i, value in enumerate(lane_sums(builder, wide[j::n_right])):
            offset = builder.add(builder.mul(right_out, I64(j)), I64(4 * i))
            builder.store(value, builder.bitcast(builder.gep(out, [offset]), single), align=4)
    builder.ret_void()


_tile_dots = _tile(TILE_LEFT, TILE_RIGHT)
_column_dots = _tile(TILE_LEFT, 1)
_fetching_tile_dots = _tile(TILE_LEFT, TILE_RIGHT, fetching=True)
_fetching_column_dots = _tile(TILE_LEFT, 1, fetching=True)
_tile_stretch = _tile(TILE_LEFT, TILE_RIGHT, WEAVES, in_stretches=True)
_column_stretch = _tile(TILE_LEFT, 1, WEAVES, in_stretches=True)


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
    fetching: bool,
) -> None:
    """Up to TILE_LEFT rows with any number of rows: each product has the bits of `dot`.

    Steps are bytes from row to row. Results of neighbouring left rows lie side by side at `out`, those of the next
    right row `right_out` bytes on. `fetching`: left rows will follow that lie further on, in no near cache.
    """
    at = 0
    while n_left == TILE_LEFT and at < n_right:
        rights, target = right + at * right_step, out + at * right_out
        if n_right - at >= TILE_RIGHT:
            if fetching and at == 0:
                _fetching_tile_dots(left, left_step, rights, right_step, length, target, right_out)
            else:
                _tile_dots(left, left_step, rights, right_step, length, target, right_out)
            at += TILE_RIGHT
        else:
            if fetching and at == 0:
                _fetching_column_dots(left, left_step, rights, right_step, length, target, right_out)
            else:
                _column_dots(left, left_step, rights, right_step, length, target, right_out)
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
        left + whole * padded, padded, n_left - whole, right, step, n_right, width, out + 4 * whole, right_out, False
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
                    _tile_stretch(lefts, padded, rights, step, here, target, right_out, sums, resumed, unfinished)
                else:
                    _column_stretch(lefts, padded, rights, step, here, target, right_out, sums, resumed, unfinished)
            at += n_here
        begin += here


@operation(types.void, *[ADDRESS, types.int64] * 2, types.int64, ADDRESS, types.int64, types.int64, constants=2)
def mix_tile(builder: Any, n_rows: int, n_vectors: int, *given: Any) -> Any:
    """Rows of weights times values, `n_vectors` · 16 coordinates of each: Σ over keys, one key after another.

    Constants: how many rows, how many vectors. Arguments: the weights `[n_rows, keys]` and their bytes from row to
    row, the values `[keys, …]` and theirs, the number of keys, the results and their bytes from row to row, and
    whether those are the sums so far, of the keys before.
    """
    weights, weights_step, values, values_step, keys, out, out_step, resumed = given
    zeros = ir.Constant(_WIDE, [0.0] * LANES)
    pairs = [(i, j) for i in range(n_rows) for j in range(n_vectors)]
    sums = {pair: cgutils.alloca_once_value(builder, zeros) for pair in pairs}
    targets = {
        (i, j): builder.gep(out, [builder.add(builder.mul(out_step, I64(i)), I64(4 * LANES * j))]) for i, j in pairs
    }
    for place in sums.values():
        builder.store(zeros, place)
    with builder.if_then(builder.icmp_signed("!=", resumed, I64(0))):
        for pair, place in sums.items():
            builder.store(load(builder, targets[pair], _WIDE), place)
    rows = [builder.gep(weights, [builder.mul(weights_step, I64(i))]) for i in range(n_rows)]
    with cgutils.for_range(builder, keys) as loop:
        here = builder.gep(values, [builder.mul(loop.index, values_step)])
        parts = [load(builder, builder.gep(here, [I64(4 * LANES * j)]), _WIDE) for j in range(n_vectors)]
        for ahead in range(2 * AHEAD, 2 * AHEAD + 4 * LANES * n_vectors, LINE):  # a row takes few instructions
            fetch(builder, builder.gep(here, [I64(ahead)]))
        for i, row in enumerate(rows):
            single = load(builder, builder.gep(row, [builder.shl(loop.index, I64(2))]), ir.FloatType())
            weight = splat(builder, single)
            for j, part in enumerate(parts):
                builder.store(fma(builder, weight, part, builder.load(sums[i, j])), sums[i, j])
    for pair, pointer in sums.items():
        builder.store(builder.load(pointer), builder.bitcast(targets[pair], _WIDE.as_pointer()), align=4)
    return ir.Constant(I8.as_pointer(), None)
