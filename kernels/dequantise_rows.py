"""Numbers of quantised blocks on a CPU: `kvcli.kernels.quantised_blocks` read in one loop, each number written once.

torch goes over all numbers once for each of its operations, which takes several times as long as moving them.

Shapes: blocks [n, bytes] uint8 -> out [n, parts, p, d] fp32, with any strides but the last; sizes [Hk, d] of keys,
block i of KV head heads[i].
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvcli.kernels._numba import compiled, flat, prange, run, serves

PIECE = 1 << 14  # numbers that a thread writes at once, about


class PartLayout(NamedTuple):
    """Where a part of a block lies: its first byte of codes, its first fp16 of scales, and the size of its groups."""

    codes: int
    scales: int
    tokens: int
    channels: int


@compiled
def _dequantise_rows(
    blocks: Any,
    halves: Any,
    floats: Any,
    bits: int,
    size: int,
    d: int,
    parts: Any,
    at_once: int,
    sizes: Any,
    heads: Any,
    out: Any,
    strides: Any,
) -> None:
    n, width, mask = len(blocks), d * bits // 8, (1 << bits) - 1
    for piece in prange((n + at_once - 1) // at_once):
        scale, zero = np.empty(d, np.float32), np.empty(d, np.float32)
        for i in range(piece * at_once, min(n, (piece + 1) * at_once)):
            for part in range(len(parts)):
                first, scales, tokens, channels = parts[part]
                columns = d // channels
                zeros = scales + size // tokens * columns
                for t in range(size):
                    codes = blocks[i, first + t * width :][:width]
                    numbers = out[i * strides[0] + part * strides[1] + t * strides[2] :][:d]
                    if channels == 1:  # every channel has its own scale, for so many tokens
                        if t % tokens == 0:
                            for c in range(d):
                                group = t // tokens * d + c
                                scale[c], zero[c] = floats[halves[i, scales + group]], floats[halves[i, zeros + group]]
                        for half in range(d // width):
                            own, s, z = numbers[half * width :][:width], scale[half * width :], zero[half * width :]
                            for c in range(width):
                                own[c] = z[c] + s[c] * np.float32(
                                    np.int32(codes[c]) >> np.int32(4 * half) & np.int32(mask)
                                )
                    else:
                        for column in range(columns):
                            group, begin = t // tokens * columns + column, column * channels
                            s1, z1 = floats[halves[i, scales + group]], floats[halves[i, zeros + group]]
                            shift = 4 * (begin // width)
                            own, its = numbers[begin:][:channels], codes[begin % width :][:channels]
                            for c in range(channels):
                                code = np.int32(its[c]) >> np.int32(shift) & np.int32(mask)
                                own[c] = z1 + s1 * np.float32(code)
                    if part == 0 and len(sizes) > 0:
                        its_sizes = sizes[heads[i]]
                        for c in range(d):
                            numbers[c] *= its_sizes[c]


def suits(blocks: Tensor, out: Tensor) -> bool:
    """Tell whether this can read these blocks into that."""
    return serves(out) and serves(blocks, dtype=torch.uint8) and blocks.data_ptr() % 2 == 0


def dequantise_rows(
    blocks: Tensor,
    bits: int,
    parts: Sequence[PartLayout],
    out: Tensor,
    sizes: Tensor | None = None,
    heads: Tensor | None = None,
) -> None:
    """Write the numbers of blocks, of `bits` each, into out; keys times their `sizes` where there are any."""
    _, _, size, d = out.shape
    if sizes is None or heads is None:
        sizes, heads = torch.empty(0, d), torch.empty(0, dtype=torch.int64)
    run(
        _dequantise_rows,
        out.numel(),
        blocks,
        blocks.view(torch.uint16),
        numbers_of_halves(),
        bits,
        size,
        d,
        np.array(parts),
        max(1, PIECE // out[0].numel()),
        sizes,
        heads,
        flat(out),
        np.array(out.stride()[:3]),
    )


@cache
def numbers_of_halves() -> Tensor:
    """What each number of fp16, by its bits, is in fp32: [65536]."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.float16).float()
