"""Scores of chosen keys of four bits on a CPU: `kvcli.kernels.four_bit_keys` in one loop over tokens where they lie.

Shapes: q [Hk, G, d], codes [Hk, capacity, ceil(d / 2)] uint8, ranges [Hk, capacity, 2] in fp32, tokens [Hk, n] ->
[Hk, G, n].
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from torch import Tensor

from kvcli.kernels._numba import compiled, prange, run, serves

PIECE = 256  # tokens that a thread takes at once


@cache
def _loop(d: int, group: int) -> Any:
    """Make the loop for a head size and a number of queries; see `few_rows` for what it may close over."""
    size = (d + 1) // 2

    @compiled
    def four_bit_rows(q: Any, codes: Any, ranges: Any, tokens: Any, out: Any) -> None:
        heads, n = tokens.shape
        pieces = (n + PIECE - 1) // PIECE
        for piece in prange(heads * pieces):
            h, first = piece // pieces, piece % pieces * PIECE
            key, whole = np.zeros(2 * size, np.float32), np.zeros(group, np.float32)
            for g in range(group):
                for c in range(d):
                    whole[g] += q[h, g, c]
            for i in range(first, min(first + PIECE, n)):
                code = codes[h, tokens[h, i]]
                for byte in range(size):
                    key[byte] = np.float32(np.int32(code[byte]) & np.int32(15))
                    key[size + byte] = np.float32(np.int32(code[byte]) >> np.int32(4))
                scale, zero = ranges[h, tokens[h, i], 0], ranges[h, tokens[h, i], 1]
                for g in range(group):
                    picked = np.float32(0)
                    for c in range(d):
                        picked += q[h, g, c] * key[c]
                    out[h, g, i] = picked * scale + whole[g] * zero

    return four_bit_rows


def suits(q: Tensor, codes: Tensor, ranges: Tensor) -> bool:
    """Tell whether this can score with these."""
    return serves(q, ranges) and codes.is_contiguous() and ranges.is_contiguous()


def four_bit_rows(q: Tensor, codes: Tensor, ranges: Tensor, tokens: Tensor) -> Tensor:
    """Score the tokens, unscaled."""
    out = q.new_empty(*q.shape[:2], tokens.shape[1])
    run(
        _loop(q.shape[2], q.shape[1]),
        tokens.numel() * q.shape[2],
        q.contiguous(),
        codes,
        ranges,
        tokens.contiguous(),
        out,
    )
    return out
