"""Kernels of ParisKV: collisions with data-independent centroids, and products of four-bit keys (arXiv 2602.07721).

Keys and queries are rotated at random, after which the direction of every block of m = 8 channels is spread evenly over
the sphere whatever the data. So the 2^m sign patterns serve as its centroids, and the magnitudes of its channels have a
known density, to which three bits are fitted once and for all. For a block with radius r, signs s and magnitude levels
a of its direction u, and a key of length n:

    q . k ~ sum_b n (r_b / alpha_b) sum_j s_bj a_bj q_bj      alpha_b = sum_j a_bj |u_bj|

Shapes: x [.., d] -> rotated [.., w], w the power of two from d on. A token has B = w / m bytes of signs, w / 2 bytes of
four-bit codes, and B weights n r / alpha.

Forms for a CPU:

    population_cpu    signs [Hk, n, B] uint8, added to counts [Hk, B, 256] int64
    turned_cpu        queries [Hk, G, d] fp32, rotation [d, w] -> their mean, rotated [Hk, w]
    worth_cpu         a rotated query [Hk, w], the centroids' population, tiers' ends [t] -> [Hk, B, 256] uint8
    votes_cpu         signs, worth -> [Hk, n], uint8 or, where they may be many, int32
    most_votes_cpu    votes, none negative -> [Hk, k] int64, the most votes, ties to the lower key, ascending
    encode_cpu        keys [Hk, n, d] fp32, rotation [d, w], levels [8], thresholds [7] -> signs, codes, weights
    products_cpu      a rotated query [Hk, w], codes [Hk, n, C] uint8, weights [Hk, n, B], tokens [Hk, c] -> [Hk, c]

A processor with AVX-512 looks up patterns and levels in its registers (`kvcli.kernels._llvm`). For others a byte of
codes, which holds two channels, has its part of a product in a table [Hk, C, 256] made for the query. Where a key's
codes and weights share a row, one memory access serves both.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kvcli.kernels._llvm import LEVELS, LOT, PATTERNS, add_looked_up, multiply_levels, permutes, prefetch
from kvcli.kernels._numba import compiled, flat, in_order, inlined, prange, run, run_alone, serial, serves
from kvcli.kernels.topk import kth_best, places_of, topk_pages

PIECE = 1024  # keys per thread at once
CHOSEN = 256  # chosen keys per thread at once
CODES_AHEAD = 48  # keys whose codes are prefetched: they are short
LOTS_AHEAD = 16  # lots of keys whose signs are prefetched
BYTES = 4  # of codes in a block


@compiled
def _population(signs: Any, head: int, n: int, out: Any) -> None:
    heads, blocks, _ = out.shape
    for h in prange(heads):
        for j in range(n):
            own = signs[h * head + j * blocks :][:blocks]
            for b in range(blocks):
                out[h, b, own[b]] += 1


@compiled
def _turn(q: Any, turn: Any, out: Any) -> None:
    (heads, group, d), width = q.shape, turn.shape[1]
    for h in prange(heads):
        out[h] = 0
        for j in range(d):
            mean = np.float32(0)
            for g in range(group):
                mean += q[h, g, j]
            mean /= np.float32(group)
            for c in range(width):
                out[h, c] += mean * turn[j, c]


@compiled
def _worth(q: Any, counts: Any, ends: Any, products_cpu: Any, out: Any) -> None:
    heads, blocks, patterns = out.shape
    for row in prange(heads * blocks):
        h, b = row // blocks, row % blocks
        scores, block, least = products_cpu[row], q[h, 8 * b : 8 * b + 8], np.float32(0)
        for c in range(8):
            least -= block[c]  # of the pattern without any bit
        scores[0] = least
        for c in range(8):  # setting bit c as the top bit adds twice this channel
            for i in range(1 << c):
                scores[(1 << c) + i] = scores[i] + np.float32(2) * block[c]
        bits = scores.view(np.int32)
        ranked, other = np.empty(patterns, np.uint64), np.empty(patterns, np.uint64)  # sort key, then pattern
        begins = np.zeros((4, 1 + 256), np.int32)
        for i in range(patterns):  # keys fall as products rise, so that the best come first
            x = np.uint32(bits[i])
            x = np.uint32(0) if x == np.uint32(0x80000000) else x  # minus zero equals zero
            key = np.uint32(x if x >> np.uint32(31) else ~(x | np.uint32(0x80000000)))
            ranked[i] = np.uint64(key) << np.uint64(8) | np.uint64(i)
        for digit in range(4):
            for i in range(patterns):
                begins[digit, np.uint64(1) + ((ranked[i] >> np.uint64(8 + 8 * digit)) & np.uint64(255))] += 1
        for digit in range(4):  # a stable radix sort
            begin, shift = begins[digit], np.uint64(8 + 8 * digit)
            for value in range(256):
                begin[value + 1] += begin[value]
            for i in range(patterns):
                value = (ranked[i] >> shift) & np.uint64(255)
                other[np.uint64(begin[value])] = ranked[i]
                begin[value] += 1
            ranked, other = other, ranked
        before, tiers = 0, len(ends)
        for i in range(patterns):
            pattern = ranked[i] & np.uint64(255)
            while tiers and before >= ends[len(ends) - tiers]:
                tiers -= 1
            out[h, b, pattern] = tiers
            before += counts[h, b, pattern]


@inlined
def _look_up(table: Any, row: int, byte: int) -> Any:
    # Unsigned, because a check for negative indices costs time.
    return table[np.uint64(256) * np.uint64(row) + np.uint64(byte)]


@cache
def _voting(blocks: int, wide: bool) -> Any:
    """Make the loop over keys of so many blocks; a `wide` one, for a power of two blocks, takes a LOT at once."""

    @in_order
    def votes_cpu(signs: Any, head: int, n: int, worth_cpu: Any, out: Any, out_head: int) -> None:
        heads, pieces = len(worth_cpu) // (blocks * PATTERNS), (n + PIECE - 1) // PIECE
        for piece in prange(heads * pieces):
            h, j = piece // pieces, piece % pieces * PIECE
            last, row = min(j + PIECE, n), h * blocks
            if wide:
                while j + LOT <= last:
                    own, place = np.uint64(h * head + j * blocks), np.uint64(h * out_head + j)
                    prefetch(signs, h * head + (j + LOTS_AHEAD * LOT) * blocks, LOT * blocks)
                    add_looked_up(signs, own, worth_cpu, np.uint64(PATTERNS * row), out, place, blocks)
                    j += LOT
            for i in range(j, last):
                own, total = np.uint64(h * head + i * blocks), np.uint32(0)
                for b in range(blocks):
                    total += np.uint32(_look_up(worth_cpu, row + b, signs[own + np.uint64(b)]))
                out[np.uint64(h * out_head + i)] = total

    return votes_cpu


@compiled
def _most(votes_cpu: Any, head: int, n: int, bits: int, out: Any) -> None:
    for h in prange(len(out)):
        own = votes_cpu[h * head : h * head + n]
        least, wanted = kth_best(own, bits, out.shape[1])
        places_of(own, least, wanted, out[h])


@serial
def _encode(keys: Any, turn: Any, levels: Any, thresholds: Any, signs: Any, codes: Any, weights: Any) -> None:
    (heads, n, d), width = keys.shape, turn.shape[1]
    turned_cpu = np.empty(width, np.float32)
    for h in range(heads):
        for i in range(n):
            turned_cpu[:] = 0
            for j in range(d):
                for c in range(width):
                    turned_cpu[c] += keys[h, i, j] * turn[j, c]
            codes[h, i] = 0
            for b in range(width // 8):
                block, square, pattern = turned_cpu[8 * b : 8 * b + 8], np.float32(0), 0
                for c in range(8):
                    square += block[c] * block[c]
                radius, alpha = np.sqrt(square), np.float32(0)
                for c in range(8):
                    magnitude, level = abs(block[c]) / max(radius, np.float32(1e-12)), 0
                    for threshold in thresholds:
                        level += magnitude > threshold
                    alpha += levels[level] * magnitude
                    if block[c] >= 0:
                        pattern |= 1 << c
                        level += 8
                    codes[h, i, 4 * b + c // 2] |= level << (4 * (c % 2))
                signs[h, i, b], weights[h, i, b] = pattern, radius / max(alpha, np.float32(1e-6))


@cache
def _multiplication(blocks: int, code_apart: int, weight_apart: int, wide: bool) -> Any:
    """Make the loop over keys of `blocks` blocks, whose codes and weights have these strides from key to key.

    A `wide` one takes LEVELS bytes of codes at once; it needs a multiple of four blocks.
    """
    size = BYTES * blocks

    @in_order
    def products_cpu(levels: Any, q: Any, held: Any, tokens: Any, out: Any) -> None:
        (codes, code_head, weights, weight_head), (heads, n) = held, tokens.shape
        if wide:
            halves = np.empty(heads * 2 * size, np.float32)
            for h in prange(heads):
                for c in range(size):
                    lower = h * 2 * size + c // LEVELS * 2 * LEVELS + c % LEVELS
                    halves[lower], halves[lower + LEVELS] = q[h, 2 * c], q[h, 2 * c + 1]
        else:
            table = np.empty(heads * size * 256, np.float32)
            for h in prange(heads):
                for c in range(size):
                    for byte in range(256):
                        low, high = levels[byte & 15] * q[h, 2 * c], levels[byte >> 4] * q[h, 2 * c + 1]
                        table[(h * size + c) * 256 + byte] = low + high
        pieces = (n + CHOSEN - 1) // CHOSEN
        for piece in prange(heads * pieces):
            h, first = piece // pieces, piece % pieces * CHOSEN
            for i in range(first, min(first + CHOSEN, n)):
                token, later = tokens[h, i], tokens[h, min(i + CODES_AHEAD, n - 1)]
                prefetch(codes, h * code_head + later * code_apart, size)
                prefetch(weights, h * weight_head + later * weight_apart, blocks)
                code = np.uint64(h * code_head + token * code_apart)
                weight = np.uint64(h * weight_head + token * weight_apart)
                if wide:
                    query, zero = np.uint64(h * 2 * size), np.uint64(0)
                    out[h, i] = multiply_levels(codes, code, weights, weight, levels, zero, halves, query, blocks)
                else:
                    total = np.float32(0)
                    for b in range(blocks):
                        at, own = h * size + BYTES * b, code + np.uint64(BYTES * b)
                        low = _look_up(table, at, codes[own]) + _look_up(table, at + 1, codes[own + np.uint64(1)])
                        high = _look_up(table, at + 2, codes[own + np.uint64(2)])
                        high += _look_up(table, at + 3, codes[own + np.uint64(3)])
                        total += weights[weight + np.uint64(b)] * (low + high)
                    out[h, i] = total

    return products_cpu


def collision_loops_suit(signs: Tensor, numbers: int = 0) -> bool:
    """Return whether CPU loops can count these signs, `numbers` in all: tokens must be contiguous."""
    return signs.stride(1) == signs.shape[2] and serves(signs, dtype=torch.uint8, numbers=numbers)


def products_suit_cpu(codes: Tensor, weights: Tensor) -> bool:
    """Return whether CPU loops can multiply by these codes and weights."""
    return serves(codes, dtype=torch.uint8) and serves(weights)


def population_cpu(signs: Tensor, counts: Tensor) -> Tensor:
    """Add to the counts how often each pattern occurs in a block."""
    heads, n, blocks = signs.shape
    run(_population, heads * n * blocks, flat(signs), signs.stride(0), n, counts)
    return counts


def turned_cpu(q: Tensor, turn: Tensor) -> Tensor:
    """Rotate the mean query of each group: [Hk, w]."""
    out = q.new_empty(q.shape[0], turn.shape[1])
    run(_turn, q.shape[0] * turn.numel(), q.contiguous(), turn, out)
    return out


def worth_cpu(q: Tensor, counts: Tensor, ends: list[int]) -> Tensor:
    """Rank the centroids of each block: count the tiers' `ends`, ascending, that exceed the keys ranked before."""
    out = torch.empty(counts.shape, dtype=torch.uint8)
    products_cpu = q.new_empty(out.shape[0] * out.shape[1], out.shape[2])
    run(_worth, 8 * out.numel(), q.contiguous(), counts, np.array(ends), products_cpu, out)
    return out


def votes_cpu(signs: Tensor, worth_cpu: Tensor, highest: int) -> Tensor:
    """Sum over the blocks of a key what its patterns are worth: `highest` at most, in bytes where that fits."""
    heads, n, blocks = signs.shape
    small = highest < PATTERNS
    out = torch.empty(heads, -(-n // LOT) * LOT, dtype=torch.uint8 if small else torch.int32)[:, :n]  # whole lines
    loop = _voting(blocks, permutes() and small and blocks & (blocks - 1) == 0)
    run(loop, signs.numel(), flat(signs), signs.stride(0), n, flat(worth_cpu), flat(out), out.stride(0))
    return out


def most_votes_cpu(votes_cpu: Tensor, count: int, highest: int) -> Tensor:
    """Choose the keys with the most votes: whole numbers up to `highest`, which is small."""
    out = torch.empty(len(votes_cpu), count, dtype=torch.int64)
    bits = highest.bit_length()
    run(_most, votes_cpu.numel(), flat(votes_cpu), votes_cpu.stride(0), votes_cpu.shape[1], bits, out)
    return out


def encode_cpu(keys: Tensor, turn: Tensor, levels: Tensor, thresholds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Encode some keys: signs [Hk, n, B] and codes [Hk, n, w / 2], both uint8, and weights [Hk, n, B]."""
    width, lead = turn.shape[1], keys.shape[:2]
    signs, codes = (torch.empty(*lead, width // each, dtype=torch.uint8) for each in (8, 2))
    weights = keys.new_empty(*lead, width // 8)
    run_alone(_encode, keys.contiguous(), turn, levels, thresholds, signs, codes, weights)
    return signs, codes, weights


def products_cpu(levels: Tensor, q: Tensor, codes: Tensor, weights: Tensor, tokens: Tensor) -> Tensor:
    """Estimate q . k of the tokens from four-bit codes, whose `levels` [16] are known, block by block."""
    out, blocks = torch.empty(tokens.shape), weights.shape[2]
    loop = _multiplication(blocks, codes.stride(1), weights.stride(1), permutes() and blocks % 4 == 0)
    held = flat(codes), codes.stride(0), flat(weights), weights.stride(0)
    run(loop, tokens.numel() * codes.shape[2], levels, q.contiguous(), held, tokens, out)
    return out


BLOCK = 8
MAGNITUDES = 8
FEW = 64
"""Keys that one thread encodes faster than torch's functions start."""

TIERS = ((0.05, 6), (0.15, 5), (0.3, 4), (0.5, 3), (0.75, 2), (1.0, 1))
"""The share of colliding keys up to which a centroid's rank counts, and its votes."""


@lru_cache(maxsize=8)
def rotation(d: int, seed: int, device: torch.device) -> Tensor:
    """Return a Hadamard transform of randomly signed channels, [d, w]: orthonormal rows, reproducible by `seed`."""
    width = max(BLOCK, 1 << (d - 1).bit_length())
    hadamard = torch.ones(1, 1)
    while len(hadamard) < width:
        hadamard = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), hadamard)
    signs = torch.randint(0, 2, (width, 1), generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return (signs * hadamard)[:d].to(device) / math.sqrt(width)


@lru_cache(maxsize=1)
def magnitude_levels() -> tuple[Tensor, Tensor]:
    """Return the Lloyd-Max levels [8] of a channel's magnitude in a block's direction, and thresholds [7] between them.

    On the sphere in m dimensions the magnitude x of a coordinate has the density (1 - x^2)^((m - 3) / 2).
    """
    x = (torch.arange(1 << 14, dtype=torch.float64) + 0.5) / (1 << 14)
    density = (1 - x * x) ** ((BLOCK - 3) / 2)
    levels = (torch.arange(MAGNITUDES, dtype=torch.float64) + 0.5) / MAGNITUDES
    for _ in range(500):
        nearest = torch.bucketize(x, (levels[1:] + levels[:-1]) / 2)
        mass = torch.zeros_like(levels).index_add(0, nearest, density)
        levels = torch.zeros_like(levels).index_add(0, nearest, density * x) / mass
    return levels.float(), ((levels[1:] + levels[:-1]) / 2).float()


@lru_cache(maxsize=1)
def signed_levels() -> Tensor:
    """Return the values of the 16 four-bit codes."""
    levels = magnitude_levels()[0]
    return torch.cat((-levels, levels))


def turned_query(q: Tensor, turn: Tensor, among: int = 0) -> Tensor:
    """Rotate the mean query of each group, to score `among` keys: q [Hk, G, d], rotation [d, w] -> [Hk, w]."""
    if serves(q, turn, numbers=among * q.shape[-1]):
        return turned_cpu(q, turn)
    return q.float().mean(1) @ turn


def encode_keys(keys: Tensor, turn: Tensor, among: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Encode keys [.., d]: signs [.., B] and four-bit codes [.., w / 2], both uint8, and weights [.., B] in fp32.

    `among`: how many keys there are in total, if these are only some of them.

    A sign byte has bit j set where channel j of its block is not negative. A code is the level, plus 8 where the
    channel is not negative; two channels share a byte, the even one in its lower half.
    """
    levels, thresholds = (each.to(keys.device) for each in magnitude_levels())
    few = keys.dim() == 3 and keys.shape[0] * keys.shape[1] <= FEW
    if few and serves(keys, turn, numbers=among * keys.shape[-1]):
        return encode_cpu(keys, turn, levels, thresholds)
    blocks = (keys.float() @ turn).unflatten(-1, (-1, BLOCK))  # type: ignore[no-untyped-call]  # [.., B, m]
    positive, radius = blocks >= 0, blocks.norm(dim=-1)
    magnitudes = F.normalize(blocks, dim=-1).abs()
    level = torch.bucketize(magnitudes, thresholds)
    alpha = (levels[level] * magnitudes).sum(-1).clamp_min(1e-6)
    signs = (positive.to(torch.uint8) << torch.arange(BLOCK, dtype=torch.uint8, device=keys.device)).sum(
        -1, dtype=torch.uint8
    )
    codes = (level.to(torch.uint8) | positive.to(torch.uint8) << 3).flatten(-2)
    return signs, codes[..., ::2] | codes[..., 1::2] << 4, radius / alpha


def population(signs: Tensor, counts: Tensor, among: int = 0) -> Tensor:
    """Add to counts [Hk, B, 256], int64, how many keys have each sign pattern in a block: signs [Hk, n, B].

    `among`: how many keys there are in total, if these are only some of them.
    """
    if collision_loops_suit(signs, numbers=among * signs.shape[2]):
        return population_cpu(signs, counts)
    own = signs.mT.long()  # [Hk, B, n]
    return counts.scatter_add_(2, own, torch.ones_like(own))


def collisions(q: Tensor, signs: Tensor, part: float, counts: Tensor | None = None) -> Tensor:
    """Count how well every key collides with a rotated query q [Hk, w]: signs [Hk, n, B] -> [Hk, n].

    In each block, centroids are ranked by their product with the query, and keys by their centroids. The first `part`
    of all keys collide; each counts by the tier of its rank (`TIERS`). Blocks are summed, in int32 or, if a CPU loop
    runs and the sums fit, in uint8. `counts` is the population of the signs, if known.
    """
    n = signs.shape[1]
    if counts is None:
        counts = population(signs, torch.zeros(*signs.shape[::2], 1 << BLOCK, dtype=torch.int64, device=signs.device))
    ends = [math.ceil(n * part * reach) for reach, _ in TIERS]
    if collision_loops_suit(signs):
        return votes_cpu(signs, worth_cpu(q, counts, ends), highest_votes(signs.shape[2]))
    products = q.unflatten(-1, (-1, BLOCK)) @ sign_patterns(q.device).T  # type: ignore[no-untyped-call]  # [Hk, B, 2^m]
    order = products.argsort(dim=-1, descending=True, stable=True)
    ranked = counts.gather(2, order)
    before = ranked.cumsum(2) - ranked
    tiers = sum((before < end).int() for end in ends)  # 6 in the first tier
    worth = torch.zeros_like(order, dtype=torch.int32).scatter(2, order, tiers)
    return worth.gather(2, signs.mT.long()).sum(1, dtype=torch.int32)


@lru_cache(maxsize=8)
def sign_patterns(device: torch.device) -> Tensor:
    """Return the centroids of a block: the signs that every byte stands for, [2^m, m]."""
    patterns = torch.arange(1 << BLOCK, device=device)
    return (patterns[:, None] >> torch.arange(BLOCK, device=device) & 1) * 2.0 - 1


def highest_votes(blocks: int) -> int:
    """Return the votes of a key that is in the first tier in every block."""
    return blocks * TIERS[0][1]


def most_votes(votes: Tensor, count: int, blocks: int) -> Tensor:
    """Choose the `count` keys with the most votes of `blocks`, as `collisions` counts them: [Hk, count].

    Ties go to the lower key.
    """
    if serves(votes, dtype=votes.dtype):
        return most_votes_cpu(votes, count, highest_votes(blocks))
    return topk_pages(votes.float(), count)


def estimated_products(q: Tensor, codes: Tensor, weights: Tensor, tokens: Tensor) -> Tensor:
    """Estimate q . k of `tokens` [Hk, c] for rotated q [Hk, w]: codes [Hk, n, w / 2], weights [Hk, n, B] -> [Hk, c]."""
    table = signed_levels().to(q.device)
    if products_suit_cpu(codes, weights):
        return products_cpu(table, q, codes, weights, tokens)
    codes, weights = (each.gather(1, tokens[..., None].expand(-1, -1, each.shape[2])) for each in (codes, weights))
    both = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)  # [Hk, c, w]
    blocks = (table[both.long()] * q[:, None]).unflatten(-1, (-1, BLOCK)).sum(-1)  # type: ignore[no-untyped-call]
    return (blocks * weights).sum(-1)  # type: ignore[no-any-return]
