"""Locality-sensitive hashing by signs of random projections (SimHash), and what it samples (arXiv 2410.16179, 4.1).

Each of L tables hashes a vector x to K bits, the signs of its products with K random directions. A query samples the
tokens whose keys share its hash in two tables at least. Where p is the chance that one direction does not part the two,
the chance of that is

    u = 1 - (1 - p^K)^L - L p^K (1 - p^K)^(L - 1)      p = 1 - arccos(cos(q, k)) / pi

On a CPU its logarithm is read off a curve that was worked out once, whose error is below 2e-5.

Shapes: x [.., d], directions [d, W, K, 8] -> codes [.., W, K] uint8, where W = ceil(L / 8), and a byte has one of the K
bits of eight tables. Of keys the bytes of a BLOCK of them lie side by side: [Hk, blocks, W, K, BLOCK].
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcli.kernels import lsh_rows
from kvcli.kernels._llvm import LOT
from kvcli.kernels._numba import serves
from kvcli.kernels.lsh_rows import CURVE
from kvcli.kernels.page_table import EMPTY

BLOCK = LOT
"""Keys whose codes are compared at once."""

TABLES = 8  # of which a byte has a bit
AT_ONCE = 1 << 24  # bytes that torch compares at once


@lru_cache(maxsize=8)
def directions(head_dim: int, tables: int, bits: int, seed: int, device: torch.device) -> Tensor:
    """Draw random directions [d, W, K, 8] in fp32: the same ones for all layers and sequences, wherever they run.

    They are laid as the bits of codes are; zeros stand where the last byte has no table.
    """
    drawn = torch.randn(head_dim, tables * bits, generator=torch.Generator().manual_seed(seed))
    by_table: Tensor = drawn.unflatten(1, (tables, bits))  # type: ignore[no-untyped-call]
    whole: Tensor = F.pad(by_table, (0, 0, 0, -tables % TABLES)).unflatten(1, (-1, TABLES))  # type: ignore[no-untyped-call]
    return whole.mT.contiguous().to(device)


def key_codes(k: Tensor, drawn: Tensor) -> Tensor:
    """Hash keys in each table: [.., W, K]."""
    if lsh_rows.hashes(k, drawn):
        return lsh_rows.codes(k, drawn)
    signs = (k.float() @ drawn.flatten(1) > 0).to(torch.uint8).unflatten(-1, drawn.shape[1:])  # type: ignore[no-untyped-call]
    codes: Tensor = (signs << torch.arange(TABLES, dtype=torch.uint8, device=k.device)).sum(-1, dtype=torch.uint8)
    return codes


def query_codes(q: Tensor, drawn: Tensor, tables: int) -> Tensor:
    """Hash queries so; what only fills up their last byte differs from that of all keys."""
    codes = key_codes(q, drawn)
    codes[..., -1, :] |= 256 - (1 << (tables - 1) % TABLES + 1)
    return codes


def lay(codes: Tensor, blocks: Tensor, first: int) -> None:
    """Put the codes [Hk, n, W, K] of keys, of which the first has this number, in their places in the blocks."""
    last, codes = first + codes.shape[1], codes.to(blocks.device)
    for block in range(first // BLOCK, -(-last // BLOCK)):
        begin = block * BLOCK
        some = slice(max(first, begin), min(last, begin + BLOCK))
        own = codes[:, some.start - first : some.stop - first].movedim(1, -1)
        blocks[:, block, ..., some.start - begin : some.stop - begin] = own


@lru_cache(maxsize=8)
def _curve(bits: int, tables: int) -> Tensor:
    """The logarithms of 1 / u at cosines from -1 to 1, in equal steps; there is one more at the end."""
    cosines = torch.linspace(-1, 1, CURVE + 1, dtype=torch.float64)
    heights = -sampling_chance(cosines, bits, tables).clamp_min(1e-30).log().float()
    return torch.cat((heights, heights[-1:]))


def colliding(q: Tensor, k: Tensor, n: int, first: int = 0) -> tuple[Tensor, Tensor]:
    """List the keys that share a query's codes in two tables at least: of every KV head those of any of its queries.

    Of the codes of keys, in blocks, those of n are there. Returns the keys, numbered from `first` on, [Hk, m] int64 in
    order, EMPTY behind a head's, and of which queries each is, [Hk, G, m] bool.
    """
    heads, group = q.shape[:2]
    if serves(k, dtype=torch.uint8):
        return lsh_rows.colliding(q, k, n, first)
    parts = torch.split(k, max(1, AT_ONCE // (heads * group * k[0, 0].numel())), 1)
    marks = torch.cat([_share_two(q, part) for part in parts], 2)[..., :n]  # [Hk, G, n]
    marked = marks.any(1)
    most = int(marked.sum(1).max())
    order = marked.int().argsort(dim=1, descending=True, stable=True)[:, :most]
    there = marked.gather(1, order)
    return (first + order).where(there, EMPTY), marks.gather(2, order[:, None].expand(-1, group, -1)) & there[:, None]


def _share_two(q: Tensor, k: Tensor) -> Tensor:
    """Tell which keys, in blocks, share two codes with which queries: [Hk, G, n]."""
    differs = torch.zeros((), dtype=torch.uint8)
    for bit in range(q.shape[-1]):
        differs = differs | (q[:, :, None, :, bit, None] ^ k[:, None, :, :, bit])  # [Hk, G, blocks, W, BLOCK]
    shared = ~differs
    several = shared & (shared - 1)  # 0 where it is one table of the eight, or none
    return ((shared != 0).sum(-2) + (several != 0).sum(-2) >= 2).flatten(2)


def log_counts(
    q: Tensor,
    k: Tensor,
    centre: Tensor,
    own: Tensor,
    bits: int,
    tables: int,
    least: float,
    rows: Tensor | None = None,
) -> Tensor:
    """Say how many tokens each stands for, 1 / u by its angle: q [Hk, G, d], k [Hk, m, d] less its centre [Hk, d].

    Of k the keys in `rows` [Hk, m] are meant, where these are given. No u is taken to be less than `least`. Returns
    logarithms [Hk, G, m], -inf where `own` [Hk, G, m] says no.
    """
    units = F.normalize(q.float(), dim=-1)
    if serves(k, units, centre, numbers=own.numel() * q.shape[2]):
        return lsh_rows.log_counts(units, k, centre, own, _curve(bits, tables), -math.log(least), rows)
    if rows is not None:
        k = k.take_along_dim(rows[..., None], 1)
    cosine = units @ F.normalize(k.float() - centre[:, None], dim=-1).mT
    chance = sampling_chance(cosine, bits, tables).clamp_min(least)
    return (-chance.log()).float().masked_fill(~own, float("-inf"))


def sampling_chance(cosine: Tensor, bits: int, tables: int) -> Tensor:
    """The chance u that a key at this cosine to a query is sampled, in fp64."""
    same = (1 - cosine.double().clamp(-1, 1).arccos() / math.pi) ** bits  # p^K
    # 1 - (1 - x)^(L - 1) (1 + (L - 1) x) without the cancellation of small x = p^K
    return -torch.expm1((tables - 1) * torch.log1p(-same) + torch.log1p((tables - 1) * same))
