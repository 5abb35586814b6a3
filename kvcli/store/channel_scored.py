"""Layers on the device whose tokens are scored by the keys themselves, as they are or in their principal axes."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.kernels.token_scores import token_scores
from kvcli.store.cache import Footprint, Tiers, Traffic, nbytes
from kvcli.store.tokens import ResidentTokenCache, TokenBudget

# Tokens whose keys are turned at once: fp32 copies of them stay this long.
PIECE = 4096


class KeyChannelIndex:
    """Nothing beside the keys [Hk, capacity, d] that a cache holds: tokens are scored by their first `channels`."""

    keys: Tensor

    def __init__(self, channels: int):
        self.channels = channels

    def fill(self, first: int, keys: Tensor) -> None:
        """See `TokenIndex.fill`: the cache has them already."""

    def scores(self, q: Tensor, tokens: range, scale: float) -> Tensor:
        """Score consecutive tokens with q [H, d] for every query head: [Hk, G, len(tokens)] in fp32."""
        return token_scores(q, self._of(tokens), scale)

    def traffic(self, budget: TokenBudget, length: int) -> Traffic:
        """See `TokenIndex.traffic`."""
        candidates = budget.candidates(length)
        return Traffic(scored=nbytes(self._of(candidates)), scores=4 * self.keys.shape[0] * len(candidates))

    def nbytes(self) -> int:
        """See `TokenIndex.nbytes`: the keys count as the cache's."""
        return 0

    def _of(self, tokens: range) -> Tensor:
        return self.keys[:, tokens.start : tokens.stop, : self.channels]


class ChannelScoredCache(ResidentTokenCache[KeyChannelIndex]):
    """Everything on the device, scored by the first `channels` channels of the keys."""

    def __init__(
        self, num_kv_heads: int, head_dim: int, capacity: int, budget: TokenBudget, channels: int, tiers: Tiers
    ):
        super().__init__(num_kv_heads, head_dim, capacity, budget, KeyChannelIndex(channels), tiers)
        self.index.keys = self.k


class PrincipalAxesCache(ChannelScoredCache):
    """The same with keys turned to `axes` [Hk, d, d], which the method sets before any token comes.

    The axes are orthonormal: scores and attention are what they were, if the query is turned likewise.
    """

    def __init__(
        self, num_kv_heads: int, head_dim: int, capacity: int, budget: TokenBudget, channels: int, tiers: Tiers
    ):
        super().__init__(num_kv_heads, head_dim, capacity, budget, channels, tiers)
        self.axes = tiers.on_device(num_kv_heads, head_dim, head_dim, dtype=torch.float32)

    def load(self, k: Tensor, v: Tensor) -> int:
        """See `LayerCache.load`."""
        written = super().load(k, v)
        for start in range(0, k.shape[1], PIECE):
            part = slice(start, min(start + PIECE, k.shape[1]))
            self.k[:, part] = k[:, part].float() @ self.axes
        return written

    def append(self, k: Tensor, v: Tensor) -> int:
        """See `LayerCache.append`."""
        return super().append(self.to_axes(k), v)

    def to_axes(self, x: Tensor) -> Tensor:
        """Queries [H, d] or keys [Hk, d] of one token in the axes of their KV head, in their dtype."""
        heads = x.float().view(self.axes.shape[0], -1, x.shape[-1]) @ self.axes
        return heads.view_as(x).to(x.dtype)

    def footprint(self) -> Footprint:
        """See `LayerCache.footprint`."""
        return super().footprint() + Footprint(device=nbytes(self.axes))
