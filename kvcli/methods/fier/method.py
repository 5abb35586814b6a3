"""FIER: retrieval of single tokens by one-bit keys (arXiv 2508.08256, section 3).

The keys of every full group of tokens are quantised, channel by channel, to their sign relative to the middle of the
group's range. A step scores all tokens by these bits, selects the best, and attends to them exactly. Important tokens
are scattered, so that a page would bring many others along. One bit per channel and two 16-bit numbers per group of 32
cost no more to read than the bounds of pages of 16: an eighth of the keys.

Decided where the paper is silent: with grouped queries the scores are scaled as in attention, turned into weights over
the candidates, and pooled over the group. With pooling none each query head attends to its own tokens and has the whole
budget; a KV head then reads their union. The tokens of a group that is not full stay in full precision, are always
attended and count in the budget; so does the current token. `offload` keeps the KV in host memory and recalls the
tokens that are missing on the device; what is attended to is the same. In the counters one token of one KV head is a
page of size 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import model_validator
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.append import NewToken, take_in_filled_page
from kvcli.kernels.group_pooling import HeadPooling, Pooling, pool_queries, pool_scores
from kvcli.kernels.recall import HostPages
from kvcli.kernels.softmax import Softmax
from kvcli.kv.cache import Tiers
from kvcli.kv.pages import paged
from kvcli.kv.tokens import OffloadedTokenCache, ResidentTokenCache, TokenBudget, TokenCache, TokenIndex
from kvcli.memory.state import Settled
from kvcli.memory.tiers import Traffic, nbytes
from kvcli.methods.config import HostKVConfig, TokenConfig, setting
from kvcli.methods.contract import Method
from kvcli.methods.fier.kernels import (
    one_bit_scores,
    one_bit_scores_device,
    quantise_filled_group,
    quantise_keys,
)
from kvcli.methods.step import (
    RESIDENT,
    BatchSlots,
    Best,
    FromHost,
    Index,
    LayerStep,
    Picked,
    Rule,
    ScoredIndex,
    StepPlan,
)
from kvcli.models.geometry import LayerGeometry


class OneBitIndex(TokenIndex):
    """One-bit keys on the device, for full groups of g tokens: `codes` [Hk, groups, g, ceil(d / 8)] uint8.

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
        """Return the indexed tensors by name."""
        return {"codes": self.codes, "ranges": self.ranges}

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """Hold these tensors instead of the present ones."""
        self.codes, self.ranges = tensors["codes"], tensors["ranges"]

    def scores(self, q: Tensor, tokens: range, scale: float, pooling: HeadPooling) -> Tensor:
        """Score consecutive tokens of full groups with q [H, d]: [Hk, len(tokens)] fp32, or [H, ..] without pooling."""
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
        """Return the bytes read to score all tokens, divided by the bytes of their keys; None if there is no group."""
        num_kv_heads, groups, group, _ = self.codes.shape
        keys = num_kv_heads * groups * group * self.ranges.shape[-1] * self.ranges.element_size()
        return self.nbytes() / keys if keys else None

    def settled(self) -> list[Settled]:
        """Return the full groups, which no longer change."""
        return [Settled(self.codes, 1, self.filled), Settled(self.ranges, 1, self.filled)]

    @override
    def nbytes(self) -> int:
        return nbytes(self.codes, self.ranges)


class FIERConfig(HostKVConfig, TokenConfig):
    """Settings of FIER; defaults: section 4.1."""

    group: int = setting(32, "consecutive tokens quantised together", "tokens", ge=1)
    dense_layers: int = setting(2, "leading layers that attend to everything", "layers", ge=0)
    pooling: HeadPooling = setting(
        "max_s", "how token scores are pooled over a KV head's query heads; none: each alone"
    )
    page: int = setting(
        1, "tokens selected together, by their mean score; 16 is Quest-p16-w/quant (table 3)", "tokens", ge=1
    )
    offload: bool = setting(False, "keep the KV in host memory and recall the selected tokens")

    @property
    @override
    def indexed_together(self) -> int:
        return self.group

    @property
    @override
    def stays_in_place(self) -> bool:
        return super().stays_in_place and self.page == 1

    @model_validator(mode="after")
    def _pages_fit(self) -> FIERConfig:
        if self.group % self.page or self.sink % self.page or self.window % self.page:
            raise ValueError(f"group, sink and window must be multiples of page {self.page}")
        return self


class FIER(Method[FIERConfig, TokenCache[OneBitIndex]]):
    """Selects single tokens anew at every step."""

    Config = FIERConfig
    title = "single tokens scored by one-bit keys"
    paper = "arXiv 2508.08256"
    long_generation = True
    offloads = False
    group_consistent = False
    device_memory = "O(L)"
    ablation: ClassVar[dict[str, dict[str, Any]]] = {
        "each query head alone": {"pooling": "none"},
        "pages of 16": {"page": 16},  # table 3
        "groups of 128": {"group": 128},
        "groups of 256": {"group": 256},
    }

    def new_cache(self, layer: LayerGeometry) -> TokenCache[OneBitIndex]:
        """Make a cache with one-bit keys on the device, and the KV there or in host memory."""
        heads, d, capacity = layer.num_kv_heads, layer.head_dim, self.context.capacity
        tiers = self.config.tiers(self.context.tiers)
        budget, group = self.config.tokens, self.config.group
        index = OneBitIndex(heads, d, group, capacity // group, tiers)
        if self.config.offload:
            return OffloadedTokenCache(heads, d, capacity, budget, index, tiers)
        return ResidentTokenCache(heads, d, capacity, budget, index, tiers, self.config.readers(layer))

    @property
    @override
    def step_plan(self) -> StepPlan:
        config = self.config
        choose = Best() if config.page == 1 else BestPages(config.page)
        return StepPlan(OneBit(config.pooling), choose, fetch=FromHost() if config.offload else RESIDENT)

    def statistics(self) -> dict[str, Any]:
        """Return the part of the keys' bytes that scoring reads: (1 + 32 / g) / 16 in 16-bit dtypes, 0.125 at g = 32.

        In fp32, s and z are 32 bits each: (1 + 64 / g) / 32, 0.09375 at g = 32.
        """
        ratios = {ratio for cache in self.retrieval.values() if (ratio := cache.index.load_ratio()) is not None}
        return {"key_load_ratio": max(ratios)} if ratios else {}


@dataclass(frozen=True)
class BestPages(Rule):
    """Chooses the pages of `page` tokens with the best mean score, as many as fit next to an unfilled last page."""

    page: int

    @override
    def pick(self, step: LayerStep, q: Tensor) -> Picked:
        scores, first = step.scores(q), step.candidates.start  # [Hk, n]
        tokens = scores.shape[1]
        whole = tokens // self.page * self.page
        means = paged(scores[:, :whole], self.page).mean(-1)
        pages = step.best(means, (step.cache.selected - tokens + whole) // self.page) - first  # [Hk, k / page]
        rows = (self.page * pages[..., None] + torch.arange(self.page, device=pages.device)).flatten(1)
        last = torch.arange(whole, tokens, device=rows.device).expand(len(rows), -1)
        return Picked(torch.cat((rows, last), 1) + first)


@dataclass(frozen=True)
class OneBit(Index):
    """Scores by the one-bit keys of full groups (`OneBitIndex`), pooled over the query heads of a KV head."""

    pooling: HeadPooling

    @override
    def scores(self, cache: Any, q: Tensor, candidates: range, softmax: Softmax) -> Tensor:
        scores: Tensor = cache.index.scores(q, candidates, softmax.scale, self.pooling)
        return scores

    @override
    def over_slots(self, slots: BatchSlots) -> OneBitOverSlots:
        assert self.pooling != "none", "query heads that choose alone are served phase after phase"
        return OneBitOverSlots(slots, self.pooling)


class OneBitOverSlots(ScoredIndex):
    """`OneBit` for a batch, by `codes` and `ranges`.

    The tokens of a group can be selected as soon as it is full, so it is quantised before scoring.
    """

    needs_newest = True

    def __init__(self, slots: BatchSlots, pooling: Pooling):
        self.slots, self.pooling = slots, pooling
        self.codes, self.ranges = slots.tensors["codes"], slots.tensors["ranges"]

    @override
    def scores(self, q: Tensor, softmax: Softmax, heads: Tensor) -> Tensor:
        b, num_kv_heads, groups, size = self.codes.shape[:4]
        out = q.new_empty(b, num_kv_heads, groups * size, dtype=torch.float32)
        one_bit_scores_device(q, self.codes, self.ranges, *self.scored, softmax.scale, self.pooling, out, heads)
        return out

    @override
    def update(self, new: NewToken, host: HostPages | None) -> None:
        quantise_filled_group(self.slots.by_position, self.codes, self.ranges)
        if host is not None:
            take_in_filled_page(self.slots.rows, host=host)
