"""ArkVale: pages are evicted from the device, and recalled when they matter again (Chen et al., NeurIPS 2024).

Every full page has a digest, a cuboid around its keys, and lies in host memory. A step scores all pages by the upper
bound of q.k in their cuboid, recalls the missing ones of the best, and only then attends: recall is on the critical
path. The pages on the device with the worst scores make room. So only a part `top_part` of the pages attended to are
the best of all; the others are the best of those that are on the device anyway.

Decided as in FreeKV's comparison (arXiv 2505.13109): every KV head has its own pages, by the mean over its query heads
of their softmaxed scores, where the reference code has one set per layer and averages raw bounds over all heads. One
leading layer is dense; the paper leaves two (section 6.1), and `dense_layers = 2` compares as the paper does: at small
budgets of small models it finds much more. That half of the pages are the best is the code's default; its experiments
take a quarter, and their sink and window are the defaults here. While nothing is resident yet, at a prompt's first
step, all pages attended to are the best.
"""

from __future__ import annotations

from typing_extensions import override

from kvcli.kernels.group_pooling import Pooling
from kvcli.kernels.page_scores import page_cuboid
from kvcli.kv.paged import OffloadedPageCache
from kvcli.methods.config import HostKVConfig, PagedConfig, setting
from kvcli.methods.contract import Method
from kvcli.methods.step import Best, FromHost, PageBounds, StepPlan
from kvcli.models.geometry import LayerGeometry


class ArkValeConfig(HostKVConfig, PagedConfig):
    """Settings of ArkVale; defaults: budget and pooling as in arXiv 2505.13109, appendix A."""

    sink: int = setting(32, "first tokens, always attended, rounded up to whole pages", "tokens", ge=0)
    window: int = setting(64, "most recent tokens, always attended, rounded up to whole pages", "tokens", ge=1)
    top_part: float = setting(0.5, "part of the selected pages that are the best, wherever they lie", gt=0, le=1)
    pooling: Pooling = setting("mean_s", "how page scores are pooled over the query heads of a KV head")


class ArkVale(Method[ArkValeConfig, OffloadedPageCache]):
    """Recalls the best pages before it attends, and evicts the worst."""

    Config = ArkValeConfig
    title = "pages scored by a cuboid around their keys, recalled before attention"
    paper = "NeurIPS 2024"
    long_generation = True
    offloads = True
    group_consistent = True
    device_memory = "O(B + L/p)"

    def new_cache(self, layer: LayerGeometry) -> OffloadedPageCache:
        """Make a cache with everything in host memory, and a budget of pages and all digests on the device."""
        return OffloadedPageCache(
            layer.num_kv_heads,
            layer.head_dim,
            self.context.capacity,
            self.config.pages,
            self.config.tiers(self.context.tiers),
            page_cuboid,
        )

    @property
    @override
    def step_plan(self) -> StepPlan:
        index = PageBounds(self.config.pooling, cuboid=True)
        return StepPlan(index, Best(self.config.top_part), fetch=FromHost())
