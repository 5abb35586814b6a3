"""Locality-sensitive hashing by signs of random projections (SimHash), and what it samples (arXiv 2410.16179, 4.1).

Each of L tables hashes a vector x to K bits, the signs of its products with K random directions. A query samples the
tokens whose keys share its hash in two tables at least. Where p is the chance that one direction does not part the two,
the chance of that is

    u = 1 - (1 - p^K)^L - L p^K (1 - p^K)^(L - 1)      p = 1 - arccos(cos(q, k)) / pi

On a CPU its logarithm is read off a curve that was worked out once, whose error is below 2e-5.

Shapes: x [.., d], directions [d, L * K] -> codes [.., L] int16; codes of queries [Hk, G, L] and keys [Hk, n, L].
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kvcli.kernels._numba import compiled, flat, inlined, prange, run, serves
from kvcli.kernels._prefetch import AHEAD, prefetch
from kvcli.kernels.slot_layout import EMPTY

PIECE = 1024  # keys that a thread takes at once
CHOSEN = 64  # keys of a sample that it takes at once
AT_ONCE = 1 << 24  # codes that torch compares at once
CURVE = 4096  # steps of the curve from one cosine, -1, to the other, 1


@lru_cache(maxsize=8)
def directions(head_dim: int, count: int, seed: int, device: torch.device) -> Tensor:
    """Draw random directions [d, count] in fp32: the same ones for all layers and sequences, wherever they run."""
    return torch.randn(head_dim, count, generator=torch.Generator().manual_seed(seed)).to(device)


def hash_codes(x: Tensor, drawn: Tensor, bits: int) -> Tensor:
    """Hash vectors to `bits` (at most 15) in each table."""
    signs: Tensor = (x.float() @ drawn > 0).unflatten(-1, (-1, bits))  # type: ignore[no-untyped-call]
    places = torch.arange(bits, dtype=torch.int16, device=x.device)
    return (signs.to(torch.int16) << places).sum(-1, dtype=torch.int16)


@cache
def _comparison(tables: int, group: int) -> Any:
    """Make the loop over keys of so many codes, for so many queries that share a KV head."""

    @compiled
    def colliding(q: Any, k: Any, head: int, tokens: Any, own: Any, counts: Any) -> None:
        # Each piece lists what it finds from its own first place on.
        heads, n = tokens.shape
        pieces = (n + PIECE - 1) // PIECE
        for piece in prange(heads * pieces):
            h, first = piece // pieces, piece % pieces * PIECE
            at = first
            for j in range(first, min(first + PIECE, n)):
                codes, some = np.uint64(h * head + j * tables), False
                for g in range(group):
                    shared = np.int16(0)  # as wide as a code, so that as many are counted at once as are compared
                    for table in range(tables):
                        i = np.uint64(table)
                        same = np.int16(q[np.uint64(h), np.uint64(g), i] == k[codes + i])
                        shared = np.int16(shared + same)
                    own[h, at, g] = shared >= 2
                    some |= bool(shared >= 2)
                tokens[h, at] = j
                at += some
            counts[h, piece % pieces] = at - first

    return colliding


@compiled
def _in_a_row(tokens: Any, own: Any, counts: Any, begin: int, all_tokens: Any, all_own: Any) -> None:
    heads, group, _ = all_own.shape
    for h in prange(heads):
        at = 0
        for piece in range(counts.shape[1]):
            for i in range(piece * PIECE, piece * PIECE + counts[h, piece]):
                all_tokens[h, at] = begin + tokens[h, i]
                for g in range(group):
                    all_own[h, g, at] = own[h, i, g]
                at += 1


@lru_cache(maxsize=8)
def _curve(bits: int, tables: int) -> Tensor:
    """The logarithms of 1 / u at cosines from -1 to 1, in equal steps; there is one more at the end."""
    cosines = torch.linspace(-1, 1, CURVE + 1, dtype=torch.float64)
    heights = -sampling_chance(cosines, bits, tables).clamp_min(1e-30).log().float()
    return torch.cat((heights, heights[-1:]))


@inlined
def _read_off(curve: Any, cosine: Any) -> Any:
    place = (min(max(cosine, np.float32(-1)), np.float32(1)) + np.float32(1)) * np.float32(CURVE / 2)
    at = np.uint64(place)
    return curve[at] + (place - np.float32(at)) * (curve[at + np.uint64(1)] - curve[at])


@compiled
def _log_counts(
    q: Any, k: Any, head: int, token: int, at: Any, centre: Any, own: Any, curve: Any, most: Any, out: Any
) -> None:
    (heads, group, m), d = out.shape, q.shape[2]
    pieces = (m + CHOSEN - 1) // CHOSEN
    key = np.empty((heads * pieces, d), np.float32)
    for piece in prange(heads * pieces):
        h, first = piece // pieces, piece % pieces * CHOSEN
        rows, centred = at[h % len(at)], key[piece]
        for i in range(first, min(first + CHOSEN, m)):
            if i + AHEAD < m:
                prefetch(k, h * head + rows[i + AHEAD] * token, d)
            begin, square = np.uint64(h * head + rows[i] * token), np.float32(0)
            for c in range(d):
                centred[c] = k[begin + np.uint64(c)] - centre[h, c]
                square += centred[c] * centred[c]
            length = max(np.sqrt(square), np.float32(1e-12))
            for g in range(group):
                product = np.float32(0)
                for c in range(d):
                    product += q[h, g, c] * centred[c]
                cosine = product / length
                if cosine != cosine:  # no place on the curve
                    out[h, g, i] = cosine
                else:
                    out[h, g, i] = min(_read_off(curve, cosine), most)
                if not own[h, g, i]:
                    out[h, g, i] = -np.inf


def colliding(q: Tensor, k: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
    """List the keys that share a query's codes in two tables at least: of every KV head those of any of its queries.

    Returns them, numbered from `first` on, [Hk, m] int64 in order, EMPTY behind a head's, and of which queries each is,
    [Hk, G, m] bool.
    """
    heads, group, tables = q.shape
    n = k.shape[1]
    if serves(k, dtype=torch.int16):
        found, own = torch.empty(heads, n, dtype=torch.int32), torch.empty(heads, n, group, dtype=torch.bool)
        counts = torch.empty(heads, -(-n // PIECE), dtype=torch.int64)
        run(_comparison(tables, group), k.numel(), q.contiguous(), flat(k), k.stride(0), found, own, counts)
        tokens = torch.full((heads, int(counts.sum(1).max())), EMPTY)
        in_a_row = torch.zeros(heads, group, tokens.shape[1], dtype=torch.bool)
        run(_in_a_row, tokens.numel(), found, own, counts, first, tokens, in_a_row)
        return tokens, in_a_row
    parts = torch.split(k, max(1, AT_ONCE // (heads * group * tables)), 1)
    marks = torch.cat([(q[:, :, None] == part[:, None]).sum(-1) >= 2 for part in parts], 2)  # [Hk, G, n]
    marked = marks.any(1)
    most = int(marked.sum(1).max())
    order = marked.int().argsort(dim=1, descending=True, stable=True)[:, :most]
    there = marked.gather(1, order)
    return (first + order).where(there, EMPTY), marks.gather(2, order[:, None].expand(-1, group, -1)) & there[:, None]


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
        out, most = torch.empty(own.shape), np.float32(-math.log(least))
        at = torch.arange(own.shape[2])[None] if rows is None else rows
        held = flat(k), k.stride(0), k.stride(1)
        run(_log_counts, own.numel() * q.shape[2], units, *held, at, centre, own, _curve(bits, tables), most, out)
        return out
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
