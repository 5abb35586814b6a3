"""MagicPIG: attention estimated from tokens that hashing samples (arXiv 2410.16179, section 4 and algorithm 1).

Attention is an expectation over tokens, and where it is spread over many of them the best few are a poor substitute. So
tokens are sampled. For every query, `tables` random hashes of `bits` each tell which tokens share its hash in at least
two tables, which is the likelier the nearer a key is to the query. A token's chance u is known in closed form, and
dividing its weight by u makes the estimate one of full attention. In addition to the sample, sinks and window are
attended to exactly. Adding one vector to all keys changes no attention, so keys are hashed minus their mean: they lie
in a narrow cone, where hashes would not tell them apart.

KV and hash codes lie in host memory. A code takes its bits, for every token and KV head: 190 bytes at 150 tables of 10
bits, eight tables to the byte, next to the 512 of a 16-bit key and value of 128 channels. There is no budget; the
statistics tell how many tokens are read.

Decided where the paper is silent or its reference code differs: each query head samples on its own, and a KV head reads
everything that its query heads sampled. All codes are compared where the paper looks them up in sorted tables, and the
sample is brought to the device where the paper attends on the CPU: the tokens are the same. Generated tokens are hashed
when they leave the window, by the prompt's mean key; the code keeps them on the device. Chances are at least 1e-4. One
leading layer is dense; the code leaves out every sixteenth. One set of random directions, drawn by `seed`, serves all
layers and sequences. In the counters one token of one KV head is a page of size 1, and nothing stays on the device from
step to step, so that every page asked for is a miss.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import override

from kvcli.kernels.softmax import Softmax
from kvcli.methods.config import HostKVConfig, setting
from kvcli.methods.contract import Method, SequenceContext
from kvcli.methods.magicpig.cache import Hashing, SampledTokenCache
from kvcli.models.geometry import LayerGeometry
from kvcli.telemetry.counters import Count


class MagicPIGConfig(HostKVConfig):
    """Settings of MagicPIG; defaults: section 5, K 10 and L 150."""

    bits: int = setting(10, "bits of a hash (K)", "bits", ge=1, le=15)
    tables: int = setting(150, "hash tables (L), two of which must agree", "tables", ge=2)
    sink: int = setting(4, "first tokens, always attended", "tokens", ge=0)
    window: int = setting(64, "most recent tokens, always attended", "tokens", ge=1)
    dense_layers: int = setting(1, "leading layers that attend to everything", "layers", ge=0)
    centred: bool = setting(True, "hash keys less their mean over the prompt")
    seed: int = setting(0, "what the random directions are drawn by", ge=0)

    @property
    @override
    def leading_dense_layers(self) -> int:
        return self.dense_layers


class MagicPIG(Method[MagicPIGConfig, SampledTokenCache]):
    """Samples tokens anew at every step, and weighs each by its chance."""

    Config = MagicPIGConfig
    title = "tokens sampled by hashing, weighted by their inverse probability"
    paper = "arXiv 2410.16179"
    long_generation = True
    offloads = True
    group_consistent = False
    device_memory = "O(W)"
    exact: ClassVar[dict[str, Any]] = {"window": 1 << 20}
    true_kv: ClassVar[dict[str, Any] | None] = None
    reads_by_chance = True
    ablation: ClassVar[dict[str, dict[str, Any]]] = {"without centring": {"centred": False}}

    def __init__(self, config: MagicPIGConfig, layers: Sequence[LayerGeometry], context: SequenceContext):
        super().__init__(config, layers, context)
        self.candidates = self.sampled = 0  # pairs of a query head and a token, over all steps
        self.selections = self.read = 0  # steps of single KV heads, and the tokens that they read

    def new_cache(self, layer: LayerGeometry) -> SampledTokenCache:
        """Make a cache with sinks and window on the device, and all tokens and their hash codes in host memory."""
        config, tiers = self.config, self.config.tiers(self.context.tiers)
        hashing = Hashing(config.bits, config.tables, config.centred, config.seed)
        near = config.sink, config.window
        return SampledTokenCache(layer.num_kv_heads, layer.head_dim, self.context.capacity, near, hashing, tiers)

    def retrieve(self, layer: int, cache: SampledTokenCache, q: Tensor, softmax: Softmax) -> Tensor:
        """Sample by this step's query, bring the sample to the device, attend weighted by chances."""
        if not cache.hashed:
            return super().retrieve(layer, cache, q, softmax)
        with self.span("score", layer):
            tokens, own = cache.sample(q)  # [Hk, m], [Hk, G, m]
        with self.span("recall", layer):
            sample, moved = cache.recall(tokens, own)
        self.count_heads(layer, Count.PAGES_REQUESTED, sample.counts)
        self.count_recalled(layer, sample.counts, moved)
        self.candidates += len(q) * cache.hashed
        self.sampled += int(own.sum())
        self.selections += len(sample.counts)
        self.read += sum(sample.counts)
        with self.span("attention", layer):
            return cache.attend_sample(q, sample, softmax)

    def statistics(self) -> dict[str, Any]:
        """Return, as means, the part of far tokens that a query head sampled, and how many a KV head read per step."""
        if not self.selections:
            return {}
        return {"sampled_part": self.sampled / self.candidates, "tokens_sampled_mean": self.read / self.selections}
