"""Pages of a layer in a file, with a cache of them in host memory; `page_pool` makes this or the other kind of pool."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.channel_sizes import channel_sizes
from kvcli.kernels.host_pages import HostLayout
from kvcli.store.disk_blocks import DiskBlocks
from kvcli.store.footprint import Footprint, nbytes
from kvcli.store.host_memory import host_memory
from kvcli.store.host_pool import HostPagePool
from kvcli.store.pages import slices
from kvcli.store.state import Settled
from kvcli.store.tiers import Tiers

WRITE_BYTES = 8 << 20
"""About as much of a prompt's KV is put in order for the disk at once."""


def page_pool(
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    num_pages: int,
    tiers: Tiers,
    layout: HostLayout = "hnd",
    tensors: int = 2,
    kept: int = 0,
) -> HostPagePool:
    """Make a pool in host memory, or on the disk where there is one and host memory has no room for all of it.

    Of a pool on the disk the first `kept` pages stay in host memory as well.

    Raises:
        KvcliError: the share of host memory does not even hold what a step needs at once (will not fit).
    """
    shape = (num_kv_heads, head_dim, page_size, num_pages)
    if tiers.disk is not None:
        pool = DiskPagePool(*shape, tiers, tensors=tensors, kept=kept)
        if num_pages * pool.page_bytes > tiers.disk.host_bytes:
            pool.on_disk.check()
            return pool
    return HostPagePool(*shape, tiers, layout, tensors)


class DiskPagePool(HostPagePool):
    """Full pages of one layer of one sequence, in a file; one page of one KV head is a block of it.

    What is read and written, and by which names, is that of `HostPagePool`.

    Raises:
        DiskError: reading and writing, where the disk is full (will not fit) or fails.
    """

    on_disk: DiskBlocks

    def __init__(
        self,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        num_pages: int,
        tiers: Tiers,
        tensors: int = 2,
        kept: int = 0,
    ):
        super().__init__(num_kv_heads, head_dim, page_size, num_pages, tiers, tensors=tensors)
        assert tiers.disk is not None
        self.heads = num_kv_heads
        count, shape = num_pages * num_kv_heads, self.page_shape[1:]
        self.on_disk = DiskBlocks(count, shape, self.dtype, tiers.disk, num_kv_heads, kept * num_kv_heads)

    @override
    def share(self, other: HostPagePool, pages: int) -> bool:
        if not isinstance(other, DiskPagePool) or other.format != self.format or pages < self.first_part:
            return False
        self._lent_sizes = other.sizes
        return self.on_disk.share(other.on_disk, pages * self.heads)

    @override
    def write(self, first: int, *tensors: Tensor) -> int:
        """Store consecutive full pages from page `first` on, the next ones; returns the bytes moved."""
        moved, count = 0, tensors[0].shape[1]
        if self.sizes is not None and first == 0 < count:
            self.on_disk.open()
            lent = self._lent_sizes if self.on_disk.shared else None
            self.sizes.copy_(channel_sizes(tensors[0][:, :, 0]) if lent is None else lent)
        for part in slices(count, max(1, WRITE_BYTES // self.page_bytes)):
            pages = host_memory((part.stop - part.start, *self.page_shape), self.dtype)
            self._fill(pages, [tensor[:, part].transpose(0, 1) for tensor in tensors])
            if tensors[0].is_cuda:
                torch.cuda.current_stream(tensors[0].device).synchronize()
            moved += self.on_disk.write((first + part.start) * self.heads, pages.flatten(0, 1))
        self.written = max(self.written, first + count)
        return moved

    def announce(self, pages: Tensor, heads: Tensor) -> None:
        """Have blocks (pages[i], heads[i]) read beside the run; the next `fetch_parts` has to be of the same ones."""
        self.on_disk.begin(self._numbers(pages, heads))
        self._announced = True

    @property
    @override
    def pieces(self) -> list[Tensor]:
        raise RuntimeError("pages on a disk are in no memory that a device reads")

    @override
    def footprint(self) -> Footprint:
        return self.on_disk.footprint() + Footprint(device=nbytes(self.sizes))

    @override
    def settled(self) -> list[Settled]:
        return []

    def __deepcopy__(self, memo: dict[int, Any]) -> DiskPagePool:
        """A copy shares what is written, and has a file and a cache of its own for what comes."""
        other = copy.copy(self)
        other.on_disk, other.sizes = copy.deepcopy(self.on_disk, memo), copy.deepcopy(self.sizes, memo)
        return other

    _announced = False
    _lent_sizes: Tensor | None = None  # sizes of keys of the pool that pages are shared of

    @override
    def _allocate(self, first: int) -> list[tuple[int, Future[Tensor]]]:
        return []

    @override
    def _gatherer(self, pages: Tensor, heads: Tensor) -> Callable[[Tensor, slice], None]:
        numbers, announced, self._announced = self._numbers(pages, heads), self._announced, False

        def gather(blocks: Tensor, part: slice) -> None:
            self.on_disk.gather(numbers[part], blocks, announced=announced)

        return gather

    def _numbers(self, pages: Tensor, heads: Tensor) -> Any:
        """Number blocks as they lie in the file: int64 [m] of numpy."""
        return (pages * self.heads + heads).cpu().numpy()
