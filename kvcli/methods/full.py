"""Full attention: the whole KV cache on the device; the reference for every other method."""

from torch import Tensor
from typing_extensions import override

from kvcli.kernels.softmax import Softmax
from kvcli.kv.cache import DenseCache
from kvcli.kv.entries import EntryLayerCache
from kvcli.kv.narrow import NarrowCache
from kvcli.kv.selected import ResidentSelectingCache
from kvcli.methods.config import ResidentKVConfig
from kvcli.methods.contract import Method
from kvcli.methods.step import StepPlan
from kvcli.models.geometry import LayerGeometry


class Full(Method[ResidentKVConfig, DenseCache | NarrowCache | EntryLayerCache[DenseCache]]):
    """Every layer keeps and attends to everything; or, where the model selects by itself, to what it selects."""

    Config = ResidentKVConfig
    title = "everything"
    paper = "the reference"
    long_generation = True
    offloads = False
    group_consistent = True
    device_memory = "O(L)"
    takes_selection = True

    def new_cache(self, layer: LayerGeometry) -> DenseCache | NarrowCache | EntryLayerCache[DenseCache]:
        """Make a cache that keeps all tokens on the device, or all entries.

        Raises:
            KvcliError: a narrow form is asked of a model with latents, or that selects by itself (usage).
        """
        capacity, tiers = self.context.capacity, self.context.tiers
        if self.config.kv_dtype != "auto":
            return self.config.cache_of(layer, layer.num_kv_heads, capacity, tiers)

        def dense(layer: LayerGeometry, capacity: int) -> DenseCache:
            if layer.selects is not None:
                return ResidentSelectingCache(layer, capacity, tiers)
            return DenseCache(layer.num_kv_heads, layer.head_dim, capacity, tiers)

        return EntryLayerCache(layer, capacity, tiers, dense) if layer.near else dense(layer, capacity)

    @property
    @override
    def step_plan(self) -> StepPlan:
        return StepPlan()

    def retrieve_window(
        self,
        layer: int,  # noqa: ARG002
        cache: DenseCache | NarrowCache,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax: Softmax,
    ) -> Tensor:
        """Attend to everything."""
        return cache.attend_window(q, k, v, softmax)
