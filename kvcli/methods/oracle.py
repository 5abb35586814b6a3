"""Oracle: the tokens with the largest attention weights, found by reading every key (an upper bound for selection).

Each query head attends to the `budget` tokens whose exact q.k is largest, so no other choice at that budget holds more
of a step's attention. It saves nothing, since a step reads all keys. Other methods are measured against it.

Decided: each query head chooses on its own, as the attention of a model does. With `pooling` the heads of a KV head
choose together, which is the upper bound of methods that choose so. Neither sink nor window is kept, only the newest
token. In the counters one token of one KV head is a page of size 1.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

from typing_extensions import override

from kvcli.kernels.group_pooling import HeadPooling
from kvcli.kv.tokens import ChannelScoredCache
from kvcli.methods.config import TokenConfig, setting
from kvcli.methods.contract import Method
from kvcli.methods.step import KeyChannels, StepPlan
from kvcli.models.geometry import LayerGeometry


class OracleConfig(TokenConfig):
    """Settings of the oracle."""

    pooling: HeadPooling = setting("none", "how scores are pooled over a KV head's query heads; none: each alone")


class Oracle(Method[OracleConfig, ChannelScoredCache]):
    """Selects by exact scores at every step."""

    Config = OracleConfig
    title = "tokens with the largest attention weights: the upper bound for selection"
    paper = "no paper"
    long_generation = True
    offloads = False
    group_consistent = False
    device_memory = "O(L)"
    true_kv: ClassVar[dict[str, Any] | None] = {"pooling": "max_s"}

    def new_cache(self, layer: LayerGeometry) -> ChannelScoredCache:
        """Make a cache that keeps everything on the device; all channels of a key are scored."""
        shape, readers = (layer.num_kv_heads, layer.head_dim, self.context.capacity), self.config.readers(layer)
        return ChannelScoredCache(*shape, self.config.tokens, layer.head_dim, self.context.tiers, readers)

    @cached_property
    @override
    def plan(self) -> StepPlan:
        """Like a `step_plan`, but no CUDA graph can run it: slots hold one selection per KV head."""
        return StepPlan(KeyChannels(None, self.config.pooling))
