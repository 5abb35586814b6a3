"""Speculation that is told what to find: for measuring a pipeline on made-up weights, whose queries mean nothing.

All the work is done as ever; then which heads wait, and which pages they select, are not what it found but what a rate
says. Texts that come out are worthless.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.resolve_pages import MissList, resolve_pages_device
from kvcli.kernels.slot_layout import SlotLayout, page_count
from kvcli.kernels.softmax import Softmax
from kvcli.methods.steps.over_slots import Chosen
from kvcli.runtime.gpu.layers import PlannedLayer

PATTERNS = 64
"""Steps after which the same heads are corrected again."""


@dataclass(frozen=True)
class DecisionRates:
    """Part of the KV heads that a step corrects, and part of a head's pages that a step exchanges."""

    corrected: float
    turnover: float


class SyntheticDecisions:
    """What the heads [b, Hk] of all layers do at a step, and what pages [b, Hk, k] they select, the same in all layers.

    A selection is a stretch of the pages that sequences of these first `lengths` [b] have to choose from, and moves on
    by `turnover` of its length.
    """

    def __init__(self, rates: DecisionRates, num_layers: int, num_kv_heads: int, layout: SlotLayout, lengths: Tensor):
        b, device = len(lengths), lengths.device
        draw = torch.rand(PATTERNS, num_layers, b, num_kv_heads, generator=torch.Generator().manual_seed(0))
        self.patterns = (draw < rates.corrected).to(device)
        self.sink, self.shift = layout.sink, round(rates.turnover * layout.selected)
        self.candidates = (page_count(lengths, layout) - layout.sink - layout.window)[:, None]
        if int(self.candidates.min()) <= layout.selected:
            raise ValueError("rates are for sequences that have outgrown their slots")
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.now = torch.zeros(num_layers, b, num_kv_heads, dtype=torch.bool, device=device)
        self.others, self.later = torch.zeros_like(self.now), torch.zeros_like(self.now)
        self.selected = torch.zeros(b, num_kv_heads, layout.selected, dtype=torch.int32, device=device)
        self.order = torch.arange(layout.selected, device=device)

    def advance(self, lengths: Tensor) -> None:
        """Begin a step with sequences of these lengths [b], 0 for those that take no part."""
        taking_part = (lengths > 0)[:, None]
        wait = self.patterns.index_select(0, self.step % PATTERNS)[0]
        torch.logical_and(wait, taking_part, out=self.now)
        torch.logical_not(self.now, out=self.others)
        torch.logical_and(~wait, taking_part, out=self.later)
        pages = self.sink + (self.step * self.shift + self.order) % self.candidates  # [b, k]
        self.selected.copy_(pages.sort(1).values[:, None])
        self.step.add_(1)


class SyntheticDecisionLayer(PlannedLayer):
    """A layer that compares, scores and selects, and then does as it is told; the log has what it found itself."""

    def follow(self, forced: SyntheticDecisions, layer: int) -> None:
        """Take what to do from `forced`, as layer `layer`."""
        assert self.speculation is not None
        self.forced, heads = forced, self.speculation
        heads.waiting, heads.others, heads.reusing = forced.now[layer], forced.others[layer], forced.later[layer]

    @override
    def select(self, q: Tensor, heads: Tensor, softmax: Softmax, misses: MissList | None = None) -> Chosen:
        """Do the work, and take the pages that were told."""
        super().select(q, heads, softmax)
        if self.recalls is not None and misses is not None:
            resolve_pages_device(self.recalls.resident, self.forced.selected, misses, heads)
        return Chosen(self.forced.selected)
