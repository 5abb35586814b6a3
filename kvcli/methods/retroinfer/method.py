"""RetroInfer: clusters of tokens, read where they matter and estimated where they matter less (arXiv 2505.02922).

The KV cache is a vector store. Its index, the wave index (section 3), clusters keys by spherical k-means within long
segments, because what lies near in a text points the same way. A step divides the tokens into zones:

    steady       sinks and recent tokens, read exactly
    retrieval    the clusters whose centroids score best, read exactly
    estimation   the next ones: each counts as its number of tokens, all at its mean key with its mean value
    the rest     left out

The estimate needs the index alone, and lets a head whose attention is spread over many tokens see most of it.

KV lies in host memory; the device caches the part `cached` of it, from which the least recently read tokens make room
(the wave buffer, section 4). Generated tokens stay in the steady zone until `update` of them have left the window, and
are then clustered as one segment.

Decided where the paper is silent or its reference code differs: the retrieval zone is as many of the best clusters as
fit into `budget` next to sinks and window, so that methods compare at equal budgets; the paper takes 1.8 % of the
clusters, 2,160 tokens of 120K. Tokens that wait for their update are attended in addition to the budget. Keys are
scaled to unit length about their segment's mean, and a token stays in its segment; the code weighs keys by their
length, and assigns them once more among all segments. Host memory keeps tokens in their order, and the cache holds
single tokens, where the paper has blocks of eight of a cluster. In the counters one token of one KV head is a page of
size 1; the block cache's hits are pages that were asked for and not missed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import model_validator
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.softmax import Softmax
from kvcli.methods.config import CountOrShare, HostKVConfig, TokenConfig, setting
from kvcli.methods.contract import Method, SequenceContext
from kvcli.methods.retroinfer.cache import ClusteredTokenCache, Clustering
from kvcli.models.geometry import LayerGeometry
from kvcli.telemetry.counters import Count


class RetroInferConfig(HostKVConfig, TokenConfig):
    """Settings of RetroInfer; defaults: section 5."""

    budget: CountOrShare = setting(
        2048, "tokens read per layer and KV head at most, sink and window included", "tokens", ge=1
    )
    sink: int = setting(4, "first tokens, always attended", "tokens", ge=0)
    window: int = setting(64, "most recent tokens, always attended", "tokens", ge=1)
    dense_layers: int = setting(0, "leading layers that attend to everything", "layers", ge=0)
    cluster: int = setting(16, "tokens in a cluster, on average", "tokens", ge=1)
    segment: int = setting(8192, "tokens of the prompt that are clustered by themselves, about", "tokens", ge=1)
    rounds: int = setting(10, "rounds of k-means", "", ge=0)
    update: int = setting(1024, "tokens behind the window that wait to be clustered together", "tokens", ge=1)
    estimation: float = setting(0.232, "part of the clusters that is estimated, after those read", ge=0, le=1)
    cached: float = setting(0.05, "part of the tokens that the device has room for, at least those read", ge=0, le=1)

    @override
    def beside_budget(self, prompt: int, generated: int) -> int:
        """Return the most tokens that wait to be clustered."""
        return self.update - 1

    @property
    def clustering(self) -> Clustering:
        """The settings of clustering."""
        return Clustering(self.cluster, self.segment, self.rounds, self.update, self.estimation)

    @model_validator(mode="after")
    def _holds_clusters(self) -> RetroInferConfig:
        if self.update < self.cluster or self.segment < 2 * self.cluster:
            least = f"update must be at least {self.cluster}, and segment {2 * self.cluster}"
            raise ValueError(f"update {self.update} or segment {self.segment} has no room for a cluster: {least}")
        return self


class RetroInfer(Method[RetroInferConfig, ClusteredTokenCache]):
    """Reads the best clusters and estimates the next ones."""

    Config = RetroInferConfig
    title = "clusters retrieved by their mean key; the next best are estimated"
    paper = "arXiv 2505.02922"
    long_generation = True
    offloads = True
    group_consistent = True
    device_memory = "O(B + L/p + 0.05·L)"
    budget_is_bound = True
    attends_to_rows = True
    true_kv: ClassVar[dict[str, Any] | None] = {"estimation": 0.0}
    ablation: ClassVar[dict[str, dict[str, Any]]] = {
        "without estimation": {"estimation": 0.0},
        "one segment": {"segment": 1 << 30},
        "room for a selection alone": {"cached": 0.0},
    }

    def __init__(self, config: RetroInferConfig, layers: Sequence[LayerGeometry], context: SequenceContext):
        super().__init__(config, layers, context)
        self.selections = self.retrieved = 0  # of single KV heads; tokens of all these selections

    def new_cache(self, layer: LayerGeometry) -> ClusteredTokenCache:
        """Make a cache with steady zone, index and block cache on the device, and all tokens in host memory."""
        config, context = self.config, self.context
        heads, tiers = (layer.num_kv_heads, layer.head_dim), config.tiers(context.tiers)
        return ClusteredTokenCache(heads, context.capacity, config.tokens, config.clustering, config.cached, tiers)

    def retrieve(self, layer: int, cache: ClusteredTokenCache, q: Tensor, softmax: Softmax) -> Tensor:
        """Divide the clusters into zones, recall what the retrieval zone misses, attend to all three."""
        if not cache.index.tokens:
            return super().retrieve(layer, cache, q, softmax)
        with self.span("select", layer):
            zones = cache.zones(q, softmax)
        with self.span("recall", layer):
            asked, misses, moved = cache.recall(zones)
        self.count_heads(layer, Count.PAGES_REQUESTED, asked)
        self.count_recalled(layer, misses, moved)
        self.selections += len(asked)
        self.retrieved += sum(asked)
        with self.span("attention", layer):
            return cache.attend_zones(q, zones, softmax)

    def statistics(self) -> dict[str, Any]:
        """Return how many tokens a KV head retrieved per step, on average, and how many clusters a layer has."""
        if not self.selections:
            return {}
        clusters = max(cache.index.clusters for cache in self.retrieval.values())
        return {"tokens_retrieved_mean": self.retrieved / self.selections, "clusters": clusters}
