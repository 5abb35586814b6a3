"""Room on the device for two layers whose KV lies in host memory: one is attended to while the next one arrives."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from kvcli.store.cache import Footprint, Tiers, nbytes
from kvcli.store.token_major import TokenMajorCache


class LayerPrefetcher:
    """Two buffers for up to `capacity` tokens of up to `width` = Hk * d channels, which the layers take in turns.

    On CUDA a layer comes on a stream of its own, while the one before it is computed; on the CPU there is nothing to
    overlap with, and it comes at once.
    """

    def __init__(self, capacity: int, width: int, tiers: Tiers):
        self.capacity, self.width, self.tiers = capacity, width, tiers
        self.buffers = [tiers.on_device(2, capacity * width) for _ in range(2)]
        self.stream: torch.cuda.Stream | None = None
        if tiers.device.type == "cuda":
            self.stream = torch.cuda.Stream(tiers.device)  # type: ignore[no-untyped-call]
        self.coming: TokenMajorCache | None = None  # what is on its way, or there, in the buffer whose turn it is
        self.rows = 0  # as many of its tokens
        self.done: torch.cuda.Event | None = None

    def prefetch(self, cache: TokenMajorCache, span: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """Begin to bring all tokens of a layer; what was brought before it stays until the next call.

        Where that goes on beside other work, `span` times it there.
        """
        self.buffers.reverse()
        self.coming, self.rows = cache, cache.held
        if self.stream is None:
            self._copy(cache, slice(cache.held))
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.tiers.device))  # whoever reads this buffer is done
        with torch.cuda.stream(self.stream), span():
            self._copy(cache, slice(cache.held))
            self.done = self.stream.record_event()
        self.buffers[0].record_stream(self.stream)

    def fetch(self, cache: TokenMajorCache) -> tuple[Tensor, Tensor, int]:
        """Keys and values [Hk, held, d] of a layer, and the bytes of them that were not on their way yet.

        Those are its newest token; or all, where no `prefetch` of this layer went before.
        """
        early = self.rows if self.coming is cache else 0
        if self.done is not None:
            torch.cuda.current_stream(self.tiers.device).wait_event(self.done)
        self._copy(cache, slice(early, cache.held))
        self.coming = self.done = None
        k, v = (rows[: cache.held].transpose(0, 1) for rows in self._views(cache))
        return k, v, nbytes(k[:, early:], v[:, early:])

    def footprint(self) -> Footprint:
        """Count the bytes allocated."""
        return Footprint(device=nbytes(*self.buffers))

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerPrefetcher:
        """A copy has room of its own, and nothing on its way."""
        return LayerPrefetcher(self.capacity, self.width, self.tiers)

    def _copy(self, cache: TokenMajorCache, tokens: slice) -> None:
        for staged, rows in zip(self._views(cache), (cache.k, cache.v), strict=True):
            staged[tokens].copy_(rows[tokens], non_blocking=True)

    def _views(self, cache: TokenMajorCache) -> tuple[Tensor, Tensor]:
        """The buffer whose turn it is in the shape of the layer's rows: k, v [capacity, Hk, d] each."""
        k, v = (part[: cache.k.numel()].view_as(cache.k) for part in self.buffers[0])
        return k, v
