"""A layer that keeps a part of its prompt and every token after it (SnapKV and its like)."""

from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.slot_layout import SlotLayout
from kvcli.store.cache import Footprint, Tiers, Traffic, nbytes
from kvcli.store.layer_slots import LayerSlots
from kvcli.store.state import Settled
from kvcli.store.token_major import TokenMajorCache


class PrunedCache(TokenMajorCache):
    """The kept tokens of each KV head in order: k, v [rows, Hk, d] on the device or, with `offload`, in host memory.

    Their `positions` [Hk, rows] are on the device. Until the prompt comes nothing is allocated, and `rows` is planned,
    for most methods an upper bound. Then there are as many rows as kept tokens and tokens to come, of `capacity`.
    """

    def __init__(self, num_kv_heads: int, head_dim: int, rows: int, capacity: int, tiers: Tiers, offload: bool = False):
        meta = torch.device("meta")
        planned = replace(tiers, device=meta, host=meta, pinned=None, staging=None)
        super().__init__(num_kv_heads, head_dim, rows, planned, offload)
        self.capacity, self.tiers = capacity, tiers
        self.positions = planned.on_device(num_kv_heads, rows, dtype=torch.int32)

    @override
    def take(self, k: Tensor, v: Tensor) -> int:
        """What is kept shows when all of the prompt is there."""
        return 0

    @override
    def load(self, k: Tensor, v: Tensor) -> int:
        """Keep every token of the prompt."""
        return self.load_subset(k, v, torch.arange(k.shape[1], device=k.device).expand(k.shape[0], -1))

    def load_subset(self, k: Tensor, v: Tensor, kept: Tensor) -> int:
        """Store of a prompt k, v [Hk, s, d] the tokens `kept` [Hk, n], ascending; returns as `load` does."""
        self.length = k.shape[1]
        return self._hold(k, v, kept, kept)

    def prune(self, rows: Tensor) -> None:
        """Keep of the rows held only `rows` [Hk, n], ascending, and free the memory of the others."""
        if rows.shape[1] < self.held:
            k, v, _ = self.fetch()
            self._hold(k, v, rows, self.positions.take_along_dim(rows, 1))

    @override
    def append(self, k: Tensor, v: Tensor) -> int:
        self.positions[:, self.held] = self.length
        return super().append(k, v)

    @override
    def settled(self) -> list[Settled]:
        return [*super().settled(), Settled(self.positions, 1, self.held)]

    @override
    def attended(self) -> Tensor:
        mask = torch.zeros(len(self.positions), self.length, dtype=torch.bool, device=self.positions.device)
        return mask.scatter_(1, self.positions[:, : self.held].long(), True)

    @override
    def as_slots(self) -> LayerSlots | None:
        if self.offload:
            return None
        kv = self.kv.transpose(1, 2)  # [t, Hk, rows, d]
        return LayerSlots(kv, SlotLayout.everything(kv.shape[2]), dropped=self.length - self.held)

    @override
    def adopt_slots(self, slots: LayerSlots) -> None:
        self._hold_in(slots.kv.transpose(1, 2))

    @override
    def footprint(self) -> Footprint:
        return super().footprint() + Footprint(device=nbytes(self.positions))

    @override
    def traffic(self, length: int) -> Traffic:
        """Count for a prompt of which as much is kept as was planned."""
        return super().traffic(max(0, length - self.capacity + self.kv.shape[1]))

    def _hold(self, k: Tensor, v: Tensor, rows: Tensor, positions: Tensor) -> int:
        """Allocate for `rows` [Hk, n] of k, v [Hk, m, d] and all tokens to come, and store these rows."""
        num_kv_heads, self.held = rows.shape
        room = self.held + self.capacity - self.length
        with torch.inference_mode(False):  # like every cache, writable wherever decoding goes on
            self._hold_in(self._rows(room))
            self.positions = self.tiers.on_device(num_kv_heads, room, dtype=torch.int32)
        kept_k, kept_v = (x.take_along_dim(rows[..., None], 1) for x in (k, v))
        self._fill(kept_k, kept_v)
        self.positions[:, : self.held] = positions
        return self._moved(self.held)
