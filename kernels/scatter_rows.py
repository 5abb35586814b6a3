"""Rows of host memory put into rows of the device's on a CPU, without a copy in between.

    k_i = the first numbers of block r_i, v_i = the last ones where there are more        i = 0 .. m - 1

Shapes: blocks [n, w] without gaps, rows [m] of them; targets [.., p] (k, and v where it is kept apart), of which the
leading dimensions are one behind the other, into rows `places` [m].
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from kvcli.kernels._numba import compiled, prange, run, serves

PIECE = 64  # rows that a thread takes at once
LINE = 16  # numbers that come from memory together


@compiled
def _scatter(blocks: Any, rows: Any, k: Any, v: Any, places: Any, touched: Any) -> None:
    size, width = blocks.shape[1], k.shape[1]
    for piece in prange(len(touched)):
        first = piece * PIECE
        last = min(first + PIECE, len(rows))
        total = np.float32(0)  # has all lines of them on their way from memory at once
        for i in range(first, last):
            row = blocks[rows[i]]
            for c in range(0, size, LINE):
                total += row[c]
        touched[piece] = total
        for i in range(first, last):
            source, key, value = blocks[rows[i]], k[places[i]], v[places[i]]
            for c in range(width):
                key[c] = source[c]
            if size > width:
                for c in range(width):
                    value[c] = source[size - width + c]


def suits(blocks: Tensor, *targets: Tensor) -> bool:
    """Tell whether this can read the blocks and write to these."""
    return serves(blocks, *targets) and all(each.is_contiguous() for each in (blocks, *targets))


def scatter_rows(blocks: Tensor, rows: Tensor, k: Tensor, v: Tensor, places: Tensor) -> bool:
    """Put blocks [n, w] into k and v [slots, p], which may be the same; False where it does not suit."""
    if not suits(blocks, k, v):
        return False
    touched = k.new_empty(-(-len(rows) // PIECE))
    run(_scatter, len(rows) * blocks.shape[1], blocks, rows.contiguous(), k, v, places.contiguous(), touched)
    return True
