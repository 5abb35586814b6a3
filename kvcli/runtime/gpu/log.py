"""What the steps of a pipeline found, kept on the device and read once in a while: it becomes the counters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvcli.kernels.query_similarity import Turn
from kvcli.telemetry.counters import Count, Counters

STEPS = 256
"""Steps between two readings."""


class LayerStepStats(NamedTuple):
    """What a layer finds at a step, of every KV head: its turn, and its misses before attention and after; [b, Hk]."""

    turn: Tensor
    missed_now: Tensor
    missed_later: Tensor


@dataclass(frozen=True)
class LoggedLayer:
    """A layer whose steps are logged: KV heads, pages that each selects, and a page of one of them."""

    layer: int
    num_kv_heads: int
    selected: int
    page_size: int
    block_bytes: int


class Log:
    """Steps of b sequences, in the layers that retrieve; `found` is where they write what the present step finds."""

    def __init__(self, layers: Sequence[LoggedLayer], lengths: Sequence[int], device: torch.device):
        self.layers, self.lengths = layers, lengths
        self.sizes = [3 * len(lengths) * layer.num_kv_heads for layer in layers]
        self.present = torch.zeros(sum(self.sizes), dtype=torch.int32, device=device)
        self.found = {
            layer.layer: LayerStepStats(*part.view(3, len(lengths), layer.num_kv_heads))
            for layer, part in zip(layers, torch.split(self.present, self.sizes), strict=True)
        }
        self.steps = torch.zeros(STEPS, len(self.present), dtype=torch.int32, device=device)
        self.next = torch.zeros(1, dtype=torch.int64, device=device)

    def start(self) -> None:
        """Begin with step 0; what was tried out before is forgotten."""
        self.next.zero_()

    def take(self) -> None:
        """Keep what this step found; the same work at every step, so that it may be captured in a graph."""
        self.steps.index_copy_(0, self.next, self.present[None])
        self.next.add_(1).remainder_(STEPS)

    def count(self, counters: Sequence[Counters], steps: range) -> None:
        """Count up to `STEPS` of the last steps, by their numbers; a sequence that had ended counts no more of them."""
        rows = self.steps[[step % STEPS for step in steps]].cpu()
        lengths = torch.tensor(self.lengths) + torch.tensor(steps)[:, None] + 1  # [steps, b], after each
        for layer, part in zip(self.layers, torch.split(rows, self.sizes, 1), strict=True):
            found = LayerStepStats(*part.view(len(steps), 3, len(self.lengths), layer.num_kv_heads).unbind(1))
            heads = _by_head(layer, found)
            amounts = _amounts(layer, heads, found, lengths).tolist()
            for step, of_step in zip(steps, amounts, strict=True):
                for own, counts in zip(counters, of_step, strict=True):
                    if step < len(own.counts):
                        own.add_all(layer.layer, counts, step)
            for row, own in enumerate(counters):
                timed = [index for index, step in enumerate(steps) if own.warmup <= step < len(own.counts)]
                for count, of_heads in heads.items():
                    own.sum_heads(layer.layer, count, of_heads[timed, row].sum(0).tolist())


def _by_head(layer: LoggedLayer, found: LayerStepStats) -> dict[Count, Tensor]:
    """What each KV head of a layer did: found [steps, b, Hk] each -> [steps, b, Hk] each."""
    corrected = found.turn == Turn.CORRECTED
    return {
        Count.HEADS_CHECKED: corrected | (found.turn == Turn.REUSED),
        Count.HEADS_CORRECTED: corrected,
        Count.PAGES_REQUESTED: layer.selected * (found.turn != Turn.IDLE),
        Count.MISSES: found.missed_now + found.missed_later,
    }


def _amounts(layer: LoggedLayer, heads: dict[Count, Tensor], found: LayerStepStats, lengths: Tensor) -> Tensor:
    """What a layer did: of its heads and found [steps, b, Hk] each, lengths [steps, b] -> [steps, b, Count]."""
    sums = {count: of_heads.sum(-1) for count, of_heads in heads.items()}
    now = found.missed_now.sum(-1)
    amounts = {
        **sums,
        Count.FIRST_RETRIEVALS: (found.turn == Turn.FIRST).sum(-1),
        Count.BYTES_TO_DEVICE: sums[Count.MISSES] * layer.block_bytes,
        Count.BYTES_TO_HOST: (lengths % layer.page_size == 0) * (layer.num_kv_heads * layer.block_bytes),
        Count.BYTES_EXPOSED: now * layer.block_bytes,
    }
    return torch.stack([amounts[count] for count in Count], -1)
