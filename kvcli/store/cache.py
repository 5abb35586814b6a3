"""What every layer's cache offers, and the two that need no retrieval: dense and sliding.

A cache serves one layer of one sequence. Device keys are post-RoPE. Shapes: H query heads, Hk KV heads, d head dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcli.kernels.decode_attention import decode_attention
from kvcli.kernels.prefill_attention import prefill_attention
from kvcli.kernels.slot_layout import SlotLayout
from kvcli.kernels.softmax import Softmax
from kvcli.store.layer_slots import LayerSlots
from kvcli.store.pinned import PinnedAllocator, pinned_allocator
from kvcli.store.staging import PinnedStaging, pinned_staging


@dataclass(frozen=True)
class Tiers:
    """Where KV lives: `device` computes, `host` keeps what the device has no room for.

    On a CPU both are host memory; on the meta device nothing is allocated, which is how memory is planned. For CUDA,
    `pinned` allocates the host's memory, which the device reads and writes itself, and what the host gathers from it
    goes through `staging`.
    """

    device: torch.device
    host: torch.device
    dtype: torch.dtype
    pinned: PinnedAllocator | None = None
    staging: PinnedStaging | None = None

    @classmethod
    def for_device(cls, device: torch.device, dtype: torch.dtype) -> Tiers:
        """Choose the host tier that belongs to a compute device."""
        if device.type == "cuda":
            return cls(device, torch.device("cpu"), dtype, pinned_allocator(device), pinned_staging(device))
        return cls(device, torch.device("meta" if device.type == "meta" else "cpu"), dtype)

    def on_device(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Allocate uninitialised device memory."""
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def on_host(self, *shape: int) -> Tensor:
        """Allocate uninitialised host memory; raises KvcliError where no more can be pinned."""
        return self.on_host_async(*shape).result()

    def on_host_async(self, *shape: int) -> Future[Tensor]:
        """Begin to allocate what `on_host` does; what is pinned gets ready in the order of these calls."""
        if self.pinned is not None:
            return self.pinned.allocate(shape, self.dtype)
        ready: Future[Tensor] = Future()
        ready.set_result(torch.empty(shape, dtype=self.dtype, device=self.host))
        return ready

    def gathered(self, shape: tuple[int, ...], gather: Callable[[Tensor, slice], None]) -> Tensor:
        """Make a tensor of this shape on the device of rows that `gather` collects in host memory.

        `gather(rows, part)` has to fill `rows` with rows `part` of the result; see `PinnedStaging.upload`.
        """
        target = self.on_device(*shape)
        if self.staging is None:
            gather(target, slice(shape[0]))
        else:
            self.staging.upload(target, gather)
        return target


@dataclass(frozen=True)
class Footprint:
    """Bytes a cache holds in each tier."""

    device: int = 0
    host: int = 0

    def __add__(self, other: Footprint) -> Footprint:
        return Footprint(self.device + other.device, self.host + other.host)


@dataclass(frozen=True)
class Traffic:
    """Bytes that a decode step has to move in one layer of one sequence.

    `attended` KV and the `scored` part of the index are read on the device, and `scores` to select by; `recalled`
    comes from the host where nothing that is wanted lies on the device yet.
    """

    attended: int = 0
    scored: int = 0
    scores: int = 0
    recalled: int = 0


def nbytes(*tensors: Tensor) -> int:
    """Sum the bytes of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def token_mask(k: Tensor, length: int, *tokens: range) -> Tensor:
    """Mark consecutive tokens, the same for every KV head of keys k [Hk, ..]: bool [Hk, length]."""
    mask = torch.zeros(k.shape[0], length, dtype=torch.bool, device=k.device)
    for part in tokens:
        mask[:, part.start : part.stop] = True
    return mask


class LayerCache(ABC):
    """KV of one layer of one sequence."""

    length: int
    """Tokens seen so far, whether still held or not."""

    @abstractmethod
    def load(self, k: Tensor, v: Tensor) -> int:
        """Take over a prompt: k, v [Hk, s, d], s >= 1. The tensors may be reused by the caller afterwards.

        Returns the bytes written to the host tier.
        """

    @abstractmethod
    def append(self, k: Tensor, v: Tensor) -> int:
        """Add the current token: k, v [Hk, d]. Returns the bytes written to the host tier."""

    @abstractmethod
    def attend(self, q: Tensor, softmax: Softmax) -> Tensor:
        """Attend with q [H, d] to everything resident -> [H, d]."""

    @abstractmethod
    def attended(self) -> Tensor:
        """Tokens that the last `attend` looked at: bool [Hk, length]; derived when asked for."""

    @abstractmethod
    def footprint(self) -> Footprint:
        """Count the bytes allocated."""

    def as_slots(self) -> LayerSlots | None:
        """Lay the cache out in slots and give its tensors; None where it has no such form.

        From then on whoever asked owns them, and nothing but `adopt_slots` and the footprint is to be asked any more.
        """
        return None

    def adopt_slots(self, slots: LayerSlots) -> None:  # noqa: ARG002
        """Hold these tensors in place of those that `as_slots` gave; they say the same."""
        raise RuntimeError(f"{type(self).__name__} has no slots")

    def traffic(self, length: int) -> Traffic:  # noqa: ARG002
        """Say what a step moves once `length` tokens were seen; works on the meta device.

        By default a step reads all that is held on the device: right for what keeps no more than it attends to.
        """
        return Traffic(attended=self.footprint().device)


class DenseCache(LayerCache):
    """Everything on the device, contiguous per head: k, v [Hk, capacity, d]."""

    def __init__(self, num_kv_heads: int, head_dim: int, capacity: int, tiers: Tiers):
        self.length = 0
        self.kv = tiers.on_device(2, num_kv_heads, capacity, head_dim)
        self.k, self.v = self.kv

    def load(self, k: Tensor, v: Tensor) -> int:
        """See `LayerCache.load`."""
        self.length = k.shape[1]
        self.k[:, : self.length] = k
        self.v[:, : self.length] = v
        return 0

    def append(self, k: Tensor, v: Tensor) -> int:
        """See `LayerCache.append`."""
        self.k[:, self.length] = k
        self.v[:, self.length] = v
        self.length += 1
        return 0

    def attend(self, q: Tensor, softmax: Softmax) -> Tensor:
        """See `LayerCache.attend`."""
        return decode_attention(q, self.k[:, : self.length], self.v[:, : self.length], softmax)

    def attend_window(self, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        """Append consecutive tokens k, v [Hk, n, d] and attend with q [H, n, d], each to all before it -> [H, n, d]."""
        start, self.length = self.length, self.length + k.shape[1]
        self.k[:, start : self.length] = k
        self.v[:, start : self.length] = v
        return prefill_attention(q, self.k[:, : self.length], self.v[:, : self.length], softmax)

    def attended(self) -> Tensor:
        """See `LayerCache.attended`."""
        return token_mask(self.k, self.length, range(self.length))

    def as_slots(self) -> LayerSlots:
        """See `LayerCache.as_slots`: every token has its own."""
        return LayerSlots(self.kv, SlotLayout.everything(self.k.shape[1]))

    def adopt_slots(self, slots: LayerSlots) -> None:
        """See `LayerCache.adopt_slots`."""
        self.kv = slots.kv
        self.k, self.v = self.kv

    def footprint(self) -> Footprint:
        """See `LayerCache.footprint`."""
        return Footprint(device=nbytes(self.k, self.v))

    def traffic(self, length: int) -> Traffic:
        """See `LayerCache.traffic`."""
        return Traffic(attended=length * nbytes(self.k[:, :1], self.v[:, :1]))


class SlidingCache(LayerCache):
    """The first `sink` and the last `window` tokens; what lies between is gone. k, v [Hk, sink + window, d].

    The window is a ring: attention does not depend on the order of keys that carry their own positions.
    """

    def __init__(self, num_kv_heads: int, head_dim: int, window: int, tiers: Tiers, sink: int = 0):
        self.length = 0
        self.sink, self.window = sink, window
        self.kv = tiers.on_device(2, num_kv_heads, sink + window, head_dim)
        self.k, self.v = self.kv

    @property
    def dropped(self) -> int:
        """Tokens that fell out of the window."""
        return max(0, self.length - self.sink - self.window)

    def load(self, k: Tensor, v: Tensor) -> int:
        """See `LayerCache.load`."""
        self.length = k.shape[1]
        kept = torch.arange(self.length, device=k.device)
        kept = torch.cat((kept[: self.sink], kept[self.sink :][-self.window :]))
        rows = self._row(kept)
        self.k[:, rows] = k[:, kept]
        self.v[:, rows] = v[:, kept]
        return 0

    def append(self, k: Tensor, v: Tensor) -> int:
        """See `LayerCache.append`."""
        row = self.row_of(self.length)
        self.k[:, row] = k
        self.v[:, row] = v
        self.length += 1
        return 0

    def row_of(self, position: int) -> int:
        """Row that a token has, or had while it was held."""
        return position if position < self.sink else self.sink + (position - self.sink) % self.window

    def attend(self, q: Tensor, softmax: Softmax) -> Tensor:
        """See `LayerCache.attend`."""
        k, v = self.resident()
        return decode_attention(q, k, v, softmax)

    def attend_window(self, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        """Append consecutive tokens k, v [Hk, n, d] and attend with q [H, n, d] -> [H, n, d].

        Each sees the last `window` tokens up to itself; for caches without sinks.
        """
        held = self._row(torch.arange(self.dropped, self.length, device=k.device))  # in the order of their positions
        seen_k, seen_v = torch.cat((self.k[:, held], k), 1), torch.cat((self.v[:, held], v), 1)
        self.length += k.shape[1]
        kept = torch.arange(self.dropped, self.length, device=k.device)
        rows = self._row(kept)
        self.k[:, rows], self.v[:, rows] = seen_k[:, -len(kept) :], seen_v[:, -len(kept) :]
        return prefill_attention(q, seen_k, seen_v, softmax, self.window)

    def resident(self) -> tuple[Tensor, Tensor]:
        """Keys and values held: the sinks in order, then the window in ring order; [Hk, n, d] each."""
        held = self.length - self.dropped
        return self.k[:, :held], self.v[:, :held]

    def attended(self) -> Tensor:
        """See `LayerCache.attended`."""
        return token_mask(self.k, self.length, range(self.sink), range(self.sink + self.dropped, self.length))

    def as_slots(self) -> LayerSlots:
        """See `LayerCache.as_slots`: pages of one token, sinks and a ring."""
        return LayerSlots(self.kv, SlotLayout(1, self.sink, 0, self.window))

    def adopt_slots(self, slots: LayerSlots) -> None:
        """See `LayerCache.adopt_slots`."""
        self.kv = slots.kv
        self.k, self.v = self.kv

    def footprint(self) -> Footprint:
        """See `LayerCache.footprint`."""
        return Footprint(device=nbytes(self.k, self.v))

    def traffic(self, length: int) -> Traffic:
        """See `LayerCache.traffic`."""
        return Traffic(attended=min(length, self.sink + self.window) * nbytes(self.k[:, :1], self.v[:, :1]))

    def _row(self, positions: Tensor) -> Tensor:
        ring = self.sink + (positions - self.sink) % self.window
        return torch.where(positions < self.sink, positions, ring)
