"""The step of Twilight: the fewest tokens of chosen pages that hold a part of the attention, by keys of four bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.append import NewToken
from kvcli.kernels.recall import HostPages
from kvcli.kernels.softmax import Softmax
from kvcli.kernels.topk import Selection
from kvcli.methods.step import (
    BatchSlots,
    Choice,
    Chosen,
    LayerStep,
    PageBounds,
    PageBoundsOverSlots,
    Picked,
    Rule,
    StepIndex,
)
from kvcli.methods.twilight import kernels as twilight_kernels
from kvcli.methods.twilight.kernels import NucleusTally, keep_nucleus, quantise_newest


class BoundsAndFourBits(PageBounds):
    """Bounds of pages, and in addition all keys in four bits."""

    @override
    def over_slots(self, slots: BatchSlots) -> BoundsAndFourBitsOverSlots:
        return BoundsAndFourBitsOverSlots(slots, self)


class BoundsAndFourBitsOverSlots(PageBoundsOverSlots):
    """`BoundsAndFourBits` for a batch: `codes` and `ranges`, see `Int4Keys`."""

    needs_newest = True

    def __init__(self, slots: BatchSlots, of: PageBounds):
        super().__init__(slots, of)
        self.codes, self.ranges = slots.tensors["codes"], slots.tensors["ranges"]

    @override
    def update(self, new: NewToken, host: HostPages | None) -> None:
        super().update(new, host)
        quantise_newest(new.k, self.slots.rows.lengths, self.codes, self.ranges)


@dataclass(frozen=True)
class Nucleus(Rule):
    """Chooses the best pages, and of their tokens the fewest that hold the part `p` of each query head's attention.

    Counts what `NucleusTally` names.
    """

    p: float

    @override
    def pick(self, step: LayerStep, q: Tensor) -> Picked:
        cache = step.cache
        pages = step.best(step.scores(q), cache.selected)  # [Hk, k]
        with step.span("score"):
            tokens, always = cache.tokens_of(pages)  # [Hk, n], [n]
            weights = step.softmax.scores(cache.estimate.products(q, tokens)).softmax(-1)  # [Hk, G, n]
        with step.span("select"):
            kept = twilight_kernels.keep_nucleus_cpu(weights, always, self.p)  # [Hk, n]
        counts: list[int] = kept.sum(1).tolist()
        tally = (len(counts), tokens.numel(), sum(counts), min(counts), max(counts))
        step.tally(**dict(zip(NucleusTally._fields, tally, strict=True)))
        return Picked(pages, tokens, kept)

    @override
    def over_slots(self, slots: BatchSlots) -> Choice:
        return NucleusOverSlots(slots, self.p)


class NucleusOverSlots(Choice):
    """`Nucleus` for a batch."""

    def __init__(self, slots: BatchSlots, p: float):
        self.slots, self.p = slots, p
        (b, num_kv_heads), layout = slots.rows.k.shape[:2], slots.rows.layout
        self.kept = torch.empty(
            b, num_kv_heads, layout.total * layout.size, dtype=torch.bool, device=slots.rows.k.device
        )
        counts = torch.zeros(len(NucleusTally._fields), b, dtype=torch.int64, device=slots.rows.k.device)
        self.counts = NucleusTally(*counts)
        self.counts.fewest.fill_(torch.iinfo(torch.int64).max)
        self.tally = self.counts._asdict()
        self.arrived: Tensor | None = None

    @override
    def __call__(self, index: StepIndex, q: Tensor, softmax: Softmax, heads: Tensor, selection: Selection) -> Chosen:
        index.best(q, softmax, heads, selection)
        if self.arrived is None:  # the first step, which no graph captures, tells how many query heads there are
            self.arrived = torch.zeros(q.shape[:2], dtype=torch.int32, device=q.device)
        resident = selection.selected if selection.resident is None else selection.resident  # the page in each slot
        rows, tensors = self.slots.rows._replace(resident=resident), self.slots.tensors
        codes, ranges = tensors["codes"], tensors["ranges"]
        keep_nucleus(q, rows, codes, ranges, softmax, self.p, heads, self.kept, self.counts, self.arrived)
        return Chosen(selection.selected, self.kept)
