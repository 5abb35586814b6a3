"""LM-Infinite: sinks and the newest tokens, with a ceiling on distances, for prompts of any length (arXiv 2308.16137).

The mask has the shape of a Greek lambda: every token, prompt or generated, attends to the first tokens and to the
newest ones, `budget` in total. No distance is larger than a ceiling, here that of the local `window`, so that a model
reads beyond the length that it was trained for. The prompt is read in windows, as by InfLLM, whose blocks these are:
those that are not local are the newest ones, at the distance of the ceiling.

Decided: defaults are for a model trained on 4,096 tokens, whose length is window and ceiling in the paper. The tokens
that the paper puts back into the middle of some layers for retrieval are left out, as in its main experiments.
"""

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kv.blocks import BlockCache
from kvcli.methods.config import CountOrShare, setting
from kvcli.methods.infllm import InfLLM, InfLLMConfig


class LMInfiniteConfig(InfLLMConfig):
    """Settings of LM-Infinite; defaults: section 4."""

    budget: CountOrShare = setting(4096, "tokens attended per layer and KV head, sink included", "tokens", ge=1)
    sink: int = setting(32, "first tokens, always attended, rounded up to whole pages", "tokens", ge=0)
    window: int = setting(
        4032, "most recent tokens at their true distance; no distance is larger with capped positions", "tokens", ge=1
    )


class LMInfinite(InfLLM):
    """Selects the newest blocks, whatever the query."""

    Config = LMInfiniteConfig
    title = "sinks and the newest tokens, with distances capped; in prefill too"
    paper = "arXiv 2308.16137"
    long_generation = True
    offloads = True
    group_consistent = True
    device_memory = "O(B + L/p)"

    @override
    def window_scores(self, layer: int, cache: BlockCache, queries: Tensor) -> Tensor:
        return _recency(cache)

    @override
    def step_scores(self, layer: int, cache: BlockCache, query: Tensor) -> Tensor:
        return _recency(cache)


def _recency(cache: BlockCache) -> Tensor:
    """Score every block by its position, the newest highest."""
    return torch.arange(len(cache.block_keys), dtype=torch.float32, device=cache.block_keys.device)
