"""Keys made of their low-rank factors, turned to their positions and put into their slots on a CPU: all in one loop.

    x_t = A_t B_h      k_tc = x_tc * cos(t, c) + x_t,partner(c) * sign(c) * sin(t, c)

Where torch has all keys in memory after each of three steps (`kvcli.kernels.key_bases.rebuild_keys`, the rotation, the
copy), a chunk stays in the processor's first cache until it is in its slot.

Shapes: a [n, c, r] and b [Hk, r, d] without gaps, misses as in `kvcli.kernels.page_table`, rotation as in
`kvcli.kernels.rebuild_keys`, slots k [Hk, k, c, d] with any strides but the last; all fp32.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvcli.kernels._numba import compiled, flat, inlined, prange, run, serves
from kvcli.kernels.page_table import Misses
from kvcli.kernels.rebuild_keys import Rotation

PIECE = 8  # chunks that a thread takes at once
LINE = 16  # numbers that come from memory together


@inlined
def _multiply(a: Any, row: int, b: Any, factor: int, size: int, rank: int, d: int, out: Any) -> None:
    # Eight rows of the factor at once, which serve for all tokens of the chunk: a sum is then read and written once for
    # eight products, and the factor, which fills the first cache, is read once a chunk.
    out[:] = 0
    whole = rank - rank % 8
    for r in range(0, whole, 8):
        b0 = np.uint64(factor + r * d)
        b1, b2, b3, b4 = b0 + np.uint64(d), b0 + np.uint64(2 * d), b0 + np.uint64(3 * d), b0 + np.uint64(4 * d)
        b5, b6, b7 = b0 + np.uint64(5 * d), b0 + np.uint64(6 * d), b0 + np.uint64(7 * d)
        for t in range(size):
            i, to = np.uint64(row + t * rank + r), np.uint64(t * d)
            a0, a1, a2, a3 = a[i], a[i + np.uint64(1)], a[i + np.uint64(2)], a[i + np.uint64(3)]
            a4, a5, a6, a7 = a[i + np.uint64(4)], a[i + np.uint64(5)], a[i + np.uint64(6)], a[i + np.uint64(7)]
            for column in range(d):
                c = np.uint64(column)
                low = a0 * b[b0 + c] + a1 * b[b1 + c] + a2 * b[b2 + c] + a3 * b[b3 + c]
                high = a4 * b[b4 + c] + a5 * b[b5 + c] + a6 * b[b6 + c] + a7 * b[b7 + c]
                out[to + c] += low + high
    for r in range(whole, rank):
        for t in range(size):
            for column in range(d):
                out[t * d + column] += a[row + t * rank + r] * b[factor + r * d + column]


@inlined
def _are_halves(partner: Any, column: Any, turned: int) -> bool:
    # Whether a channel's partner stands half the width away, and its cosine where the channel does: no look-up is
    # needed then, and registers are filled at once.
    half, found = turned // 2, True
    for c in range(half):
        found &= partner[c] == c + half and partner[c + half] == c
    for c in range(turned):
        found &= column[c] == c
    return found


@cache
def _loop(d: int) -> Any:
    """Make the loop over keys of d numbers; with a size that is known they stay in the processor's registers."""

    @compiled
    def rebuild(
        a: Any,
        b: Any,
        sizes: Any,
        heads: Any,
        slots: Any,
        chunks: Any,
        cos: Any,
        sin: Any,
        partner: Any,
        column: Any,
        sign: Any,
        k: Any,
        strides: Any,
        keys: Any,
    ) -> None:
        size, rank, turned = sizes
        half = turned // 2
        for piece in prange(len(keys)):
            own, halves = keys[piece], _are_halves(partner, column, turned)
            first = piece * PIECE
            last = min(first + PIECE, len(chunks))
            touched = np.float32(0)  # has all that is read on its way from memory at once
            for i in range(first, last):
                for c in range(chunks[i] * size * rank, (chunks[i] + 1) * size * rank, LINE):
                    touched += a[c]
                for t in range(chunks[i] * size, (chunks[i] + 1) * size if turned else 0):
                    for c in range(0, cos.shape[1], LINE):
                        touched += cos[t, c] + sin[t, c]
            own[0] = touched
            for i in range(first, last):
                _multiply(a, chunks[i] * size * rank, b, heads[i] * rank * d, size, rank, d, own)
                for t in range(size):
                    position, key = chunks[i] * size + t, own[t * d :][:d]
                    out = k[heads[i] * strides[0] + slots[i] * strides[1] + t * strides[2] :][:d]
                    if halves:
                        cosine, sine = cos[position], sin[position]
                        for c in range(half):
                            out[c] = key[c] * cosine[c] + key[half + c] * sign[c] * sine[c]
                        for c in range(half):
                            out[half + c] = key[half + c] * cosine[half + c] + key[c] * sign[half + c] * sine[half + c]
                    else:
                        for c in range(turned):
                            at, other = np.uint32(column[c]), key[np.uint32(partner[c])]
                            out[c] = key[c] * cos[position, at] + other * sign[c] * sin[position, at]
                    for c in range(turned, d):
                        out[c] = key[c]

    return rebuild


def suits(a: Tensor, b: Tensor, k: Tensor) -> bool:
    """Tell whether this can make keys of these factors there."""
    return serves(a, b, k) and a.is_contiguous() and b.is_contiguous()


def rebuild_rows(a: Tensor, b: Tensor, misses: Misses, rotation: Rotation | None, k: Tensor) -> None:
    """Rebuild the keys of the chunks that `misses` lists, each in its slot; they are not turned without a rotation."""
    (_, size, rank), d, count = a.shape, b.shape[2], len(misses.pages)
    if rotation is None:
        nothing, none = a.new_empty(0, 0), torch.empty(0, dtype=torch.int32)
        rotation = Rotation(nothing, nothing, none, none, a.new_empty(0))
    sizes = size, rank, int((rotation.column >= 0).sum())  # channels that are turned come first
    keys = a.new_empty(-(-count // PIECE), size * d)
    strides = np.array(k.stride()[:3])
    run(_loop(d), count * size * rank * d, flat(a), flat(b), sizes, *misses, *rotation, flat(k), strides, keys)
