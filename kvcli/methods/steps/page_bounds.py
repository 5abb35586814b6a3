"""The index of pages by bounds on their keys (Quest, FreeKV, ArkVale): what the keys of a full page allow q.k to be."""

from torch import Tensor
from typing_extensions import override

from kvcli.kernels.append_token import NewToken
from kvcli.kernels.choose_pages import choose_pages
from kvcli.kernels.filled_page import take_in_filled_page
from kvcli.kernels.group_pooling import Pooling
from kvcli.kernels.host_pages import HostPages
from kvcli.kernels.softmax import Softmax
from kvcli.kernels.topk import Selection
from kvcli.methods.steps.batch_slots import BatchSlots
from kvcli.methods.steps.plan import StepIndex


class PageBoundsIndex(StepIndex):
    """`bounds` [b, Hk, n, 2, d] of every full page, or the cuboid about its keys.

    A page is in the window until another one is full: it need not have its bounds before attention.
    """

    needs_newest = False

    def __init__(self, slots: BatchSlots, pooling: Pooling, score_scale: bool = True, cuboid: bool = False):
        self.slots, self.bounds = slots, slots.tensors["bounds"]
        self.pooling, self.score_scale, self.cuboid = pooling, score_scale, cuboid
        self.pages = slots.by_position

    @override
    def best(
        self, q: Tensor, softmax: Softmax, heads: Tensor, selection: Selection, wanted: Tensor | None = None
    ) -> None:
        assert wanted is None, "as many pages as there are places for"
        scale = softmax.scale if self.score_scale else 1.0
        choose_pages(q, self.bounds, *self.scored, scale, self.pooling, selection, heads, self.slots.rows.arrived)

    @override
    def update(self, new: NewToken, host: HostPages | None) -> None:
        take_in_filled_page(self.pages, self.bounds, host, self.cuboid)
