"""The pages of a layer in host memory (FreeKV, section 4.2), in one of the two layouts of `HostPages`.

hnd   [pages, Hk, t, p, d]   one page of one KV head is a contiguous block of t*p*d elements, keys then values, so
                             that a recall moves it in one piece (16 KiB at p = 32, d = 128 in bf16)
nhd   [pages, t, p, Hk, d]   the paper's ablation: it lies in t*p pieces

t is 2 for keys and values; 1 where a method keeps its keys elsewhere.
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
from kvcli.store.pages import slices

PIECE_BYTES = 256 << 20
"""About as much is pinned at once: small enough that the first layer need not wait for long."""

OFFLOAD_BYTES = 32 << 20
"""As much of a prompt's KV is on its way to the host in another layout at once: enough for the bus's full rate."""


class HostPagePool:
    """Full pages of one layer of one sequence, in host memory alone.

    Where memory is pinned, they lie in several tensors of equally many pages, the last one shorter, that get ready in
    the background; elsewhere in one.

    Reading and writing wait for the memory of the pages concerned.

    Raises:
        KvcliError: reading and writing, where the system does not pin that memory (will not fit).
    """

    def __init__(
        self,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        num_pages: int,
        tiers: Tiers,
        layout: HostLayout = "hnd",
        tensors: int = 2,
    ):
        self.layout, self.tiers, self.num_pages = layout, tiers, num_pages
        if layout == "hnd":
            self.page_shape = (num_kv_heads, tensors, page_size, head_dim)
        else:
            self.page_shape = (tensors, page_size, num_kv_heads, head_dim)
        self.page_bytes = math.prod(self.page_shape) * tiers.dtype.itemsize
        self.per_piece = max(1, num_pages if tiers.pinned is None else PIECE_BYTES // self.page_bytes)
        self._allocating = self._allocate()

    @property
    def pieces(self) -> list[Tensor]:
        """All pages, [n, Hk, t, p, d] or [n, t, p, Hk, d] each."""
        return [piece.result() for piece in self._allocating]

    def write(self, first: int, *tensors: Tensor) -> int:
        """Store consecutive full pages from page `first` on: t tensors [Hk, n, p, d]. Returns the bytes moved.

        From a GPU to pinned memory this only queues the copies on the current stream.
        """
        stop = first + tensors[0].shape[1]
        for index in range(first // self.per_piece, -(-stop // self.per_piece)):
            start = index * self.per_piece
            begin, end = max(first, start), min(stop, start + self.per_piece)
            target = self._allocating[index].result()[begin - start : end - start]
            self._fill(target, [tensor[:, begin - first : end - first] for tensor in tensors])
        return (stop - first) * self.page_bytes

    def fetch(self, pages: Tensor, heads: Tensor) -> Tensor:
        """Bring block (pages[i], heads[i]) for every i to the device: [m, t, p, d].

        Indices on the device are waited for, and with them every earlier `write` of its stream.
        """
        pieces = self.pieces
        pages, heads = pages.to(pieces[0].device), heads.to(pieces[0].device)

        def gather(blocks: Tensor, part: slice) -> None:
            if len(pieces) == 1:
                self._take(pieces[0], pages[part], heads[part], blocks)
                return
            for index, piece in enumerate(pieces):
                here = (pages[part] // self.per_piece == index).nonzero()[:, 0]
                blocks[here] = self._take(piece, pages[part][here] % self.per_piece, heads[part][here])

        return self.tiers.gathered((len(pages), *self._blocks(pieces[0]).shape[2:]), gather)

    def nbytes(self) -> int:
        """Bytes in host memory."""
        return self.num_pages * self.page_bytes

    def __deepcopy__(self, memo: dict[int, Any]) -> HostPagePool:
        """A copy has memory of its own, pinned like this one's."""
        if self.tiers.device.type == "cuda":
            torch.cuda.synchronize(self.tiers.device)  # pages may still be on their way here
        other = copy.copy(self)
        other._allocating = other._allocate()
        for there, here in zip(other.pieces, self.pieces, strict=True):
            there.copy_(here)
        return other

    def _allocate(self) -> list[Future[Tensor]]:
        starts = range(0, max(1, self.num_pages), self.per_piece)
        return [self.tiers.on_host_async(min(self.per_piece, self.num_pages - at), *self.page_shape) for at in starts]

    def _fill(self, target: Tensor, tensors: list[Tensor]) -> None:
        """Put pages, t tensors [Hk, n, p, d], into their places `target`, n pages."""
        on_gpu = tensors[0].is_cuda
        # On a GPU the layout changes there, so that contiguous copies cross the bus; a little at a time, for room.
        for part in slices(len(target), max(1, OFFLOAD_BYTES // self.page_bytes if on_gpu else len(target))):
            pages = torch.empty_like(target[part], device=tensors[0].device) if on_gpu else target[part]
            for blocks, tensor in zip(self._blocks(pages).unbind(2), tensors, strict=True):
                blocks.copy_(tensor[:, part].transpose(0, 1))
            if on_gpu:
                target[part].copy_(pages, non_blocking=True)

    def _take(self, piece: Tensor, pages: Tensor, heads: Tensor, out: Tensor | None = None) -> Tensor:
        """Collect blocks of a piece, in `out` where it is given: [m, t, p, d]."""
        if self.layout == "hnd":
            return torch.index_select(piece.flatten(0, 1), 0, pages * piece.shape[1] + heads, out=out)
        taken = self._blocks(piece)[pages, heads]
        return taken if out is None else out.copy_(taken)

    def _blocks(self, piece: Tensor) -> Tensor:
        """View a piece by pages of one KV head, whatever the layout: [n, Hk, t, p, d]."""
        return piece if self.layout == "hnd" else piece.permute(0, 3, 1, 2, 4)
