"""FreeKV's comparison: pages selected by the previous layer's query vector (arXiv 2505.13109, appendix B.1, table 4).

This speculates across layers instead of steps: the pages of a layer are selected with the query that the previous layer
had at the same step, scored as FreeKV scores them, and recalled while that layer is still computing. Nothing is
corrected. InfiniGen projects the hidden states anew for this; here, as in the paper's comparison, the query vector is
used as it is. The model's first layer selects with its own query.

On a GPU a graph runs the step where all layers have queries of one shape and lie on one device; there the scale of the
layer before goes with its query.
"""

from collections.abc import Sequence

from torch import Tensor
from typing_extensions import override

from kvcli.kernels.group_pooling import Pooling
from kvcli.kernels.softmax import Softmax
from kvcli.kv.paged import OffloadedPageCache
from kvcli.methods.config import HostKVConfig, PagedConfig, setting
from kvcli.methods.contract import Method, SequenceContext
from kvcli.methods.step import FromHost, PageBounds, StepPlan
from kvcli.models.geometry import LayerGeometry


class FreeKVLayerConfig(HostKVConfig, PagedConfig):
    """Settings of selection by the previous layer's query; defaults: appendix B.1, table 4."""

    pooling: Pooling = setting("mean_s", "how page scores are pooled over the query heads of a KV head")


class FreeKVLayer(Method[FreeKVLayerConfig, OffloadedPageCache]):
    """Selects a layer's pages with the query of the previous layer."""

    Config = FreeKVLayerConfig
    title = "pages selected by the query of the previous layer"
    paper = "arXiv 2505.13109"
    long_generation = True
    offloads = True
    group_consistent = True
    device_memory = "O(B + L/p)"

    def __init__(self, config: FreeKVLayerConfig, layers: Sequence[LayerGeometry], context: SequenceContext):
        super().__init__(config, layers, context)
        self.newest: Tensor | None = None  # [H, d], the query of the previous layer
        kinds = {(layer.num_heads, layer.head_dim, context.device(at)) for at, layer in enumerate(layers)}
        self.lends = len(kinds) == 1  # whether every layer's query serves the next layer

    def new_cache(self, layer: LayerGeometry) -> OffloadedPageCache:
        """Keep everything in host memory and a budget of pages on the device."""
        shape, pages = (layer.num_kv_heads, layer.head_dim, self.context.capacity), self.config.pages
        return OffloadedPageCache(*shape, pages, self.config.tiers(self.context.tiers))

    @property
    @override
    def step_plan(self) -> StepPlan:
        return StepPlan(PageBounds(self.config.pooling), when="borrowed", fetch=FromHost())

    @property
    @override
    def stays_in_place(self) -> bool:
        return super().stays_in_place and self.lends

    @override
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        self.newest = self.newest if layer else None
        return super().attend(layer, q, k, v, softmax)

    @override
    def attend_to(self, layer: int, q: Tensor, softmax: Softmax) -> Tensor:
        if layer in self.retrieval:
            newest = self.newest if self.newest is not None and self.newest.shape == q.shape else None
            self.remembered[layer].lent = None if newest is None else newest.to(q.device)
        out = super().attend_to(layer, q, softmax)
        self.newest = q.clone()
        return out
