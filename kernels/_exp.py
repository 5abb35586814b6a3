"""e^x inside loops for a CPU, in arithmetic that a compiler makes of sixteen numbers at once.

The mathematics library that numba calls takes one number at a time. Here x is split into a multiple of log 2, whose
power of two is written into the exponent of a float, and a rest of at most half of it, whose power is a polynomial
(Cephes' coefficients); the relative error is below 3e-7.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvcli.kernels._numba import inlined, intrinsic

LEAST = np.float32(-87.3)
"""Below it e^x is 0: a float of full precision has no smaller one."""

_PER_LOG_2, _LOG_2, _LOG_2_REST = np.float32(1.44269504), np.float32(0.693359375), np.float32(-2.12194440e-4)
_C6, _C5, _C4 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_C3, _C2, _C1 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
_HALF, _ONE, _ZERO = np.float32(0.5), np.float32(1), np.float32(0)


@intrinsic
def _float_of_bits(_: Any, __: Any) -> Any:
    """Read the 32 bits of a whole number as a float."""
    from numba import types

    def read(context: Any, builder: Any, ___: Any, given: Any) -> Any:
        return builder.bitcast(given[0], context.get_value_type(types.float32))

    return types.float32(types.int32), read


@inlined
def exp(x: Any) -> Any:
    """Give e^x of a float32 up to 88; what is no number stays so."""
    times = np.floor((x if x > LEAST else LEAST) * _PER_LOG_2 + _HALF)
    rest = x - times * _LOG_2 - times * _LOG_2_REST
    power = ((((_C6 * rest + _C5) * rest + _C4) * rest + _C3) * rest + _C2) * rest + _C1
    power = power * rest * rest + rest + _ONE
    scale = _float_of_bits((np.int32(times) + np.int32(127)) << np.int32(23))
    return _ZERO if x < LEAST else power * scale
