"""TOVA: evicts the token that the newest query attends to least (arXiv 2401.06104, section 3, algorithm 1).

The cache is the state of a recurrent network, with a fixed number of tokens. At every step the attention row of the
newest query alone, averaged over the heads, decides which token is evicted. Neither sinks nor recent tokens are
protected, and the newest token may be evicted itself. A prompt is read exactly and cut by its last row.

Decided as in the paper's algorithm and reference code: the mean is over all query heads of the layer, so that its KV
heads hold the same tokens. The budget includes the current token, at whose arrival the eviction happens.
"""

from torch import Tensor
from typing_extensions import override

from kvcli.kernels.prefill_attention import last_rows
from kvcli.kernels.softmax import Softmax
from kvcli.kv.pruned import EvictingCache
from kvcli.methods.config import CountOrShare, MethodConfig, setting
from kvcli.methods.contract import Method
from kvcli.methods.step import LowestScore, StepPlan, mean_attention
from kvcli.models.geometry import LayerGeometry


class TOVAConfig(MethodConfig):
    """Settings of TOVA; defaults: section 3."""

    budget: CountOrShare = setting(2048, "tokens held per layer", "tokens", ge=1)


class TOVA(Method[TOVAConfig, EvictingCache]):
    """Keeps what the newest query still attends to."""

    Config = TOVAConfig
    title = "tokens left after each step evicts the one with the least attention"
    paper = "arXiv 2401.06104"
    long_generation = True
    offloads = False
    group_consistent = True
    device_memory = "O(B)"

    def new_cache(self, layer: LayerGeometry) -> EvictingCache:
        """Make a cache of a budget of tokens."""
        rows = min(self.config.budget, self.context.capacity)
        return EvictingCache(layer.num_kv_heads, layer.head_dim, rows, 0, self.context.tiers)

    @property
    @override
    def query_rows(self) -> int:
        return 1

    def take_prompt(self, layer: int, cache: EvictingCache, k: Tensor, v: Tensor, q: Tensor, softmax: Softmax) -> None:
        """Keep what the prompt's last query attends to most."""
        with self.span("prune", layer):
            newest = last_rows(q, k, softmax)[:, 0]  # [H, s]
            cache.load_scored(k, v, mean_attention(newest, len(k), "layer"))

    @property
    @override
    def step_plan(self) -> StepPlan:
        return StepPlan(evict=LowestScore(recent=0, heads="layer", summed=False))
