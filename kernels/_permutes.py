"""Tables that lie in a processor's registers, looked up by many lanes at once: parts of loops for x86 with AVX-512.

Of a table in memory a number or two come at a time, of one in registers 64 bytes or 16 numbers. Loops for other
processors look up one by one.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from kvcli.kernels._numba import intrinsic
from kvcli.kernels._vectors import LOT, FlatArrays, lanes

PATTERNS = 256  # of a byte
LEVELS = 16  # that four bits tell apart

BYTES = "llvm.x86.avx512.vpermi2var.qi.512"  # of a pair of registers, by the lower seven bits
NUMBERS = "llvm.x86.avx512.permvar.sf.512"


@cache
def permutes() -> bool:
    """Tell whether loops are compiled for a processor that has these; asked where loops serve."""
    from numba.core.registry import cpu_target

    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return "+avx512vbmi" in features.split(",")


@intrinsic
def add_looked_up(_: Any, rows: Any, first: Any, tables: Any, own: Any, sums: Any, place: Any, columns: Any) -> Any:
    """Look up each byte of LOT rows in the table of its column, and add up a row's.

    Flat arrays of bytes: rows from `first` on, tables [columns, PATTERNS] from `own` on, sums from `place` on. The
    columns are a power of two that the loop knows.
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
    """Sort the bytes of LOT rows, given as they lie in memory, by their column: a vector of LOT for each."""
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
    The blocks are a multiple of four that the loop knows.
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
