"""Random: random tokens, drawn anew at every step (a baseline for selection).

A method that does no better than this has gained nothing from queries and keys; one that concentrates on the wrong
tokens can do worse. Sink and window are kept as in streaming, so that the choice of the tokens between them is
measured; with `sink = 0` and `window = 1` all is random.

Decided: the draw depends on `seed`, the layer and the length alone, so that a run can be repeated and resumed. The
query heads of a KV head read the same tokens. In the counters one token of one KV head is a page of size 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.softmax import Softmax
from kvcli.kv.cache import Tiers
from kvcli.kv.tokens import ChannelScoredCache, TokenBudget
from kvcli.methods.config import TokenConfig, setting
from kvcli.methods.contract import Method
from kvcli.methods.step import Index, StepPlan
from kvcli.models.geometry import LayerGeometry


class RandomConfig(TokenConfig):
    """Settings of random selection."""

    sink: int = setting(4, "first tokens, always attended", "tokens", ge=0)
    window: int = setting(64, "most recent tokens, always attended; the current one is in any case", "tokens", ge=0)
    seed: int = setting(0, "same seed, same tokens", ge=0)


class DrawnTokenCache(ChannelScoredCache):
    """Keys and values k, v [Hk, capacity, d] of every token of a `layer`, on the device, without an index."""

    def __init__(self, layer: int, num_kv_heads: int, head_dim: int, capacity: int, budget: TokenBudget, tiers: Tiers):
        super().__init__(num_kv_heads, head_dim, capacity, budget, head_dim, tiers)
        self.layer = layer


class Random(Method[RandomConfig, DrawnTokenCache]):
    """Selects random tokens at every step."""

    Config = RandomConfig
    title = "random tokens: the baseline for selection"
    paper = "no paper"
    long_generation = True
    offloads = False
    group_consistent = True
    device_memory = "O(L)"

    def new_cache(self, layer: LayerGeometry) -> DrawnTokenCache:
        """Make a cache that keeps everything on the device."""
        shape = layer.num_kv_heads, layer.head_dim, self.context.capacity
        return DrawnTokenCache(layer.index, *shape, self.config.tokens, self.context.tiers)

    @cached_property
    @override
    def plan(self) -> StepPlan:
        """Like a `step_plan`, but no CUDA graph can run it: numbers are drawn on the host."""
        return StepPlan(Chance(self.config.seed))


@dataclass(frozen=True)
class Chance(Index):
    """Random scores, uniform in [0, 1)."""

    seed: int

    @override
    def scores(self, cache: DrawnTokenCache, q: Tensor, candidates: range, softmax: Softmax) -> Tensor:
        generator = torch.Generator().manual_seed(hash((self.seed, cache.layer, cache.length)))
        return torch.rand(cache.k.shape[0], len(candidates), generator=generator).to(q.device)
