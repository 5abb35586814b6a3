"""How long the sequences of a batch are at a step, on the device: what steps differ by, once for all layers.

Everything is [b] int32 but for flags; a sequence that takes no part has length 0.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcli.kernels.slot_layout import PagedKV, SlotLayout
from kvcli.store.layer_slots import LayerSlots


class StepLengths:
    """`seen`: tokens of every sequence, the newest among them; `first`: those whose KV exists before the first step."""

    def __init__(self, lengths: Sequence[int], num_layers: int, device: torch.device):
        self.first = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.seen = torch.zeros_like(self.first)
        self.running = torch.zeros_like(self.first)
        self.held, self.dropped, self.most = torch.zeros(3, num_layers, len(lengths), dtype=torch.int32, device=device)
        self.some_dropped = False
        self.flags: dict[tuple[SlotLayout, int, int], tuple[PagedKV, Tensor]] = {}

    def of(self, layer: int, parts: Sequence[LayerSlots]) -> Tensor:
        """Give the tokens held in a layer, where it does not hold all that were seen; kernels know them as lengths."""
        if all(part.dropped == 0 and part.most is None for part in parts):
            return self.seen
        self.some_dropped = True
        self.dropped[layer] = self.first.new_tensor([part.dropped for part in parts])
        most = torch.iinfo(torch.int32).max
        self.most[layer] = self.first.new_tensor([most if part.most is None else part.most for part in parts])
        held: Tensor = self.held[layer]
        return held

    def outgrown(self, rows: PagedKV) -> Tensor:
        """Give the flags [b, Hk] of sequences that have outgrown such slots; layers that are alike share them."""
        key = rows.layout, rows.k.shape[1], rows.lengths.data_ptr()
        if key not in self.flags:
            self.flags[key] = rows, torch.zeros(rows.k.shape[:2], dtype=torch.bool, device=rows.k.device)
        return self.flags[key][1]

    def start(self) -> None:
        """Let the sequences take part."""
        self.seen.copy_(self.first)
        self.running.fill_(1)

    def end(self, row: int) -> None:
        """Let a sequence take part no more."""
        self.seen[row] = 0
        self.running[row] = 0

    def advance(self) -> None:
        """Begin a step."""
        self.seen.add_(self.running)
        if self.some_dropped:
            torch.sub(self.seen, self.dropped, out=self.held)
            torch.minimum(self.held.clamp_min_(0), self.most, out=self.held)
        for rows, flags in self.flags.values():
            torch.gt(rows.lengths[:, None].expand_as(flags), rows.layout.budget * rows.layout.size, out=flags)
