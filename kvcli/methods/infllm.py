"""InfLLM: blocks of the past, found by a few tokens that represent them (arXiv 2402.04617).

The prompt is read window by window. Each window, and later each generated token, attends to the sinks, to the local
window and itself, and to the blocks whose representative keys have the largest inner product with its query, averaged
over the window. Tokens that leave the local window go to host memory in blocks: neither attention nor device memory
grows with the context, except for one key per block. One set of blocks serves all heads of a layer.

The local window is the newest whole blocks: `window` tokens before the window that is being read. A token represents
its block by the attention that it received, summed over all heads, from later tokens while it was local. Queries are
compared with block keys without rotation on either side, heads concatenated, so that relevance does not depend on
distance. With `positions = "capped"` everything that is not local is `window - 1` tokens away from every query, and
prompts can be longer than the positions that the model was trained for; local tokens and the window itself keep their
distances. The method is exact while the context fits into the budget; with "capped" only until something leaves the
local window (except for NoPE).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from pydantic import model_validator
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.softmax import Softmax
from kvcli.kernels.topk import topk_pages
from kvcli.kv.blocks import BlockCache, BlockLayout, BlockStats, PhaseStats, Positions, dot_scores, summarise
from kvcli.methods.config import HostKVConfig, PagedConfig, setting
from kvcli.methods.contract import Method, SequenceContext
from kvcli.models.geometry import LayerGeometry
from kvcli.telemetry.counters import Count


class InfLLMConfig(HostKVConfig, PagedConfig):
    """Settings of InfLLM; a page is a block; sizes as in arXiv 2502.13542, section 5.1."""

    sink: int = setting(64, "first tokens, always attended, rounded up to whole pages", "tokens", ge=0)
    dense_layers: int = setting(0, "leading layers that attend to everything", "layers", ge=0)
    prefill_window: int = setting(256, "tokens of the prompt read at once", "tokens", ge=1)
    representatives: int = setting(4, "most attended tokens of a page whose mean key represents it", "tokens", ge=1)
    positions: Positions = setting("capped", "distance of what is not local: capped (window - 1) or original")
    smallest_page: ClassVar[int | None] = None  # a page is read by its representatives, not by bounds

    @property
    def slots(self) -> int:
        """Retrieved blocks that the device has room for, per layer."""
        return self.pages.selected

    @property
    def beside(self) -> int:
        """How many of these slots can be given up to tokens that stay."""
        return 0

    @model_validator(mode="after")
    def _represents_by_its_own(self) -> InfLLMConfig:
        if self.representatives > self.page_size:
            raise ValueError(f"representatives {self.representatives} are more than a page has tokens {self.page_size}")
        return self


class InfLLM(Method[InfLLMConfig, BlockCache]):
    """Searches with a window's mean query, by inner product with block keys, for a fixed number of blocks."""

    Config = InfLLMConfig
    title = "blocks retrieved by their representative tokens; in prefill too"
    paper = "arXiv 2402.04617"
    long_generation = True
    offloads = True
    group_consistent = True
    device_memory = "O(B + L/p)"
    no_latents = "it keeps keys without their rotation apart from values, and a latent is both"
    exact: ClassVar[dict[str, Any]] = {"positions": "original"}
    true_kv: ClassVar[dict[str, Any] | None] = exact

    def __init__(self, config: InfLLMConfig, layers: Sequence[LayerGeometry], context: SequenceContext):
        super().__init__(config, layers, context)
        self.usage = {layer: PhaseStats() for layer in self.retrieval}

    def new_cache(self, layer: LayerGeometry) -> BlockCache:
        """Make a cache with local tokens, sinks, block keys and some blocks on the device, the rest in host memory."""
        config, context = self.config, self.context
        layout = BlockLayout(
            config.pages, config.slots, config.prefill_window, config.representatives, config.positions, config.beside
        )
        return BlockCache(layer, context.capacity, layout, context.rotary[layer.index], config.tiers(context.tiers))

    @property
    @override
    def prefill_window(self) -> int:
        return self.config.prefill_window

    def retrieve_window(
        self, layer: int, cache: BlockCache, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax
    ) -> Tensor:
        """Select blocks for the whole window, attend, then offload what has left the local window."""
        cache.extend(k, v)
        with self.span("score", layer):
            plain = cache.unrotate(q, cache.length - q.shape[1])
            scores = self.window_scores(layer, cache, plain)
        self._recall(layer, cache, scores, cache.selected, self.usage[layer].prefill)
        with self.span("attention", layer):
            out = cache.attend_newest(q, softmax, plain)
        self.count(layer, Count.BYTES_TO_HOST, cache.advance())
        return out

    def retrieve(self, layer: int, cache: BlockCache, q: Tensor, softmax: Softmax) -> Tensor:
        """Select blocks for this token and attend."""
        with self.span("score", layer):
            plain = cache.unrotate(q[:, None], cache.length - 1)
            scores = self.step_scores(layer, cache, plain[:, 0])
            wanted = cache.selected
            if len(scores) > wanted:
                wanted = self.allot(layer, scores)
        self._recall(layer, cache, scores, wanted, self.usage[layer].decode)
        with self.span("attention", layer):
            return cache.attend_newest(q[:, None], softmax, plain)[:, 0]

    def window_scores(self, layer: int, cache: BlockCache, queries: Tensor) -> Tensor:  # noqa: ARG002
        """Score every block for a window of the prompt with un-rotated queries [H, n, d]; return [blocks]."""
        return dot_scores(queries.mean(1), cache.block_keys)

    def step_scores(self, layer: int, cache: BlockCache, query: Tensor) -> Tensor:  # noqa: ARG002
        """Score every block for a generated token with its un-rotated query [H, d]; return [blocks]."""
        return dot_scores(query, cache.block_keys)

    def allot(self, layer: int, scores: Tensor) -> int:  # noqa: ARG002
        """Return how many blocks a generated token may have in this layer."""
        return self.retrieval[layer].selected

    @override
    def statistics(self) -> dict[str, Any]:
        """Return what was retrieved."""
        return summarise(self.usage)

    def _recall(self, layer: int, cache: BlockCache, scores: Tensor, wanted: int, usage: BlockStats) -> None:
        """Bring the `wanted` best blocks to the device; all of them, uncounted, where there are no more than fit."""
        if len(scores) <= cache.selected:
            if len(scores):
                cache.recall(torch.arange(len(scores), device=scores.device))
            return
        with self.span("select", layer):
            blocks = topk_pages(scores[None], wanted)[0].sort().values  # evictions depend on the order
        with self.span("recall", layer):
            misses, moved = cache.recall(blocks)
        self.count_heads(layer, Count.PAGES_REQUESTED, [wanted] * len(misses))
        self.count_recalled(layer, misses, moved)
        usage.add(wanted, misses[0], moved, float(scores[blocks].mean()))
