"""Rules by which scores choose what a step attends to; see `kvcli.methods.steps.plan.Choice`."""

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.near_best import NearTally, count_near_best
from kvcli.kernels.softmax import Softmax
from kvcli.kernels.topk import Selection, topk_pages_device
from kvcli.methods.steps.batch_slots import BatchSlots
from kvcli.methods.steps.plan import Choice, Chosen, ScoredIndex, StepIndex


class BestScores(Choice):
    """What scores best, as much as the layout has places for.

    With a `part`: the best for that part of all places; then what is on the device, then others, by score (ArkVale).
    """

    def __init__(self, slots: BatchSlots, part: float | None = None):
        self.first = 0 if part is None else max(1, round(part * slots.rows.layout.selected))

    @override
    def __call__(self, index: StepIndex, q: Tensor, softmax: Softmax, heads: Tensor, selection: Selection) -> Chosen:
        index.best(q, softmax, heads, selection._replace(first=self.first))
        return Chosen(selection.selected)


class NearBest(Choice):
    """Tokens that score within `alpha` of the best, as many for a KV head as the heads want on average (InfiniGen)."""

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
