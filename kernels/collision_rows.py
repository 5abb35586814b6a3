"""Votes of sign patterns on a CPU: what `kvcli.kernels.collisions` counts and adds up, in two loops over the bytes.

Shapes: signs [Hk, n, B] uint8 -> population [Hk, B, 256] int64; worth [Hk, B, 256] int32 -> votes [Hk, n] int32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvcli.kernels._numba import compiled, flat, prange, run, serves

PIECE = 1024  # keys that a thread takes at once


@compiled
def _population(signs: Any, head: int, n: int, out: Any) -> None:
    heads, blocks, _ = out.shape
    for h in prange(heads):
        for j in range(n):
            own = signs[h * head + j * blocks :][:blocks]
            for b in range(blocks):
                out[h, b, own[b]] += 1


@compiled
def _votes(signs: Any, head: int, worth: Any, out: Any) -> None:
    heads, n = out.shape
    blocks = worth.shape[1]
    pieces = (n + PIECE - 1) // PIECE
    for piece in prange(heads * pieces):
        h, first = piece // pieces, piece % pieces * PIECE
        for j in range(first, min(first + PIECE, n)):
            own, total = signs[h * head + j * blocks :][:blocks], 0
            for b in range(blocks):
                total += worth[h, b, own[b]]
            out[h, j] = total


def suits(signs: Tensor) -> bool:
    """Tell whether this can count these: tokens one behind the other."""
    return signs.stride()[1:] == (signs.shape[2], 1) and serves(signs, dtype=torch.uint8)


def population(signs: Tensor) -> Tensor:
    """Count how often each pattern occurs in a block."""
    (heads, n, blocks), out = signs.shape, torch.zeros(len(signs), signs.shape[2], 256, dtype=torch.int64)
    run(_population, heads * n * blocks, flat(signs), signs.stride(0), n, out)
    return out


def votes(signs: Tensor, worth: Tensor) -> Tensor:
    """Add up over the blocks of a key what its patterns are worth."""
    out = torch.empty(signs.shape[:2], dtype=torch.int32)
    run(_votes, signs.numel(), flat(signs), signs.stride(0), worth, out)
    return out
