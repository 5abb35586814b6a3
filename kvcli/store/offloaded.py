"""A layer whose full KV lies in host memory while the device holds a budget of pages (FreeKV, section 4).

Device slots are NHD: k, v [slots, p, Hk, d], so that the new token is appended as the projections give it. Slots stand
in this order, and the valid rows are always a prefix of them:

    [ sink pages | selected pages, one set a KV head | window pages, the partly filled one last ]

Until the context outgrows the budget slot j simply holds page j.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.kernels.decode_attention import decode_attention
from kvcli.kernels.resolve_pages import resolve_pages
from kvcli.kernels.softmax import Softmax
from kvcli.store.cache import Footprint, LayerCache, Tiers, nbytes
from kvcli.store.host import HostPool
from kvcli.store.pages import PageBudget, Paged, paged
from kvcli.store.summaries import PageSummaries

EMPTY = -1  # a selected slot that holds no page


class OffloadedCache(Paged, LayerCache):
    """Host pool, device slots, page table and page summaries of one layer."""

    def __init__(self, num_kv_heads: int, head_dim: int, capacity: int, budget: PageBudget, tiers: Tiers):
        self.length = 0
        self.budget = budget
        num_pages = budget.count(capacity)
        self.pool = HostPool(num_kv_heads, head_dim, budget.size, num_pages, tiers)
        self.summaries = PageSummaries(num_kv_heads, head_dim, num_pages, tiers)
        self.k = tiers.on_device(budget.total, budget.size, num_kv_heads, head_dim)
        self.v = tiers.on_device(budget.total, budget.size, num_kv_heads, head_dim)
        self.resident = tiers.on_device(num_kv_heads, budget.selected, dtype=torch.int64)  # page in each selected slot

    def load(self, k: Tensor, v: Tensor) -> int:
        """See `LayerCache.load`; full pages go to the host, nothing is selected yet."""
        budget, self.length = self.budget, k.shape[1]
        full = self.length // budget.size
        paged_k, paged_v = (paged(x[:, : full * budget.size], budget.size) for x in (k, v))
        self.summaries.fill(0, paged_k)
        written = self.pool.write(0, paged_k, paged_v)
        if not self.active:
            self._fill_slots(0, k, v)
            self.resident[:] = torch.arange(budget.sink, budget.sink + budget.selected, device=self.resident.device)
            return written
        window_start = (budget.count(self.length) - budget.window) * budget.size
        self._fill_slots(0, k[:, : budget.sink * budget.size], v[:, : budget.sink * budget.size])
        self._fill_slots(budget.sink + budget.selected, k[:, window_start:], v[:, window_start:])
        self.resident.fill_(EMPTY)
        return written

    def append(self, k: Tensor, v: Tensor) -> int:
        """See `LayerCache.append`; a page that fills is summarised and written to the host."""
        page, row = divmod(self.length, self.budget.size)
        if row == 0 and page >= self.budget.total:
            self._advance_window()
        slot = min(page, self.budget.total - 1)
        self.k[slot, row] = k
        self.v[slot, row] = v
        self.length += 1
        if row < self.budget.size - 1:
            return 0
        full_k, full_v = (x[slot].transpose(0, 1)[:, None] for x in (self.k, self.v))  # [Hk, 1, p, d]
        self.summaries.fill(page, full_k)
        return self.pool.write(page, full_k, full_v)

    def recall(self, selected: Tensor, heads: Tensor | None = None) -> tuple[int, int]:
        """Bring the missing pages of `selected` [Hk, k] to the device, evicting what left the selection.

        `heads` [Hk] bool limits the recall to some KV heads; the others keep what they have. Returns the number of
        misses (a page of a KV head counts one) and the bytes moved.
        """
        if heads is not None:
            selected = selected.where(heads[:, None], self.resident)
        misses = resolve_pages(self.resident, selected)
        blocks = self.pool.gather(misses.pages, misses.heads).to(self.k.device)  # [m, 2, p, d]
        slots = misses.slots + self.budget.sink
        self.k[slots, :, misses.heads] = blocks[:, 0]
        self.v[slots, :, misses.heads] = blocks[:, 1]
        self.resident[misses.heads, misses.slots] = misses.pages
        return len(misses.pages), nbytes(blocks)

    def attend(self, q: Tensor, softmax: Softmax) -> Tensor:
        """See `LayerCache.attend`."""
        rows = self.length
        if self.active:
            rows -= (self.budget.count(self.length) - self.budget.total) * self.budget.size
        k, v = (x.flatten(0, 1)[:rows].transpose(0, 1) for x in (self.k, self.v))  # [Hk, rows, d]
        return decode_attention(q, k, v, softmax)

    def footprint(self) -> Footprint:
        """See `LayerCache.footprint`."""
        device = nbytes(self.k, self.v, self.resident) + self.summaries.nbytes()
        return Footprint(device=device, host=self.pool.nbytes())

    def _fill_slots(self, slot: int, k: Tensor, v: Tensor) -> None:
        """Put consecutive tokens k, v [Hk, n, d] into the rows from `slot` on."""
        first = slot * self.budget.size
        self.k.flatten(0, 1)[first : first + k.shape[1]] = k.transpose(0, 1)
        self.v.flatten(0, 1)[first : first + v.shape[1]] = v.transpose(0, 1)

    def _advance_window(self) -> None:
        """Make room for a new page: the oldest window page leaves the device (the host has it)."""
        first = self.budget.sink + self.budget.selected
        for slots in (self.k, self.v):
            slots[first:-1] = slots[first + 1 :].clone()
