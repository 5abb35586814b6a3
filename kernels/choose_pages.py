"""Pages chosen by the bounds on their keys: scores, the best of them, and what the page table lacks of these.

Shapes as in `kvcli.kernels.page_scores` and `kvcli.kernels.topk`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.kernels._triton import takes
from kvcli.kernels.group_pooling import Pooling
from kvcli.kernels.page_scores import ALONE, page_scores_device_ref, score_pages
from kvcli.kernels.slot_layout import SlotLayout
from kvcli.kernels.topk import Selection, topk_pages_device


def choose_pages_ref(
    q: Tensor,
    summary: Tensor,
    lengths: Tensor,
    layout: SlotLayout,
    scale: float,
    pooling: Pooling,
    selection: Selection,
    heads: Tensor | None = None,
    arrived: Tensor | None = None,
) -> None:
    """Score, then choose."""
    out = torch.empty(summary.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    page_scores_device_ref(q, summary, lengths, layout, scale, pooling, out, heads)
    topk_pages_device(out.float(), lengths, layout, selection, heads, arrived=arrived)


def choose_pages(
    q: Tensor,
    summary: Tensor,
    lengths: Tensor,
    layout: SlotLayout,
    scale: float,
    pooling: Pooling,
    selection: Selection,
    heads: Tensor | None = None,
    arrived: Tensor | None = None,
) -> None:
    """Choose pages by their scores: what `page_scores_device` and `topk_pages_device` do, if possible in one kernel."""
    selection.check(*summary.shape[:2])
    if not takes(q):
        return choose_pages_ref(q, summary, lengths, layout, scale, pooling, selection, heads)
    out = torch.empty(summary.shape[:3], dtype=torch.float32, device=q.device)
    alone = summary.shape[2] <= ALONE
    score_pages(q, summary, lengths, layout, scale, pooling, out, heads, arrived, selection if alone else None)
    if not alone:
        topk_pages_device(out, lengths, layout, selection, heads, arrived=arrived)
    return None
