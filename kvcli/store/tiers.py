"""The memory that KV lives in: what a device holds, and what the host keeps for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvcli.kernels.quantised_blocks import KVDtype
from kvcli.store.disk_tier import DiskShare, DiskTier
from kvcli.store.host_memory import HUGE_PAGE, host_memory
from kvcli.store.pinned import HostAllocator, pinned_allocator
from kvcli.store.staging import PinnedStaging, pinned_staging


@dataclass(frozen=True)
class Tiers:
    """The memory that KV lives in: `device` computes, `host` keeps what the device has no room for.

    On a CPU both are host memory; on the meta device nothing is allocated, which is how memory is planned. For
    CUDA, `pinned` allocates the host's memory, which the device reads and writes itself, and what the host gathers
    from it goes through `staging`. Where both are `one_memory`, nothing has to be brought that can be read in its
    place. A token has two `parts` in each KV head, its key and its value, or one that is both. KV is in `dtype`,
    but in host memory as `kv_dtype` says. Where there is a `disk`, its files hold what host memory would, which
    then is their cache.
    """

    device: torch.device
    host: torch.device
    dtype: torch.dtype
    pinned: HostAllocator | None = None
    staging: PinnedStaging | None = None
    parts: int = 2
    kv_dtype: KVDtype = "auto"
    disk: DiskShare | None = None
    one_memory: bool = False

    @classmethod
    def for_device(cls, device: torch.device, dtype: torch.dtype) -> Tiers:
        """Choose the host tier that belongs to a compute device."""
        if device.type == "cuda":
            return cls(device, torch.device("cpu"), dtype, pinned_allocator(device), pinned_staging(device))
        host = torch.device("meta" if device.type == "meta" else "cpu")
        return cls(device, host, dtype, one_memory=device.type == "cpu")

    def on(self, device: torch.device) -> Tiers:
        """The same with another device, and the host's memory as that one reads it; meta stays meta."""
        if device == self.device or self.device.type == "meta":
            return self
        other = Tiers.for_device(device, self.dtype)
        return replace(self, device=device, pinned=other.pinned, staging=other.staging, one_memory=other.one_memory)

    def above(self, disk: DiskTier | None) -> Tiers:
        """The memory of one sequence, of which what host memory is not to hold lies on a disk, where there is one."""
        return self if disk is None else replace(self, disk=disk.share())

    def on_device(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Allocate uninitialised device memory that stays; on a CPU much of it is in huge pages.

        Rows that lie anywhere are found faster there: a processor remembers where a few thousand pages are.
        """
        kind = dtype or self.dtype
        if self.device.type == "cpu" and math.prod(shape) * kind.itemsize >= HUGE_PAGE:
            return host_memory(shape, kind)
        return self.scratch(*shape, dtype=kind)

    def scratch(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Allocate uninitialised device memory that is given back soon, and then need not be made again."""
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def on_host(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Allocate uninitialised host memory.

        Raises:
            KvcliError: the system pins no more (will not fit).
        """
        return self.on_host_async(*shape, dtype=dtype).result()

    def on_host_async(self, *shape: int, dtype: torch.dtype | None = None, urgent: bool = False) -> Future[Tensor]:
        """Begin to allocate as `on_host` does; pinned memory gets ready in the order of these calls, `urgent` first."""
        if self.pinned is not None:
            return self.pinned.allocate(shape, dtype or self.dtype, urgent)
        ready: Future[Tensor] = Future()
        kind, on_meta = dtype or self.dtype, self.host.type == "meta"
        ready.set_result(torch.empty(shape, dtype=kind, device=self.host) if on_meta else host_memory(shape, kind))
        return ready

    def gathered(
        self, shape: tuple[int, ...], gather: Callable[[Tensor, slice], None], dtype: torch.dtype | None = None
    ) -> Tensor:
        """Make a tensor of this shape on the device of rows that `gather` collects in host memory.

        `gather(rows, part)` has to fill `rows` with rows `part` of the result; see `PinnedStaging.upload`.
        """
        target = self.scratch(*shape, dtype=dtype)
        if self.staging is None:
            gather(target, slice(shape[0]))
        else:
            self.staging.upload(target, gather)
        return target
