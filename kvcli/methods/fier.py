"""FIER: retrieval of single tokens by one-bit keys (arXiv 2508.08256, section 3).

The keys of every full group of tokens are quantised to their sign about the middle of the group's range, channel by
channel. A step scores all tokens by these bits, takes the best, and attends to them exactly. Important tokens lie
scattered, so that a page would bring many others along; a bit a channel with two 16-bit numbers a group of 32 costs no
more to read than the bounds of pages of 16: an eighth of the keys.

Decided where the paper is silent: with grouped queries the scores are scaled as in attention, turned to weights over
the candidates, and pooled over the group; with pooling none each query head attends to its own tokens, the budget
being that of a query head, and a KV head is read for their union. The tokens of a group that is not full stay in full
precision, are always attended and count in the budget; so does the current token. `offload` keeps the KV in host
memory and recalls the tokens that are missing on the device; what is attended to is the same. In the counters one token
of one KV head is a page of size 1.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
from pydantic import model_validator
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.group_pooling import HeadPooling
from kvcli.kernels.softmax import Softmax
from kvcli.kernels.topk import topk_pages
from kvcli.methods.base import Method
from kvcli.methods.config import HostKVConfig, TokenConfig, setting
from kvcli.methods.steps.plan import RESIDENT, FromHost, StepPlan
from kvcli.methods.steps.token_scores import OneBitScores
from kvcli.models.geometry import LayerGeometry
from kvcli.store.offloaded_tokens import OffloadedTokenCache
from kvcli.store.one_bit import OneBitIndex
from kvcli.store.pages import paged
from kvcli.store.tokens import ResidentTokenCache, TokenCache


class FIERConfig(HostKVConfig, TokenConfig):
    """Settings of FIER."""

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

    @model_validator(mode="after")
    def _union_is_on_the_device(self) -> FIERConfig:
        if self.offload and self.pooling == "none":
            raise ValueError("offload has room for one selection a KV head: pooling = none needs offload = false")
        return self


class FIER(Method[FIERConfig, TokenCache[OneBitIndex]]):
    """Selects tokens anew at every step, each for itself."""

    Config = FIERConfig
    title = "single tokens by one-bit keys"
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
        """Keep one-bit keys on the device, and the KV there or in host memory."""
        heads, d, capacity = layer.num_kv_heads, layer.head_dim, self.context.capacity
        tiers = self.config.tiers(self.context.tiers)
        budget, group = self.config.tokens, self.config.group
        index = OneBitIndex(heads, d, group, capacity // group, tiers)
        if self.config.offload:
            return OffloadedTokenCache(heads, d, capacity, budget, index, tiers)
        return ResidentTokenCache(heads, d, capacity, budget, index, tiers, self.config.readers(layer))

    @property
    @override
    def step_plan(self) -> StepPlan | None:
        if self.config.pooling == "none" or self.config.page > 1:
            return None
        index = partial(OneBitScores, pooling=self.config.pooling)
        return StepPlan(index, fetch=FromHost() if self.config.offload else RESIDENT)

    def retrieve(self, layer: int, cache: TokenCache[OneBitIndex], q: Tensor, softmax: Softmax) -> Tensor:
        """Select with the query of this step, bring what is missing, then attend."""
        if not cache.active:
            return super().retrieve(layer, cache, q, softmax)
        with self.span("score", layer):
            scores = cache.index.scores(q, cache.candidates, softmax.scale, self.config.pooling)
        with self.span("select", layer):
            selected = self._best(scores, cache.selected) + cache.candidates.start  # [Hk, k]
        self.count_selected(layer, selected, cache.readers)
        with self.span("recall", layer):
            misses, moved = cache.recall(selected)
        self.count_recalled(layer, misses, moved)
        with self.span("attention", layer):
            return cache.attend_selected(q, selected, softmax)

    def _best(self, scores: Tensor, count: int) -> Tensor:
        """Select tokens by scores [Hk, n]; or whole pages, as many as fit into `count` beside an unfilled last one."""
        page, tokens = self.config.page, scores.shape[1]
        if page == 1:
            return topk_pages(scores, count)
        whole = tokens // page * page
        pages = topk_pages(paged(scores[:, :whole], page).mean(-1), (count - tokens + whole) // page)  # [Hk, k / page]
        rows = (page * pages[..., None] + torch.arange(page, device=pages.device)).flatten(1)
        return torch.cat((rows, torch.arange(whole, tokens, device=rows.device).expand(len(rows), -1)), 1)

    def statistics(self) -> dict[str, Any]:
        """Say what part of the keys' bytes a selection reads: (1 + 32 / g) / 16 in 16-bit dtypes, 0.125 at g = 32.

        In fp32 scale and zero are 32 bits each: (1 + 64 / g) / 32, 0.09375 at g = 32.
        """
        ratios = {ratio for cache in self.retrieval.values() if (ratio := cache.index.load_ratio()) is not None}
        return {"key_load_ratio": max(ratios)} if ratios else {}
