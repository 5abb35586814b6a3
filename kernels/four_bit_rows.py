"""Scores of chosen keys of four bits on a CPU: `kvcli.kernels.four_bit_keys` in one loop over tokens where they lie.

Shapes: q [Hk, G, d], codes [Hk, capacity, ceil(d / 2)] uint8, ranges [Hk, capacity, 2] in fp32, tokens [Hk, n] ->
[Hk, G, n]. A step's new keys [Hk, n, d], which are few, have a loop of their own for codes and ranges.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvcli.kernels._numba import compiled, prange, run, run_alone, serial, serves

PIECE = 256  # tokens that a thread takes at once
LEVELS = 15  # steps between a token's least and greatest channel


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


@serial
def _quantise(keys: Any, smallest: Any, codes: Any, ranges: Any) -> None:
    (heads, n, d), size = keys.shape, codes.shape[2]
    for h in range(heads):
        for i in range(n):
            key, code = keys[h, i], codes[h, i]
            low, high = key[0], key[0]
            for c in range(d):
                low, high = min(low, key[c]), max(high, key[c])
            scale = (high - low) / np.float32(LEVELS)
            ranges[h, i, 0], ranges[h, i, 1] = scale, low
            for c in range(d):
                level = np.uint8(min(np.rint((key[c] - low) / max(scale, smallest)), np.float32(LEVELS)))
                code[c % size] = level if c < size else code[c % size] | level << np.uint8(4)


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


def quantise(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a few keys: codes and ranges."""
    heads, n, d = keys.shape
    codes, ranges = torch.empty(heads, n, (d + 1) // 2, dtype=torch.uint8), keys.new_empty(heads, n, 2)
    run_alone(_quantise, keys, np.float32(torch.finfo(torch.float32).tiny), codes, ranges)
    return codes, ranges
