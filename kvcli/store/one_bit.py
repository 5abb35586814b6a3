"""Keys of one bit a channel, by which single tokens are scored (FIER, arXiv 2508.08256, section 3.3)."""

from collections.abc import Mapping

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.group_pooling import HeadPooling, pool_queries, pool_scores
from kvcli.kernels.one_bit import one_bit_scores, quantise_keys
from kvcli.kv.cache import Tiers
from kvcli.kv.pages import paged
from kvcli.kv.tokens import TokenBudget, TokenIndex
from kvcli.memory.state import Settled
from kvcli.memory.tiers import Traffic, nbytes


class OneBitIndex(TokenIndex):
    """On the device, for full groups of g tokens: `codes` [Hk, groups, g, ceil(d / 8)] uint8, one bit a channel.

    `ranges` [Hk, groups, 2, d] are s and z of each channel in a group: its bits stand for z - s and z + s.
    """

    def __init__(self, num_kv_heads: int, head_dim: int, group: int, num_groups: int, tiers: Tiers):
        self.group = group
        self.codes = tiers.on_device(num_kv_heads, num_groups, group, -(-head_dim // 8), dtype=torch.uint8)
        self.ranges = tiers.on_device(num_kv_heads, num_groups, 2, head_dim)
        self.filled = 0  # groups from the first one on

    @override
    def fill(self, first: int, keys: Tensor) -> None:
        groups, start = paged(keys, self.group), first // self.group
        self.filled = start + groups.shape[1]
        part = slice(start, self.filled)
        self.codes[:, part], self.ranges[:, part] = quantise_keys(groups)

    def tensors(self) -> dict[str, Tensor]:
        """What is indexed, by name."""
        return {"codes": self.codes, "ranges": self.ranges}

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """Hold these in their place."""
        self.codes, self.ranges = tensors["codes"], tensors["ranges"]

    def scores(self, q: Tensor, tokens: range, scale: float, pooling: HeadPooling) -> Tensor:
        """Score consecutive tokens of full groups with q [H, d] -> [Hk, len(tokens)] fp32; pooling none: [H, ..]."""
        heads = pool_queries(q.float().view(self.codes.shape[0], -1, q.shape[-1]), pooling)  # [Hk, G or 1, d]
        first = tokens.start // self.group
        part = slice(first, -(-tokens.stop // self.group))
        start = tokens.start - first * self.group
        scores = one_bit_scores(heads, self.codes[:, part], self.ranges[:, part])
        return pool_scores(scale * scores[..., start : start + len(tokens)], pooling)

    @override
    def traffic(self, budget: TokenBudget, length: int) -> Traffic:
        candidates = budget.candidates(length)
        groups = slice(candidates.start // self.group, -(-candidates.stop // self.group))
        scored = nbytes(self.codes[:, groups], self.ranges[:, groups])
        return Traffic(scored=scored, scores=4 * self.codes.shape[0] * len(candidates))

    def load_ratio(self) -> float | None:
        """Bytes read to score all tokens, divided by the bytes of their keys; None where there is no group."""
        num_kv_heads, groups, group, _ = self.codes.shape
        keys = num_kv_heads * groups * group * self.ranges.shape[-1] * self.ranges.element_size()
        return self.nbytes() / keys if keys else None

    def settled(self) -> list[Settled]:
        """Full groups do not change."""
        return [Settled(self.codes, 1, self.filled), Settled(self.ranges, 1, self.filled)]

    @override
    def nbytes(self) -> int:
        return nbytes(self.codes, self.ranges)
