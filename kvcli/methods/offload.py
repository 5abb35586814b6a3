"""Offloading as libraries usually do it: all KV in host memory, every layer brought whole, one ahead.

Exact attention at any length, with room on the device for two layers: while one is computed the next one arrives, and
during the last one the first, for the next token. Each step moves the whole KV cache across the bus, which is what
retrieval saves. On CUDA the prefetch runs on a stream of its own; in one graph of a whole step too, where a kernel
brings the tokens that there are, and an odd number of layers takes turns with three buffers. On a CPU, where host
memory is the device's, layers are attended to in their place, which counts as if they had come; those on a disk do
come, and quantised ones where a prompt is read by windows.
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


class OffloadConfig(HostKVConfig):
    """Offloading has nothing else to set."""

    @property
    @override
    def stays_in_place(self) -> bool:
        return self.kv_dtype == "auto"  # bytes become numbers on their way


class Offload(Method[OffloadConfig, TokenMajorCache]):
    """Every layer attends to everything, two of them on the device at a time."""

    Config = OffloadConfig
    title = "everything, brought layer by layer, one ahead"
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
        """Beside the layers the two buffers of each device, which no prompt needs."""
        return [*super().waiting, *getattr(self, "prefetchers", ())]

    def new_cache(self, layer: LayerGeometry) -> TokenMajorCache:
        """Keep all tokens in host memory."""
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
        """Have the layer on the device, let the next one come, and attend; on a CPU to bytes where they lie."""
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
        """Attend likewise; of the first layer nothing comes early, for its newest tokens may be taken back before."""
        self.count(layer, Count.BYTES_TO_HOST, cache.append_window(k, v))
        following = self.following[layer]
        seen_k, seen_v = self._recall(layer, cache, following if following > layer else None)
        with self.span("attention", layer):
            return prefill_attention(q, seen_k, seen_v, softmax)

    def _recall(self, layer: int, cache: TokenMajorCache, following: int | None) -> tuple[Tensor, Tensor]:
        """Bring a layer's keys and values [Hk, held, d], and have those of the layer `following` come."""
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
        """Host memory, and room for two layers on each device."""
        devices = dict.fromkeys(map(self.context.device, self.retrieval))
        pairs = zip(self.prefetchers, devices, strict=True)
        return sum((self.context.placed(each.footprint(), device) for each, device in pairs), super().footprint())
