"""Sixteen numbers at a time: the few vector operations that the kernels are written in.

LLVM's vectors are portable: sixteen lanes become one AVX-512 register, two of AVX2, four of NEON. Writing
them out, instead of hoping that a loop is vectorised, fixes the order of every sum, and so its bits: lane
l adds up the products l, l + 16, l + 32, … and the lanes are added in pairs, whatever else is computed.

Kernels get memory as an integer and make it an `Address` at once, so that one compiled kernel serves read-only
maps, slices and strided views alike. (Integers as addresses all the way would be wrong: LLVM may turn
`load(a + b)` into an offset from b, and if b is a constant 0, into a load from null, which "cannot happen".)
Nothing here checks a bound; the engine does, before it calls a kernel.
"""

import operator
from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.core.errors import TypingError
from numba.extending import intrinsic, overload, register_model

from cutaway.engines.cpu.processor import LANES, has

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_HALF_TO_SINGLE = 2.0**112  # from a half's exponent, biased by 15, to a single's, biased by 127


class Vector(types.Type):
    """Sixteen lanes of int32 or float32, held in registers."""

    def __init__(self, element: str) -> None:
        self.element = element
        super().__init__(name=f"vector_{element}")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Vector) -> None:
        lane = ir.FloatType() if kind.element == "float" else I32
        super().__init__(manager, kind, ir.VectorType(lane, LANES))


class AddressType(types.Type):
    """A place in memory; adding an integer moves it by so many bytes."""

    def __init__(self) -> None:
        super().__init__(name="address")


@register_model(AddressType)
class _AddressModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: AddressType) -> None:
        super().__init__(manager, kind, I8.as_pointer())


ADDRESS = AddressType()
FLOATS = Vector("float")
FLOAT_LANES = ir.VectorType(ir.FloatType(), LANES)
INT_LANES = ir.VectorType(I32, LANES)


def lanes(values: list[int] | list[float], lane: ir.Type = I32) -> ir.Constant:
    return ir.Constant(ir.VectorType(lane, len(values)), values)


def splat(builder: Any, value: Any) -> Any:
    """The same number in every lane."""
    empty = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    first = builder.insert_element(empty, value, I32(0))
    return builder.shuffle_vector(first, empty, lanes([0] * LANES))


def load(builder: Any, address: Any, kind: ir.Type) -> Any:
    return builder.load(builder.bitcast(address, kind.as_pointer()), align=1)


def load_some(builder: Any, address: Any, count: Any, kind: ir.VectorType) -> Any:
    """The first `count` lanes from memory, zero in the others, whose memory is not touched."""
    mask, pointer = first_lanes(builder, count, kind), address
    declared = ir.FunctionType(kind, [I8.as_pointer(), I32, mask.type, kind])
    name = f"llvm.masked.load.v{kind.count}f32.p0"
    function = cgutils.get_or_insert_function(builder.module, declared, name)
    return builder.call(function, [pointer, I32(4), mask, ir.Constant(kind, [0.0] * kind.count)])


def first_lanes(builder: Any, count: Any, kind: ir.VectorType) -> Any:
    empty = ir.Constant(ir.VectorType(I64, kind.count), ir.Undefined)
    first = builder.insert_element(empty, count, I32(0))
    counts = builder.shuffle_vector(first, empty, lanes([0] * kind.count))
    return builder.icmp_signed("<", lanes(list(range(kind.count)), I64), counts)


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a · b + c with one rounding."""
    suffix = f"v{a.type.count}f32" if isinstance(a.type, ir.VectorType) else "f32"
    declared = ir.FunctionType(a.type, [a.type] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, declared, f"llvm.fma.{suffix}"), [a, b, c])


def lane_sum(builder: Any, vector: Any) -> Any:
    """The lanes added in pairs, halves upon halves."""
    while (count := vector.type.count) > 1:
        half = count // 2
        low = builder.shuffle_vector(vector, vector, lanes(list(range(half))))
        high = builder.shuffle_vector(vector, vector, lanes(list(range(half, count))))
        vector = builder.fadd(low, high)
    return builder.extract_element(vector, I32(0))


# Without the instructions LLVM would call a function that is not there.
_CONVERTS_HALVES = has("f16c")


def half_to_single(builder: Any, bits: Any) -> Any:
    """IEEE halves, given as 32-bit integers (one, or a vector), as singles, exactly.

    Shifted into a single's places the number is right but for its exponent's bias, which one product
    mends, also for denormals; infinities and NaNs get the exponent of all ones.
    """
    integer = bits.type
    count = integer.count if isinstance(integer, ir.VectorType) else 0

    def of(lane: ir.Type) -> ir.Type:
        return ir.VectorType(lane, count) if count else lane

    single = of(ir.FloatType())
    if _CONVERTS_HALVES:  # one instruction
        return builder.fpext(builder.bitcast(builder.trunc(bits, of(I16)), of(ir.HalfType())), single)

    def constant(value: int) -> ir.Constant:
        return lanes([value] * count) if count else ir.Constant(I32, value)

    size = builder.and_(bits, constant(0x7FFF))
    shifted = builder.shl(size, constant(13))
    factor = ir.Constant(single, [_HALF_TO_SINGLE] * count if count else _HALF_TO_SINGLE)
    finite = builder.bitcast(builder.fmul(builder.bitcast(shifted, single), factor), integer)
    special = builder.or_(shifted, constant(0x7F800000))
    chosen = builder.select(builder.icmp_unsigned(">=", size, constant(0x7C00)), special, finite)
    sign = builder.shl(builder.and_(bits, constant(0x8000)), constant(16))
    return builder.bitcast(builder.or_(chosen, sign), single)


def operation(result: Any, *arguments: Any, constants: int = 0) -> Callable[[Callable[..., Any]], Any]:
    """Make a function for kernels, of these types, from one that emits its instructions.

    Before these it takes so many `constants`, which `emit` gets as the Python values that the kernel names.
    """

    def wrap(emit: Callable[..., Any]) -> Any:
        def typed(typing_context: Any, *given: Any) -> Any:
            fixed = given[:constants]
            if not all(isinstance(kind, types.Literal) for kind in fixed):
                raise TypingError(f"{emit.__name__} takes constants of its kernel")

            def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                return emit(builder, *(kind.literal_value for kind in fixed), *values[constants:])

            return result(*fixed, *arguments), generate

        # Numba takes the number of arguments from the signature.
        names = ["typing_context", *(f"a{i}" for i in range(constants + len(arguments)))]
        parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        typed.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        typed.__name__ = typed.__qualname__ = emit.__name__
        typed.__doc__ = emit.__doc__
        return intrinsic(prefer_literal=constants > 0)(typed)

    return wrap


@operation(ADDRESS, types.int64)
def address(builder: Any, number: Any) -> Any:
    """The place in memory with this number."""
    return builder.inttoptr(number, I8.as_pointer())


@operation(ADDRESS, ADDRESS, types.int64)
def ahead(builder: Any, place: Any, offset: Any) -> Any:
    """The place `offset` bytes further on."""
    return builder.gep(place, [offset])


@overload(operator.add)
def _add(place: Any, offset: Any) -> Any:
    if place is not ADDRESS or not isinstance(offset, types.Integer):
        return None

    def add(place: Any, offset: Any) -> Any:
        return ahead(place, offset)

    return add


@intrinsic(prefer_literal=True)
def arguments(typing_context, packed, count):  # type: ignore[no-untyped-def]
    """The first `count` of a kernel's arguments, integers of 64 bits that lie packed at an address."""
    if not isinstance(count, types.IntegerLiteral):
        return None
    result = types.UniTuple(types.int64, count.literal_value)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        first = builder.inttoptr(values[0], I64.as_pointer())
        numbers = [builder.load(builder.gep(first, [I64(i)])) for i in range(count.literal_value)]
        return context.make_tuple(builder, result, numbers)

    return result(types.int64, count), generate


@operation(types.float32, types.int64)
def as_float(builder: Any, bits: Any) -> Any:
    """The float64 with these 64 bits, rounded to float32: how a kernel is given a number that is not whole."""
    return builder.fptrunc(builder.bitcast(bits, ir.DoubleType()), ir.FloatType())


@operation(types.float32, ADDRESS)
def float_at(builder: Any, address: Any) -> Any:
    """One float32."""
    return load(builder, address, ir.FloatType())


@operation(types.int64, ADDRESS)
def index_at(builder: Any, address: Any) -> Any:
    """One 64-bit integer."""
    return load(builder, address, I64)


@operation(types.void, ADDRESS, types.float32)
def put_one(builder: Any, address: Any, value: Any) -> Any:
    """Store one float."""
    builder.store(value, builder.bitcast(address, ir.FloatType().as_pointer()), align=4)
    return ir.Constant(I8.as_pointer(), None)


def fetch(builder: Any, place: Any) -> None:
    """Ask for the cache line at a place, which need not exist."""
    kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [place, I32(0), I32(3), I32(1)])  # to be read, into every level, data


AHEAD = 4096  # bytes: one page, at whose end a processor's own fetching ahead stops
LINE = 64  # bytes fetched at a time
