"""The index of pages by bounds on their keys (Quest, FreeKV, ArkVale): what the keys of a full page allow q.k to be."""

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.append_token import NewToken
from kvcli.kernels.group_pooling import Pooling
from kvcli.kernels.page_scores import page_scores_device
from kvcli.kernels.page_summary import summarise_filled_page
from kvcli.kernels.softmax import Softmax
from kvcli.methods.steps.batch_slots import BatchSlots
from kvcli.methods.steps.plan import StepIndex


class PageBoundsIndex(StepIndex):
    """`bounds` [b, Hk, n, 2, d] of every full page, or the cuboid about its keys.

    A page is in the window until another one is full: it need not have its bounds before attention.
    """

    needs_newest = False

    def __init__(self, slots: BatchSlots, pooling: Pooling, score_scale: bool = True, cuboid: bool = False):
        self.rows, self.bounds = slots.rows, slots.tensors["bounds"]
        self.pooling, self.score_scale, self.cuboid = pooling, score_scale, cuboid
        self.pages = slots.by_position

    @override
    def scores(self, q: Tensor, softmax: Softmax, heads: Tensor | None) -> Tensor:
        scale = softmax.scale if self.score_scale else 1.0
        out = torch.empty(self.bounds.shape[:3], dtype=torch.float32, device=q.device)
        page_scores_device(q, self.bounds, self.rows.lengths, self.rows.layout, scale, self.pooling, out, heads)
        return out

    @override
    def update(self, new: NewToken) -> None:
        summarise_filled_page(self.pages, self.bounds, self.cuboid)
