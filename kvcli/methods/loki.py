"""Loki: tokens scored by the few dimensions in which keys vary (arXiv 2406.02542, section 4).

The keys of a head lie close to a low-dimensional subspace. They are stored rotated to their principal axes, which come
from a calibration or, without one, from the prompt's keys. That changes no score, but the first `rank` channels now
carry most of it. A step scores all tokens by these, selects the best, and attends to them with all channels. `offload`
keeps the KV in host memory, with keys as the model computes them, and recalls the tokens that are missing on the
device; the device has the leading channels alone. What is attended to is the same but for rounding.

Axes of a prompt are those of its keys alone and do not change: a prompt of a few tokens has too few keys to find the
subspace, and what is generated after it is scored poorly. Some 40 tokens are enough; a calibrated file always is.

Decided where the paper, which has no grouped queries, is silent: scores are scaled as in attention, turned into weights
over the candidates, and pooled over the query heads of a KV head. The paper's part k_f of the context is a budget in
tokens here. In the counters one token of one KV head is a page of size 1.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.group_pooling import Pooling
from kvcli.kernels.key_bases import centred_moments, principal_axes
from kvcli.kernels.softmax import Softmax
from kvcli.kernels.token_scores import project_heads
from kvcli.kv.calibration_file import CalibrationMatrices
from kvcli.kv.tokens import OffloadedTokenCache, PartialKeyIndex, PrincipalAxesCache
from kvcli.methods.config import HostKVConfig, TokenConfig, setting
from kvcli.methods.contract import Method, SequenceContext
from kvcli.methods.step import BatchSlots, Coordinates, FromHost, KeyChannels, PartialKeys, StepPlan
from kvcli.models.geometry import LayerGeometry

Cache = PrincipalAxesCache | OffloadedTokenCache[PartialKeyIndex]


class LokiConfig(HostKVConfig, TokenConfig):
    """Settings of Loki; defaults: section 5; a quarter of 128 channels."""

    rank: int = setting(32, "leading principal axes that tokens are scored by", "channels", ge=1)
    pca: str = setting("", "safetensors file with the axes of every layer; without it they are the prompt's own")
    pooling: Pooling = setting("max_s", "how token scores are pooled over the query heads of a KV head")
    offload: bool = setting(False, "keep the KV in host memory and recall the selected tokens")


class Loki(Method[LokiConfig, Cache]):
    """Scores by a few dimensions, attends with all."""

    Config = LokiConfig
    title = "single tokens scored by the leading principal axes of the keys"
    paper = "arXiv 2406.02542"
    long_generation = True
    offloads = False
    group_consistent = False
    device_memory = "O(L)"
    no_latents = "it keeps keys in axes of their own, apart from values, and a latent is both"

    def __init__(self, config: LokiConfig, layers: Sequence[LayerGeometry], context: SequenceContext):
        super().__init__(config, layers, context)
        shapes = {
            layer: (cache.k.shape[0], cache.k.shape[2], cache.k.shape[2]) for layer, cache in self.retrieval.items()
        }
        self.pca = CalibrationMatrices(config.pca, shapes, "pca") if config.pca else None

    def new_cache(self, layer: LayerGeometry) -> Cache:
        """Make a cache with keys in their principal axes, or one with KV in host memory and the leading axes' index."""
        heads, d, capacity = layer.num_kv_heads, layer.head_dim, self.context.capacity
        budget, rank, tiers = self.config.tokens, min(self.config.rank, d), self.config.tiers(self.context.tiers)
        if self.config.offload:
            index = PartialKeyIndex(heads, d, rank, capacity, tiers)
            return OffloadedTokenCache(heads, d, capacity, budget, index, tiers)
        return PrincipalAxesCache(heads, d, capacity, budget, rank, tiers)

    def take_prompt(self, layer: int, cache: Cache, k: Tensor, v: Tensor, q: Tensor, softmax: Softmax) -> None:
        """Compute the axes of the keys; the cache or its index rotates the keys that it stores."""
        axes = self.pca[layer] if self.pca else principal_axes(centred_moments(k))
        held = cache.axes if isinstance(cache, PrincipalAxesCache) else cache.index.basis
        held.copy_(axes[..., : held.shape[2]])
        super().take_prompt(layer, cache, k, v, q, softmax)

    @property
    @override
    def step_plan(self) -> StepPlan:
        pooling = self.config.pooling
        if self.config.offload:
            return StepPlan(PartialKeys(pooling), fetch=FromHost())
        return StepPlan(KeyChannels(self.config.rank, pooling), turn=InAxes())


class InAxes(Coordinates):
    """Coordinates along the principal axes of the KV heads; dtypes stay."""

    @override
    def turned(self, cache: PrincipalAxesCache, q: Tensor) -> Tensor:
        return cache.to_axes(q)

    @override
    def over_slots(self, slots: BatchSlots) -> "InAxesOverSlots":
        return InAxesOverSlots(slots)


class InAxesOverSlots:
    """`InAxes` for queries and new keys of a batch, [b, H or Hk, d]."""

    def __init__(self, slots: BatchSlots):
        self.axes = slots.tensors["axes"]  # [b, Hk, d, d]

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate x to the axes, as `PrincipalAxesCache.to_axes` does."""
        turned = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)  # x may be strided
        project_heads(x, self.axes, turned)
        return turned
