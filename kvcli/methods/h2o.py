"""H2O: heavy hitters and recent tokens are kept, the rest is evicted at every step (arXiv 2306.14048, section 4).

The attention that a token received, summed over all queries so far, measures its importance. In addition to the most
recent tokens the cache holds those that received most, the heavy hitters; each new token evicts the one that received
least. The prompt's queries count like all others: its sums are the columns of the whole attention matrix, computed
chunk by chunk while the prompt is read, which costs its attention once more.

Decided where the paper, written for one KV head per query head, says nothing: the tokens of a KV head are chosen by the
mean over its query heads. Budget and recent tokens include the current one, at whose arrival the eviction happens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.prefill_attention import many_rows_by_kv_head
from kvcli.kernels.softmax import Softmax
from kvcli.kv.pruned import EvictingCache
from kvcli.methods.config import CountOrShare, MethodConfig, setting
from kvcli.methods.contract import Method, SequenceContext, last_used_here
from kvcli.methods.step import LowestScore, StepPlan, mean_attention
from kvcli.models.geometry import LayerGeometry


class H2OConfig(MethodConfig):
    """Settings of H2O; defaults: section 5."""

    budget: CountOrShare = setting(2048, "tokens held per layer and KV head, recent ones included", "tokens", ge=1)
    recent: float = setting(0.5, "part of the budget that the most recent tokens take", ge=0, le=1)


class H2O(Method[H2OConfig, EvictingCache]):
    """Keeps the tokens that received most attention so far, and the most recent ones."""

    Config = H2OConfig
    title = "tokens with the most attention so far and recent ones; evicts at every step"
    paper = "arXiv 2306.14048"
    long_generation = True
    offloads = False
    group_consistent = False
    device_memory = "O(B)"

    def __init__(self, config: H2OConfig, layers: Sequence[LayerGeometry], context: SequenceContext):
        super().__init__(config, layers, context)
        self.sums: dict[int, Tensor] = {}  # layer being read -> attention each token received, [Hk, m]

    def new_cache(self, layer: LayerGeometry) -> EvictingCache:
        """Make a cache of a budget of tokens."""
        rows = min(self.config.budget, self.context.capacity)
        recent = int(self.config.recent * self.config.budget)
        return EvictingCache(layer.num_kv_heads, layer.head_dim, rows, min(recent, rows), self.context.tiers)

    def observe(self, layer: int, q: Tensor, k: Tensor, softmax: Softmax) -> None:
        """Add the attention of the prompt's next queries."""
        if layer in self.retrieval:
            with self.span("score", layer):
                sums = mean_attention(column_sums(q, k, softmax), len(k), "group")
                if layer in self.sums:
                    before = self.sums[layer]
                    sums[:, : before.shape[1]] += before
                self.sums[layer] = sums

    def take_prompt(
        self,
        layer: int,
        cache: EvictingCache,
        k: Tensor,
        v: Tensor,
        q: Tensor,  # noqa: ARG002
        softmax: Softmax,  # noqa: ARG002
    ) -> None:
        """Keep the prompt's heavy hitters and its last tokens."""
        with self.span("prune", layer):
            sums = self.sums.pop(layer)
            cache.load_scored(k, v, sums)
            last_used_here(sums)

    @property
    @override
    def step_plan(self) -> StepPlan:
        recent = int(self.config.recent * self.config.budget)
        return StepPlan(evict=LowestScore(recent, heads="group", summed=True))


def column_sums(q: Tensor, k: Tensor, softmax: Softmax) -> Tensor:
    """Sum the attention that each key got from the newest n queries: q [H, n, d], k [Hk, m, d], n <= m -> [H, m].

    The sums are in at least fp32. There is never an n*m matrix: only the weights of a bounded number of queries of one
    KV head are held at a time.
    """
    groups = q.shape[0] // k.shape[0]
    sums = q.new_zeros(k.shape[0], groups, k.shape[1], dtype=torch.promote_types(q.dtype, torch.float32))
    for head, weights in many_rows_by_kv_head(q, k, softmax):  # [G, r, seen]
        sums[head, :, : weights.shape[2]] += weights.sum(1)
    return sums.flatten(0, 1)
