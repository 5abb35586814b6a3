"""A few columns of every key in another basis, by which single tokens are scored (InfiniGen, OSDI 2024)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.kernels.token_scores import token_scores
from kvcli.store.cache import Tiers, Traffic, nbytes
from kvcli.store.tokens import TokenBudget

# Tokens whose keys are projected at once: fp32 copies of them stay this long.
PIECE = 4096


class PartialKeyIndex:
    """keys [Hk, capacity, c] = the full keys times `basis` [Hk, d, c], which the method sets before any token comes."""

    def __init__(self, num_kv_heads: int, head_dim: int, columns: int, capacity: int, tiers: Tiers):
        self.basis = tiers.on_device(num_kv_heads, head_dim, columns, dtype=torch.float32)
        self.keys = tiers.on_device(num_kv_heads, capacity, columns)

    def fill(self, first: int, keys: Tensor) -> None:
        """See `TokenIndex.fill`."""
        for start in range(0, keys.shape[1], PIECE):
            piece = keys[:, start : start + PIECE].float() @ self.basis
            self.keys[:, first + start : first + start + piece.shape[1]] = piece

    def scores(self, q: Tensor, tokens: range, scale: float) -> Tensor:
        """Score consecutive tokens with q [H, d] for every query head: [Hk, G, len(tokens)] in fp32."""
        heads = q.float().view(self.keys.shape[0], -1, q.shape[-1]) @ self.basis  # [Hk, G, c]
        return token_scores(heads.flatten(0, 1), self.keys[:, tokens.start : tokens.stop], scale)

    def traffic(self, budget: TokenBudget, length: int) -> Traffic:
        """See `TokenIndex.traffic`."""
        candidates = budget.candidates(length)
        scored = nbytes(self.keys[:, candidates.start : candidates.stop])
        return Traffic(scored=scored, scores=4 * self.keys.shape[0] * len(candidates))

    def nbytes(self) -> int:
        """See `TokenIndex.nbytes`."""
        return nbytes(self.basis, self.keys)
