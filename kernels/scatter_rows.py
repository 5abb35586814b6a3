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
    half = len(k[0])
    for piece in prange((len(rows) + at_once - 1) // at_once):
        for i in range(piece * at_once, min(piece * at_once + at_once, len(rows))):
            if i + AHEAD < len(rows):
                prefetch(held, rows[i + AHEAD] * len(blocks[0]), len(blocks[0]))
            source, key, value = blocks[rows[i]], k[places[i]], v[places[i]]
            for c in range(half):
                key[c] = source[c]
                value[c] = source[half + c]


@compiled
def _scatter_whole(blocks: Any, held: Any, rows: Any, into: Any, places: Any, at_once: int) -> None:
    half = len(into[0]) // 2
    for piece in prange((len(rows) + at_once - 1) // at_once):
        for i in range(piece * at_once, min(piece * at_once + at_once, len(rows))):
            if i + AHEAD < len(rows):
                prefetch(held, rows[i + AHEAD] * len(blocks[0]), len(blocks[0]))
            source, target = blocks[rows[i]], into[places[i]]
            for c in range(half):  # two at once: for a single one a library's copy is called, which short rows wait for
                target[c] = source[c]
                target[half + c] = source[half + c]
            if len(target) > 2 * half:
                target[2 * half] = source[2 * half]


def suits(blocks: Tensor, *targets: Tensor) -> bool:
    """Tell whether this can read the blocks and write to these."""
    return serves(blocks, *targets) and all(each.is_contiguous() for each in (blocks, *targets))


def scatter_rows(blocks: Tensor, rows: Tensor, k: Tensor, v: Tensor, places: Tensor) -> bool:
    """Put blocks [n, w] into k and v [slots, p], which may be the same; False where it does not suit."""
    if not suits(blocks, k, v):
        return False
    at_once, numbers = max(1, PIECE // blocks.shape[1]), rows.shape[0] * blocks.shape[1]
    held, (rows, places) = (blocks, flat(blocks)), (rows.contiguous(), places.contiguous())
    if blocks.shape[1] > k.shape[1]:
        run(_scatter, numbers, *held, rows, k, v, places, at_once)
    else:
        run(_scatter_whole, numbers, *held, rows, k, places, at_once)
    return True
