"""The fewest tokens of chosen pages that hold a part of the attention, by keys of four bits (Twilight)."""

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.append_token import NewToken
from kvcli.kernels.group_pooling import Pooling
from kvcli.kernels.host_pages import HostPages
from kvcli.kernels.slot_layout import row_positions
from kvcli.kernels.softmax import Softmax
from kvcli.kernels.topk import Selection
from kvcli.methods.steps.batch_slots import BatchSlots
from kvcli.methods.steps.page_bounds import PageBoundsIndex
from kvcli.methods.steps.plan import Choice, Chosen, StepIndex
from kvcli.methods.steps.rows import put_rows
from kvcli.store.int4_estimate import four_bit_scores, quantise_four_bit


class BoundsAndFourBits(PageBoundsIndex):
    """Bounds of pages, and beside them all keys in four bits: `codes` and `ranges`, see `Int4Keys`."""

    needs_newest = True

    def __init__(self, slots: BatchSlots, pooling: Pooling):
        super().__init__(slots, pooling)
        self.codes, self.ranges = slots.tensors["codes"], slots.tensors["ranges"]

    @override
    def update(self, new: NewToken, host: HostPages | None) -> None:
        super().update(new, host)
        codes, ranges = quantise_four_bit(new.k.flatten(0, 1)[:, None])  # [b * Hk, 1, ...]
        for kept, found in ((self.codes, codes), (self.ranges, ranges)):
            put_rows(kept, self.slots.rows.lengths - 1, found.view(*new.k.shape[:2], -1))


class Nucleus(Choice):
    """The best pages, and of their tokens the fewest that hold the part `p` of each query head's attention."""

    def __init__(self, slots: BatchSlots, p: float):
        self.slots, self.p = slots, p
        layout, device = slots.rows.layout, slots.rows.k.device
        slot = torch.arange(layout.total * layout.size, device=device) // layout.size
        self.always = (slot < layout.sink) | (slot >= layout.first)  # [rows]
        names = ("selections", "weighed", "kept", "fewest", "most")
        self.tally = {name: torch.zeros(len(slots.rows.k), dtype=torch.int64, device=device) for name in names}
        self.tally["fewest"].fill_(torch.iinfo(torch.int64).max)

    @override
    def __call__(self, index: StepIndex, q: Tensor, softmax: Softmax, heads: Tensor, selection: Selection) -> Chosen:
        rows, tensors, pages = self.slots.rows, self.slots.tensors, selection.selected
        index.best(q, softmax, heads, selection)
        positions = row_positions(rows.lengths, rows.layout, pages)  # [b, Hk, rows]
        there, token = positions >= 0, positions.clamp_min(0).long()[..., None]
        codes, ranges = (
            tensors[name].gather(2, token.expand(-1, -1, -1, tensors[name].shape[3])).flatten(0, 1)
            for name in ("codes", "ranges")
        )
        products = four_bit_scores(q.float().view(len(codes), -1, q.shape[2]), codes, ranges)  # [b * Hk, G, rows]
        scores = softmax.scores(products).masked_fill(~there.flatten(0, 1)[:, None], float("-inf"))
        kept = nucleus(scores.softmax(-1), self.always, self.p).any(1).view(there.shape)
        kept = (kept | ~heads[..., None]) & there
        self._count(heads, there, kept)
        return Chosen(pages, kept)

    def _count(self, heads: Tensor, there: Tensor, kept: Tensor) -> None:
        of_head = kept.sum(2) * heads  # [b, Hk]
        self.tally["selections"] += heads.sum(1)
        self.tally["weighed"] += (there & heads[..., None]).sum((1, 2))
        self.tally["kept"] += of_head.sum(1)
        fewest = of_head.masked_fill(~heads, torch.iinfo(torch.int64).max).amin(1)
        torch.minimum(self.tally["fewest"], fewest, out=self.tally["fewest"])
        torch.maximum(self.tally["most"], of_head.amax(1), out=self.tally["most"])


def nucleus(weights: Tensor, always: Tensor, p: float) -> Tensor:
    """Flag the fewest tokens that hold the part `p` of each row's attention, those of `always` [n] bool among them.

    Weights [..., n], each row of sum 1 -> bool [..., n]. Of equal weights the lower index goes first; p = 1 keeps all
    tokens, whatever the sum rounds to.
    """
    if p >= 1:
        return torch.ones_like(weights, dtype=torch.bool)
    order = weights.masked_fill(always, float("inf")).argsort(dim=-1, descending=True, stable=True)
    ranked = weights.gather(-1, order)
    before = ranked.cumsum(-1) - ranked  # the mass of those that rank higher
    kept = torch.empty_like(weights, dtype=torch.bool).scatter_(-1, order, before < p)
    return kept | always
