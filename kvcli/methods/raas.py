"""RaaS: a page is kept as long as queries come back to it (arXiv 2502.11147, section 3).

In a chain of thought a token that matters ("milestone") is attended to for a while after it appeared, and then no more.
So every page carries the last step at which its score passed a threshold. When the budget is full, the page with the
oldest stamp is evicted for good. The prompt's pages are protected, because its tokens are attended to after long pauses
("phoenix tokens"). Time and memory are O(budget) for any length of the output, if the prompt fits into the budget.

A page's score is the softmax, over the pages held, of the bound of q.k that its keys allow (as in Quest); a new page
counts as used. Decided where the paper is silent: pages are kept per KV head, by the largest score of its query heads
(FreeKV's comparison does the same, arXiv 2505.13109, appendix A). Sinks and the newest pages are never evicted. A
prompt that leaves no room for them within the budget is kept nevertheless, and they are kept in addition: a single page
can then be evicted, and none is scored. The threshold is that of the paper's first version; its second, and the
reference code, mark the better half of the pages instead. That code also has pages of 16 tokens and never evicts the
newest; unlike here, it has no sinks and no dense first layer.

Every page has a timestamp: the length of the sequence when it was last worth keeping. The slots are in this order, and
the rows of a head that hold tokens are always a prefix of them:

    [ prompt and sink pages, never evicted | kept pages, a set per KV head | window pages, the partly filled one last ]

Until there are more pages than slots, slot j holds page j. Then each new page pushes the oldest window page out of the
window, and each KV head evicts the page with the oldest timestamp, possibly that page itself; of equals the older page.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.decode_attention import decode_attention
from kvcli.kernels.page_scores import page_summary
from kvcli.kernels.page_table import SlotLayout
from kvcli.kernels.softmax import Softmax
from kvcli.kv.cache import NEVER, LayerSlots, ResidentCache, Tiers
from kvcli.kv.pages import PageBudget, paged
from kvcli.memory.state import Settled
from kvcli.memory.tiers import Footprint, Traffic, nbytes
from kvcli.methods.config import PagedConfig, PowerOfTwo, setting
from kvcli.methods.contract import Method
from kvcli.methods.step import StalestPage, StepPlan
from kvcli.models.geometry import LayerGeometry


class TimestampedPageCache(ResidentCache):
    """Pages in slots on the device: k, v [Hk, slots * p, d], and `bounds` of their keys [Hk, slots, 2, d].

    `stamps` and `pages` [Hk, slots] are their timestamps and page numbers. `prompt` is the length of the prompt, where
    it is known; otherwise there are slots for any. Where the prompt takes up the budget, the window has slots beyond
    it.
    """

    def __init__(
        self,
        num_kv_heads: int,
        head_dim: int,
        capacity: int,
        prompt: int | None,
        budget: PageBudget,
        tiers: Tiers,
    ):
        self.budget = budget
        self.protected, self.num_slots = self._split(capacity if prompt is None else prompt)
        slots = min(self.num_slots, budget.count(capacity))
        super().__init__(num_kv_heads, head_dim, slots * budget.size, tiers)
        self.bounds = tiers.on_device(num_kv_heads, slots, 2, head_dim)
        self.stamps, self.pages = (tiers.on_device(num_kv_heads, slots, dtype=torch.int64) for _ in range(2))
        self.prompt_pages = 0  # full pages of the prompt

    @property
    def evicted(self) -> int:
        """Pages that each KV head has evicted."""
        return max(0, self.budget.count(self.length) - self.num_slots)

    @property
    def contested(self) -> bool:
        """Whether there is a choice of pages to evict; otherwise stamps are not needed."""
        return self.num_slots - self.budget.window > self.protected

    @property
    def summaries(self) -> Tensor:
        """Bounds of the keys of the full pages held: [Hk, n, 2, d]."""
        return self.bounds[:, : self._rows // self.budget.size]

    @override
    def load(self, k: Tensor, v: Tensor) -> int:
        self.length, size = k.shape[1], self.budget.size
        self.protected, self.num_slots = self._split(self.length)
        self.k[:, : self.length], self.v[:, : self.length] = k, v
        full, held = self.length // size, self.budget.count(self.length)
        self.prompt_pages = full
        if full:
            self.bounds[:, :full] = page_summary(paged(k[:, : full * size], size))
        self.pages[:, :held] = torch.arange(held, device=k.device)
        self.stamps[:, :held] = self.length
        return 0

    @override
    def append(self, k: Tensor, v: Tensor) -> int:
        """Store the current token; if a new page finds no free slot, each KV head evicts one."""
        size = self.budget.size
        page, row = divmod(self.length, size)
        if row == 0 and page >= self.num_slots:
            self._evict()
        slot = min(page, self.num_slots - 1)
        first = slot * size
        self.k[:, first + row], self.v[:, first + row] = k, v
        self.length += 1
        if row == 0:
            self.pages[:, slot] = page
            self.stamps[:, slot] = self.length
        if row == size - 1:
            self.bounds[:, slot : slot + 1] = page_summary(paged(self.k[:, first : first + size], size))
        return 0

    def stamp(self, used: Tensor) -> None:
        """Give the full pages marked in `used` [Hk, n] the newest timestamp."""
        self.stamps[:, : used.shape[1]].masked_fill_(used, self.length)

    @override
    def attend(self, q: Tensor, softmax: Softmax) -> Tensor:
        rows = self._rows
        return decode_attention(q, self.k[:, :rows], self.v[:, :rows], softmax)

    def settled(self) -> list[Settled]:
        """Return the prompt's full pages, which are never evicted."""
        size, full, held = self.budget.size, self.prompt_pages, self.budget.count(self._rows)
        return [Settled(self.kv, 2, full * size, held * size), Settled(self.bounds, 1, full, held)]

    @override
    def attended(self) -> Tensor:
        pages = self.pages[:, : self.budget.count(self._rows)]
        mask = pages.new_zeros(len(pages), self.budget.count(self.length), self.budget.size, dtype=torch.bool)
        mask[torch.arange(len(pages), device=pages.device)[:, None], pages] = True
        return mask.flatten(1)[:, : self.length]

    @override
    def as_slots(self) -> LayerSlots:
        sizes = {"protected": self.protected, "slots": self.num_slots}
        tensors = {name: torch.tensor(size, device=self.k.device) for name, size in sizes.items()}
        tensors |= {"bounds": self.bounds, "stamps": self.stamps, "pages": self.pages}
        layout = SlotLayout.everything(self.bounds.shape[1], self.budget.size)
        return LayerSlots(self.kv, layout, tensors, active_from=None if self.contested else NEVER)

    @override
    def adopt_slots(self, slots: LayerSlots) -> None:
        super().adopt_slots(slots)
        self.bounds, self.stamps, self.pages = (slots.tensors[name] for name in ("bounds", "stamps", "pages"))

    @override
    def footprint(self) -> Footprint:
        return Footprint(device=nbytes(self.kv, self.bounds, self.stamps, self.pages))

    @override
    def traffic(self, length: int) -> Traffic:
        """Estimate the traffic of a step: held tokens are attended to; full pages are scored if stamps are needed."""
        size = self.budget.size
        held = length - max(0, self.budget.count(length) - self.num_slots) * size
        return Traffic(
            attended=nbytes(self.kv[:, :, :held]),
            scored=nbytes(self.bounds[:, : held // size]) if self.contested else 0,
            scores=4 * self.k.shape[0] * (held // size) if self.contested else 0,
        )

    @property
    def _rows(self) -> int:
        """Tokens held by each KV head."""
        return self.length - self.evicted * self.budget.size

    def _split(self, prompt: int) -> tuple[int, int]:
        """Return the number of protected slots after a prompt of `prompt` tokens, and of all slots."""
        protected = max(self.budget.sink, self.budget.count(prompt))
        return protected, max(self.budget.total, protected + self.budget.window)

    def _evict(self) -> None:
        """Free the last slot: the page that leaves the window replaces the evicted one, and the window moves on."""
        leaving = self.num_slots - self.budget.window
        stale = slice(self.protected, leaving + 1)
        age = self.stamps[:, stale] * self.budget.count(self.length + 1) + self.pages[:, stale]
        victim = self.protected + age.argmin(1)  # [Hk]
        heads = torch.arange(len(victim), device=victim.device)
        for slots in (*(paged(rows, self.budget.size) for rows in self.kv), self.bounds, self.stamps, self.pages):
            slots[heads, victim] = slots[:, leaving].clone()  # with one head, source and target share memory
            slots[:, leaving : self.num_slots - 1] = slots[:, leaving + 1 : self.num_slots].clone()


class RaaSConfig(PagedConfig):
    """Settings of RaaS; defaults: section 4; threshold of its first version."""

    page_size: PowerOfTwo = setting(16, "tokens in a page, a power of two", "tokens")
    sink: int = setting(16, "first tokens, never evicted, rounded up to whole pages", "tokens", ge=0)
    window: int = setting(16, "most recent tokens, never evicted, rounded up to whole pages", "tokens", ge=1)
    threshold: float = setting(1e-4, "a page is used where its score is larger than this part of all", ge=0, le=1)
    pooling: Literal["mean_s", "max_s"] = setting("max_s", "how page scores are pooled over the group of a KV head")

    @override
    def beside_budget(self, prompt: int, generated: int) -> int:
        """Return the tokens of a long prompt and of the newest pages that exceed the budget."""
        pages = self.pages
        return max(0, (pages.count(prompt) + pages.window) * pages.size - self.budget)


class RaaS(Method[RaaSConfig, TimestampedPageCache]):
    """Attends to all pages held, and stamps those that were used."""

    Config = RaaSConfig
    title = "the prompt, and the generated pages that queries used most recently"
    paper = "arXiv 2502.11147"
    long_generation = True
    offloads = False
    group_consistent = False
    device_memory = "O(B + k)"

    def new_cache(self, layer: LayerGeometry) -> TimestampedPageCache:
        """Make a cache of a budget of pages, including the prompt's, and their stamps."""
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
        """Return how many pages were evicted, over all layers and KV heads."""
        return {"evicted_pages": sum(cache.evicted * cache.k.shape[0] for cache in self.retrieval.values())}
