"""Offloading as libraries usually do it: all KV in host memory, every layer brought whole, one ahead.

Exact attention at any length, with room on the device for two layers: while one is computed the next one arrives, and
during the last one the first, for the next token. Each step moves the whole KV cache across the bus, which is what
retrieval saves. On CUDA the prefetch runs on a stream of its own; in one graph of a whole step too, where a kernel
brings the tokens that there are, and an odd number of layers takes turns with three buffers. On a CPU, where host
memory is the device's, layers are attended to in their place, which counts as if they had come; those on a disk do
come, and quantised ones where a prompt is read by windows.
"""

from collections.abc import Sequence
from functools import partial

from torch import Tensor
from typing_extensions import override

from kvcli.kernels.decode_attention import decode_attention
from kvcli.kernels.prefill_attention import prefill_attention
from kvcli.kernels.softmax import Softmax
from kvcli.kv.dense import TokenMajorCache
from kvcli.kv.parking import Waits
from kvcli.memory.tiers import Footprint, nbytes
from kvcli.methods.base import Method, SequenceContext
from kvcli.methods.config import HostKVConfig
from kvcli.methods.steps.plan import StepPlan, Whole
from kvcli.models.geometry import LayerGeometry
from kvcli.store.layer_prefetcher import LayerPrefetcher
from kvcli.telemetry.counters import Count


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
