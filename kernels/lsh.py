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

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kvcli.kernels._numba import compiled, flat, prange, run, serves
from kvcli.kernels.slot_layout import EMPTY

PIECE = 1024  # keys that a thread takes at once
CHOSEN = 64  # keys of a sample that it takes at once
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
def _colliding(q: Any, k: Any, head: int, tokens: Any, own: Any, counts: Any) -> None:
    # Each piece lists what it finds from its own first place on.
    heads, group, tables = q.shape
    n = tokens.shape[1]
    pieces = (n + PIECE - 1) // PIECE
    for piece in prange(heads * pieces):
        h, first = piece // pieces, piece % pieces * PIECE
        at = first
        for j in range(first, min(first + PIECE, n)):
            codes, some = k[h * head + j * tables :][:tables], False
            for g in range(group):
                query, shared = q[h, g], np.int32(0)
                for table in range(tables):
                    shared = np.int32(shared + (query[table] == codes[table]))  # 64 bits would halve its lanes
                own[h, at, g] = shared >= 2
                some |= bool(shared >= 2)
            tokens[h, at] = j
            at += some
        counts[h, piece % pieces] = at - first


@compiled
def _in_a_row(tokens: Any, own: Any, counts: Any, all_tokens: Any, all_own: Any) -> None:
    heads, group, _ = all_own.shape
    for h in prange(heads):
        at = 0
        for piece in range(counts.shape[1]):
            for i in range(piece * PIECE, piece * PIECE + counts[h, piece]):
                all_tokens[h, at] = tokens[h, i]
                for g in range(group):
                    all_own[h, g, at] = own[h, i, g]
                at += 1


@compiled
def _cosines(q: Any, k: Any, centre: Any, out: Any) -> None:
    heads, group, m = out.shape
    d = q.shape[2]
    pieces = (m + CHOSEN - 1) // CHOSEN
    for piece in prange(heads * pieces):
        h, first = piece // pieces, piece % pieces * CHOSEN
        for i in range(first, min(first + CHOSEN, m)):
            square = np.float32(0)
            for c in range(d):
                square += (k[h, i, c] - centre[h, c]) * (k[h, i, c] - centre[h, c])
            length = max(np.sqrt(square), np.float32(1e-12))
            for g in range(group):
                product = np.float32(0)
                for c in range(d):
                    product += q[h, g, c] * (k[h, i, c] - centre[h, c])
                out[h, g, i] = product / length


def colliding(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """List the keys that share a query's codes in two tables at least: of every KV head those of any of its queries.

    Returns them, [Hk, m] int64 in order, EMPTY behind a head's, and of which queries each is, [Hk, G, m] bool.
    """
    heads, group, tables = q.shape
    n = k.shape[1]
    if serves(k, dtype=torch.int16):
        found, own = torch.empty(heads, n, dtype=torch.int32), torch.empty(heads, n, group, dtype=torch.bool)
        counts = torch.empty(heads, -(-n // PIECE), dtype=torch.int64)
        run(_colliding, k.numel(), q.contiguous(), flat(k), k.stride(0), found, own, counts)
        tokens = torch.full((heads, int(counts.sum(1).max())), EMPTY)
        in_a_row = torch.zeros(heads, group, tokens.shape[1], dtype=torch.bool)
        run(_in_a_row, tokens.numel(), found, own, counts, tokens, in_a_row)
        return tokens, in_a_row
    parts = torch.split(k, max(1, AT_ONCE // (heads * group * tables)), 1)
    marks = torch.cat([(q[:, :, None] == part[:, None]).sum(-1) >= 2 for part in parts], 2)  # [Hk, G, n]
    marked = marks.any(1)
    most = int(marked.sum(1).max())
    order = marked.int().argsort(dim=1, descending=True, stable=True)[:, :most]
    there = marked.gather(1, order)
    return order.where(there, EMPTY), marks.gather(2, order[:, None].expand(-1, group, -1)) & there[:, None]


def log_counts(q: Tensor, k: Tensor, centre: Tensor, own: Tensor, bits: int, tables: int, least: float) -> Tensor:
    """Say how many tokens each stands for, 1 / u by its angle: q [Hk, G, d], k [Hk, m, d] less its centre [Hk, d].

    No u is taken to be less than `least`. Returns logarithms [Hk, G, m], -inf where `own` [Hk, G, m] says no.
    """
    units = F.normalize(q.float(), dim=-1)
    if serves(k, units, centre):
        cosine = torch.empty(own.shape)
        run(_cosines, k.numel(), units, k, centre, cosine)
    else:
        cosine = units @ F.normalize(k.float() - centre[:, None], dim=-1).mT
    chance = sampling_chance(cosine, bits, tables).clamp_min(least)
    return (-chance.log()).float().masked_fill(~own, float("-inf"))


def sampling_chance(cosine: Tensor, bits: int, tables: int) -> Tensor:
    """The chance u that a key at this cosine to a query is sampled, in fp64."""
    same = (1 - cosine.double().clamp(-1, 1).arccos() / math.pi) ** bits  # p^K
    # 1 - (1 - x)^(L - 1) (1 + (L - 1) x) without the cancellation of small x = p^K
    return -torch.expm1((tables - 1) * torch.log1p(-same) + torch.log1p((tables - 1) * same))
