"""Locality-sensitive hashing by signs of random projections (SimHash), and what it samples (arXiv 2410.16179, 4.1).

Each of L tables hashes a vector x to K bits, the signs of its products with K random directions. A query samples the
tokens whose keys share its hash in two tables at least. Where p is the chance that one direction does not part the two,
the chance of that is

    u = 1 - (1 - p^K)^L - L p^K (1 - p^K)^(L - 1)      p = 1 - arccos(cos(q, k)) / pi

Shapes: x [.., d], directions [d, L * K] -> codes [.., L] int16; codes of queries [Hk, G, L] and keys [Hk, n, L].
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kvcli.kernels._numba import compiled, flat, prange, run, serves

PIECE = 1024  # keys that a thread takes at once
AT_ONCE = 1 << 24  # codes that torch compares at once


@lru_cache(maxsize=8)
def directions(head_dim: int, count: int, seed: int, device: torch.device) -> Tensor:
    """Draw random directions [d, count] in fp32: the same ones for all layers and sequences, wherever they run."""
    return torch.randn(head_dim, count, generator=torch.Generator().manual_seed(seed)).to(device)


def hash_codes(x: Tensor, drawn: Tensor, bits: int) -> Tensor:
    """Hash vectors to `bits` (at most 15) in each table."""
    signs: Tensor = (x.float() @ drawn > 0).unflatten(-1, (-1, bits))  # type: ignore[no-untyped-call]
    places = torch.arange(bits, dtype=torch.int16, device=x.device)
    return (signs.to(torch.int16) << places).sum(-1, dtype=torch.int16)


@compiled
def _colliding(q: Any, k: Any, head: int, out: Any) -> None:
    heads, group, tables = q.shape
    n = out.shape[2]
    pieces = (n + PIECE - 1) // PIECE
    for piece in prange(heads * pieces):
        h, first = piece // pieces, piece % pieces * PIECE
        for j in range(first, min(first + PIECE, n)):
            codes = k[h * head + j * tables :][:tables]
            for g in range(group):
                query, shared = q[h, g], 0
                for table in range(tables):
                    shared += query[table] == codes[table]
                out[h, g, j] = shared >= 2


def colliding(q: Tensor, k: Tensor) -> Tensor:
    """Mark the keys that share a query's codes in two tables at least: bool [Hk, G, n]."""
    heads, group, tables = q.shape
    if serves(k, dtype=torch.int16):
        out = torch.empty(heads, group, k.shape[1], dtype=torch.bool)
        run(_colliding, k.numel(), q.contiguous(), flat(k), k.stride(0), out)
        return out
    parts = torch.split(k, max(1, AT_ONCE // (heads * group * tables)), 1)
    return torch.cat([(q[:, :, None] == part[:, None]).sum(-1) >= 2 for part in parts], 2)


def sampling_chance(cosine: Tensor, bits: int, tables: int) -> Tensor:
    """The chance u that a key at this cosine to a query is sampled, in fp64."""
    same = (1 - cosine.double().clamp(-1, 1).arccos() / math.pi) ** bits  # p^K
    # 1 - (1 - x)^(L - 1) (1 + (L - 1) x) without the cancellation of small x = p^K
    return -torch.expm1((tables - 1) * torch.log1p(-same) + torch.log1p((tables - 1) * same))
