"""RaaS: a page is kept as long as queries come back to it (arXiv 2502.11147, section 3).

In a chain of thought a token that matters ("milestone") is attended to for a while after it appeared, and then no more.
So every page carries the last step at which its score passed a threshold, and when the budget is full, the page with
the oldest stamp is evicted for good. The prompt's pages are protected: its tokens are looked back at after long pauses
("phoenix tokens"). Time and memory are O(budget) for any length of the output, if the prompt fits into the budget.

A page's score is the softmax, over the pages held, of the bound of q.k that its keys allow (as in Quest); a new page
counts as used. Decided where the paper is silent: pages are kept per KV head, by the largest score of its query heads
(FreeKV's comparison does the same, arXiv 2505.13109, appendix A); sinks and the newest pages are never evicted; a
prompt that leaves no room for them within the budget is kept nevertheless, and they beside it: a single page can then
be evicted, and none is scored. The threshold is that of the paper's first version; its second, and the reference code,
mark the better half of the pages instead. In that code pages have 16 tokens, too, and the newest is never evicted; it
has no sinks and leaves no layer dense, as is done here with the first.
"""

from typing import Any, Literal

from typing_extensions import override

from kvcli.methods.base import Method
from kvcli.methods.config import PagedConfig, PowerOfTwo, setting
from kvcli.methods.steps.eviction import StalestPage
from kvcli.methods.steps.plan import StepPlan
from kvcli.models.geometry import LayerGeometry
from kvcli.store.timestamped import TimestampedPageCache


class RaaSConfig(PagedConfig):
    """Settings of RaaS."""

    page_size: PowerOfTwo = setting(16, "tokens in a page, a power of two", "tokens")
    sink: int = setting(16, "first tokens, never evicted, rounded up to whole pages", "tokens", ge=0)
    window: int = setting(16, "most recent tokens, never evicted, rounded up to whole pages", "tokens", ge=1)
    threshold: float = setting(1e-4, "a page is used where its score is larger than this part of all", ge=0, le=1)
    pooling: Literal["mean_s", "max_s"] = setting("max_s", "how page scores are pooled over the group of a KV head")

    @override
    def beside_budget(self, prompt: int, generated: int) -> int:
        """What of a long prompt and the newest pages the budget does not hold."""
        pages = self.pages
        return max(0, (pages.count(prompt) + pages.window) * pages.size - self.budget)


class RaaS(Method[RaaSConfig, TimestampedPageCache]):
    """Attends to all pages held, and stamps those that were worth it."""

    Config = RaaSConfig
    title = "the prompt, and generated pages that queries still come back to"
    paper = "arXiv 2502.11147"
    long_generation = True
    offloads = False
    group_consistent = False
    device_memory = "O(B + k)"

    def new_cache(self, layer: LayerGeometry) -> TimestampedPageCache:
        """Keep a budget of pages, the prompt's among them, and stamps."""
        context = self.context
        return TimestampedPageCache(
            layer.num_kv_heads,
            layer.head_dim,
            context.capacity,
            context.prompt_tokens,
            self.config.pages,
            context.tiers,
        )

    @property
    @override
    def step_plan(self) -> StepPlan:
        config, pages = self.config, self.config.pages
        return StepPlan(evict=StalestPage(pages.window, pages.size, config.threshold, config.pooling))

    def statistics(self) -> dict[str, Any]:
        """Say how many pages were evicted, over all layers; a page of one KV head counts one."""
        return {"evicted_pages": sum(cache.evicted * cache.k.shape[0] for cache in self.retrieval.values())}
