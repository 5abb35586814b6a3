"""Numbers compared 64 at a time in loops for a CPU, with a bit for each: bits are counted and found at once.

A processor compares as many as its registers hold, and none of it is a branch that it would have to foretell.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from kvcli.kernels._numba import inlined, intrinsic
from kvcli.kernels._vectors import LOT, FlatArrays, all_of


def _comparing(sign: str) -> Any:
    @intrinsic
    def mask(_: Any, values: Any, first: Any, bound: Any) -> Any:  # noqa: ARG001
        """Compare a LOT of a flat array with the bound."""
        from llvmlite import ir
        from numba import types

        def compare(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            numbers = FlatArrays(context, builder, signature, given).load(0, LOT)
            compared = builder.icmp_signed if values.dtype.signed else builder.icmp_unsigned
            return builder.bitcast(compared(sign, numbers, all_of(builder, given[2], LOT)), ir.IntType(LOT))

        return types.uint64(values, first, values.dtype), compare

    return mask


@intrinsic
def ones(_: Any, mask: Any) -> Any:
    """Count the bits."""
    from numba import types

    def count(_: Any, builder: Any, __: Any, given: Any) -> Any:
        return builder.ctpop(given[0])

    return types.int64(mask), count


@intrinsic
def first_one(_: Any, mask: Any) -> Any:
    """Find the first bit of a mask that has one."""
    from llvmlite import ir
    from numba import types

    def find(_: Any, builder: Any, __: Any, given: Any) -> Any:
        return builder.cttz(given[0], ir.IntType(1)(1))

    return types.int64(mask), find


def _flagging(of_lot: Any, holds: Any) -> Any:
    @inlined
    def flags(keys: Any, j: int, bound: int) -> Any:
        """Flag those of a LOT of keys, whole numbers, from j on for which it holds."""
        if len(keys) - j >= LOT:
            return of_lot(keys, np.uint64(j), bound)
        mask = np.uint64(0)
        for i in range(len(keys) - j):
            mask |= np.uint64(holds(keys[np.uint64(j + i)], bound)) << np.uint64(i)
        return mask

    return flags


at_least, above = _flagging(_comparing(">="), operator.ge), _flagging(_comparing(">"), operator.gt)
"""Which of a LOT of keys from j on are not below a bound, and which exceed it: flags(keys, j, bound)."""


@inlined
def without_first(mask: Any) -> Any:
    """Take the first bit away."""
    return mask & (mask - np.uint64(1))
