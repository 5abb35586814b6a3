"""Kernels of MagicPIG: hashing by signs of random projections (SimHash), and sampling by it (arXiv 2410.16179, 4.1).

Each of L tables hashes a vector x to K bits, the signs of its products with K random directions. A query samples the
tokens whose keys share its hash in at least two tables. Where p is the chance that one direction does not separate the
two, the chance of sampling is

    u = 1 - (1 - p^K)^L - L p^K (1 - p^K)^(L - 1)      p = 1 - arccos(cos(q, k)) / pi

On a CPU its logarithm is read off a precomputed curve, with an error below 2e-5.

Shapes: x [.., d], directions [d, W, K, 8] -> codes [.., W, K] uint8, where W = ceil(L / 8), and a byte has one of the K
bits of eight tables. The bytes of a BLOCK of keys are adjacent: [Hk, blocks, W, K, BLOCK].

On a CPU, loops compare codes byte by byte for all keys of a block at once. Differences in any of the K bits are
collected with or; what does not differ is a shared code, seen for the first time or again.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kvcli.kernels._llvm import LOT, FlatArrays, all_of, first_one, ones, prefetch, without_first
from kvcli.kernels._numba import compiled, flat, inlined, intrinsic, prange, run, run_alone, serial, serves
from kvcli.kernels.page_table import EMPTY

FEW = 16  # vectors that one thread hashes
PIECE = 16  # blocks per thread at once
KEYS_AHEAD = 16  # keys that are prefetched: sampled keys lie anywhere
CHOSEN = 64  # keys of a sample per thread at once
CURVE = 4096  # steps of the curve over cosines from -1 to 1


@intrinsic
def _share_two_cpu(_: Any, queries: Any, query: Any, keys: Any, key: Any, words: Any, bits: Any) -> Any:
    """Flag the keys, of a LOT of them, that share two codes with a query.

    Flat arrays: codes of the query [words, bits] from `query` on, of keys [words, bits, LOT] from `key` on. The number
    of bits is known at compile time.
    """
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils

    def compare(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        queries, query, keys, key, words, _ = given
        place, count = query.type, bits.literal_value
        nothing, one = (ir.Constant(ir.VectorType(ir.IntType(8), LOT), [number] * LOT) for number in (0, 1))
        variable: Any = cgutils.alloca_once_value
        once, twice = (variable(builder, nothing) for _ in range(2))
        with cgutils.for_range(builder, words, intp=place) as word:
            own = builder.mul(word.index, place(count))
            at = builder.add(query, own), builder.add(key, builder.mul(own, place(LOT)))
            held = FlatArrays(context, builder, signature, (queries, at[0], keys, at[1]))
            differs = nothing
            for bit in range(count):
                number = builder.extract_element(held.load(0, 1, bit), ir.IntType(32)(0))
                other = builder.xor(all_of(builder, number, LOT), held.load(2, LOT, LOT * bit))
                differs = builder.or_(differs, other)
            shared, before = builder.not_(differs), builder.load(once)
            builder.store(builder.or_(builder.load(twice), builder.and_(before, shared)), twice)
            builder.store(builder.or_(before, shared), once)
        tables = builder.load(once)  # bits at which a code was shared; two bits mean two shared codes as well
        several = builder.and_(tables, builder.sub(tables, one))
        found = builder.icmp_unsigned("!=", builder.or_(builder.load(twice), several), nothing)
        return builder.bitcast(found, ir.IntType(LOT))

    if not isinstance(bits, types.Literal):
        return None
    return types.uint64(queries, query, keys, key, words, bits), compare


@cache
def _sharing(bits: int) -> Any:
    """Make the loop over blocks of keys for codes of this many bits."""

    @compiled
    def sharing(q: Any, words: int, k: Any, head: int, n: int, flags: Any, counts: Any) -> None:
        heads, blocks, group = flags.shape
        width, pieces = words * bits, (blocks + PIECE - 1) // PIECE
        for piece in prange(heads * pieces):
            h, first = piece // pieces, piece % pieces * PIECE
            for block in range(first, min(first + PIECE, blocks)):
                key, found = h * head + block * LOT * width, np.uint64(0)
                there = np.uint64(-1) >> np.uint64(max(0, (block + 1) * LOT - n))
                for g in range(group):
                    query = np.uint64((h * group + g) * width)
                    own = _share_two_cpu(q, query, k, np.uint64(key), np.uint64(words), bits) & there
                    flags[h, block, g] = own
                    found |= own
                counts[h, block] = ones(found)

    return sharing


@serial
def _codes(x: Any, drawn: Any, out: Any) -> None:
    # One thread finishes before a second one would have started.
    (n, d), width = x.shape, drawn.shape[1]
    products = np.empty(width, np.float32)
    for row in range(n):
        products[:] = 0
        for i in range(d):
            for j in range(width):
                products[j] += x[row, i] * drawn[i, j]
        for byte in range(width // 8):
            code = np.uint8(0)
            for table in range(8):
                code |= np.uint8(products[8 * byte + table] > 0) << np.uint8(table)
            out[row, byte] = code


@compiled
def _listed(flags: Any, first: int, tokens: Any, own: Any) -> None:
    heads, blocks, group = flags.shape
    for h in prange(heads):
        at = 0
        for block in range(blocks):
            found = np.uint64(0)
            for g in range(group):
                found |= np.uint64(flags[h, block, g])
            while found:
                j = first_one(found)
                tokens[h, at] = first + block * LOT + j
                for g in range(group):
                    own[h, g, at] = np.uint64(flags[h, block, g]) >> np.uint64(j) & np.uint64(1)
                at, found = at + 1, without_first(found)


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
            if i + KEYS_AHEAD < m:
                prefetch(k, h * head + rows[i + KEYS_AHEAD] * token, d)
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
                if cosine != cosine:  # NaN has no place on the curve
                    out[h, g, i] = cosine
                else:
                    out[h, g, i] = min(_read_off(curve, cosine), most)
                if not own[h, g, i]:
                    out[h, g, i] = -np.inf


def hashes_cpu(x: Tensor, drawn: Tensor) -> bool:
    """Return whether `codes_cpu` can hash these vectors, which must be few."""
    return x.numel() <= FEW * x.shape[-1] and serves(x, drawn)


def codes_cpu(x: Tensor, drawn: Tensor) -> Tensor:
    """Hash vectors [.., d] by directions [d, W, K, 8]: [.., W, K]."""
    out = torch.empty(*x.shape[:-1], *drawn.shape[1:3], dtype=torch.uint8)
    run_alone(_codes, x.reshape(-1, x.shape[-1]), drawn.flatten(1), out.view(-1, drawn[0, ..., 0].numel()))
    return out


def colliding_cpu(q: Tensor, k: Tensor, n: int, first: int) -> tuple[Tensor, Tensor]:
    """List the keys, numbered from `first`, that share two codes with a query, and which queries those are."""
    heads, group, words, bits = q.shape
    blocks = k.shape[1]
    flags, counts = torch.empty(heads, blocks, group, dtype=torch.int64), torch.empty(heads, blocks, dtype=torch.int32)
    run(_sharing(bits), k.numel(), flat(q.contiguous()), words, flat(k), k.stride(0), n, flags, counts)
    tokens = torch.full((heads, int(counts.sum(1).max())), EMPTY)
    own = torch.zeros(heads, group, tokens.shape[1], dtype=torch.bool)
    run(_listed, tokens.numel(), flags, first, tokens, own)
    return tokens, own


def log_counts_cpu(
    q: Tensor, k: Tensor, centre: Tensor, own: Tensor, curve: Tensor, most: float, rows: Tensor | None
) -> Tensor:
    """Read log counts off the curve at the cosines of unit queries and keys, at most `most`; -inf where not `own`."""
    out = torch.empty(own.shape)
    at = torch.arange(own.shape[2])[None] if rows is None else rows
    held = flat(k), k.stride(0), k.stride(1)
    run(_log_counts, own.numel() * q.shape[2], q, *held, at, centre, own, curve, np.float32(most), out)
    return out


BLOCK = LOT
"""Keys whose codes are compared at once."""

TABLES = 8  # tables per byte
AT_ONCE = 1 << 24  # bytes that torch compares at once


@lru_cache(maxsize=8)
def directions(head_dim: int, tables: int, bits: int, seed: int, device: torch.device) -> Tensor:
    """Draw random directions [d, W, K, 8] in fp32, the same for all layers, sequences and devices.

    They are laid out like the bits of codes, padded with zeros where the last byte has no table.
    """
    drawn = torch.randn(head_dim, tables * bits, generator=torch.Generator().manual_seed(seed))
    by_table: Tensor = drawn.unflatten(1, (tables, bits))  # type: ignore[no-untyped-call]
    whole: Tensor = F.pad(by_table, (0, 0, 0, -tables % TABLES)).unflatten(1, (-1, TABLES))  # type: ignore[no-untyped-call]
    return whole.mT.contiguous().to(device)


def key_codes(k: Tensor, drawn: Tensor) -> Tensor:
    """Hash keys in each table: [.., W, K]."""
    if hashes_cpu(k, drawn):
        return codes_cpu(k, drawn)
    signs = (k.float() @ drawn.flatten(1) > 0).to(torch.uint8).unflatten(-1, drawn.shape[1:])  # type: ignore[no-untyped-call]
    codes: Tensor = (signs << torch.arange(TABLES, dtype=torch.uint8, device=k.device)).sum(-1, dtype=torch.uint8)
    return codes


def query_codes(q: Tensor, drawn: Tensor, tables: int) -> Tensor:
    """Hash queries; the padding bits of their last byte differ from those of all keys."""
    codes = key_codes(q, drawn)
    codes[..., -1, :] |= 256 - (1 << (tables - 1) % TABLES + 1)
    return codes


def lay(codes: Tensor, blocks: Tensor, first: int) -> None:
    """Write the codes [Hk, n, W, K] of keys, numbered from `first`, to their places in the blocks."""
    last, codes = first + codes.shape[1], codes.to(blocks.device)
    for block in range(first // BLOCK, -(-last // BLOCK)):
        begin = block * BLOCK
        some = slice(max(first, begin), min(last, begin + BLOCK))
        own = codes[:, some.start - first : some.stop - first].movedim(1, -1)
        blocks[:, block, ..., some.start - begin : some.stop - begin] = own


@lru_cache(maxsize=8)
def _curve(bits: int, tables: int) -> Tensor:
    """Return log(1 / u) at cosines from -1 to 1, in equal steps, with one more at the end."""
    cosines = torch.linspace(-1, 1, CURVE + 1, dtype=torch.float64)
    heights = -sampling_chance(cosines, bits, tables).clamp_min(1e-30).log().float()
    return torch.cat((heights, heights[-1:]))


def colliding(q: Tensor, k: Tensor, n: int, first: int = 0) -> tuple[Tensor, Tensor]:
    """List the keys that share a query's codes in at least two tables, per KV head for any of its queries.

    Only the first n keys of the blocks exist. Returns the keys in order, numbered from `first`, [Hk, m] int64, padded
    with EMPTY, and the queries that each belongs to, [Hk, G, m] bool.
    """
    heads, group = q.shape[:2]
    if serves(k, dtype=torch.uint8):
        return colliding_cpu(q, k, n, first)
    parts = torch.split(k, max(1, AT_ONCE // (heads * group * k[0, 0].numel())), 1)
    marks = torch.cat([_share_two(q, part) for part in parts], 2)[..., :n]  # [Hk, G, n]
    marked = marks.any(1)
    most = int(marked.sum(1).max())
    order = marked.int().argsort(dim=1, descending=True, stable=True)[:, :most]
    there = marked.gather(1, order)
    return (first + order).where(there, EMPTY), marks.gather(2, order[:, None].expand(-1, group, -1)) & there[:, None]


def _share_two(q: Tensor, k: Tensor) -> Tensor:
    """Flag which keys, in blocks, share two codes with which queries: [Hk, G, n]."""
    differs = torch.zeros((), dtype=torch.uint8)
    for bit in range(q.shape[-1]):
        differs = differs | (q[:, :, None, :, bit, None] ^ k[:, None, :, :, bit])  # [Hk, G, blocks, W, BLOCK]
    shared = ~differs
    several = shared & (shared - 1)  # 0 where at most one of the eight tables is shared
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
    """Return the logarithm of 1 / u, how many tokens each stands for: q [Hk, G, d], k [Hk, m, d] minus centre [Hk, d].

    `rows` [Hk, m], where given, are the keys of k that are meant. u is at least `least`. Returns [Hk, G, m], -inf where
    `own` [Hk, G, m] is False.
    """
    units = F.normalize(q.float(), dim=-1)
    if serves(k, units, centre, numbers=own.numel() * q.shape[2]):
        return log_counts_cpu(units, k, centre, own, _curve(bits, tables), -math.log(least), rows)
    if rows is not None:
        k = k.take_along_dim(rows[..., None], 1)
    cosine = units @ F.normalize(k.float() - centre[:, None], dim=-1).mT
    chance = sampling_chance(cosine, bits, tables).clamp_min(least)
    return (-chance.log()).float().masked_fill(~own, float("-inf"))


def sampling_chance(cosine: Tensor, bits: int, tables: int) -> Tensor:
    """Return the chance u that a key at this cosine to a query is sampled, in fp64."""
    same = (1 - cosine.double().clamp(-1, 1).arccos() / math.pi) ** bits  # p^K
    # 1 - (1 - x)^(L - 1) (1 + (L - 1) x) without the cancellation of small x = p^K
    return -torch.expm1((tables - 1) * torch.log1p(-same) + torch.log1p((tables - 1) * same))
