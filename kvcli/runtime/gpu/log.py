"""What the steps of a pipeline found, kept on the device and read once in a while: it becomes the counters."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvcli.kernels.query_similarity import Turn
from kvcli.kernels.slot_layout import SlotLayout, selected_count
from kvcli.telemetry.counters import Count, Counters

STEPS = 256
"""Steps between two readings."""


class LayerStepStats(NamedTuple):
    """What a layer finds at a step, of every KV head [b, Hk]: its turn, its misses before attention and after it, and
    what it asked for where that varies.
    """

    turn: Tensor
    missed_now: Tensor
    missed_later: Tensor
    asked: Tensor


@dataclass(frozen=True)
class LoggedLayer:
    """A layer that chooses: KV heads, the layout of what it chooses, bytes of a page of one head in host memory.

    It writes a page to host memory whenever one fills, in the sequences in which it `writes`. A layer that `speculates`
    chooses as its `turn` says, others at every step of a sequence that has `active_from` tokens or more.
    """

    layer: int
    num_kv_heads: int
    layout: SlotLayout
    active_from: tuple[int, ...]
    block_bytes: int
    writes: tuple[bool, ...]
    speculates: bool
    varies: bool

    @property
    def size(self) -> int:
        """Numbers that a KV head of it finds at a step: none where everything follows from lengths."""
        return len(LayerStepStats._fields) if self.block_bytes else 0


class Log:
    """Steps of b sequences, in the layers that choose; `found` is where they write what the present step finds."""

    def __init__(self, layers: Sequence[LoggedLayer], lengths: Sequence[int], device: torch.device):
        self.layers, self.lengths = layers, lengths
        self.sizes = [layer.size * len(lengths) * layer.num_kv_heads for layer in layers]
        self.present = torch.zeros(sum(self.sizes), dtype=torch.int32, device=device)
        self.found = {
            layer.layer: LayerStepStats(*part.view(layer.size, len(lengths), layer.num_kv_heads))
            for layer, part in zip(layers, torch.split(self.present, self.sizes), strict=True)
            if layer.size
        }
        self.steps = torch.zeros(STEPS, len(self.present), dtype=torch.int32, device=device)
        self.next = torch.zeros(1, dtype=torch.int64, device=device)

    @property
    def keeps(self) -> bool:
        """Whether a step finds anything that is kept."""
        return len(self.present) > 0

    def start(self) -> None:
        """Begin with step 0; what was tried out before is forgotten."""
        self.next.zero_()

    def take(self) -> None:
        """Keep what this step found; the same work at every step, so that it may be captured in a graph."""
        if self.keeps:
            self.steps.index_copy_(0, self.next, self.present[None])
            self.next.add_(1).remainder_(STEPS)

    def count(self, counters: Sequence[Counters], steps: range) -> None:
        """Count up to `STEPS` of the last steps, by their numbers; a sequence that had ended counts no more of them."""
        rows = self.steps[[step % STEPS for step in steps]].cpu()
        lengths = torch.tensor(self.lengths) + torch.tensor(steps)[:, None] + 1  # [steps, b], after each
        for layer, part in zip(self.layers, torch.split(rows, self.sizes, 1), strict=True):
            shape = len(steps), len(self.lengths), layer.num_kv_heads
            found = LayerStepStats(*torch.zeros(len(LayerStepStats._fields), *shape, dtype=torch.int32))
            if layer.size:
                found = LayerStepStats(*part.view(len(steps), layer.size, *shape[1:]).unbind(1))
            heads = _by_head(layer, found, lengths)
            amounts = _amounts(layer, heads, found, lengths).tolist()
            for step, of_step in zip(steps, amounts, strict=True):
                for own, counts in zip(counters, of_step, strict=True):
                    if step < len(own.counts):
                        own.add_all(layer.layer, counts, step)
            for row, own in enumerate(counters):
                timed = [index for index, step in enumerate(steps) if own.warmup <= step < len(own.counts)]
                for count, of_heads in heads.items():
                    own.sum_heads(layer.layer, count, of_heads[timed, row].sum(0).tolist())


def _by_head(layer: LoggedLayer, found: LayerStepStats, lengths: Tensor) -> dict[Count, Tensor]:
    """What each KV head of a layer did: found [steps, b, Hk] each, lengths [steps, b] -> [steps, b, Hk] each."""
    corrected = found.turn == Turn.CORRECTED
    active = (lengths >= torch.tensor(layer.active_from))[..., None]
    chose = found.turn != Turn.IDLE if layer.speculates else active
    asked = selected_count(lengths, layer.layout)[..., None] * chose
    return {
        Count.HEADS_CHECKED: corrected | (found.turn == Turn.REUSED),
        Count.HEADS_CORRECTED: corrected,
        Count.PAGES_REQUESTED: found.asked if layer.varies else asked.expand_as(corrected),
        Count.MISSES: found.missed_now + found.missed_later,
    }


def _amounts(layer: LoggedLayer, heads: dict[Count, Tensor], found: LayerStepStats, lengths: Tensor) -> Tensor:
    """What a layer did: of its heads and found [steps, b, Hk] each, lengths [steps, b] -> [steps, b, Count]."""
    sums = {count: of_heads.sum(-1) for count, of_heads in heads.items()}
    indexed = layer.layout.size * layer.layout.group  # tokens that are written out together
    together = layer.num_kv_heads * layer.layout.group * layer.block_bytes
    written = (lengths % indexed == 0) * torch.tensor(layer.writes) * together
    amounts = {
        **sums,
        Count.FIRST_RETRIEVALS: (found.turn == Turn.FIRST).sum(-1),
        Count.BYTES_TO_DEVICE: sums[Count.MISSES] * layer.block_bytes,
        Count.BYTES_TO_HOST: written,
        Count.BYTES_EXPOSED: found.missed_now.sum(-1) * layer.block_bytes,
    }
    none = torch.zeros_like(written)  # graphs do not read from a disk
    return torch.stack([amounts.get(count, none) for count in Count], -1)
