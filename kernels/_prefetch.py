"""Memory that loops for a CPU will read soon, asked for ahead.

A processor foresees what lies in a row, if not as far as memory would let it; of rows that lie anywhere it waits for
each. A hint some rows ahead has the next ones on their way meanwhile, and changes nothing else.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvcli.kernels._numba import inlined, intrinsic

AHEAD = 8  # rows
LINE = 64  # bytes that come together


@intrinsic
def _ask_for(_: Any, array: Any, index: Any) -> Any:
    """Have the line with a number of a flat array come."""
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
        builder.call(function, [place, number(0), number(3), number(1)])  # to read, to be kept close, data
        return context.get_dummy_value()

    return types.none(array, index), ask


@intrinsic
def _in_a_line(_: Any, array: Any) -> Any:
    """How many numbers of an array a line has, which its type says: to ask the array would cost a division."""
    from numba import types

    def count(context: Any, __: Any, signature: Any, ___: Any) -> Any:
        size = context.get_abi_sizeof(context.get_data_type(signature.args[0].dtype))
        return context.get_constant(types.intp, LINE // size)

    return types.intp(array), count


@inlined
def prefetch(array: Any, first: Any, count: int) -> None:
    """Have `count` numbers from `first` on come, of a flat array; nobody waits for them."""
    for c in range(0, count, _in_a_line(array)):
        _ask_for(array, np.uint64(first) + np.uint64(c))
