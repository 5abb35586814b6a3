"""LLVM instructions for CPU loops: prefetching, vectors of numbers, bits of masks, e^x, and look-up tables.

A processor prefetches contiguous data, though not as far ahead as memory would allow; for scattered rows it waits for
each. A hint some rows ahead brings the next ones meanwhile, and changes nothing else.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np

from kvcli.kernels._numba import carray, inlined, intrinsic

AHEAD = 8  # rows
LINE = 64  # bytes of a cache line


@intrinsic
def _ask_for(_: Any, array: Any, index: Any) -> Any:
    """Prefetch the cache line that holds a number of a flat array."""
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils

    def ask(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        of = context.make_array(signature.args[0])(context, builder, given[0])
        number, anything = ir.IntType(32), cgutils.voidptr_t
        hint = ir.FunctionType(ir.VoidType(), [anything, number, number, number])
        declare: Any = cgutils.get_or_insert_function
        function = declare(builder.module, hint, "llvm.prefetch.p0")
        place = builder.bitcast(builder.gep(of.data, [given[1]]), anything)
        builder.call(function, [place, number(0), number(3), number(1)])  # for reading, with high locality, data cache
        return context.get_dummy_value()

    return types.none(array, index), ask


@intrinsic
def _in_a_line(_: Any, array: Any) -> Any:
    """Return how many numbers of an array a cache line holds, from its type: to ask the array would cost a division."""
    from numba import types

    def count(context: Any, __: Any, signature: Any, ___: Any) -> Any:
        size = context.get_abi_sizeof(context.get_data_type(signature.args[0].dtype))
        return context.get_constant(types.intp, LINE // size)

    return types.intp(array), count


@inlined
def prefetch(array: Any, first: Any, count: int) -> None:
    """Prefetch `count` numbers of a flat array from `first` on, without waiting."""
    for c in range(0, count, _in_a_line(array)):
        _ask_for(array, np.uint64(first) + np.uint64(c))


@intrinsic
def _pointer(_: Any, place: Any, like: Any) -> Any:
    """Point to numbers of a kind at an address."""
    from numba import types

    def point(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.inttoptr(given[0], context.get_value_type(signature.return_type))

    pointer: Any = types.CPointer
    return pointer(like)(place, like), point


@inlined
def at_address(place: Any, like: Any, shape: Any) -> Any:
    """View numbers at an address as an array without gaps; `like` is any number of their kind."""
    return carray(_pointer(place, like), shape)


@intrinsic
def call_at(_: Any, place: Any, numbers: Any) -> Any:
    """Call a loop at its address with a tuple of integers, see `compiled_at`."""
    from llvmlite import ir
    from numba import types

    def call(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        number, count = ir.IntType(64), len(signature.args[1])
        of = ir.FunctionType(ir.VoidType(), [number] * count).as_pointer()
        loop = builder.inttoptr(given[0], of)
        builder.call(loop, [builder.extract_value(given[1], at) for at in range(count)])
        return context.get_dummy_value()

    return types.none(place, numbers), call


@intrinsic
def fetch_and_add(_: Any, numbers: Any, at: Any, more: Any) -> Any:
    """Add to an integer that other threads add to as well; return what it was."""
    from numba import types

    def add(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, given[0]).data
        return builder.atomic_rmw("add", builder.gep(data, [given[1]]), given[2], "seq_cst")

    return types.int64(numbers, at, more), add


@intrinsic
def fetched(_: Any, numbers: Any, at: Any) -> Any:
    """Read an integer that other threads add to; what they wrote before is seen afterwards."""
    from numba import types

    def read(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, given[0]).data
        return builder.load_atomic(builder.gep(data, [given[1]]), "seq_cst", 8)

    return types.int64(numbers, at), read


@intrinsic
def let_others_run(_: Any) -> Any:
    """Give the processor to another thread that waits for it."""
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils

    def give(context: Any, builder: Any, __: Any, ___: Any) -> Any:
        declare: Any = cgutils.get_or_insert_function
        builder.call(declare(builder.module, ir.FunctionType(ir.IntType(32), []), "sched_yield"), [])
        return context.get_dummy_value()

    return types.none(), give


LOT = 64  # numbers handled at once: bytes of an AVX-512 register, bits of a mask


class FlatArrays:
    """The arguments of a part of a loop: flat arrays, each followed by the place where its numbers begin."""

    def __init__(self, context: Any, builder: Any, signature: Any, given: Any):
        """Keep the compiler's description of the arguments."""
        self.context, self.builder, self.kinds, self.given = context, builder, signature.args, given

    def load(self, argument: int, count: int, offset: int = 0) -> Any:
        """Load `count` numbers, the first of them `offset` after the place."""
        begin, size = self._begin(argument, count, offset)
        vector = self.builder.load(begin)
        vector.align = size
        return vector

    def store(self, argument: int, vector: Any, offset: int = 0) -> None:
        """Store a vector, its first number `offset` after the place."""
        begin, size = self._begin(argument, vector.type.count, offset)
        self.builder.store(vector, begin).align = size

    def place(self, argument: int, offset: int = 0) -> Any:
        """Return a pointer to the number `offset` after the place."""
        array, place = self.given[argument : argument + 2]
        data = self.context.make_array(self.kinds[argument])(self.context, self.builder, array).data
        return self.builder.gep(data, [self.builder.add(place, place.type(offset))])

    def _begin(self, argument: int, count: int, offset: int = 0) -> tuple[Any, int]:
        from llvmlite import ir

        begin = self.place(argument, offset)
        number = begin.type.pointee
        of_many = ir.VectorType(number, count).as_pointer()
        return self.builder.bitcast(begin, of_many), self.context.get_abi_sizeof(number)


def lanes(builder: Any, vectors: tuple[Any, Any], which: Any) -> Any:
    """Make a vector of some lanes of two vectors; lanes of the second are numbered after those of the first."""
    from llvmlite import ir

    named = list(which)
    return builder.shuffle_vector(*vectors, ir.Constant(ir.VectorType(ir.IntType(32), len(named)), named))


def all_of(builder: Any, number: Any, count: int) -> Any:
    """Make a vector of one repeated number."""
    from llvmlite import ir

    one = builder.insert_element(ir.Constant(ir.VectorType(number.type, 1), ir.Undefined), number, ir.IntType(32)(0))
    return lanes(builder, (one, one), [0] * count)


@intrinsic
def ones(_: Any, mask: Any) -> Any:
    """Count the set bits."""
    from numba import types

    def count(_: Any, builder: Any, __: Any, given: Any) -> Any:
        return builder.ctpop(given[0])

    return types.int64(mask), count


@intrinsic
def first_one(_: Any, mask: Any) -> Any:
    """Return the index of the first set bit of a mask that has one."""
    from llvmlite import ir
    from numba import types

    def find(_: Any, builder: Any, __: Any, given: Any) -> Any:
        return builder.cttz(given[0], ir.IntType(1)(1))

    return types.int64(mask), find


@inlined
def without_first(mask: Any) -> Any:
    """Clear the first set bit."""
    return mask & (mask - np.uint64(1))


LEAST = np.float32(-87.3)
"""Below it, e^x is taken as 0: fp32 has no smaller number of full precision."""

_PER_LOG_2, _LOG_2, _LOG_2_REST = np.float32(1.44269504), np.float32(0.693359375), np.float32(-2.12194440e-4)
_C6, _C5, _C4 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_C3, _C2, _C1 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
_HALF, _ONE, _ZERO = np.float32(0.5), np.float32(1), np.float32(0)


@intrinsic
def _float_of_bits(_: Any, __: Any) -> Any:
    """Reinterpret the 32 bits of an integer as a float."""
    from numba import types

    def read(context: Any, builder: Any, ___: Any, given: Any) -> Any:
        return builder.bitcast(given[0], context.get_value_type(types.float32))

    return types.float32(types.int32), read


@inlined
def exp(x: Any) -> Any:
    """Return e^x of a float32 up to 88, in arithmetic that a compiler can vectorise; NaN stays NaN."""
    times = np.floor((x if x > LEAST else LEAST) * _PER_LOG_2 + _HALF)
    rest = x - times * _LOG_2 - times * _LOG_2_REST
    power = ((((_C6 * rest + _C5) * rest + _C4) * rest + _C3) * rest + _C2) * rest + _C1
    power = power * rest * rest + rest + _ONE
    scale = _float_of_bits((np.int32(times) + np.int32(127)) << np.int32(23))
    return _ZERO if x < LEAST else power * scale


@inlined
def highest(row: Any) -> Any:
    """Return the highest of float32 numbers, -inf of none.

    Their bits are compared, turned where the sign is set: a compiler vectorises this, but not a comparison of floats,
    which NaN makes depend on the order.
    """
    bits, top = row.view(np.int32), np.int32(-0x7F800001)
    for i in range(len(bits)):
        b = bits[i] ^ (bits[i] >> np.int32(31) & np.int32(0x7FFFFFFF))
        top = b if b > top else top
    return _float_of_bits(top ^ (top >> np.int32(31) & np.int32(0x7FFFFFFF)))


PATTERNS = 256  # values of a byte
LEVELS = 16  # values of four bits

BYTES = "llvm.x86.avx512.vpermi2var.qi.512"  # looks up in two registers, by the lower seven bits
NUMBERS = "llvm.x86.avx512.permvar.sf.512"
NUMBERS_OF_TWO = "llvm.x86.avx512.vpermi2var.ps.512"  # looks up in two registers, by the lower five bits
BYTE_PRODUCTS = "llvm.x86.avx512.vpdpbusd.512"  # of bytes without a sign and bytes with one
SHIFTED = "llvm.x86.avx512.pmultishift.qb.512"  # makes each byte of eight bits of its 64, from a given one on


def permutes() -> bool:
    """Return whether loops are compiled for a processor with these instructions (AVX-512 VBMI)."""
    return "+avx512vbmi" in _features()


def has_wide_registers() -> bool:
    """Return whether it has 32 registers of sixteen numbers (AVX-512), which others have for eight or four."""
    return "+avx512f" in _features()


def multiplies_bytes() -> bool:
    """Return whether it adds products of four bytes to each of sixteen integers at once (AVX-512 VNNI)."""
    return "+avx512vnni" in _features()


@cache
def _features() -> frozenset[str]:
    from numba.core.registry import cpu_target

    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return frozenset(features.split(","))


@intrinsic
def add_looked_up(_: Any, rows: Any, first: Any, tables: Any, own: Any, sums: Any, place: Any, columns: Any) -> Any:
    """Look up each byte of LOT rows in the table of its column, in registers, and sum over each row.

    Flat arrays of bytes: rows from `first` on, tables [columns, PATTERNS] from `own` on, sums from `place` on. The
    number of columns is a power of two, known at compile time.
    """
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils

    def look_up(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        held = FlatArrays(context, builder, signature, given)
        indices = _columns(builder, [held.load(0, LOT, LOT * i) for i in range(columns.literal_value)])
        vector = indices[0].type
        declare: Any = cgutils.get_or_insert_function
        of_pair = declare(builder.module, ir.FunctionType(vector, [vector] * 3), BYTES)
        total = nothing = ir.Constant(vector, [0] * LOT)
        for column, index in enumerate(indices):
            table = [held.load(2, LOT, PATTERNS * column + LOT * quarter) for quarter in range(4)]
            lower, upper = (builder.call(of_pair, [table[i], index, table[i + 1]]) for i in (0, 2))
            highest_bit = builder.icmp_signed("<", index, nothing)
            total = builder.add(total, builder.select(highest_bit, upper, lower))
        held.store(4, total)
        return context.get_dummy_value()

    if not isinstance(columns, types.Literal):
        return None
    return types.none(rows, first, tables, own, sums, place, columns), look_up


def _columns(builder: Any, rows: list[Any]) -> list[Any]:
    """Sort the bytes of LOT rows, given as they lie in memory, by column: one vector of LOT per column."""
    if len(rows) == 1:
        return rows
    columns = [None] * len(rows)
    for odd in (0, 1):
        halved = [lanes(builder, pair, range(odd, 2 * LOT, 2)) for pair in zip(rows[::2], rows[1::2], strict=True)]
        columns[odd::2] = _columns(builder, halved)
    return columns


@intrinsic
def multiply_levels(
    _: Any, codes: Any, code: Any, weights: Any, weight: Any, levels: Any, zero: Any, q: Any, own: Any, blocks: Any
) -> Any:
    """Multiply a key of four bits with a query: sum_b weight_b * sum_c levels[code_bc] * q_bc, eight channels a block.

    Flat arrays: codes from `code` on, two channels a byte; weights from `weight` on; levels [LEVELS] from `zero` on; q
    from `own` on, for every LEVELS bytes of codes the channels of their lower halves before those of their upper ones.
    The number of blocks is a multiple of four, known at compile time.
    """
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils

    def multiply(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        held = FlatArrays(context, builder, signature, given)
        add, times = (partial(written, flags=("contract",)) for written in (builder.fadd, builder.fmul))
        table, index = held.load(4, LEVELS), ir.VectorType(ir.IntType(32), LEVELS)
        declare: Any = cgutils.get_or_insert_function
        permute = declare(builder.module, ir.FunctionType(table.type, [table.type, index]), NUMBERS)
        total = ir.Constant(table.type, [0.0] * LEVELS)
        for turn in range(blocks.literal_value // 4):
            both = builder.zext(held.load(0, LEVELS, LEVELS * turn), index)
            halves = (
                builder.and_(both, ir.Constant(index, [15] * LEVELS)),
                builder.lshr(both, ir.Constant(index, [4] * LEVELS)),
            )
            lower, upper = (
                times(builder.call(permute, [table, half]), held.load(6, LEVELS, LEVELS * (2 * turn + i)))
                for i, half in enumerate(halves)
            )
            of_blocks = held.load(2, 4, 4 * turn)
            weighing = lanes(builder, (of_blocks, of_blocks), (i // 4 for i in range(LEVELS)))
            total = add(total, times(add(lower, upper), weighing))
        for count in (8, 4, 2, 1):
            total = add(*(lanes(builder, (total, total), range(i, i + count)) for i in (0, count)))
        return builder.extract_element(total, ir.IntType(32)(0))

    if not isinstance(blocks, types.Literal):
        return None
    return types.float32(codes, code, weights, weight, levels, zero, q, own, blocks), multiply
