"""Scores of one-bit keys on a CPU: `kvcli.kernels.one_bit_scores` in one loop over groups.

What a bit adds to a score is the same number for all tokens of a group that have it. So all of these take a bit at
once, as lanes of the processor: half the time of looking up in a table what each token's four bits add.

Shapes: as there, q [Hk, G, d] and ranges [Hk, n, 2, d] in fp32 -> [Hk, G, n * g].
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from torch import Tensor

from kvcli.kernels._numba import compiled, flat, prange, run, serves

GROUPS = 16  # that a thread takes at once


@cache
def _loop(d: int, size: int, queries: int) -> Any:
    """Make the loop for a head size, a group and a number of queries; see `few_rows` for what it may close over."""
    width = (d + 7) // 8

    @compiled
    def one_bit_rows(q: Any, codes: Any, head: int, ranges: Any, ranges_head: int, out: Any) -> None:
        heads, n = len(q), out.shape[2] // size
        pieces = (n + GROUPS - 1) // GROUPS
        for piece in prange(heads * pieces):
            h, first = piece // pieces, piece % pieces * GROUPS
            bits, sums = np.empty(size, np.int32), np.empty((queries, size), np.float32)
            weights, none = np.zeros((queries, 8 * width), np.float32), np.float32(0)
            for group in range(first, min(first + GROUPS, n)):
                scale = ranges[h * ranges_head + 2 * group * d :][:d]
                zero = ranges[h * ranges_head + (2 * group + 1) * d :][:d]
                for g in range(queries):
                    base = np.float32(0)
                    for c in range(d):
                        weights[g, c] = np.float32(2) * q[h, g, c] * scale[c]
                        base += q[h, g, c] * (zero[c] - scale[c])
                    sums[g] = base
                at = np.uint64(h * head + group * size * width)
                for byte in range(width):
                    for t in range(size):
                        bits[t] = codes[at + np.uint64(t * width + byte)]
                    for g in range(queries):
                        w = weights[g, 8 * byte :]
                        w0, w1, w2, w3, w4, w5, w6, w7 = w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]
                        for t in range(size):
                            b = bits[t]
                            x = w0 if b & 1 else none
                            x += w1 if b & 2 else none
                            x += w2 if b & 4 else none
                            x += w3 if b & 8 else none
                            x += w4 if b & 16 else none
                            x += w5 if b & 32 else none
                            x += w6 if b & 64 else none
                            x += w7 if b & 128 else none
                            sums[g, t] += x
                for g in range(queries):
                    for t in range(size):
                        out[h, g, group * size + t] = sums[g, t]

    return one_bit_rows


def suits(q: Tensor, codes: Tensor, ranges: Tensor) -> bool:
    """Tell whether this can score with these: groups one behind the other."""
    size, width = codes.shape[2:]
    together = codes.stride()[1:] == (size * width, width, 1) and ranges.stride()[1:] == (2 * q.shape[2], q.shape[2], 1)
    return together and serves(q, ranges)


def one_bit_rows(q: Tensor, codes: Tensor, ranges: Tensor) -> Tensor:
    """Score every token of every group, unscaled."""
    (heads, queries, d), (groups, size) = q.shape, codes.shape[1:3]
    out, loop = q.new_empty(heads, queries, groups * size), _loop(d, size, queries)
    run(loop, out.numel(), q.contiguous(), flat(codes), codes.stride(0), flat(ranges), ranges.stride(0), out)
    return out
