"""A layer wholly on the device that is attended to by pages, selected by their summaries (Quest, arXiv 2406.10774)."""

from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.decode_attention import attend_chosen, attend_chosen_suits, decode_attention
from kvcli.kernels.softmax import Softmax
from kvcli.store.cache import DenseCache, Footprint, Tiers, Traffic
from kvcli.store.layer_slots import LayerSlots
from kvcli.store.pages import PageBudget, PagedCache, beside, paged, take
from kvcli.store.summaries import PageSummaries


class ResidentPageCache(PagedCache, DenseCache):
    """On the device: k, v [Hk, pages * p, d] of every token, and the summaries of all full pages."""

    lends = True

    def __init__(
        self, num_kv_heads: int, head_dim: int, capacity: int, budget: PageBudget, tiers: Tiers, readers: int = 1
    ):
        """Make room; each of `readers` query heads of a KV head chooses for itself, or all together where it is 1."""
        num_pages = budget.count(capacity)
        super().__init__(num_kv_heads, head_dim, num_pages * budget.size, tiers)
        self.budget = budget
        self.summaries = PageSummaries(num_kv_heads, head_dim, num_pages, tiers)
        self.readers = readers
        self.chosen: Tensor | None = None  # [Hk, k] or [H, k] pages last attended to, None for all

    @override
    def load(self, k: Tensor, v: Tensor) -> int:
        super().load(k, v)
        self._summarise(0, self.length // self.budget.size)
        return 0

    @override
    def append(self, k: Tensor, v: Tensor) -> int:
        super().append(k, v)
        page, row = divmod(self.length, self.budget.size)
        if row == 0:
            self._summarise(page - 1, page)
        return 0

    @override
    def as_slots(self) -> LayerSlots:
        return LayerSlots(self.kv, self.budget.slots, {"bounds": self.summaries.bounds}, in_place=True)

    @override
    def adopt_slots(self, slots: LayerSlots) -> None:
        super().adopt_slots(slots)
        self.summaries.bounds = slots.tensors["bounds"]

    @override
    def attend_selected(self, q: Tensor, selected: Tensor, softmax: Softmax) -> Tensor:
        """Attend with q [H, d] to sink, window and `selected` pages [Hk, k], or [H, k] of each query head -> [H, d]."""
        self.chosen = selected
        size = self.budget.size
        sink, window = slice(self.candidates.start * size), slice(self.candidates.stop * size, self.length)
        if attend_chosen_suits(q, self.k, self.v, selected):
            numbers = torch.arange(self.length)
            inside = (selected[..., None] * size + numbers[:size]).flatten(1)
            before, after = (numbers[part].expand(len(selected), -1) for part in (sink, window))
            return attend_chosen(q, self.k, self.v, torch.cat((before, inside, after), 1), softmax)

        def rows(kv: Tensor) -> Tensor:
            inside = take(paged(kv, size), selected).flatten(1, 2)
            return torch.cat((beside(kv[:, sink], selected), inside, beside(kv[:, window], selected)), 1)

        return decode_attention(q, rows(self.k), rows(self.v), softmax)

    @override
    def attended(self) -> Tensor:
        return super().attended() if self.chosen is None else self.attended_pages(self.chosen, self.readers)

    @override
    def footprint(self) -> Footprint:
        return super().footprint() + Footprint(device=self.summaries.nbytes())

    @override
    def traffic(self, length: int) -> Traffic:
        attended = super().traffic(min(length, self.readers * self.budget.tokens(length))).attended  # the most
        moved = self.summaries.traffic(self.budget, length)
        return replace(moved, attended=attended, scores=self.readers * moved.scores)

    def _summarise(self, first: int, last: int) -> None:
        if last > first:
            size = self.budget.size
            self.summaries.fill(first, paged(self.k[:, first * size : last * size], size))
