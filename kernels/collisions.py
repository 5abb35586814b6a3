"""Collisions with data-independent centroids, and inner products of four-bit keys (ParisKV, arXiv 2602.07721).

Keys and queries are turned by a random rotation, after which the direction of every block of m = 8 channels is spread
evenly over the sphere whatever the data. So the 2^m sign patterns serve as its centroids, and the magnitudes of its
channels have a known density, to which three bits are fitted once and for all. For a block with radius r, signs s and
magnitude levels a of its direction u, and a key of length n:

    q . k ~ sum_b n (r_b / alpha_b) sum_j s_bj a_bj q_bj      alpha_b = sum_j a_bj |u_bj|

Shapes: x [.., d] -> rotated [.., w], w the power of two from d on; of a token B = w / m bytes of signs, w / 2 bytes of
four-bit codes, and B weights n r / alpha.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcli.kernels import collision_rows
from kvcli.kernels._numba import serves
from kvcli.kernels.topk import topk_pages

BLOCK = 8
LEVELS = 8
FEW = 64
"""Keys that one thread encodes as fast as torch's functions begin."""

TIERS = ((0.05, 6), (0.15, 5), (0.3, 4), (0.5, 3), (0.75, 2), (1.0, 1))
"""Up to which part of the keys that may collide a centroid's rank counts, and how much."""


@lru_cache(maxsize=8)
def rotation(d: int, seed: int, device: torch.device) -> Tensor:
    """A Hadamard transform of randomly signed channels, [d, w]: orthonormal rows, the same ones everywhere."""
    width = max(BLOCK, 1 << (d - 1).bit_length())
    hadamard = torch.ones(1, 1)
    while len(hadamard) < width:
        hadamard = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), hadamard)
    signs = torch.randint(0, 2, (width, 1), generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return (signs * hadamard)[:d].to(device) / math.sqrt(width)


@lru_cache(maxsize=1)
def magnitude_levels() -> tuple[Tensor, Tensor]:
    """The Lloyd-Max levels [8] of a channel's magnitude in a block's direction, and the thresholds [7] between them.

    On the sphere in m dimensions the magnitude x of a coordinate has the density (1 - x^2)^((m - 3) / 2).
    """
    x = (torch.arange(1 << 14, dtype=torch.float64) + 0.5) / (1 << 14)
    density = (1 - x * x) ** ((BLOCK - 3) / 2)
    levels = (torch.arange(LEVELS, dtype=torch.float64) + 0.5) / LEVELS
    for _ in range(500):
        nearest = torch.bucketize(x, (levels[1:] + levels[:-1]) / 2)
        mass = torch.zeros_like(levels).index_add(0, nearest, density)
        levels = torch.zeros_like(levels).index_add(0, nearest, density * x) / mass
    return levels.float(), ((levels[1:] + levels[:-1]) / 2).float()


@lru_cache(maxsize=1)
def signed_levels() -> Tensor:
    """What the four bits of a code stand for: [16]."""
    levels = magnitude_levels()[0]
    return torch.cat((-levels, levels))


def turned_query(q: Tensor, turn: Tensor, among: int = 0) -> Tensor:
    """Turn the mean query of each group, asked for so many keys: q [Hk, G, d], rotation [d, w] -> [Hk, w]."""
    if serves(q, turn, numbers=among * q.shape[-1]):
        return collision_rows.turned(q, turn)
    return q.float().mean(1) @ turn


def encode_keys(keys: Tensor, turn: Tensor, among: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Encode keys [.., d]: signs [.., B] and four-bit codes [.., w / 2], both uint8, and weights [.., B] in fp32.

    `among`: how many keys there are altogether, if there are more to come.

    A sign byte has bit j set where channel j of its block is not negative. A code is the level, and 8 more where the
    channel is not negative; two channels share a byte, the even one its lower half.
    """
    levels, thresholds = (each.to(keys.device) for each in magnitude_levels())
    few = keys.dim() == 3 and keys.shape[0] * keys.shape[1] <= FEW
    if few and serves(keys, turn, numbers=among * keys.shape[-1]):
        return collision_rows.encode(keys, turn, levels, thresholds)
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

    `among`: how many keys there are altogether, if these are a part of them.
    """
    if collision_rows.suits(signs, numbers=among * signs.shape[2]):
        return collision_rows.population(signs, counts)
    own = signs.mT.long()  # [Hk, B, n]
    return counts.scatter_add_(2, own, torch.ones_like(own))


def collisions(q: Tensor, signs: Tensor, part: float, counts: Tensor | None = None) -> Tensor:
    """Count how well every key collides with a rotated query q [Hk, w]: signs [Hk, n, B] -> [Hk, n].

    In each block centroids are ranked by their product with the query, and keys by their centroids. The first ones, the
    `part` of all, collide; by its rank each counts as much as its tier (`TIERS`), and blocks are added up, in int32 or,
    where a loop does it and a byte has room, in uint8.
    `counts` are the population of the signs, where it is known.
    """
    n = signs.shape[1]
    if counts is None:
        counts = population(signs, torch.zeros(*signs.shape[::2], 1 << BLOCK, dtype=torch.int64, device=signs.device))
    ends = [math.ceil(n * part * reach) for reach, _ in TIERS]
    if collision_rows.suits(signs):
        return collision_rows.votes(signs, collision_rows.worth(q, counts, ends), highest_votes(signs.shape[2]))
    products = q.unflatten(-1, (-1, BLOCK)) @ sign_patterns(q.device).T  # type: ignore[no-untyped-call]  # [Hk, B, 2^m]
    order = products.argsort(dim=-1, descending=True, stable=True)
    ranked = counts.gather(2, order)
    before = ranked.cumsum(2) - ranked
    tiers = sum((before < end).int() for end in ends)  # 6 in the first tier
    worth = torch.zeros_like(order, dtype=torch.int32).scatter(2, order, tiers)
    return worth.gather(2, signs.mT.long()).sum(1, dtype=torch.int32)


@lru_cache(maxsize=8)
def sign_patterns(device: torch.device) -> Tensor:
    """The centroids of a block: the signs that every byte stands for, [2^m, m]."""
    patterns = torch.arange(1 << BLOCK, device=device)
    return (patterns[:, None] >> torch.arange(BLOCK, device=device) & 1) * 2.0 - 1


def highest_votes(blocks: int) -> int:
    """How many votes a key can have that is of the first tier in every block."""
    return blocks * TIERS[0][1]


def most_votes(votes: Tensor, count: int, blocks: int) -> Tensor:
    """Choose the `count` keys with the most votes of `blocks`, as `collisions` counts them: [Hk, count].

    Ties go to the lower key.
    """
    if serves(votes, dtype=votes.dtype):
        return collision_rows.most(votes, count, highest_votes(blocks))
    return topk_pages(votes.float(), count)


def estimated_products(q: Tensor, codes: Tensor, weights: Tensor, tokens: Tensor) -> Tensor:
    """Estimate q . k of `tokens` [Hk, c] for rotated q [Hk, w]: codes [Hk, n, w / 2], weights [Hk, n, B] -> [Hk, c]."""
    table = signed_levels().to(q.device)
    if collision_rows.multiplies(codes, weights):
        return collision_rows.products(table, q, codes, weights, tokens)
    codes, weights = (each.gather(1, tokens[..., None].expand(-1, -1, each.shape[2])) for each in (codes, weights))
    both = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)  # [Hk, c, w]
    blocks = (table[both.long()] * q[:, None]).unflatten(-1, (-1, BLOCK)).sum(-1)  # type: ignore[no-untyped-call]
    return (blocks * weights).sum(-1)  # type: ignore[no-any-return]
