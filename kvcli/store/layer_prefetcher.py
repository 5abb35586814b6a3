"""Offloaded layers brought to the device whole: one is attended to while the next one arrives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvcli.kv.cache import Tiers, both
from kvcli.kv.dense import TokenMajorCache
from kvcli.memory.tiers import Footprint, nbytes


class LayerPrefetcher:
    """Two buffers [t, capacity * width] on the device that layers take in turns; `width` is the largest Hk * d.

    On CUDA a layer is copied on a stream of its own while the one before it is computed; on the CPU there is nothing to
    overlap with: a layer is viewed where it lies, or made of its bytes at once, unless it comes from a disk.
    """

    not_state: ClassVar[tuple[str, ...]] = ("buffers", "stream", "done", "coming")

    def __init__(self, capacity: int, width: int, tiers: Tiers):
        self.capacity, self.width, self.tiers = capacity, width, tiers
        self.buffers = [tiers.on_device(tiers.parts, capacity * width) for _ in range(2)]
        self.stream: torch.cuda.Stream | None = None
        if tiers.device.type == "cuda":
            self.stream = torch.cuda.Stream(tiers.device)  # type: ignore[no-untyped-call]
        self.prefetched: TokenMajorCache | None = None  # the layer in the buffer whose turn it is
        self.rows = 0  # how many of its tokens are there, or on their way
        self.done: torch.cuda.Event | None = None  # when they are there
        self.coming: Future[None] | None = None  # likewise, from a disk

    def prefetch(self, cache: TokenMajorCache, span: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """Begin to copy all tokens of a layer; the layer fetched last stays valid until the next call.

        On CUDA the copies run in a `span`, which times them.
        """
        self._arrive()
        self.buffers.reverse()
        self.prefetched, self.rows = cache, cache.held
        if cache.in_place:
            return
        if self.stream is None:
            if cache.on_disk is None:
                cache.read(slice(0, cache.held), self._views(cache))
            else:  # a thread takes it from the disk
                ahead, tokens = cache.on_disk.share_of.tier.ahead, slice(0, cache.held)
                self.coming = ahead.submit(_read, cache, tokens, self._views(cache))
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.tiers.device))  # which has read this buffer
        with torch.cuda.stream(self.stream), span():
            cache.read(slice(0, cache.held), self._views(cache))
            self.done = self.stream.record_event()
        self.buffers[0].record_stream(self.stream)

    def fetch(self, cache: TokenMajorCache) -> tuple[Tensor, Tensor, int]:
        """Return keys and values [Hk, held, d] of a layer, and the bytes of them that only this call copies.

        Those are the newest token; or all, where the last `prefetch` was not of this layer. Bytes that are viewed in
        their place count as if they were copied.
        """
        early = self.rows if self.prefetched is cache else 0
        late = nbytes(cache.kv[:, early : cache.held])
        if cache.in_place:
            self.prefetched = None
            return *cache.views(), late
        if self.done is not None:
            torch.cuda.current_stream(self.tiers.device).wait_event(self.done)
        self._arrive()
        views = self._views(cache)
        cache.read(slice(early, cache.held), views)
        cache.restore_recent(views)
        self.prefetched = self.done = None
        return *both(views[:, : cache.held].transpose(1, 2)), late

    def waiting(self) -> Sequence[Tensor]:
        """Give the buffers, which no prompt needs."""
        return self.buffers

    def restored(self) -> None:
        """Copy again what was in the buffer whose turn it is."""
        if self.prefetched is not None and not self.prefetched.in_place:
            self.prefetched.read(slice(0, self.rows), self._views(self.prefetched))

    def release(self) -> None:
        """Free the buffers; no layer is brought any more."""
        self.prefetched = self.done = None
        self.buffers = []

    def footprint(self) -> Footprint:
        """Count the bytes allocated."""
        return Footprint(device=nbytes(*self.buffers))

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerPrefetcher:
        """A copy has buffers of its own, and nothing on its way."""
        return LayerPrefetcher(self.capacity, self.width, self.tiers)

    def _arrive(self) -> None:
        """Wait for what comes from a disk."""
        coming, self.coming = self.coming, None
        if coming is not None:
            coming.result()

    def _views(self, cache: TokenMajorCache) -> Tensor:
        """View the buffer whose turn it is in the shape of the layer: [t, capacity, Hk, d]."""
        shape = (cache.kv.shape[1], *cache.token_shape)
        return self.buffers[0][:, : math.prod(shape)].unflatten(1, shape)  # type: ignore[no-untyped-call, no-any-return]


@torch.inference_mode()
def _read(cache: TokenMajorCache, tokens: slice, views: Tensor) -> None:
    cache.read(tokens, views)
