"""How long the sequences of a batch are at a step, on the device: what steps differ by, once for all layers.

Everything is [b] int32 but for flags; a sequence that takes no part has length 0.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcli.methods.steps.batch_slots import BatchSlots
from kvcli.store.layer_slots import LayerSlots


class StepLengths:
    """`seen`: tokens of every sequence, the newest among them; `first`: those whose KV exists before the first step."""

    def __init__(self, lengths: Sequence[int], num_layers: int, device: torch.device):
        self.first = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.seen = torch.zeros_like(self.first)
        self.running = torch.zeros_like(self.first)
        shape = 4, num_layers, len(lengths)
        self.held, self.dropped, self.most, self.period = torch.ones(shape, dtype=torch.int32, device=device)
        self.some_dropped = False
        self.flags: dict[tuple[tuple[int, ...], int], tuple[Tensor, Tensor]] = {}

    def held_in(self, layer: int, parts: Sequence[LayerSlots]) -> Tensor | None:
        """Give the tokens held in a layer, where it does not hold all that were seen; kernels know them as lengths."""
        if all(part.dropped == 0 and part.most is None and part.period is None for part in parts):
            return None
        self.some_dropped = True
        self.dropped[layer] = self.first.new_tensor([part.dropped for part in parts])
        most = torch.iinfo(torch.int32).max
        self.most[layer] = self.first.new_tensor([most if part.most is None else part.most for part in parts])
        self.period[layer] = self.first.new_tensor([most if part.period is None else part.period for part in parts])
        held: Tensor = self.held[layer]
        return held

    def active(self, slots: BatchSlots) -> Tensor:
        """Give the flags [b, Hk] of sequences in which such a layer chooses; layers that are alike share them."""
        key = tuple(slots.active_from), slots.rows.k.shape[1]
        if key not in self.flags:
            least = self.first.new_tensor(slots.active_from)[:, None].expand(-1, key[1])
            self.flags[key] = least, torch.zeros(least.shape, dtype=torch.bool, device=least.device)
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
            self.held.sub_(1).fmod_(self.period).add_(1)  # one that takes no part stays at zero
            torch.minimum(self.held.clamp_min_(0), self.most, out=self.held)
        for least, flags in self.flags.values():
            torch.ge(self.seen[:, None].expand_as(flags), least, out=flags)
