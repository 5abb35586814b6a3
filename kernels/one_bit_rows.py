"""Scores of one-bit keys on a CPU: `kvcli.kernels.one_bit_scores` in one loop over groups.

What four bits add to a score is one of sixteen numbers, the same for all tokens of a group: they are worked out once,
and a token's score is a sum of those that its codes point to, two for a byte.

Shapes: as there, q [Hk, G, d] and ranges [Hk, n, 2, d] in fp32 -> [Hk, G, n * g].
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from kvcli.kernels._numba import compiled, flat, prange, run, serves

GROUPS = 16  # that a thread takes at once


@compiled
def _one_bit_rows(q: Any, codes: Any, head: int, ranges: Any, ranges_head: int, size: int, out: Any) -> None:
    heads, queries, d = q.shape
    bytes_ = (d + 7) // 8
    n = out.shape[2] // size
    pieces = (n + GROUPS - 1) // GROUPS
    for piece in prange(heads * pieces):
        h, first = piece // pieces, piece % pieces * GROUPS
        at = np.empty((size, 2 * bytes_), np.int32)  # where each half of a token's bytes points to
        table, weights = np.empty(32 * bytes_, np.float32), np.zeros(8 * bytes_, np.float32)
        for group in range(first, min(first + GROUPS, n)):
            for t in range(size):
                code, points = codes[h * head + (group * size + t) * bytes_ :][:bytes_], at[t]
                for byte in range(bytes_):
                    both = np.int32(code[byte])
                    points[2 * byte] = 32 * byte + (both & 15)
                    points[2 * byte + 1] = 32 * byte + 16 + (both >> 4)
            scale = ranges[h * ranges_head + 2 * group * d :][:d]
            zero = ranges[h * ranges_head + (2 * group + 1) * d :][:d]
            for g in range(queries):
                base = np.float32(0)
                for c in range(d):
                    weights[c] = np.float32(2) * q[h, g, c] * scale[c]
                    base += q[h, g, c] * (zero[c] - scale[c])
                for half in range(2 * bytes_):
                    values, known = table[16 * half :][:16], 1
                    values[0] = 0
                    for bit in range(4):
                        weight = weights[4 * half + bit]
                        for value in range(known):
                            values[known + value] = values[value] + weight
                        known *= 2
                for t in range(size):
                    total, points = base, at[t]
                    for half in range(2 * bytes_):
                        total += table[np.uint32(points[half])]
                    out[h, g, group * size + t] = total


def suits(q: Tensor, codes: Tensor, ranges: Tensor) -> bool:
    """Tell whether this can score with these: groups one behind the other."""
    size, width = codes.shape[2:]
    together = codes.stride()[1:] == (size * width, width, 1) and ranges.stride()[1:] == (2 * q.shape[2], q.shape[2], 1)
    return together and serves(q, ranges)


def one_bit_rows(q: Tensor, codes: Tensor, ranges: Tensor) -> Tensor:
    """Score every token of every group, unscaled."""
    (heads, queries, _), (groups, size) = q.shape, codes.shape[1:3]
    out = q.new_empty(heads, queries, groups * size)
    run(
        _one_bit_rows,
        out.numel(),
        q.contiguous(),
        flat(codes),
        codes.stride(0),
        flat(ranges),
        ranges.stride(0),
        size,
        out,
    )
    return out
