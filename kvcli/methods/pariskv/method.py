"""ParisKV: data-independent centroids, votes of blocks, four-bit reranking (arXiv 2602.07721).

Centroids learned from a prompt fit later generated text less and less. Here keys and queries are scaled to unit length
and rotated at random, which spreads the directions of each block of eight channels evenly over the sphere. The block's
centroids, all 256 patterns of signs, are known beforehand and stay right however long the text gets.

A step finds tokens in two stages. In every block, centroids are ranked by the query, and the keys of the best ones
collide with it; the better the rank, the more they count. The tokens with the most votes over all blocks are
candidates. These are ranked again by an estimate of their products from keys of four bits, a sign and three bits of
magnitude per channel, and the best are recalled from host memory, where all KV lies.

The paper's settings adapt to the context: of fewer than 5K tokens half collide in each block and half are reranked, of
30K and more a fifth and a tenth. Ranks count 6 for the first 5 % of what collides, then 5, 4, 3, 2 and 1, up to 15, 30,
50, 75 and 100 %.

Decided where the paper is silent or its reference code differs: the mean query of a group stands for it, as in the
code. Every token is encoded when it comes, where the code waits for 512 and lets the window grow meanwhile; centroids
do not depend on the data, so the codes are the same. Head sizes that are not powers of two are padded with zeros. Ties
go to the lower token. In the counters one token of one KV head is a page of size 1.
"""

from typing import Any, ClassVar

from torch import Tensor

from kvcli.kernels.softmax import Softmax
from kvcli.kv.tokens import OffloadedTokenCache
from kvcli.methods.config import CountOrShare, HostKVConfig, TokenConfig, setting
from kvcli.methods.contract import Method
from kvcli.methods.pariskv.cache import CollisionIndex
from kvcli.models.geometry import LayerGeometry

Cache = OffloadedTokenCache[CollisionIndex]


class ParisKVConfig(HostKVConfig, TokenConfig):
    """Settings of ParisKV; defaults: 2048 tokens with 4 first and 512 recent ones."""

    budget: CountOrShare = setting(2564, "tokens attended per layer and KV head, all included", "tokens", ge=1)
    sink: int = setting(4, "first tokens, always attended", "tokens", ge=0)
    window: int = setting(512, "most recent tokens, always attended", "tokens", ge=1)
    dense_layers: int = setting(0, "leading layers that attend to everything", "layers", ge=0)
    reranked: float = setting(0.0, "part of the tokens that is ranked again; 0: by the context's length", ge=0, le=1)
    colliding: float = setting(
        0.0, "part of the tokens that collides in a block; 0: by the context's length", ge=0, le=1
    )
    seed: int = setting(0, "what the random rotation is drawn by", ge=0)


class ParisKV(Method[ParisKVConfig, Cache]):
    """Selects tokens anew at every step, in two stages."""

    Config = ParisKVConfig
    title = "single tokens: candidates by votes of sign patterns, ranked by 4-bit keys"
    paper = "arXiv 2602.07721"
    long_generation = True
    offloads = True
    group_consistent = True
    device_memory = "O(B + 0.22·L)"
    ablation: ClassVar[dict[str, dict[str, Any]]] = {
        "votes alone": {"reranked": 1e-6},
        "four bits alone": {"reranked": 1.0},
    }

    def new_cache(self, layer: LayerGeometry) -> Cache:
        """Make a cache with everything in host memory; on the device a budget of tokens and the codes of all keys."""
        heads, d, capacity = layer.num_kv_heads, layer.head_dim, self.context.capacity
        tiers = self.config.tiers(self.context.tiers)
        parts = self.config.reranked, self.config.colliding
        index = CollisionIndex(heads, d, capacity, self.config.seed, parts, tiers)
        return OffloadedTokenCache(heads, d, capacity, self.config.tokens, index, tiers)

    def retrieve(self, layer: int, cache: Cache, q: Tensor, softmax: Softmax) -> Tensor:
        """Select with the query of this step, recall the missing tokens, then attend."""
        if not cache.active:
            return super().retrieve(layer, cache, q, softmax)
        with self.span("select", layer):
            selected = cache.index.best(q, cache.candidates, cache.selected)  # [Hk, k]
        self.count_selected(layer, selected)
        with self.span("recall", layer):
            misses, moved = cache.recall(selected)
        self.count_recalled(layer, misses, moved)
        with self.span("attention", layer):
            return cache.attend_selected(q, selected, softmax)
