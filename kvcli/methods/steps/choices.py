"""Rules by which scores choose what a step attends to; see `kvcli.methods.steps.plan.Choice`."""

import torch
from torch import Tensor
from typing_extensions import override

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
        names = ("chosen", "choices", "layer_steps")
        self.tally = {name: torch.zeros(b, dtype=torch.int64, device=device) for name in names}

    @override
    def __call__(self, index: StepIndex, q: Tensor, softmax: Softmax, heads: Tensor, selection: Selection) -> Chosen:
        assert isinstance(index, ScoredIndex)
        scores, rows = index.scores(q, softmax, heads), self.slots.rows  # [b, Hk, n]
        near = scores >= scores.amax(2, keepdim=True) - self.alpha
        wanted = (near.sum((1, 2)) // heads.shape[1]).clamp(1, rows.layout.selected).int()
        chose = heads.sum(1)  # KV heads
        self.tally["chosen"] += wanted * chose
        self.tally["choices"] += chose
        self.tally["layer_steps"] += heads[:, 0]
        topk_pages_device(scores, rows.lengths, rows.layout, selection, heads, wanted, rows.arrived)
        return Chosen(selection.selected, asked=wanted)
