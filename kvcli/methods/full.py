"""Full attention: the whole KV cache on the device. What every other method is measured against."""

from __future__ import annotations

from torch import Tensor

from kvcli.kernels.softmax import Softmax
from kvcli.methods.base import Method
from kvcli.methods.config import MethodConfig
from kvcli.models.geometry import LayerGeometry
from kvcli.store.cache import DenseCache
from kvcli.store.layer_slots import SlotRule


class FullConfig(MethodConfig):
    """Full attention has nothing to set."""


class Full(Method[FullConfig, DenseCache]):
    """Every layer keeps and attends to everything."""

    Config = FullConfig
    title = "everything"
    paper = "the reference"
    long_generation = True
    offloads = False
    group_consistent = True
    device_memory = "O(L)"

    def new_cache(self, layer: LayerGeometry) -> DenseCache:
        """Keep all tokens on the device."""
        return DenseCache(layer.num_kv_heads, layer.head_dim, self.context.capacity, self.context.tiers)

    @property
    def slot_rule(self) -> SlotRule:
        """See `Method.slot_rule`."""
        return SlotRule()

    def retrieve_window(
        self,
        layer: int,  # noqa: ARG002
        cache: DenseCache,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax: Softmax,
    ) -> Tensor:
        """See `Method.retrieve_window`: attend to everything."""
        return cache.attend_window(q, k, v, softmax)
