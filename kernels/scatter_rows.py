"""Rows of host memory put into rows of the device's on a CPU, without a copy in between.

    k_i = the first numbers of block r_i, v_i = the last ones where there are more        i = 0 .. m - 1

Shapes: blocks [n, w] without gaps, rows [m] of them; targets [.., p] (k, and v where it is kept apart), of which the
leading dimensions are one behind the other, into rows `places` [m].
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvcli.kernels._numba import compiled, flat, prange, run, serves
from kvcli.kernels._prefetch import AHEAD, prefetch

PIECE = 1 << 13  # numbers that a thread takes at once, in whole rows


@compiled
def _scatter(blocks: Any, held: Any, rows: Any, k: Any, v: Any, places: Any, at_once: int) -> None:
    half, apart = blocks.shape[1] // 2, blocks.shape[1] > k.shape[1]
    for piece in prange((len(rows) + at_once - 1) // at_once):
        for i in range(piece * at_once, min(piece * at_once + at_once, len(rows))):
            if i + AHEAD < len(rows):
                prefetch(held, rows[i + AHEAD] * len(blocks[0]), len(blocks[0]))
            source, key, value = blocks[rows[i]], k[places[i]], v[places[i]]
            # Two at once: a compiler calls a library's copy for a single one, which short rows wait for.
            if apart:
                for c in range(half):
                    key[c] = source[c]
                    value[c] = source[half + c]
            else:
                for c in range(half):
                    key[c] = source[c]
                    key[half + c] = source[half + c]
                if len(key) > 2 * half:
                    key[2 * half] = source[2 * half]


def suits(blocks: Tensor, *targets: Tensor) -> bool:
    """Tell whether this can read the blocks and write to these."""
    return serves(blocks, *targets) and all(each.is_contiguous() for each in (blocks, *targets))


def scatter_rows(blocks: Tensor, rows: Tensor, k: Tensor, v: Tensor, places: Tensor) -> bool:
    """Put blocks [n, w] into k and v [slots, p], which may be the same; False where it does not suit."""
    if not suits(blocks, k, v):
        return False
    at_once = max(1, PIECE // blocks.shape[1])
    numbers = rows.shape[0] * blocks.shape[1]
    run(_scatter, numbers, blocks, flat(blocks), rows.contiguous(), k, v, places.contiguous(), at_once)
    return True
