"""Memory tiers of KV: what a device holds, and what the host keeps for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch
from torch import Tensor

from kvcli.kernels.quant import KVDtype
from kvcli.memory.disk_tier import DiskShare, DiskTier
from kvcli.memory.pinned import (
    HUGE_PAGE,
    HostAllocator,
    PinnedStaging,
    host_memory,
    pinned_allocator,
    pinned_staging,
)


@dataclass(frozen=True)
class Tiers:
    """The memory that KV lives in: `device` computes, `host` keeps what the device has no room for.

    On a CPU both are host memory; on the meta device nothing is allocated, which is how memory is planned. For CUDA,
    `pinned` allocates host memory that the device reads and writes directly, and data that the host gathers from it
    goes through `staging`. With `one_memory`, data that can be read in place is not copied. A token has two `parts` in
    each KV head, its key and its value, or one that is both. KV is in `dtype`, but in host memory as `kv_dtype` says.
    With a `disk`, its files take the place of host memory, which becomes their cache.
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
        """Return the tiers with another device, and host memory as that one reads it; meta stays meta."""
        if device == self.device or self.device.type == "meta":
            return self
        other = Tiers.for_device(device, self.dtype)
        return replace(self, device=device, pinned=other.pinned, staging=other.staging, one_memory=other.one_memory)

    def above(self, disk: DiskTier | None) -> Tiers:
        """Return the tiers of one sequence, with its share of the disk if there is one."""
        return self if disk is None else replace(self, disk=disk.share())

    def on_device(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Allocate uninitialised device memory to be kept; on a CPU, large tensors use huge pages.

        Scattered rows are found faster in huge pages, because a processor caches only a few thousand address
        translations.
        """
        kind = dtype or self.dtype
        if self.device.type == "cpu" and math.prod(shape) * kind.itemsize >= HUGE_PAGE:
            return host_memory(shape, kind)
        return self.scratch(*shape, dtype=kind)

    def scratch(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Allocate uninitialised device memory that is freed soon, and then can be reused."""
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def on_host(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Allocate uninitialised host memory.

        Raises:
            KvcliError: no more memory can be pinned (will not fit).
        """
        return self.on_host_async(*shape, dtype=dtype).result()

    def on_host_async(self, *shape: int, dtype: torch.dtype | None = None, urgent: bool = False) -> Future[Tensor]:
        """Start allocating like `on_host`; pinned memory gets ready in the order of the calls, `urgent` ones first."""
        if self.pinned is not None:
            return self.pinned.allocate(shape, dtype or self.dtype, urgent)
        ready: Future[Tensor] = Future()
        kind, on_meta = dtype or self.dtype, self.host.type == "meta"
        ready.set_result(torch.empty(shape, dtype=kind, device=self.host) if on_meta else host_memory(shape, kind))
        return ready

    def gathered(
        self, shape: tuple[int, ...], gather: Callable[[Tensor, slice], None], dtype: torch.dtype | None = None
    ) -> Tensor:
        """Make a tensor of this shape on the device, from rows that `gather` collects in host memory.

        `gather(rows, part)` must fill `rows` with rows `part` of the result; see `PinnedStaging.upload`.
        """
        target = self.scratch(*shape, dtype=dtype)
        if self.staging is None:
            gather(target, slice(shape[0]))
        else:
            self.staging.upload(target, gather)
        return target


@dataclass(frozen=True)
class Footprint:
    """Bytes that a cache holds in each tier; `shared` are bytes in host memory that another sequence holds.

    `disk` are the bytes of its files, of which `host` holds copies. With several devices, `by_device` has the bytes of
    each, in order.
    """

    device: int = 0
    host: int = 0
    shared: int = 0
    disk: int = 0
    by_device: tuple[int, ...] = ()

    def __add__(self, other: Footprint) -> Footprint:
        return Footprint(
            self.device + other.device,
            self.host + other.host,
            self.shared + other.shared,
            self.disk + other.disk,
            tuple(map(sum, zip_longest(self.by_device, other.by_device, fillvalue=0))),
        )

    def times(self, number: int) -> Footprint:
        """Multiply all sizes by `number`, which may be negative."""
        device, host, shared, disk = (number * size for size in (self.device, self.host, self.shared, self.disk))
        return Footprint(device, host, shared, disk, tuple(number * size for size in self.by_device))

    def on(self, place: int, devices: int) -> Footprint:
        """Assign the device bytes to device number `place` of `devices`."""
        return replace(self, by_device=tuple(self.device if place == at else 0 for at in range(devices)))


@dataclass(frozen=True)
class Traffic:
    """Bytes that a decode step moves in one layer of one sequence.

    Read on the device are the `attended` KV, the `scored` part of the index, and the `scores` used for selection.
    `recalled` comes from the host if none of the selected KV is on the device yet. In addition, `rebuilt_from` is read
    on the device where keys are rebuilt from factors, in `rebuilding` operations (a multiply-add is two).
    """

    attended: int = 0
    scored: int = 0
    scores: int = 0
    recalled: int = 0
    rebuilt_from: int = 0
    rebuilding: int = 0


def nbytes(*tensors: Tensor | None) -> int:
    """Sum the bytes of tensors, ignoring None."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)
