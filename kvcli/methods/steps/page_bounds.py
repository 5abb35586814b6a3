"""The index of pages by bounds on their keys (Quest, FreeKV, ArkVale): what the keys of a full page allow q.k to be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from typing_extensions import override

from kvcli.kernels.append import NewToken, take_in_filled_page
from kvcli.kernels.group_pooling import HeadPooling
from kvcli.kernels.host_pages import HostPages
from kvcli.kernels.page_scores import choose_pages, page_scores
from kvcli.kernels.softmax import Softmax
from kvcli.kernels.topk import Selection
from kvcli.methods.steps.batch_slots import BatchSlots
from kvcli.methods.steps.over_slots import StepIndex
from kvcli.methods.steps.plan import Index


@dataclass(frozen=True)
class PageBounds(Index):
    """The most that q.k can be in a page by its summary, pooled over the query heads of a KV head.

    The summary is the least and the greatest value of each channel, or a `cuboid` about the keys: a cache says which,
    and where pages are indexed over slots this says the same. Without `score_scale` scores are not scaled.
    """

    pooling: HeadPooling
    score_scale: bool = True
    cuboid: bool = False

    @override
    def scores(self, cache: Any, q: Tensor, candidates: range, softmax: Softmax) -> Tensor:
        return page_scores(q, cache.summaries.of(candidates), self.scale(softmax), self.pooling)

    def scale(self, softmax: Softmax) -> float:
        """What q.k is multiplied by."""
        return softmax.scale if self.score_scale else 1.0

    @override
    def over_slots(self, slots: BatchSlots) -> PageBoundsOverSlots:
        return PageBoundsOverSlots(slots, self)


class PageBoundsOverSlots(StepIndex):
    """`bounds` [b, Hk, n, 2, d] of every full page, or the cuboid about its keys.

    A page is in the window until another one is full: it need not have its bounds before attention.
    """

    needs_newest = False

    def __init__(self, slots: BatchSlots, of: PageBounds):
        assert of.pooling != "none", "query heads that choose alone are served phase after phase"
        self.slots, self.bounds, self.of, self.pooling = slots, slots.tensors["bounds"], of, of.pooling
        self.pages = slots.by_position

    @override
    def best(
        self, q: Tensor, softmax: Softmax, heads: Tensor, selection: Selection, wanted: Tensor | None = None
    ) -> None:
        assert wanted is None, "as many pages as there are places for"
        scale, arrived = self.of.scale(softmax), self.slots.rows.arrived
        choose_pages(q, self.bounds, *self.scored, scale, self.pooling, selection, heads, arrived)

    @override
    def update(self, new: NewToken, host: HostPages | None) -> None:
        take_in_filled_page(self.pages, self.bounds, host, self.of.cuboid)
