"""Layers that evict: where the newest token goes, and what attention gives back for the choice (H2O, TOVA, RaaS)."""

from typing import Literal, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.filled_page import take_in_filled_page
from kvcli.kernels.group_pooling import Pooling
from kvcli.kernels.page_scores import page_scores_device
from kvcli.kernels.slot_layout import PagedKV, SlotLayout
from kvcli.kernels.softmax import Softmax
from kvcli.methods.steps.batch_slots import BatchSlots
from kvcli.methods.steps.rows import put_rows


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
        self.recent, self.over, self.summed = recent, over, summed
        self.row = torch.arange(self.scores.shape[2], device=self.scores.device)

    @override
    def make_room(self) -> Tensor:
        newest = self.seen - 1  # [b], its position
        evictable = self.positions <= (newest - self.recent)[:, None, None]
        evictable &= self.row < self.most[:, None, None]
        scores = self.scores.where(evictable, torch.inf)
        least = evictable & (scores == scores.amin(2, keepdim=True))
        lowest = self.positions.where(least, -1).argmax(2)  # [b, Hk]
        at = newest[:, None].where((self.seen <= self.most)[:, None], lowest).clamp_min(0)
        mine = (self.row == at[..., None]) & (newest >= 0)[:, None, None]
        self.positions.copy_(newest[:, None, None].where(mine, self.positions))
        self.scores.masked_fill_(mine, 0)
        return at.int()

    @override
    def look_back(self, q: Tensor, softmax: Softmax) -> None:
        k = self.rows.k.float()
        held = (self.row < self.rows.lengths[:, None])[:, None, None]  # [b, 1, 1, rows]
        heads = q.float().view(*k.shape[:2], -1, k.shape[3])  # [b, Hk, G, d]
        scores = softmax.scores(heads @ k.transpose(2, 3)).masked_fill(~held, float("-inf"))
        weights = scores.softmax(3)
        if softmax.sinks is not None:  # of the norm, what is not the sink's
            norms = scores.logsumexp(3).view(len(q), -1)
            weights = weights * torch.sigmoid(norms - softmax.sinks).view(*weights.shape[:3], 1)
        weights = weights.masked_fill(~held, 0)
        received = weights.mean(2) if self.over == "group" else weights.mean((1, 2))[:, None]
        if self.summed:
            self.scores.add_(received)
        else:
            self.scores.copy_(received.where(held[:, 0], self.scores))


class StalestPage(Eviction):
    """The page of the oldest timestamp leaves when a new one needs its slot (see `TimestampedPageCache`)."""

    def __init__(self, slots: BatchSlots, window: int, size: int, threshold: float, pooling: Pooling):
        self.seen, self.size, self.threshold, self.pooling = slots.seen, size, threshold, pooling
        self.kv = [x.unflatten(2, (-1, size)) for x in slots.rows.tensors]  # type: ignore[no-untyped-call]
        self.bounds, self.stamps, self.pages = (slots.tensors[name] for name in ("bounds", "stamps", "pages"))
        self.protected, self.num_slots = slots.tensors["protected"], slots.tensors["slots"]  # [b]
        self.held, self.full = torch.zeros_like(self.seen), torch.zeros_like(self.seen)
        self.rows = slots.rows._replace(lengths=self.held)
        self.slot, self.order = (torch.arange(n, device=self.seen.device) for n in (self.stamps.shape[2], window))

    @override
    def make_room(self) -> None:
        """Let the page that leaves the window take the place of the stalest, and the window move on."""
        page = (self.seen - 1) // self.size
        begins = (self.seen > 0) & ((self.seen - 1) % self.size == 0)
        evicts = begins & (page >= self.num_slots)  # [b]
        leaving = (self.num_slots - len(self.order))[:, None]  # [b, 1]
        stale = (self.slot >= self.protected[:, None]) & (self.slot <= leaving)  # [b, slots]
        age = self.stamps * (page + 1)[:, None, None] + self.pages
        victim = age.masked_fill(~stale[:, None], torch.iinfo(age.dtype).max).argmin(2)  # [b, Hk]
        last = (self.num_slots - 1)[:, None].expand_as(victim)
        stays = victim == leaving
        sources = (leaving[:, None] + self.order).expand(*victim.shape, -1).clone()  # [b, Hk, window]
        targets = sources - 1
        targets[:, :, 0] = last.where(stays, victim)
        sources[:, :, 0] = last.where(stays, leaving)
        sources, targets = (x.where(evicts[:, None, None], 0) for x in (sources, targets))  # else nothing moves
        for slots in (*self.kv, self.bounds, self.stamps, self.pages):
            shape = (*targets.shape, *[1] * (slots.dim() - 3))
            from_, to = (x.long().view(shape).expand(-1, -1, -1, *slots.shape[3:]) for x in (sources, targets))
            slots.scatter_(2, to, slots.gather(2, from_))
        slot = torch.minimum(page, self.num_slots - 1).where(begins, -1)
        put_rows(self.pages, slot, page[:, None].expand_as(victim))
        put_rows(self.stamps, slot, self.seen[:, None].expand_as(victim))
        evicted = (page + 1 - self.num_slots).clamp_min(0)
        torch.sub(self.seen, evicted * self.size, out=self.held)
        torch.mul(self.held // self.size, self.size, out=self.full)

    @override
    def look_back(self, q: Tensor, softmax: Softmax) -> None:
        take_in_filled_page(self.rows, self.bounds)
        layout = SlotLayout(self.size, 0, 0, 0)  # all full pages are scored
        scores = torch.empty(self.stamps.shape, dtype=torch.float32, device=q.device)
        page_scores_device(
            q, self.bounds, self.full, layout, softmax.scale, self.pooling, scores, arrived=self.rows.arrived
        )
        torch.where(scores > self.threshold, self.seen[:, None, None], self.stamps, out=self.stamps)
