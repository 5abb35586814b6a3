"""Rules by which scores choose what a step attends to; see `kvcli.methods.steps.plan.Rule`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.near_best import NearTally, count_near_best, near_best
from kvcli.kernels.softmax import Softmax
from kvcli.kernels.topk import Selection, topk_pages, topk_pages_device
from kvcli.methods.steps.batch_slots import BatchSlots
from kvcli.methods.steps.over_slots import Choice, Chosen, ScoredIndex, StepIndex
from kvcli.methods.steps.plan import Rule
from kvcli.methods.steps.step import LayerStep, Picked


@dataclass(frozen=True)
class Best(Rule):
    """What scores best, as much as there are places for.

    With a `part`: the best for that part of all places; then what is on the device, then others, by score (ArkVale).
    """

    part: float | None = None

    @override
    def pick(self, step: LayerStep, q: Tensor) -> Picked:
        scores, places = step.scores(q), step.cache.selected  # [Hk, n]
        if self.part is not None:
            with step.span("select"):
                scores = self._standing(scores, step.cache.resident - step.candidates.start, places)
        return Picked(step.best(scores, places))

    def _standing(self, scores: Tensor, held: Tensor, places: int) -> Tensor:
        """Put what is best or `held` before all else, each by its scores [Hk, n]: int64 [Hk, n], more is better.

        held [Hk, places]: candidates on the device, below 0 for none. The bits of positive numbers, as whole numbers,
        are in their order; those of negative ones are once all but the sign are turned over.
        """
        ahead = scores.new_zeros(scores.shape[0], scores.shape[1] + 1, dtype=torch.bool)  # column 0 is of no page
        ahead = ahead.scatter_(1, held.clamp_min(-1) + 1, True)[:, 1:]
        ahead.scatter_(1, topk_pages(scores, self.first(places)), True)
        bits = (scores.float() + 0.0).view(torch.int32)  # zeros of either sign are equal
        return (bits ^ (bits >> 31 & 0x7FFFFFFF)).long() + (ahead.long() << 33)

    def first(self, places: int) -> int:
        """How many are the best wherever they lie; 0: all."""
        return 0 if self.part is None else max(1, round(self.part * places))

    @override
    def over_slots(self, slots: BatchSlots) -> Choice:
        return BestOverSlots(self.first(slots.rows.layout.selected))


class BestOverSlots(Choice):
    """The best scores of a batch; see `Selection.first`."""

    def __init__(self, first: int):
        self.first = first

    @override
    def __call__(self, index: StepIndex, q: Tensor, softmax: Softmax, heads: Tensor, selection: Selection) -> Chosen:
        index.best(q, softmax, heads, selection._replace(first=self.first))
        return Chosen(selection.selected)


@dataclass(frozen=True)
class NearBest(Rule):
    """Tokens that score within `alpha` of the best, as many for a KV head as the heads want on average (InfiniGen)."""

    alpha: float

    @override
    def pick(self, step: LayerStep, q: Tensor) -> Picked:
        scores = step.scores(q)  # [Hk, n]
        with step.span("select"):
            wanted = int(near_best(scores, self.alpha).float().mean())
        tokens = step.best(scores, min(wanted, step.cache.budget.max_selected))
        step.tally(chosen=tokens.numel(), choices=len(tokens), layer_steps=int(step.foretold))
        return Picked(tokens)

    @override
    def over_slots(self, slots: BatchSlots) -> Choice:
        return NearBestOverSlots(slots, self.alpha)


class NearBestOverSlots(Choice):
    """The same of a batch."""

    def __init__(self, slots: BatchSlots, alpha: float):
        self.slots, self.alpha = slots, alpha
        b, device = len(slots.rows.k), slots.rows.k.device
        self.counts = NearTally(*torch.zeros(len(NearTally._fields), b, dtype=torch.int64, device=device))
        self.tally = self.counts._asdict()
        self.wanted, self.arrived = torch.zeros(2, b, dtype=torch.int32, device=device)

    @override
    def __call__(self, index: StepIndex, q: Tensor, softmax: Softmax, heads: Tensor, selection: Selection) -> Chosen:
        assert isinstance(index, ScoredIndex)
        scores, rows = index.scores(q, softmax, heads), self.slots.rows  # [b, Hk, n]
        count_near_best(scores, heads, self.alpha, rows.layout.selected, self.wanted, self.counts, self.arrived)
        topk_pages_device(scores, rows.lengths, rows.layout, selection, heads, self.wanted, rows.arrived)
        return Chosen(selection.selected, asked=self.wanted)
