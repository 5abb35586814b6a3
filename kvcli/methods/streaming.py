"""StreamingLLM: attention sinks and a recent window, the rest is dropped (arXiv 2309.17453, section 3).

`positions` decides the positions of the kept tokens. "original" leaves them unchanged. "cache" counts positions within
the cache, as the paper does, so that distances never exceed the budget: the window is contiguous with the query
already, so only the sink keys move, forward by the number of tokens dropped between them and the window.

By default a prompt is read exactly and then cut, so that only generation is streamed. With `prefill_window` it is read
in windows, and each token attends to what it would attend to if it were generated. With positions in the cache no
distance exceeds the budget, and prompts can be longer than the model was trained for. That is how others run it as a
baseline (arXiv 2502.13542, tables 1, 2 and 10).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from pydantic import model_validator
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.norm_rope import move_sinks
from kvcli.kernels.prefill_attention import FarTokens, prefill_attention, windowed_attention
from kvcli.kernels.softmax import Softmax
from kvcli.kv.sliding import SlidingCache
from kvcli.methods.config import CountOrShare, MethodConfig, setting
from kvcli.methods.contract import Method, SequenceContext
from kvcli.methods.step import BatchSlots, StepPlan
from kvcli.models.geometry import LayerGeometry

if TYPE_CHECKING:
    from kvcli.models.rope import Rotary


class StreamingConfig(MethodConfig):
    """Settings of StreamingLLM."""

    budget: CountOrShare = setting(2048, "tokens attended per layer and KV head, sink included", "tokens", ge=1)
    sink: int = setting(4, "first tokens, always attended", "tokens", ge=0)
    positions: Literal["original", "cache"] = setting("original", "where kept tokens stand: original or cache")
    prefill_window: int = setting(
        0,
        "tokens of the prompt read at once, streamed like generated ones; 0: the prompt is read exactly",
        "tokens",
        ge=0,
    )

    @model_validator(mode="after")
    def _leaves_a_window(self) -> StreamingConfig:
        if self.budget <= self.sink:
            raise ValueError(f"budget {self.budget} leaves no window after sink {self.sink}: it must be larger")
        return self


class Streaming(Method[StreamingConfig, SlidingCache]):
    """Keeps sinks and window; O(budget) memory at any length."""

    Config = StreamingConfig
    title = "attention sinks and a recent window"
    paper = "arXiv 2309.17453"
    long_generation = True
    offloads = False
    group_consistent = True
    device_memory = "O(B)"
    attends_to_rows = True

    def __init__(self, config: StreamingConfig, layers: Sequence[LayerGeometry], context: SequenceContext):
        super().__init__(config, layers, context)
        self.unrotated_sinks: dict[int, Tensor] = {}  # layer -> [Hk, sink, d]

    def new_cache(self, layer: LayerGeometry) -> SlidingCache:
        """Make a cache of `sink` first and `budget - sink` last tokens."""
        window = self.config.budget - self.config.sink
        return SlidingCache(layer.num_kv_heads, layer.head_dim, window, self.context.tiers, self.config.sink)

    @property
    @override
    def prefill_window(self) -> int | None:
        return self.config.prefill_window or None

    def retrieve_window(
        self, layer: int, cache: SlidingCache, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax
    ) -> Tensor:
        """Attend with each token to everything while that fits into the budget, then to sinks and its own window."""
        start, (seen_k, seen_v) = cache.length, cache.extend(k, v)
        if cache.length >= cache.sink:
            self._place_sinks(layer, cache, 0)  # back to where they were: an earlier turn may have moved them
        with self.span("attention", layer):
            parts, whole = [], min(max(0, self.config.budget - start), q.shape[1])
            if whole:
                held = start + whole
                parts.append(prefill_attention(q[:, :whole], seen_k[:, :held], seen_v[:, :held], softmax))
            if rest := q.shape[1] - whole:
                near = slice(-min(rest + cache.window - 1, seen_k.shape[1]), None)
                far = self._far(layer, cache, q[:, whole:])
                streamed = (q[:, whole:], seen_k[:, near], seen_v[:, near], far, softmax, cache.window)
                parts.append(windowed_attention(*streamed)[0])
            return torch.cat(parts, 1)

    @property
    @override
    def step_plan(self) -> StepPlan:
        return StepPlan(prepare=MovingSinks if self.config.positions == "cache" else None)

    def retrieve(self, layer: int, cache: SlidingCache, q: Tensor, softmax: Softmax) -> Tensor:
        """Attend to what is kept; with positions in the cache, first move the sinks up to the window."""
        if cache.dropped:
            self._place_sinks(layer, cache, cache.dropped)
        return super().retrieve(layer, cache, q, softmax)

    def _place_sinks(self, layer: int, cache: SlidingCache, moved: int) -> None:
        """Rotate the sinks to `moved` tokens beyond their own positions; only with positions in the cache."""
        rotary = self._moving(layer)
        if rotary is None or not cache.sink:
            return
        original = torch.arange(cache.sink, device=cache.k.device)
        if layer not in self.unrotated_sinks:
            self.unrotated_sinks[layer] = rotary.unrotate(cache.k[:, : cache.sink], original)
        cache.k[:, : cache.sink] = rotary.rotate(self.unrotated_sinks[layer], original + moved)

    def _far(self, layer: int, cache: SlidingCache, q: Tensor) -> FarTokens:
        """Return the sinks at their own positions, and the newest queries q [H, m, d] rotated to look at them.

        With positions in the cache, queries are placed at the end of a full cache.
        """
        rotary = self._moving(layer)
        if rotary is not None:
            plain = rotary.unrotate(q, torch.arange(cache.length - q.shape[1], cache.length, device=q.device))
            q = rotary.rotate(plain, torch.full((q.shape[1],), self.config.budget - 1, device=q.device)).to(q.dtype)
        return FarTokens(q, cache.k[:, : cache.sink], cache.v[:, : cache.sink])

    def _moving(self, layer: int) -> Rotary | None:
        """Return the rotary embedding that moves a layer's sinks within the cache; None: keys keep their positions."""
        return self.context.rotary[layer] if self.config.positions == "cache" else None


class MovingSinks:
    """Moves the sinks of a batch up to their windows, once tokens between them were dropped: rows of its slots."""

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
        """Un-rotate the sinks while they are at their own positions, and rotate them to their new ones.

        The last sink was appended at least one step before the first one moves.
        """
        for part, unrotated, rotation in self.parts:
            move_sinks(self.k[part], unrotated, self.lengths[part], self.held, rotation)
