"""The full KV of a layer in host memory, by pages (FreeKV, section 4.2), in one of the two layouts of `HostPages`.

hnd   [pages, Hk, 2, p, d]   one page of one KV head is a contiguous block of 2*p*d elements, keys then values, so
                             that a recall moves it in one piece (16 KiB at p = 32, d = 128 in bf16)
nhd   [pages, 2, p, Hk, d]   the paper's ablation: it lies in 2*p pieces
"""

from __future__ import annotations

import copy
import math
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from kvcli.kernels.host_pages import HostLayout
from kvcli.store.cache import Tiers

PIECE_BYTES = 256 << 20
"""About as much is pinned at once: small enough that the first layer need not wait for long."""

STAGED_BYTES = 32 << 20
"""As much of a prompt's KV is on its way to the host in another layout at once: enough for the bus's full rate."""


class HostPagePool:
    """Full pages of one layer of one sequence.

    Where memory is pinned, they lie in several tensors of equally many pages, the last one shorter, that get ready in
    the background; elsewhere in one. Whoever reads or writes a page waits for its memory, and may learn that there is
    none (KvcliError).
    """

    def __init__(
        self,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        num_pages: int,
        tiers: Tiers,
        layout: HostLayout = "hnd",
    ):
        self.layout, self.tiers, self.num_pages = layout, tiers, num_pages
        if layout == "hnd":
            self.page_shape = (num_kv_heads, 2, page_size, head_dim)
        else:
            self.page_shape = (2, page_size, num_kv_heads, head_dim)
        self.page_bytes = math.prod(self.page_shape) * tiers.dtype.itemsize
        self.per_piece = max(1, num_pages if tiers.pinned is None else PIECE_BYTES // self.page_bytes)
        self._coming = self._allocate()

    @property
    def pieces(self) -> list[Tensor]:
        """All pages, [n, Hk, 2, p, d] or [n, 2, p, Hk, d] each; waits until all are there."""
        return [piece.result() for piece in self._coming]

    def write(self, first: int, k: Tensor, v: Tensor) -> int:
        """Store consecutive full pages from page `first` on: k, v [Hk, n, p, d]. Returns the bytes moved."""
        stop = first + k.shape[1]
        for index in range(first // self.per_piece, -(-stop // self.per_piece)):
            start = index * self.per_piece
            here = slice(max(first, start), min(stop, start + self.per_piece))
            target = self._coming[index].result()[here.start - start : here.stop - start]
            part = slice(here.start - first, here.stop - first)
            self._fill(target, k[:, part], v[:, part])
        return (stop - first) * self.page_bytes

    def gather(self, pages: Tensor, heads: Tensor) -> Tensor:
        """Collect block (pages[i], heads[i]) for every i -> [m, 2, p, d] in host memory.

        Bringing the indices to the host waits for the device, and with it for every earlier `write` of its stream.
        """
        pieces = self.pieces
        pages, heads = pages.to(pieces[0].device), heads.to(pieces[0].device)
        if len(pieces) == 1:
            return self._take(pieces[0], pages, heads)
        blocks = self._blocks(pieces[0]).new_empty(len(pages), *self._blocks(pieces[0]).shape[2:])
        for index, piece in enumerate(pieces):
            here = (pages // self.per_piece == index).nonzero()[:, 0]
            blocks[here] = self._take(piece, pages[here] % self.per_piece, heads[here])
        return blocks

    def nbytes(self) -> int:
        """Bytes in host memory."""
        return self.num_pages * self.page_bytes

    def __deepcopy__(self, memo: dict[int, Any]) -> HostPagePool:
        """A copy has memory of its own, pinned like this one's."""
        if self.tiers.device.type == "cuda":
            torch.cuda.synchronize(self.tiers.device)  # pages may still be on their way here
        other = copy.copy(self)
        other._coming = other._allocate()
        for there, here in zip(other.pieces, self.pieces, strict=True):
            there.copy_(here)
        return other

    def _allocate(self) -> list[Future[Tensor]]:
        starts = range(0, max(1, self.num_pages), self.per_piece)
        return [self.tiers.on_host_async(min(self.per_piece, self.num_pages - at), *self.page_shape) for at in starts]

    def _fill(self, target: Tensor, k: Tensor, v: Tensor) -> None:
        """Put pages k, v [Hk, n, p, d] into their place."""
        if not k.is_cuda:
            self._fill_blocks(target, k, v)
            return
        # The layout changes on the device, so that contiguous copies cross the bus; a little at a time, for room.
        at_once = max(1, STAGED_BYTES // self.page_bytes)
        for part in map(slice, range(0, len(target), at_once), range(at_once, len(target) + at_once, at_once)):
            staged = torch.empty_like(target[part], device=k.device)
            self._fill_blocks(staged, k[:, part], v[:, part])
            target[part].copy_(staged, non_blocking=True)

    def _fill_blocks(self, target: Tensor, k: Tensor, v: Tensor) -> None:
        blocks = self._blocks(target)
        blocks[:, :, 0].copy_(k.transpose(0, 1))
        blocks[:, :, 1].copy_(v.transpose(0, 1))

    def _take(self, piece: Tensor, pages: Tensor, heads: Tensor) -> Tensor:
        if self.layout == "hnd":
            return piece.flatten(0, 1).index_select(0, pages * piece.shape[1] + heads)
        return self._blocks(piece)[pages, heads]

    def _blocks(self, piece: Tensor) -> Tensor:
        """View a piece by pages of one KV head, whatever the layout: [n, Hk, 2, p, d]."""
        return piece if self.layout == "hnd" else piece.permute(0, 3, 1, 2, 4)
