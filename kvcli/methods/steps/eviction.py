"""Layers that evict: where the newest token goes, and what attention gives back for the choice (H2O, TOVA, RaaS)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.append import take_in_filled_page
from kvcli.kernels.group_pooling import Pooling
from kvcli.kernels.make_room import make_room
from kvcli.kernels.page_scores import page_scores, page_scores_device
from kvcli.kernels.page_table import SlotLayout
from kvcli.kernels.prefill_attention import last_rows
from kvcli.kernels.replace_page import PageCounts, StampedPages, replace_page
from kvcli.kernels.softmax import Softmax
from kvcli.kernels.token_scores import token_scores_device
from kvcli.methods.steps.batch_slots import BatchSlots
from kvcli.methods.steps.over_slots import Eviction
from kvcli.methods.steps.plan import Evict

Heads = Literal["group", "layer"]
"""The query heads whose attention is averaged: those of a KV head, or all of the layer."""


@dataclass(frozen=True)
class LowestScore(Evict):
    """The token of the lowest score leaves, of equals the newest; not the `recent` newest (see `EvictingCache`).

    Scores are the attention of each token, by KV head (`heads` of its group) or the same for the whole layer; of all
    steps so far (`summed`) or of the last.
    """

    recent: int
    heads: Heads
    summed: bool

    @override
    def look_back(self, cache: Any, q: Tensor, softmax: Softmax) -> None:
        k, _ = cache.resident
        received, scores = mean_attention(last_rows(q[:, None], k, softmax)[:, 0], len(k), self.heads), cache.scores
        held = scores[:, : cache.held]
        if self.summed:
            held += received
        else:
            held[:] = received

    @override
    def over_slots(self, slots: BatchSlots) -> Eviction:
        return LowestScoreOverSlots(slots, self.recent, self.heads, self.summed)


def mean_attention(weights: Tensor, num_kv_heads: int, heads: Heads) -> Tensor:
    """Average what query heads give the tokens, [H, n], for each KV head: [Hk, n]."""
    if heads == "layer":
        return weights.mean(0).expand(num_kv_heads, -1)
    return weights.view(num_kv_heads, -1, weights.shape[-1]).mean(1)


class LowestScoreOverSlots(Eviction):
    """The same of a batch."""

    def __init__(self, slots: BatchSlots, recent: int, heads: Heads, summed: bool):
        self.rows, self.seen = slots.rows, slots.seen
        self.positions, self.scores = slots.tensors["positions"], slots.tensors["scores"]  # [b, Hk, rows]
        self.most = slots.tensors["rows"]  # [b]
        self.recent, self.summed = recent, summed
        self.received = torch.empty_like(self.scores if heads == "group" else self.scores[:, :1])
        self.at = torch.zeros(self.scores.shape[:2], dtype=torch.int32, device=self.seen.device)

    @override
    def make_room(self) -> Tensor:
        make_room(self.positions, self.scores, self.seen, self.most, self.recent, self.at)
        return self.at

    @override
    def look_back(self, q: Tensor, softmax: Softmax) -> None:
        # A row that holds no token gets -inf, and keeps its score; a sequence that takes no part keeps all of them. The
        # score of a token that comes there begins at zero.
        rows, layout = self.rows, SlotLayout(1, 0, 0, 0)  # all rows that hold one
        token_scores_device(q, rows.k, rows.lengths, layout, softmax, "mean_s", self.received)
        if self.summed:
            self.scores.add_(self.received.clamp_min_(0))
        else:
            torch.where(self.received >= 0, self.received, self.scores, out=self.scores)


@dataclass(frozen=True)
class StalestPage(Evict):
    """The page of the oldest timestamp leaves when a new one needs its slot (see `TimestampedPageCache`).

    A page of `size` tokens is stamped where its score is larger than a `threshold`; the newest `window` never leave.
    """

    window: int
    size: int
    threshold: float
    pooling: Pooling

    @override
    def look_back(self, cache: Any, q: Tensor, softmax: Softmax) -> None:
        if cache.contested:
            cache.stamp(page_scores(q, cache.summaries, softmax.scale, self.pooling) > self.threshold)  # [Hk, pages]

    @override
    def over_slots(self, slots: BatchSlots) -> Eviction:
        return StalestPageOverSlots(slots, self)


class StalestPageOverSlots(Eviction):
    """The same of a batch."""

    def __init__(self, slots: BatchSlots, of: StalestPage):
        self.size, self.window, self.threshold, self.pooling = of.size, of.window, of.threshold, of.pooling
        tensors, seen = slots.tensors, slots.seen
        self.held = StampedPages(slots.rows.k, slots.rows.v, tensors["bounds"], tensors["stamps"], tensors["pages"])
        self.counts = PageCounts(
            tensors["protected"], tensors["slots"], seen, torch.zeros_like(seen), torch.zeros_like(seen)
        )
        self.rows, self.contested = slots.rows._replace(lengths=self.counts.held), not slots.holds_all

    @override
    def make_room(self) -> None:
        replace_page(self.held, self.counts, self.window)

    @override
    def look_back(self, q: Tensor, softmax: Softmax) -> None:
        if not self.contested:
            return
        bounds, stamps = self.held.bounds, self.held.stamps
        take_in_filled_page(self.rows, bounds)
        layout = SlotLayout(self.size, 0, 0, 0)  # all full pages are scored
        scores = torch.empty(stamps.shape, dtype=torch.float32, device=q.device)
        page_scores_device(
            q, bounds, self.counts.full, layout, softmax.scale, self.pooling, scores, arrived=self.rows.arrived
        )
        torch.where(scores > self.threshold, self.counts.seen[:, None, None].long(), stamps, out=stamps)
