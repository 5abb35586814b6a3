"""Kernels of YAKV: keys in two bits per channel, and their products with queries (arXiv 2604.08426).

A Hadamard transform of randomly signed channels makes the channels of any key look like draws from a normal
distribution, so that one quantiser fits them all. With w channels after the transform, y the rotated key:

    u = y sqrt(w) / |y|      code_c = number of thresholds below u_c      k~ = |y| / sqrt(w) levels[code]

Levels and thresholds are those of the four-level quantiser with the least mean square error for a standard normal
variable (Max, 1960, table I; Lloyd, 1982).

Shapes: keys [Hk, n, d] -> codes [Hk, n, w / 4] uint8 and sizes [Hk, n] fp32, the factor |y| / sqrt(w). Bits 2 i and
2 i + 1 of byte b are the code of channel 4 b + i. Queries q [Hk, G, w] are rotated like the keys.
"""

from __future__ import annotations

from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvcli.kernels._numba import compiled, prange, run, serves
from kvcli.sizes import slices

PER_BYTE = 4
"""Channels whose codes share a byte."""

AT_ONCE = 1024
"""Tokens scored at once by a thread, or by torch on a CPU, which holds their keys in fp32; on a GPU 16 times more."""


@lru_cache(maxsize=1)
def quantiser() -> tuple[Tensor, Tensor]:
    """Return the levels [4] and the thresholds [3] between them.

    A level is the mean of a standard normal variable between its thresholds, a threshold halfway between two levels.
    """
    normal, outer = NormalDist(), 1.0  # the threshold above 0
    for _ in range(100):
        low = (normal.pdf(0) - normal.pdf(outer)) / (normal.cdf(outer) - 0.5)
        high = normal.pdf(outer) / (1 - normal.cdf(outer))
        outer = (low + high) / 2
    return torch.tensor([-high, -low, low, high]), torch.tensor([-outer, 0.0, outer])


@lru_cache(maxsize=2)
def levels_of_bytes(device: torch.device) -> Tensor:
    """Return the levels of the four channels of every byte: [256, 4] fp32."""
    shifts = 2 * torch.arange(PER_BYTE)
    return quantiser()[0][torch.arange(256)[:, None] >> shifts & 3].to(device)


def encode_two_bits(rotated: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rotated keys [.., w]: codes [.., w / 4] uint8 and sizes [..] fp32; a key of zeros has size zero."""
    sizes = torch.linalg.vector_norm(rotated.float(), dim=-1) / rotated.shape[-1] ** 0.5
    scaled = rotated.float() / sizes.clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    codes = torch.bucketize(scaled, quantiser()[1].to(rotated.device), out_int32=True)
    shifts = 2 * torch.arange(PER_BYTE, device=rotated.device, dtype=torch.int32)
    return (codes.view(*codes.shape[:-1], -1, PER_BYTE) << shifts).sum(-1, dtype=torch.int32).to(torch.uint8), sizes


def two_bit_products_ref(q: Tensor, codes: Tensor, sizes: Tensor) -> Tensor:
    """Reference of `two_bit_products` in plain torch, some tokens at a time."""
    table = levels_of_bytes(q.device).to(q.dtype)
    parts = []
    for part in slices(codes.shape[1], AT_ONCE if codes.device.type == "cpu" else 16 * AT_ONCE):
        keys = table[codes[:, part].long()].flatten(-2)  # [Hk, n, w]
        parts.append((q @ keys.transpose(1, 2)) * sizes[:, None, part].to(q.dtype))
    return torch.cat(parts, -1)


@compiled
def _products(q: Any, codes: Any, sizes: Any, first: int, table: Any, out: Any) -> None:
    (heads, group, n), width = out.shape, q.shape[2]
    pieces = (n + AT_ONCE - 1) // AT_ONCE
    for piece in prange(heads * pieces):
        h, begin = piece // pieces, piece % pieces * AT_ONCE
        key = np.empty(width, np.float32)
        for j in range(begin, min(n, begin + AT_ONCE)):
            for b in range(width // PER_BYTE):
                byte = codes[h, first + j, b]
                for i in range(PER_BYTE):
                    key[PER_BYTE * b + i] = table[byte, i]
            for g in range(group):
                total = np.float32(0)
                for c in range(width):
                    total += q[h, g, c] * key[c]
                out[h, g, j] = total * sizes[h, first + j]


def two_bit_products(q: Tensor, codes: Tensor, sizes: Tensor, tokens: range) -> Tensor:
    """Multiply queries q [Hk, G, w] by keys of these consecutive tokens: [Hk, G, len(tokens)] in fp32.

    codes [Hk, n, w / 4] and sizes [Hk, n] are those of all tokens.
    """
    if codes.is_contiguous() and serves(codes, dtype=torch.uint8) and serves(q, sizes, numbers=codes.numel()):
        out = q.new_empty(*q.shape[:2], len(tokens))
        table = levels_of_bytes(q.device)
        run(_products, out[:, 0].numel() * q.shape[2], q.contiguous(), codes, sizes, tokens.start, table, out)
        return out
    part = slice(tokens.start, tokens.stop)
    return two_bit_products_ref(q, codes[:, part], sizes[:, part])
