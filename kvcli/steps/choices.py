"""Rules by which scores choose what a step attends to; see `kvcli.steps.plan.Choice`."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.kernels.slot_layout import candidates_end
from kvcli.kernels.topk import topk_pages_device
from kvcli.steps.batch_slots import BatchSlots


def best_scores(scores: Tensor, slots: BatchSlots, heads: Tensor | None) -> Tensor:
    """Choose what scores best, as much as the layout has places for."""
    layout = slots.rows.layout
    selected = torch.empty(*scores.shape[:2], layout.selected, dtype=torch.int32, device=scores.device)
    topk_pages_device(scores, slots.rows.lengths, layout, selected, heads)
    return selected


def best_then_resident(scores: Tensor, slots: BatchSlots, heads: Tensor | None, part: float) -> Tensor:
    """Choose first the best, a `part` of all places; then what is on the device, then others, each by its score."""
    resident, layout = slots.rows.resident, slots.rows.layout
    assert resident is not None
    n, device = scores.shape[2], scores.device
    page = torch.arange(n, device=device)
    outside = (page < layout.sink) | (page >= candidates_end(slots.rows.lengths, layout)[:, None, None])
    order = scores.masked_fill(outside, float("-inf")).argsort(dim=2, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(2, order, page.expand_as(order))  # 0 is the best
    held = torch.zeros(*scores.shape[:2], n + 1, dtype=torch.bool, device=device)
    held.scatter_(2, resident.long() + 1, True)  # an empty slot marks the column before the first page's
    first = (rank < max(1, round(part * layout.selected))) | held[:, :, 1:]
    return best_scores(-(rank + n * ~first).float(), slots, heads)
