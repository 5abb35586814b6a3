"""StreamingLLM: attention sinks and a recent window, the rest is dropped (arXiv 2309.17453, section 3).

`positions` says where the kept tokens stand. "original" leaves them at their own positions. "cache" counts positions
within the cache, as the paper does, so that distances never exceed the budget: the window is contiguous with the
query already, hence only the sink keys move, forward by the number of tokens dropped between them and the window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import model_validator
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.move_keys import move_sinks
from kvcli.kernels.softmax import Softmax
from kvcli.methods.base import Method, SequenceContext
from kvcli.methods.config import CountOrShare, MethodConfig, setting
from kvcli.methods.steps.batch_slots import BatchSlots
from kvcli.methods.steps.plan import StepPlan
from kvcli.models.geometry import LayerGeometry
from kvcli.store.cache import SlidingCache


class StreamingConfig(MethodConfig):
    """Settings of StreamingLLM."""

    budget: CountOrShare = setting(2048, "tokens attended per layer and KV head, sink included", "tokens", ge=1)
    sink: int = setting(4, "first tokens, always attended", "tokens", ge=0)
    positions: Literal["original", "cache"] = setting("original", "where kept tokens stand: original or cache")

    @model_validator(mode="after")
    def _leaves_a_window(self) -> StreamingConfig:
        if self.budget <= self.sink:
            raise ValueError(f"budget {self.budget} leaves no window beside sink {self.sink}: it must be larger")
        return self


class Streaming(Method[StreamingConfig, SlidingCache]):
    """Sinks and window; O(budget) memory at any length."""

    Config = StreamingConfig
    title = "attention sinks and a recent window"
    paper = "arXiv 2309.17453"
    long_generation = True
    offloads = False
    group_consistent = True
    device_memory = "O(B)"

    def __init__(self, config: StreamingConfig, layers: Sequence[LayerGeometry], context: SequenceContext):
        super().__init__(config, layers, context)
        self.unrotated_sinks: dict[int, Tensor] = {}  # layer -> [Hk, sink, d]

    def new_cache(self, layer: LayerGeometry) -> SlidingCache:
        """Keep `sink` first and `budget - sink` last tokens."""
        window = self.config.budget - self.config.sink
        return SlidingCache(layer.num_kv_heads, layer.head_dim, window, self.context.tiers, self.config.sink)

    @property
    @override
    def step_plan(self) -> StepPlan:
        return StepPlan(prepare=MovingSinks if self.config.positions == "cache" else None)

    def retrieve(self, layer: int, cache: SlidingCache, q: Tensor, softmax: Softmax) -> Tensor:
        """Attend to what is left, with the sinks moved up to the window where positions count within the cache."""
        rotary = self.context.rotary[layer]
        if self.config.positions == "cache" and cache.dropped and cache.sink and rotary is not None:
            original = torch.arange(cache.sink, device=q.device)
            if layer not in self.unrotated_sinks:
                self.unrotated_sinks[layer] = rotary.unrotate(cache.k[:, : cache.sink], original)
            moved = rotary.rotate(self.unrotated_sinks[layer], original + cache.dropped)
            cache.k[:, : cache.sink] = moved
        return super().retrieve(layer, cache, q, softmax)


class MovingSinks:
    """Moves the sinks of a batch up to their windows, where tokens between them were dropped: rows of its slots."""

    def __init__(self, slots: BatchSlots):
        layout, (first, *others) = slots.rows.layout, slots.rotary
        self.lengths, self.held = slots.rows.lengths, layout.total
        original = torch.arange(layout.sink, device=self.lengths.device)
        alike = all(rotary is first for rotary in others)
        rows = [slice(None)] if alike else [slice(row, row + 1) for row in range(len(slots.rotary))]
        self.parts = [
            (part, rotary.unrotate(k[:, :, : layout.sink], original), rotary.rotation(k.shape[3]))
            for part, rotary in zip(rows, slots.rotary, strict=False)
            if rotary is not None and layout.sink
            for k in [slots.rows.k[part]]
        ]
        self.k = slots.rows.k

    def __call__(self) -> None:
        """Take the sinks out of their rotation as long as they stand where they were, and rotate them to where they go.

        The last of them was appended a step before the first of them moves, or earlier.
        """
        for part, unrotated, rotation in self.parts:
            move_sinks(self.k[part], unrotated, self.lengths[part], self.held, rotation)
