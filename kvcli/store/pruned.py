"""A layer that keeps a part of its prompt, and every token after it, on the device or in host memory."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.store.cache import Footprint, Tiers, Traffic, nbytes
from kvcli.store.token_major import TokenMajorCache


class PrunedCache(TokenMajorCache):
    """The kept tokens of each KV head in order: k, v [rows, Hk, d] in one tier, `positions` [Hk, rows] on the device.

    Until the prompt comes, `rows` is a plan, an upper bound for most, and nothing is allocated. From then on the memory
    held is that of the tokens kept and those to come, up to `capacity` with what was dropped.
    """

    def __init__(self, num_kv_heads: int, head_dim: int, rows: int, capacity: int, tiers: Tiers, offload: bool = False):
        planned = Tiers.for_device(torch.device("meta"), tiers.dtype)
        super().__init__(num_kv_heads, head_dim, rows, planned, offload)
        self.capacity, self.tiers = capacity, tiers
        self.positions = planned.on_device(num_kv_heads, rows, dtype=torch.int32)

    def load(self, k: Tensor, v: Tensor) -> int:
        """See `LayerCache.load`; keeps everything."""
        return self.load_subset(k, v, torch.arange(k.shape[1], device=k.device).expand(k.shape[0], -1))

    def load_subset(self, k: Tensor, v: Tensor, kept: Tensor) -> int:
        """Take over a prompt k, v [Hk, s, d], but only the tokens `kept` [Hk, n], ascending. Returns as `load`."""
        self.length = k.shape[1]
        return self._hold(k, v, kept, kept)

    def prune(self, rows: Tensor) -> None:
        """Drop all but `rows` [Hk, n], ascending, of what is held on the device, and give their memory back."""
        if rows.shape[1] < self.held:
            k, v, _ = self.fetch()
            self._hold(k, v, rows, self.positions.take_along_dim(rows, 1))

    def append(self, k: Tensor, v: Tensor) -> int:
        """See `LayerCache.append`."""
        self.positions[:, self.held] = self.length
        return super().append(k, v)

    def attended(self) -> Tensor:
        """See `LayerCache.attended`."""
        mask = torch.zeros(len(self.positions), self.length, dtype=torch.bool, device=self.positions.device)
        return mask.scatter_(1, self.positions[:, : self.held].long(), True)

    def footprint(self) -> Footprint:
        """See `LayerCache.footprint`."""
        return super().footprint() + Footprint(device=nbytes(self.positions))

    def traffic(self, length: int) -> Traffic:
        """See `LayerCache.traffic`; of a prompt of which as much is kept as there are rows for."""
        return super().traffic(max(0, length - self.capacity + len(self.k)))

    def _hold(self, k: Tensor, v: Tensor, rows: Tensor, positions: Tensor) -> int:
        """Make room for `rows` [Hk, n] of k, v [Hk, m, d] and for all tokens to come, and take over the former."""
        num_kv_heads, self.held = rows.shape
        room = self.held + self.capacity - self.length
        with torch.inference_mode(False):  # like every cache, writable wherever decoding goes on
            self.k, self.v = (self._rows(room, num_kv_heads, k.shape[2]) for _ in range(2))
            self.positions = self.tiers.on_device(num_kv_heads, room, dtype=torch.int32)
        self._fill(self.k, k.take_along_dim(rows[..., None], 1))
        self._fill(self.v, v.take_along_dim(rows[..., None], 1))
        self.positions[:, : self.held] = positions
        return self._moved(self.held)
