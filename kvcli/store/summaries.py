"""The summary of every full page of a layer, on the device, by which pages are scored (Quest, ArkVale)."""

from collections.abc import Callable

from torch import Tensor

from kvcli.kernels.page_summary import page_summary
from kvcli.store.cache import Tiers, Traffic, nbytes
from kvcli.store.pages import PageBudget
from kvcli.store.state import Settled

Digest = Callable[[Tensor], Tensor]
"""A function from the keys of full pages [Hk, n, p, d] to their upper and lower bounds [Hk, n, 2, d]."""


class PageSummaries:
    """`bounds` [Hk, num_pages, 2, d]: upper and lower bound of every channel of the keys of a page, on the device."""

    def __init__(self, num_kv_heads: int, head_dim: int, num_pages: int, tiers: Tiers, digest: Digest = page_summary):
        self.digest = digest
        self.bounds = tiers.on_device(num_kv_heads, num_pages, 2, head_dim)
        self.filled = 0  # pages from the first one on

    def fill(self, first: int, keys: Tensor) -> None:
        """Summarise consecutive full pages from page `first` on: keys [Hk, n, p, d]."""
        self.filled = first + keys.shape[1]
        self.bounds[:, first : self.filled] = self.digest(keys)

    def of(self, pages: range) -> Tensor:
        """View the summaries of consecutive pages: [Hk, len(pages), 2, d]."""
        return self.bounds[:, pages.start : pages.stop]

    def traffic(self, budget: PageBudget, length: int) -> Traffic:
        """Count what the selection of pages moves once `length` tokens were seen."""
        if not budget.active(length):
            return Traffic()
        candidates = self.of(budget.candidates(length))
        return Traffic(scored=nbytes(candidates), scores=4 * candidates.shape[0] * candidates.shape[1])

    def settled(self) -> list[Settled]:
        """Full pages do not change."""
        return [Settled(self.bounds, 1, self.filled)]

    def nbytes(self) -> int:
        """Bytes on the device."""
        return nbytes(self.bounds)
