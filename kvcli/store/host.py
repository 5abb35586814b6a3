"""The full KV of a layer in host memory, by pages (FreeKV, section 4.2).

One page of one KV head is a contiguous block of 2*p*d elements, keys then values, so that a recall moves it in one
piece (16 KiB at p = 32, d = 128 in bf16).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.store.cache import Tiers, nbytes


class HostPool:
    """Full pages of one layer of one sequence, HND: blocks [capacity in pages, Hk, 2, p, d]."""

    def __init__(self, num_kv_heads: int, head_dim: int, page_size: int, num_pages: int, tiers: Tiers):
        self.blocks = tiers.on_host(num_pages, num_kv_heads, 2, page_size, head_dim)

    def write(self, first: int, k: Tensor, v: Tensor) -> int:
        """Store consecutive full pages from page `first` on: k, v [Hk, n, p, d]. Returns the bytes moved."""
        target = self.blocks[first : first + k.shape[1]]
        if k.is_cuda:  # change the layout on the device, so that one contiguous copy crosses the bus
            target.copy_(torch.stack((k, v), 2).transpose(0, 1).contiguous(), non_blocking=True)
        else:
            target[:, :, 0].copy_(k.transpose(0, 1))
            target[:, :, 1].copy_(v.transpose(0, 1))
        return nbytes(target)

    def gather(self, pages: Tensor, heads: Tensor) -> Tensor:
        """Collect block (pages[i], heads[i]) for every i -> [m, 2, p, d] in host memory.

        Bringing the indices to the host waits for the device, and with it for every earlier `write` of its stream.
        """
        rows = pages * self.blocks.shape[1] + heads
        return self.blocks.flatten(0, 1).index_select(0, rows.to(self.blocks.device))

    def nbytes(self) -> int:
        """Bytes in host memory."""
        return nbytes(self.blocks)
