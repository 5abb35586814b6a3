"""The index of ParisKV: keys in signs and four bits, searched in two stages (arXiv 2602.07721)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.topk import topk_named
from kvcli.kv.cache import Tiers
from kvcli.kv.tokens import TokenBudget, TokenIndex
from kvcli.memory.state import Settled
from kvcli.memory.tiers import Traffic, nbytes
from kvcli.methods.pariskv.kernels import (
    BLOCK,
    collisions,
    encode_keys,
    estimated_products,
    most_votes,
    population,
    rotation,
    turned_query,
)
from kvcli.sizes import slices

# Tokens whose keys are encoded at once; bounds the fp32 copies.
PIECE = 4096

PARTS = ((5_000, 0.5, 0.5), (10_000, 0.25, 0.3), (30_000, 0.2, 0.25), (math.inf, 0.1, 0.2))
"""Up to how many tokens which part of them is reranked, and which part collides in a block."""


class CollisionIndex(TokenIndex):
    """Codes of all keys on the device: `signs` [Hk, capacity, B] and `rows` [Hk, capacity, ..], both uint8.

    A row holds a key's `codes` [w / 2] uint8 and its `weights` [B], so that one memory access finds both. `counts` [Hk,
    B, 256] are the sign patterns of the tokens `counted`, from the first to before the second.
    """

    not_state: ClassVar[tuple[str, ...]] = ("counts", "counted")

    def __init__(
        self, num_kv_heads: int, head_dim: int, capacity: int, seed: int, parts: tuple[float, float], tiers: Tiers
    ):
        """Allocate; `parts` of the tokens are reranked, and collide in a block, where they are not 0 (see `PARTS`)."""
        self.seed, self.parts, self.filled = seed, parts, 0
        width = max(BLOCK, 1 << (head_dim - 1).bit_length())
        blocks = width // BLOCK
        self.dtype, self.code_bytes = tiers.dtype, width // 2
        self.signs = tiers.on_device(num_kv_heads, capacity, blocks, dtype=torch.uint8)
        row = self.code_bytes + blocks * tiers.dtype.itemsize
        self.rows = tiers.on_device(num_kv_heads, capacity, row, dtype=torch.uint8)
        self.counts = tiers.on_device(num_kv_heads, blocks, 1 << BLOCK, dtype=torch.int64)
        self.counted = 0, 0

    @property
    def codes(self) -> Tensor:
        """Signs and levels in four bits per channel: [Hk, capacity, w / 2]."""
        return self.rows[..., : self.code_bytes]

    @property
    def weights(self) -> Tensor:
        """Weights of the blocks of a key: [Hk, capacity, B]."""
        return self.rows[..., self.code_bytes :].view(self.dtype)

    @override
    def fill(self, first: int, keys: Tensor) -> None:
        turn = rotation(keys.shape[-1], self.seed, keys.device)
        self.counted = self.counted if self.counted[1] <= first else (0, 0)
        for part in slices(keys.shape[1], PIECE):
            self.filled = first + part.stop
            new = slice(first + part.start, self.filled)
            self.signs[:, new], self.codes[:, new], self.weights[:, new] = encode_keys(keys[:, part], turn, self.filled)

    def tensors(self) -> dict[str, Tensor]:
        """Return the indexed tensors by name."""
        return {"signs": self.signs, "rows": self.rows}

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """Hold these tensors instead of the present ones."""
        self.signs, self.rows = tensors["signs"], tensors["rows"]
        self.counted = 0, 0

    def best(self, q: Tensor, tokens: range, count: int) -> Tensor:
        """Find the best `count` of consecutive tokens for q [H, d], whose mean stands for a group: [Hk, count]."""
        heads = q.view(self.signs.shape[0], -1, q.shape[-1])
        query = turned_query(heads, rotation(q.shape[-1], self.seed, q.device), len(tokens))  # [Hk, w]
        reranked, colliding = self.parts_of(len(tokens))
        part = slice(tokens.start, tokens.stop)
        votes = collisions(query, self.signs[:, part], colliding, self._population(tokens))
        most = max(count, math.ceil(len(tokens) * reranked))
        found = most_votes(votes, most, self.signs.shape[2])  # [Hk, c]
        products = estimated_products(query, self.codes[:, part], self.weights[:, part], found)
        return topk_named(products, count, found, tokens.start)

    def parts_of(self, tokens: int) -> tuple[float, float]:
        """Return the part of `tokens` tokens that is reranked, and the part that collides in a block."""
        reranked, colliding = next(parts for below, *parts in PARTS if tokens < below)
        return self.parts[0] or reranked, self.parts[1] or colliding

    def _population(self, tokens: range) -> Tensor:
        """Count the sign patterns of the tokens, starting from the counts of the last step where possible."""
        first, stop = self.counted
        if first != tokens.start or not first <= stop <= tokens.stop:
            first, stop = tokens.start, tokens.start
        if stop == first:
            self.counts.zero_()
        self.counted = first, tokens.stop
        return population(self.signs[:, stop : tokens.stop], self.counts, tokens.stop)

    @override
    def traffic(self, budget: TokenBudget, length: int) -> Traffic:
        tokens = budget.candidates(length)
        reranked = math.ceil(len(tokens) * self.parts_of(len(tokens))[0])
        signs = nbytes(self.signs[:, tokens.start : tokens.stop])
        return Traffic(
            scored=signs + nbytes(self.rows[:, :reranked]),
            scores=4 * len(self.signs) * (len(tokens) + reranked),
        )

    def settled(self) -> list[Settled]:
        """Return the codes, which do not change."""
        return [Settled(each, 1, self.filled) for each in self.tensors().values()]

    @override
    def nbytes(self) -> int:
        return nbytes(*self.tensors().values(), self.counts)
