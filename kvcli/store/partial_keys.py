"""A few columns of every key in a basis of its head, by which tokens are scored (InfiniGen, OSDI 2024)."""

from collections.abc import Mapping

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.token_scores import token_scores
from kvcli.kv.cache import Tiers
from kvcli.kv.tokens import TokenBudget, TokenIndex
from kvcli.memory.state import Settled
from kvcli.memory.tiers import Traffic, nbytes
from kvcli.sizes import slices

# Tokens whose keys are projected at once: fp32 copies of them stay this long.
PIECE = 4096


class PartialKeyIndex(TokenIndex):
    """The paper's partial key cache, on the device: `keys` [Hk, capacity, c], the full keys times `basis` [Hk, d, c].

    The method sets the basis before any token comes.
    """

    def __init__(self, num_kv_heads: int, head_dim: int, columns: int, capacity: int, tiers: Tiers):
        self.basis = tiers.on_device(num_kv_heads, head_dim, columns, dtype=torch.float32)
        self.keys = tiers.on_device(num_kv_heads, capacity, columns)
        self.filled = 0  # tokens

    @override
    def fill(self, first: int, keys: Tensor) -> None:
        self.filled = first + keys.shape[1]
        for part in slices(keys.shape[1], PIECE):
            self.keys[:, first:][:, part] = keys[:, part].float() @ self.basis

    def tensors(self) -> dict[str, Tensor]:
        """What is indexed, by name."""
        return {"basis": self.basis, "keys": self.keys}

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """Hold these in their place."""
        self.basis, self.keys = tensors["basis"], tensors["keys"]

    def scores(self, q: Tensor, tokens: range, scale: float) -> Tensor:
        """Score consecutive tokens with q [H, d] for every query head: [Hk, G, len(tokens)] in fp32."""
        heads = q.float().view(self.keys.shape[0], -1, q.shape[-1]) @ self.basis  # [Hk, G, c]
        return token_scores(heads.flatten(0, 1), self.keys[:, tokens.start : tokens.stop], scale)

    @override
    def traffic(self, budget: TokenBudget, length: int) -> Traffic:
        candidates = budget.candidates(length)
        scored = nbytes(self.keys[:, candidates.start : candidates.stop])
        return Traffic(scored=scored, scores=4 * self.keys.shape[0] * len(candidates))

    def settled(self) -> list[Settled]:
        """Keys stay as they came."""
        return [Settled(self.keys, 1, self.filled)]

    @override
    def nbytes(self) -> int:
        return nbytes(self.basis, self.keys)
