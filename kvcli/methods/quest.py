"""Quest: query-aware page selection (arXiv 2406.10774, section 3).

Each step scores every page by the upper bound of q.k that the page's per-channel minima and maxima allow, and attends
to the best pages in addition to sink and window. The published method selects per query head; here the selection is
made group-consistent by pooling over the query heads of a KV head, as FreeKV's comparison does (arXiv 2505.13109,
appendix A). With pooling none each query head attends to its own pages and has the whole budget; a KV head then reads
their union, and the counters count this union. The paper has neither sink nor window: here the first page and the last,
which is seldom full, are always read. Its budgets of 32 and 64 tokens take `sink = 0`: a page of 16 is then the newest
one. `offload` keeps the KV in host memory and recalls the pages that are missing on the device; what is attended to is
the same.
"""

from typing import Any, ClassVar

from typing_extensions import override

from kvcli.kernels.group_pooling import HeadPooling
from kvcli.kv.paged import OffloadedPageCache, ResidentPageCache
from kvcli.methods.config import HostKVConfig, PagedConfig, PowerOfTwo, setting
from kvcli.methods.contract import Method
from kvcli.methods.step import RESIDENT, FromHost, PageBounds, StepPlan
from kvcli.models.geometry import LayerGeometry


class PageBoundsConfig(HostKVConfig, PagedConfig):
    """Settings of pages that are chosen by bounds on their keys; defaults: section 4."""

    page_size: PowerOfTwo = setting(16, "tokens in a page, a power of two", "tokens")
    sink: int = setting(16, "first tokens, always attended, rounded up to whole pages", "tokens", ge=0)
    window: int = setting(16, "most recent tokens, always attended, rounded up to whole pages", "tokens", ge=1)
    dense_layers: int = setting(2, "leading layers that attend to everything", "layers", ge=0)
    offload: bool = setting(False, "keep the KV in host memory and recall the selected pages")


class QuestConfig(PageBoundsConfig):
    """Settings of Quest."""

    pooling: HeadPooling = setting("max_s", "how page scores are pooled over a KV head's query heads; none: each alone")


class Quest(Method[QuestConfig, ResidentPageCache | OffloadedPageCache]):
    """Selects pages anew at every step."""

    Config = QuestConfig
    title = "pages scored by bounds on their keys"
    paper = "arXiv 2406.10774"
    long_generation = True
    offloads = False
    group_consistent = False
    device_memory = "O(L)"
    ablation: ClassVar[dict[str, dict[str, Any]]] = {
        "each query head alone": {"pooling": "none"},
        "pages of 8": {"page_size": 8},  # arXiv 2508.08256, table 3
        "pages of 32": {"page_size": 32},
    }

    def new_cache(self, layer: LayerGeometry) -> ResidentPageCache | OffloadedPageCache:
        """Make a cache with page summaries on the device, and the KV there or in host memory."""
        shape, pages = (layer.num_kv_heads, layer.head_dim, self.context.capacity), self.config.pages
        tiers = self.config.tiers(self.context.tiers)
        if self.config.offload:
            return OffloadedPageCache(*shape, pages, tiers)
        return ResidentPageCache(*shape, pages, tiers, self.config.readers(layer))

    @property
    @override
    def step_plan(self) -> StepPlan:
        return StepPlan(PageBounds(self.config.pooling), fetch=FromHost() if self.config.offload else RESIDENT)
