"""Linear layers for a few rows on a CPU, which read their weights once and at the memory's rate: y_mi = x_m . W_i.

torch's own reads at a half to a third of that rate for so few rows (`benchmarks/cpu_linear.py`). Layers with the same
input share a launch; of the gate of an MLP, y = silu(x . A) * (x . B), both weights do, and the gate is applied where
the products are.

Shapes: x [m, in], W [out, in] without gaps -> [m, out]; all fp32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from kvcli.kernels._exp import exp
from kvcli.kernels._numba import compiled, inlined, prange, run

ROWS = 32  # of a weight, that a thread takes at once


@inlined
def _products(x: Any, weight: Any, first: int, last: int, out: Any, at: int) -> None:
    """Multiply x by some rows of a weight; `out` has the products from column `at` on."""
    part = (last - first) // 4
    for i in range(first, first + part):
        w0, w1, w2, w3 = weight[i], weight[i + part], weight[i + 2 * part], weight[i + 3 * part]
        for m in range(len(x)):
            s0, s1, s2, s3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
            for c in range(x.shape[1]):
                s0 += x[m, c] * w0[c]
                s1 += x[m, c] * w1[c]
                s2 += x[m, c] * w2[c]
                s3 += x[m, c] * w3[c]
            row = out[m, at:]
            row[i], row[i + part], row[i + 2 * part], row[i + 3 * part] = s0, s1, s2, s3
    for i in range(first + 4 * part, last):
        for m in range(len(x)):
            total = np.float32(0)
            for c in range(x.shape[1]):
                total += x[m, c] * weight[i, c]
            out[m, at + i] = total


@inlined
def _blocks(weight: Any) -> int:
    return (len(weight) + ROWS - 1) // ROWS


@inlined
def _place(weights: Any, block: int) -> tuple[int, int, int]:
    """Tell the layer of a block, where it begins in the layer's rows, and how many rows the layers before have."""
    layer, at = 0, 0
    while block >= _blocks(weights[layer]):
        block -= _blocks(weights[layer])
        at += len(weights[layer])
        layer += 1
    return layer, block * ROWS, at


@compiled
def _row_products(x: Any, weights: Any, out: Any) -> None:
    blocks = 0  # of all layers, so that threads have the same to do
    for i in range(len(weights)):
        blocks += _blocks(weights[i])
    for block in prange(blocks):
        layer, first, at = _place(weights, np.int64(block))
        _products(x, weights[layer], first, min(first + ROWS, len(weights[layer])), out, at)


@compiled
def _gated_products(x: Any, gate: Any, up: Any, products: Any, out: Any) -> None:
    n = len(gate)
    for block in prange(_blocks(gate)):
        first, last = block * ROWS, min(block * ROWS + ROWS, n)
        _products(x, gate, first, last, products, 0)
        _products(x, up, first, last, products, n)
        for m in range(len(x)):
            for i in range(first, last):
                s = products[m, i]
                less = -s if s > np.float32(-88) else np.float32(88)  # beyond, e^88 is as good as infinite
                out[m, i] = s / (np.float32(1) + exp(less)) * products[m, n + i]


def row_products(x: Tensor, weights: tuple[Any, ...]) -> Tensor:
    """Multiply by the weights of linear layers, arrays without gaps: [m, all their out], side by side."""
    out = x.new_empty(x.shape[0], sum(weight.shape[0] for weight in weights))
    run(_row_products, out.shape[1] * x.shape[1], x.contiguous(), weights, out)
    return out


def gated_products(x: Tensor, gate: Any, up: Any) -> Tensor:
    """Give silu(x . gate) * (x . up) by two arrays without gaps: [m, out]."""
    rows, size = x.shape[0], gate.shape[0]
    products, out = x.new_empty(rows, 2 * size), x.new_empty(rows, size)
    run(_gated_products, gate.size + up.size, x.contiguous(), gate, up, products, out)
    return out
