"""Offloading as libraries usually do it: all KV in host memory, every layer brought whole, one layer ahead.

Exact attention at any length, with room on the device for two layers: while one is computed the next one arrives, and
during the last one the first, for the next token. Each step moves the whole KV cache across the bus, which is the cost
that retrieval saves. On CUDA the prefetch runs on a stream of its own, also within one graph of a whole step. There a
kernel brings the tokens that exist, and an odd number of layers takes turns with three buffers. On a CPU, where host
memory is the device's, layers are attended to in place, which counts as if they had been brought; layers on a disk are
brought, and so are quantised ones where a prompt is read in windows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.decode_attention import decode_attention
from kvcli.kernels.prefill_attention import prefill_attention
from kvcli.kernels.softmax import Softmax
from kvcli.kv.cache import Tiers, both
from kvcli.kv.dense import TokenMajorCache
from kvcli.kv.parking import Waits
from kvcli.memory.tiers import Footprint, nbytes
from kvcli.methods.config import HostKVConfig
from kvcli.methods.contract import Method, SequenceContext
from kvcli.methods.step import StepPlan, Whole
from kvcli.models.geometry import LayerGeometry
from kvcli.telemetry.counters import Count


class LayerPrefetcher:
    """Two buffers [t, capacity * width] on the device that layers use in turn; `width` is the largest Hk * d.

    On CUDA a layer is copied on a stream of its own while the previous one is computed. On the CPU there is nothing to
    overlap with: a layer is viewed in place or dequantised at once, unless it comes from a disk.
    """

    not_state: ClassVar[tuple[str, ...]] = ("buffers", "stream", "done", "coming")

    def __init__(self, capacity: int, width: int, tiers: Tiers):
        self.capacity, self.width, self.tiers = capacity, width, tiers
        self.buffers = [tiers.on_device(tiers.parts, capacity * width) for _ in range(2)]
        self.stream: torch.cuda.Stream | None = None
        if tiers.device.type == "cuda":
            self.stream = torch.cuda.Stream(tiers.device)  # type: ignore[no-untyped-call]
        self.prefetched: TokenMajorCache | None = None  # the layer in the buffer whose turn it is
        self.rows = 0  # how many of its tokens have arrived or are on their way
        self.done: torch.cuda.Event | None = None  # recorded when they have arrived
        self.coming: Future[None] | None = None  # done when they have arrived from a disk

    def prefetch(self, cache: TokenMajorCache, span: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """Start copying all tokens of a layer; the layer fetched last stays valid until the next call.

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
        self.stream.wait_stream(torch.cuda.current_stream(self.tiers.device))  # may read this buffer
        with torch.cuda.stream(self.stream), span():
            cache.read(slice(0, cache.held), self._views(cache))
            self.done = self.stream.record_event()
        self.buffers[0].record_stream(self.stream)

    def fetch(self, cache: TokenMajorCache) -> tuple[Tensor, Tensor, int]:
        """Return keys and values [Hk, held, d] of a layer, and the bytes that only this call copies.

        These are the newest token's, or all bytes if the last `prefetch` was of another layer. Bytes that are viewed in
        place count as if they were copied.
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
        """Return the buffers, which no prompt needs."""
        return self.buffers

    def restored(self) -> None:
        """Copy the contents of the current buffer again."""
        if self.prefetched is not None and not self.prefetched.in_place:
            self.prefetched.read(slice(0, self.rows), self._views(self.prefetched))

    def release(self) -> None:
        """Free the buffers; no layer can be fetched any more."""
        self.prefetched = self.done = None
        self.buffers = []

    def footprint(self) -> Footprint:
        """Count the bytes allocated."""
        return Footprint(device=nbytes(*self.buffers))

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerPrefetcher:
        """Make a copy with buffers of its own and nothing in flight."""
        return LayerPrefetcher(self.capacity, self.width, self.tiers)

    def _arrive(self) -> None:
        """Wait for the layer that comes from a disk."""
        coming, self.coming = self.coming, None
        if coming is not None:
            coming.result()

    def _views(self, cache: TokenMajorCache) -> Tensor:
        """View the current buffer in the shape of the layer: [t, capacity, Hk, d]."""
        shape = (cache.kv.shape[1], *cache.token_shape)
        return self.buffers[0][:, : math.prod(shape)].unflatten(1, shape)  # type: ignore[no-untyped-call, no-any-return]


@torch.inference_mode()
def _read(cache: TokenMajorCache, tokens: slice, views: Tensor) -> None:
    cache.read(tokens, views)


class OffloadConfig(HostKVConfig):
    """Settings of offloading: only those of host memory."""

    @property
    @override
    def stays_in_place(self) -> bool:
        return self.kv_dtype == "auto"  # quantised layers are dequantised on their way


class Offload(Method[OffloadConfig, TokenMajorCache]):
    """Attends to everything in every layer, with two layers on the device at a time."""

    Config = OffloadConfig
    title = "everything, fetched from host memory one layer ahead"
    paper = "transformers"
    long_generation = True
    offloads = True
    group_consistent = True
    device_memory = "O(L/n)"

    def __init__(self, config: OffloadConfig, layers: Sequence[LayerGeometry], context: SequenceContext):
        super().__init__(config, layers, context)
        self.prefetchers: list[LayerPrefetcher] = []
        self.prefetcher_of: dict[int, int] = {}
        self.following: dict[int, int] = {}
        for device in dict.fromkeys(map(context.device, self.retrieval)):  # layers take turns on their own device
            order = [layer for layer in self.retrieval if context.device(layer) == device]
            brought = [layers[layer] for layer in order if not self.retrieval[layer].in_place]
            width = max((layer.num_kv_heads * layer.head_dim for layer in brought), default=0)
            self.prefetcher_of |= dict.fromkeys(order, len(self.prefetchers))
            self.following |= dict(zip(order, [*order[1:], *order[:1]], strict=True))
            self.prefetchers.append(LayerPrefetcher(context.capacity, width, context.tiers.on(device)))
            self.wait(self.prefetchers[-1], keeps=False)

    @property
    def waiting(self) -> Sequence[Waits]:
        """The layers, and the two buffers of each device, which no prompt needs."""
        return [*super().waiting, *getattr(self, "prefetchers", ())]

    def new_cache(self, layer: LayerGeometry) -> TokenMajorCache:
        """Make a cache that keeps all tokens in host memory."""
        context, tiers = self.context, self.config.tiers(self.context.tiers)
        return TokenMajorCache(layer.num_kv_heads, layer.head_dim, context.capacity, tiers, offload=True)

    @property
    @override
    def step_plan(self) -> StepPlan:
        return StepPlan(fetch=Whole())

    @override
    def leave_phases(self) -> None:
        for prefetcher in self.prefetchers:
            prefetcher.release()

    def retrieve(self, layer: int, cache: TokenMajorCache, q: Tensor, softmax: Softmax) -> Tensor:
        """Fetch the layer, start prefetching the next one, and attend; a CPU reads quantised bytes in place."""
        if cache.reads_in_place(q):
            self.prefetchers[self.prefetcher_of[layer]].prefetched = None
            self.count(layer, Count.BYTES_TO_DEVICE, nbytes(cache.kv[:, : cache.held]))
            newest = nbytes(cache.kv[:, :1])  # all others would have come early
            self.count(layer, Count.BYTES_EXPOSED, newest)
            with self.span("attention", layer):
                return cache.attend_in_place(q, softmax)
        k, v = self._recall(layer, cache, self.following[layer])
        with self.span("attention", layer):
            return decode_attention(q, k, v, softmax)

    def retrieve_window(
        self, layer: int, cache: TokenMajorCache, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax
    ) -> Tensor:
        """Attend to all tokens so far with a window of the prompt.

        The first layer is not prefetched, because its newest tokens may be taken back before it is read.
        """
        self.count(layer, Count.BYTES_TO_HOST, cache.append_window(k, v))
        following = self.following[layer]
        seen_k, seen_v = self._recall(layer, cache, following if following > layer else None)
        with self.span("attention", layer):
            return prefill_attention(q, seen_k, seen_v, softmax)

    def _recall(self, layer: int, cache: TokenMajorCache, following: int | None) -> tuple[Tensor, Tensor]:
        """Fetch a layer's keys and values [Hk, held, d], and start prefetching the layer `following`."""
        with self.span("recall", layer):
            prefetcher = self.prefetchers[self.prefetcher_of[layer]]
            k, v, late = prefetcher.fetch(cache)
            if following is not None:
                prefetcher.prefetch(self.retrieval[following], partial(self.span, "recall", following))
        self.count(layer, Count.BYTES_TO_DEVICE, nbytes(cache.kv[:, : cache.held]))
        self.count(layer, Count.BYTES_EXPOSED, late)
        return k, v

    @override
    def footprint(self) -> Footprint:
        """Count host memory, and room for two layers on each device."""
        devices = dict.fromkeys(map(self.context.device, self.retrieval))
        pairs = zip(self.prefetchers, devices, strict=True)
        return sum((self.context.placed(each.footprint(), device) for each, device in pairs), super().footprint())
