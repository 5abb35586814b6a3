"""Layers on the device whose tokens are scored by some channels of their keys (TokenSelect; Loki, arXiv 2406.02542)."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from kvcli.kernels.token_scores import token_scores
from kvcli.store.cache import Footprint, Tiers, Traffic, nbytes
from kvcli.store.layer_slots import LayerSlots
from kvcli.store.pages import slices
from kvcli.store.tokens import ResidentTokenCache, TokenBudget, TokenIndex

# Tokens whose keys are rotated to their axes at once: fp32 copies of them stay this long.
PIECE = 4096


class KeyChannelIndex(TokenIndex):
    """Scores tokens by the first `channels` of the keys [Hk, capacity, d] of a cache, without memory of its own."""

    keys: Tensor

    def __init__(self, channels: int):
        self.channels = channels

    @override
    def fill(self, first: int, keys: Tensor) -> None:
        """Do nothing: the cache has stored them."""

    @override
    def tensors(self) -> dict[str, Tensor]:
        """Return nothing: the keys are the cache's."""
        return {}

    @override
    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """Do nothing: the cache tells where its keys are."""

    def scores(self, q: Tensor, tokens: range, scale: float) -> Tensor:
        """Score consecutive tokens with q [H, d] for every query head: [Hk, G, len(tokens)] in fp32."""
        if self.keys.device.type != "cpu":
            return token_scores(q, self._of(tokens), scale)
        # The BLAS reads whole rows up to three times as fast as the first half of each.
        query = pad(q[:, : self.channels], (0, max(0, self.keys.shape[2] - self.channels)))
        return token_scores(query, self.keys[:, tokens.start : tokens.stop], scale)

    @override
    def traffic(self, budget: TokenBudget, length: int) -> Traffic:
        candidates = budget.candidates(length)
        return Traffic(scored=nbytes(self._of(candidates)), scores=4 * self.keys.shape[0] * len(candidates))

    @override
    def nbytes(self) -> int:
        """Return 0, since the keys count as the cache's."""
        return 0

    def _of(self, tokens: range) -> Tensor:
        return self.keys[:, tokens.start : tokens.stop, : self.channels]


class ChannelScoredCache(ResidentTokenCache[KeyChannelIndex]):
    """On the device: k, v [Hk, capacity, d] of every token, scored by the first `channels` of the keys."""

    def __init__(
        self, num_kv_heads: int, head_dim: int, capacity: int, budget: TokenBudget, channels: int, tiers: Tiers
    ):
        super().__init__(num_kv_heads, head_dim, capacity, budget, KeyChannelIndex(channels), tiers)
        self.index.keys = self.k

    @override
    def adopt_slots(self, slots: LayerSlots) -> None:
        super().adopt_slots(slots)
        self.index.keys = self.k


class PrincipalAxesCache(ChannelScoredCache):
    """The same with keys in the coordinates of `axes` [Hk, d, d], which the method sets before any token comes.

    The axes are orthonormal: scores and attention stay what they are, if the query is in these coordinates, too.
    """

    def __init__(
        self, num_kv_heads: int, head_dim: int, capacity: int, budget: TokenBudget, channels: int, tiers: Tiers
    ):
        super().__init__(num_kv_heads, head_dim, capacity, budget, channels, tiers)
        self.axes = tiers.on_device(num_kv_heads, head_dim, head_dim, dtype=torch.float32)

    @override
    def load(self, k: Tensor, v: Tensor) -> int:
        written = super().load(k, v)
        for part in slices(k.shape[1], PIECE):
            self.k[:, part] = k[:, part].float() @ self.axes
        return written

    @override
    def append(self, k: Tensor, v: Tensor) -> int:
        return super().append(self.to_axes(k), v)

    @override
    def as_slots(self) -> LayerSlots:
        slots = super().as_slots()
        return slots._replace(tensors={**slots.tensors, "axes": self.axes})

    def to_axes(self, x: Tensor) -> Tensor:
        """Rotate queries [H, d] or keys [Hk, d] of one token to the axes of their KV head; their dtype stays."""
        heads = x.float().view(self.axes.shape[0], -1, x.shape[-1]) @ self.axes
        return heads.view_as(x).to(x.dtype)

    @override
    def footprint(self) -> Footprint:
        return super().footprint() + Footprint(device=nbytes(self.axes))
