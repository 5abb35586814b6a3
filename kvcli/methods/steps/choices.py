"""Rules by which scores choose what a step attends to; see `kvcli.methods.steps.plan.Choice`."""

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.slot_layout import candidates_end
from kvcli.kernels.softmax import Softmax
from kvcli.kernels.topk import topk_pages_device
from kvcli.methods.steps.batch_slots import BatchSlots
from kvcli.methods.steps.plan import Choice, Chosen, StepIndex


class BestScores(Choice):
    """What scores best, as much as the layout has places for."""

    def __init__(self, slots: BatchSlots):
        self.slots = slots

    @override
    def __call__(self, index: StepIndex, q: Tensor, softmax: Softmax, heads: Tensor | None) -> Chosen:
        return Chosen(best_scores(index.scores(q, softmax, heads), self.slots, heads))


class BestThenResident(Choice):
    """First the best, a `part` of all places; then what is on the device, then others, each by its score (ArkVale)."""

    def __init__(self, slots: BatchSlots, part: float):
        self.slots, self.best = slots, max(1, round(part * slots.rows.layout.selected))

    @override
    def __call__(self, index: StepIndex, q: Tensor, softmax: Softmax, heads: Tensor | None) -> Chosen:
        scores = index.scores(q, softmax, heads)
        resident, layout = self.slots.rows.resident, self.slots.rows.layout
        assert resident is not None
        n, device = scores.shape[2], scores.device
        page = torch.arange(n, device=device)
        outside = (page < layout.sink) | (page >= candidates_end(self.slots.rows.lengths, layout)[:, None, None])
        order = scores.masked_fill(outside, float("-inf")).argsort(dim=2, descending=True, stable=True)
        rank = torch.empty_like(order).scatter_(2, order, page.expand_as(order))  # 0 is the best
        # An empty slot marks the column before the first page's; short sequences have slots for pages that never come.
        held = torch.zeros(*scores.shape[:2], max(n, layout.budget) + 1, dtype=torch.bool, device=device)
        held.scatter_(2, resident.long() + 1, True)
        first = (rank < self.best) | held[:, :, 1 : n + 1]
        return Chosen(best_scores(-(rank + n * ~first).float(), self.slots, heads))


class NearBest(Choice):
    """Tokens that score within `alpha` of the best, as many for a KV head as the heads want on average (InfiniGen)."""

    def __init__(self, slots: BatchSlots, alpha: float):
        self.slots, self.alpha = slots, alpha
        b, device = len(slots.rows.k), slots.rows.k.device
        names = ("chosen", "choices", "layer_steps")
        self.tally = {name: torch.zeros(b, dtype=torch.int64, device=device) for name in names}

    @override
    def __call__(self, index: StepIndex, q: Tensor, softmax: Softmax, heads: Tensor) -> Chosen:
        scores = index.scores(q, softmax, heads)  # [b, Hk, n]
        near = scores >= scores.amax(2, keepdim=True) - self.alpha
        wanted = (near.sum((1, 2)) // heads.shape[1]).clamp(1, self.slots.rows.layout.selected).int()
        chose = heads.sum(1)  # KV heads
        self.tally["chosen"] += wanted * chose
        self.tally["choices"] += chose
        self.tally["layer_steps"] += heads[:, 0]
        return Chosen(best_scores(scores, self.slots, heads, wanted), asked=wanted)


def best_scores(scores: Tensor, slots: BatchSlots, heads: Tensor | None, wanted: Tensor | None = None) -> Tensor:
    """Choose by scores [b, Hk, n]: [b, Hk, selected] int32, -1 behind them; `wanted` [b] int32 where it is less."""
    layout = slots.rows.layout
    selected = torch.empty(*scores.shape[:2], layout.selected, dtype=torch.int32, device=scores.device)
    topk_pages_device(scores, slots.rows.lengths, layout, selected, heads, wanted)
    return selected
