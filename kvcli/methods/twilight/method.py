"""Twilight: as many tokens as the attention needs, on top of a page selector (arXiv 2502.02770, sections 3 and 4).

The number of tokens that matter differs from head to head and from step to step, and no fixed budget follows it. So a
selector first takes a generous number of pages, here Quest's by their bounds. Then the weights of their tokens are
estimated with keys of four bits per channel, and each query head keeps the fewest tokens whose weights reach `p`
together: top-p instead of top-k. The budget is that of the selector, so it is an upper bound. `offload` keeps the KV in
host memory and recalls the pages that are missing on the device, of which it attends to the same tokens; the keys of
four bits stay on the device.

Decided: sink and window are always attended and their weights count, so that a head may need none of the selected
tokens. A KV head attends to what any of its query heads keeps. In the counters, pages are those of the selector; the
statistics tell how many of their tokens were kept.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import override

from kvcli.kernels.group_pooling import Pooling
from kvcli.methods.config import CountOrShare, setting
from kvcli.methods.contract import Method, SequenceContext
from kvcli.methods.quest import PageBoundsConfig
from kvcli.methods.step import RESIDENT, FromHost, StepPlan
from kvcli.methods.twilight.cache import EstimatedPageCache, Int4EstimateCache, OffloadedInt4EstimateCache
from kvcli.methods.twilight.step import BoundsAndFourBits, Nucleus
from kvcli.models.geometry import LayerGeometry


class TwilightConfig(PageBoundsConfig):
    """Settings of Twilight: those of its page selector, and how much attention is kept; defaults: section 5."""

    budget: CountOrShare = setting(8192, "tokens attended per layer and KV head, at most", "tokens", ge=1)
    pooling: Pooling = setting("max_s", "how page scores are pooled over the query heads of a KV head")
    p: float = setting(0.85, "part of each query head's attention that the tokens kept must hold", gt=0, le=1)


class Twilight(Method[TwilightConfig, EstimatedPageCache]):
    """Selects pages, then keeps the tokens that hold a part of the attention."""

    Config = TwilightConfig
    title = "within selected pages, the fewest tokens that hold a share p of attention"
    paper = "arXiv 2502.02770"
    long_generation = True
    offloads = False
    group_consistent = False
    device_memory = "O(L)"
    budget_is_bound = True

    def __init__(self, config: TwilightConfig, layers: Sequence[LayerGeometry], context: SequenceContext):
        super().__init__(config, layers, context)
        self.selections = self.weighed = self.kept = 0  # of single KV heads; tokens of all these selections
        self.fewest, self.most = context.capacity, 0  # tokens kept by one selection

    def new_cache(self, layer: LayerGeometry) -> EstimatedPageCache:
        """Make a cache with page summaries and four-bit keys on the device, and the KV there or in host memory."""
        kind = OffloadedInt4EstimateCache if self.config.offload else Int4EstimateCache
        tiers = self.config.tiers(self.context.tiers)
        return kind(layer.num_kv_heads, layer.head_dim, self.context.capacity, self.config.pages, tiers)

    @property
    @override
    def step_plan(self) -> StepPlan:
        fetch = FromHost() if self.config.offload else RESIDENT
        return StepPlan(BoundsAndFourBits(self.config.pooling), Nucleus(self.config.p), fetch=fetch)

    @override
    def take_tally(self, layer: int, tally: Mapping[str, int]) -> None:
        if tally["selections"]:
            self.selections += tally["selections"]
            self.weighed += tally["weighed"]
            self.kept += tally["kept"]
            self.fewest, self.most = min(self.fewest, tally["fewest"]), max(self.most, tally["most"])

    def statistics(self) -> dict[str, Any]:
        """Return how many tokens a KV head weighed and kept per layer and step: means, and the fewest and most kept."""
        if not self.selections:
            return {}
        return {
            "tokens_weighed_mean": self.weighed / self.selections,
            "tokens_kept_mean": self.kept / self.selections,
            "tokens_kept_min": self.fewest,
            "tokens_kept_max": self.most,
        }
