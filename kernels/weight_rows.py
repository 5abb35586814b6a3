"""A linear layer for a few rows on a CPU, which reads its weight once and at the memory's rate: y_mi = x_m . W_i.

torch's own reads at a half to a third of that rate for so few rows (`benchmarks/cpu_linear.py`).

Shapes: x [m, in], W [out, in] without gaps -> [m, out]; all fp32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from kvcli.kernels._numba import compiled, prange, run

ROWS = 32  # of a weight, that a thread takes at once


@compiled
def _row_products(x: Any, weight: Any, out: Any) -> None:
    n, d = weight.shape
    for block in prange((n + ROWS - 1) // ROWS):
        first = block * ROWS
        last = min(first + ROWS, n)
        part = (last - first) // 4
        for i in range(first, first + part):
            w0, w1, w2, w3 = weight[i], weight[i + part], weight[i + 2 * part], weight[i + 3 * part]
            for m in range(len(x)):
                s0, s1, s2, s3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
                for c in range(d):
                    s0 += x[m, c] * w0[c]
                    s1 += x[m, c] * w1[c]
                    s2 += x[m, c] * w2[c]
                    s3 += x[m, c] * w3[c]
                row = out[m]
                row[i], row[i + part], row[i + 2 * part], row[i + 3 * part] = s0, s1, s2, s3
        for i in range(first + 4 * part, last):
            for m in range(len(x)):
                total = np.float32(0)
                for c in range(d):
                    total += x[m, c] * weight[i, c]
                out[m, i] = total


def row_products(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply by a linear layer's weight, without gaps: [m, out]."""
    out = x.new_empty(len(x), len(weight))
    run(_row_products, weight.numel(), x.contiguous(), weight, out)
    return out
