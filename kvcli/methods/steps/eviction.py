"""Layers that evict: where the newest token goes, and what attention gives back for the choice (H2O, TOVA, RaaS)."""

from typing import Literal, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.filled_page import take_in_filled_page
from kvcli.kernels.group_pooling import Pooling
from kvcli.kernels.make_room import make_room
from kvcli.kernels.page_scores import page_scores_device
from kvcli.kernels.replace_page import PageCounts, StampedPages, replace_page
from kvcli.kernels.slot_layout import PagedKV, SlotLayout
from kvcli.kernels.softmax import Softmax
from kvcli.kernels.token_scores import token_scores_device
from kvcli.methods.steps.batch_slots import BatchSlots


class Eviction(Protocol):
    """What a layer of a batch does before and after attention in order to hold a bounded number of tokens."""

    rows: PagedKV
    """The rows that are attended to, with the tokens held as lengths."""

    def make_room(self) -> Tensor | None:
        """Make room for the newest token; its rows [b, Hk] int32 where they are not the next ones."""

    def look_back(self, q: Tensor, softmax: Softmax) -> None:
        """Learn from what queries [b, H, d] look at; the newest token is among the rows."""


class LowestScore(Eviction):
    """The token of the lowest score leaves, of equals the newest; not the `recent` newest (see `EvictingCache`).

    Scores are the attention of each token, by KV head (`over` its query heads) or the same for the whole layer; of all
    steps so far (`summed`) or of the last.
    """

    def __init__(self, slots: BatchSlots, recent: int, over: Literal["group", "layer"], summed: bool):
        self.rows, self.seen = slots.rows, slots.seen
        self.positions, self.scores = slots.tensors["positions"], slots.tensors["scores"]  # [b, Hk, rows]
        self.most = slots.tensors["rows"]  # [b]
        self.recent, self.summed = recent, summed
        self.received = torch.empty_like(self.scores if over == "group" else self.scores[:, :1])
        self.at = torch.zeros(self.scores.shape[:2], dtype=torch.int32, device=self.seen.device)

    @override
    def make_room(self) -> Tensor:
        make_room(self.positions, self.scores, self.seen, self.most, self.recent, self.at)
        return self.at

    @override
    def look_back(self, q: Tensor, softmax: Softmax) -> None:
        # A row that holds no token gets -inf; the score of a token that comes there begins at zero.
        rows, layout = self.rows, SlotLayout(1, 0, 0, 0)  # all rows that hold one
        token_scores_device(q, rows.k, rows.lengths, layout, softmax, "mean_s", self.received)
        if self.summed:
            self.scores.add_(self.received)
        else:
            self.scores.copy_(self.received.expand_as(self.scores))


class StalestPage(Eviction):
    """The page of the oldest timestamp leaves when a new one needs its slot (see `TimestampedPageCache`)."""

    def __init__(self, slots: BatchSlots, window: int, size: int, threshold: float, pooling: Pooling):
        self.size, self.window, self.threshold, self.pooling = size, window, threshold, pooling
        tensors, seen = slots.tensors, slots.seen
        self.held = StampedPages(slots.rows.k, slots.rows.v, tensors["bounds"], tensors["stamps"], tensors["pages"])
        self.counts = PageCounts(
            tensors["protected"], tensors["slots"], seen, torch.zeros_like(seen), torch.zeros_like(seen)
        )
        self.rows = slots.rows._replace(lengths=self.counts.held)

    @override
    def make_room(self) -> None:
        replace_page(self.held, self.counts, self.window)

    @override
    def look_back(self, q: Tensor, softmax: Softmax) -> None:
        bounds, stamps = self.held.bounds, self.held.stamps
        take_in_filled_page(self.rows, bounds)
        layout = SlotLayout(self.size, 0, 0, 0)  # all full pages are scored
        scores = torch.empty(stamps.shape, dtype=torch.float32, device=q.device)
        page_scores_device(
            q, bounds, self.counts.full, layout, softmax.scale, self.pooling, scores, arrived=self.rows.arrived
        )
        torch.where(scores > self.threshold, self.counts.seen[:, None, None].long(), stamps, out=stamps)
