"""Caches attended to by pages, which summaries select: all on the device (Quest), or offloaded (FreeKV, ArkVale)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels import page_table
from kvcli.kernels.decode_attention import Tokens, attend_chosen, attend_chosen_suits, decode_attention
from kvcli.kernels.narrow_attention import ChainTokens
from kvcli.kernels.page_scores import page_summary
from kvcli.kernels.page_table import EMPTY, Misses, resolve_pages
from kvcli.kernels.quant import BlockFormat
from kvcli.kernels.recall import HostLayout
from kvcli.kernels.softmax import Softmax
from kvcli.kv.cache import DenseCache, LayerCache, LayerSlots, Tiers, both, token_mask
from kvcli.kv.pages import Digest, PageBudget, PagedCache, beside, paged, take
from kvcli.memory.host_pool import DiskPagePool, HostPagePool, page_pool
from kvcli.memory.state import Settled
from kvcli.memory.tiers import Footprint, Traffic, nbytes
from kvcli.sizes import slices


class ResidentPageCache(PagedCache, DenseCache):
    """Keys and values k, v [Hk, pages * p, d] of every token on the device, and the summaries of all full pages."""

    lends = True

    def __init__(
        self, num_kv_heads: int, head_dim: int, capacity: int, budget: PageBudget, tiers: Tiers, readers: int = 1
    ):
        """Allocate; each of `readers` query heads of a KV head selects on its own, or all together if it is 1."""
        num_pages = budget.count(capacity)
        super().__init__(num_kv_heads, head_dim, num_pages * budget.size, tiers)
        self.budget = budget
        self.summaries = PageSummaries(num_kv_heads, head_dim, num_pages, tiers)
        self.readers = readers
        self.chosen: Tensor | None = None  # [Hk, k] or [H, k] pages last attended to, None for all

    @override
    def load(self, k: Tensor, v: Tensor) -> int:
        super().load(k, v)
        self._summarise(0, self.length // self.budget.size)
        return 0

    @override
    def tokens_in_chain(self) -> ChainTokens | None:
        return None if self.budget.active(self.length + 1) else super().tokens_in_chain()

    @override
    def take_row(self) -> int:
        super().take_row()
        page, row = divmod(self.length, self.budget.size)
        if row == 0:
            self._summarise(page - 1, page)
        return 0

    @override
    def as_slots(self) -> LayerSlots:
        return LayerSlots(self.kv, self.budget.slots, {"bounds": self.summaries.bounds}, in_place=True)

    @override
    def adopt_slots(self, slots: LayerSlots) -> None:
        super().adopt_slots(slots)
        self.summaries.bounds = slots.tensors["bounds"]

    @override
    def attend_selected(self, q: Tensor, selected: Tensor, softmax: Softmax) -> Tensor:
        """Attend with q [H, d] to sink, window and `selected` pages [Hk, k], or [H, k] by query head; return [H, d]."""
        self.chosen = selected
        size = self.budget.size
        sink, window = slice(self.candidates.start * size), slice(self.candidates.stop * size, self.length)
        if attend_chosen_suits(q, self.k, self.v, selected):
            numbers = torch.arange(self.length)
            inside = (selected[..., None] * size + numbers[:size]).flatten(1)
            before, after = (numbers[part].expand(len(selected), -1) for part in (sink, window))
            return attend_chosen(q, self.k, self.v, torch.cat((before, inside, after), 1), softmax)

        def rows(kv: Tensor) -> Tensor:
            inside = take(paged(kv, size), selected).flatten(1, 2)
            return torch.cat((beside(kv[:, sink], selected), inside, beside(kv[:, window], selected)), 1)

        return decode_attention(q, rows(self.k), rows(self.v), softmax)

    @override
    def attended(self) -> Tensor:
        return super().attended() if self.chosen is None else self.attended_pages(self.chosen, self.readers)

    @override
    def footprint(self) -> Footprint:
        return super().footprint() + Footprint(device=self.summaries.nbytes())

    @override
    def traffic(self, length: int) -> Traffic:
        attended = super().traffic(min(length, self.readers * self.budget.tokens(length))).attended  # the most
        moved = self.summaries.traffic(self.budget, length)
        return replace(moved, attended=attended, scores=self.readers * moved.scores)

    def _summarise(self, first: int, last: int) -> None:
        if last > first:
            size = self.budget.size
            self.summaries.fill(first, paged(self.k[:, first * size : last * size], size))


class OffloadedPageCache(PagedCache, LayerCache):
    """All full pages in host memory (`pool`); summaries, slots and page table on the device (FreeKV, section 4).

    The page table is `resident` [Hk, selected], the page in each selected slot, or EMPTY.
    """

    pool: HostPagePool

    def __init__(
        self,
        num_kv_heads: int,
        head_dim: int,
        capacity: int,
        budget: PageBudget,
        tiers: Tiers,
        digest: Digest = page_summary,
        layout: HostLayout = "hnd",
    ):
        self.length = 0
        self.taken = 0  # pages stored of an unfinished prompt
        self.budget = budget
        num_pages = budget.count(capacity)
        kept = 0 if budget.sink else 1  # sinks are on the device
        self.pool = page_pool(num_kv_heads, head_dim, budget.size, num_pages, tiers, layout, kept=kept)
        if self.pool.format is not None:
            digest = partial(_digest_as_held, digest, self.pool.format)
        self.summaries = PageSummaries(num_kv_heads, head_dim, num_pages, tiers, digest)
        self.kv = tiers.on_device(tiers.parts, num_kv_heads, budget.total, budget.size, head_dim)
        self.resident = tiers.on_device(num_kv_heads, budget.selected, dtype=torch.int64)  # page in each selected slot
        self.coming: Misses | None = None  # recalled for later: resident, but not in its slots yet

    @override
    def share(self, other: LayerCache, tokens: int) -> None:
        assert isinstance(other, OffloadedPageCache)
        self.pool.share(other.pool, tokens // self.budget.size)

    @override
    def share_pages(self, pages: HostPagePool, tokens: int) -> bool:
        return self.pool.share(pages, tokens // self.budget.size)

    @override
    def waiting(self) -> Sequence[Tensor]:
        return self.kv, self.summaries.bounds

    @override
    def take(self, k: Tensor, v: Tensor) -> int:
        """Summarise the full pages and write them to the host."""
        size, first = self.budget.size, self.taken
        self.taken = k.shape[1] // size
        new_k, new_v = (paged(x[:, first * size : self.taken * size], size) for x in (k, v))
        self.summaries.fill(first, new_k)
        return self.pool.write(first, new_k, new_v)

    @override
    def load(self, k: Tensor, v: Tensor) -> int:
        """Store a prompt: full pages on the host, sink and window on the device, nothing selected yet."""
        written = self.take(k, v)
        budget, self.length, self.taken = self.budget, k.shape[1], 0
        if not self.active:
            self._fill_slots(0, slice(None), k, v)
            self._hold_first_pages()
            return written
        window_start = (budget.count(self.length) - budget.window) * budget.size
        self._fill_slots(0, slice(budget.sink * budget.size), k, v)
        self._fill_slots(budget.sink + budget.selected, slice(window_start, None), k, v)
        self.resident.fill_(EMPTY)
        return written

    @override
    def append(self, k: Tensor, v: Tensor) -> int:
        """Store the current token; summarise a page that it fills, and write it to the host."""
        page, row, slot = self._next
        if row == 0 and page >= self.budget.total:
            self._advance_window()
        self.kv[0, :, slot, row] = k
        self.kv[-1, :, slot, row] = v
        return self.take_row()

    @override
    def tokens_in_chain(self) -> ChainTokens | None:
        length = self.length + 1
        return None if self.budget.active(length) else Tokens(self.kv.flatten(2, 3), length)

    @override
    def pages_in_chain(self) -> tuple[Tokens, Tensor, Tensor] | None:
        budget, (_, row, _) = self.budget, self._next
        if row == 0 or not budget.active(self.length + 1):  # the window may move, or nothing is left out
            return None
        if len(self.kv) != 2 or self.coming is not None or self.resident.dtype != torch.int64:
            return None
        blocks = self.pool.blocks(self.kv)
        if blocks is None:
            return None
        slots = self.kv[:, :, budget.sink : budget.sink + budget.selected]
        return Tokens(self.kv.flatten(2, 3), budget.tokens(self.length + 1)), slots, blocks

    @override
    def take_row(self) -> int:
        page, row, slot = self._next
        self.length += 1
        if row < self.budget.size - 1:
            return 0
        full_k, full_v = both(self.kv[:, :, slot : slot + 1])  # [Hk, 1, p, d]
        self.summaries.fill(page, full_k)
        return self.pool.write(page, full_k, full_v)

    def recall(self, selected: Tensor, heads: Tensor | None = None, later: bool = False) -> tuple[list[int], int]:
        """Bring the missing pages of `selected` [Hk, k] to the device, in place of those no longer selected.

        Only the KV heads marked in `heads` [Hk], if given, change their pages. With `later`, no attention of this step
        needs the pages, and a disk is read asynchronously. Returns the misses of each KV head and the bytes moved.
        """
        self._arrive()
        if heads is not None:
            selected = selected.where(heads[:, None], self.resident)
        if page_table.suits(self.resident, selected, self.kv.numel()):
            misses = page_table.resolve(self.resident, selected, self.budget.count(self.length))
        else:
            misses = resolve_pages(self.resident, selected)
            self.resident[misses.heads, misses.slots] = misses.pages
        if not len(misses.slots):
            return [0] * len(selected), 0
        return misses.by_head(len(selected)), self.bring(misses, later)

    def bring(self, misses: Misses, later: bool = False) -> int:
        """Bring pages that `resident` names already, see `recall`; return the bytes moved."""
        self._arrive()
        if later and isinstance(self.pool, DiskPagePool):
            self.pool.announce(misses.pages, misses.heads)
            self.coming = misses
        else:
            self._fetch(misses)
        return len(misses.slots) * self.pool.block_bytes

    @override
    def attend(self, q: Tensor, softmax: Softmax) -> Tensor:
        self._arrive()
        k, v = both(self.kv.flatten(2, 3)[:, :, : self.budget.tokens(self.length)])  # [Hk, rows, d]
        return decode_attention(q, k, v, softmax)

    @override
    def attended(self) -> Tensor:
        """Mark the tokens that the last step attended to, if nothing was recalled after it."""
        if not self.active:
            return token_mask(self.resident, self.length, range(self.length))
        return self.attended_pages(self.resident)

    @override
    def as_slots(self) -> LayerSlots:
        """Lay the cache out in slots; the window becomes a ring."""
        budget = self.budget
        first, passed = budget.sink + budget.selected, max(0, budget.count(self.length) - budget.total)
        self.kv[:, :, first:] = self.kv[:, :, first:].roll(passed % budget.window, 2)
        tensors = {"resident": self.resident.int(), "bounds": self.summaries.bounds}
        pool = self.pool
        return LayerSlots(
            *(self.kv.flatten(2, 3), budget.slots, tensors),
            pieces=pool.pieces,
            host_layout=pool.layout,
            format=pool.format,
        )

    @override
    def adopt_slots(self, slots: LayerSlots) -> None:
        self.kv = slots.kv.view(len(slots.kv), *self.resident.shape[:1], self.budget.total, self.budget.size, -1)
        self.resident, self.summaries.bounds = slots.tensors["resident"], slots.tensors["bounds"]

    @override
    def footprint(self) -> Footprint:
        device = nbytes(self.kv, self.resident) + self.summaries.nbytes()
        return Footprint(device) + self.pool.footprint()

    @override
    def traffic(self, length: int) -> Traffic:
        attended = nbytes(self.kv.flatten(2, 3)[:, :, : self.budget.tokens(length)])
        recalled = self.resident.numel() * self.pool.block_bytes if self.budget.active(length) else 0
        return replace(self.summaries.traffic(self.budget, length), attended=attended, recalled=recalled)

    @property
    def _next(self) -> tuple[int, int, int]:
        """The next token's page, its row there, and the slot of the page."""
        page, row = divmod(self.length, self.budget.size)
        return page, row, min(page, self.budget.total - 1)

    def _hold_first_pages(self) -> None:
        """Register the first pages as resident, unless the host holds them in another form: then they are fetched."""
        first = self.budget.sink
        pages = torch.arange(first, first + self.budget.selected, device=self.resident.device)
        self.resident[:] = pages if self.pool.format is None else EMPTY

    def _fetch(self, misses: Misses) -> None:
        """Fetch pages into their slots."""
        self.pool.bring(misses.pages, misses.heads, self.kv, misses.slots + self.budget.sink)

    def _arrive(self) -> None:
        """Fetch what was recalled for later."""
        coming, self.coming = self.coming, None
        if coming is not None:
            self._fetch(coming)

    def _fill_slots(self, slot: int, tokens: slice, k: Tensor, v: Tensor) -> None:
        """Write `tokens` of k, v [Hk, s, d] to the rows from `slot` on."""
        rows = self.kv.flatten(2, 3)[:, :, slot * self.budget.size :]  # [t, Hk, rows, d]
        for target, source in zip(rows, (k[:, tokens], v[:, tokens]), strict=False):
            target[:, : source.shape[1]] = source

    def _advance_window(self) -> None:
        """Make room for a new page: the window's oldest page, which the host has, leaves the device."""
        first = self.budget.sink + self.budget.selected
        self.kv[:, :, first:-1] = self.kv[:, :, first + 1 :].clone()


def _digest_as_held(digest: Digest, form: BlockFormat, keys: Tensor) -> Tensor:
    """Digest keys [Hk, n, p, d] as they will be read, some pages at a time."""
    parts = slices(keys.shape[1], max(1, form.at_once // len(keys)))
    return torch.cat([digest(form.rounded(keys[:, part])) for part in parts], 1) if keys.numel() else digest(keys)


class PageSummaries:
    """Page summaries on the device: `bounds` [Hk, num_pages, 2, d], upper and lower bound of each channel of keys."""

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
        """Estimate what the selection of pages moves once `length` tokens were seen."""
        if not budget.active(length):
            return Traffic()
        candidates = self.of(budget.candidates(length))
        return Traffic(scored=nbytes(candidates), scores=4 * candidates.shape[0] * candidates.shape[1])

    def settled(self) -> list[Settled]:
        """Return the summaries of full pages, which do not change."""
        return [Settled(self.bounds, 1, self.filled)]

    def nbytes(self) -> int:
        """Count the bytes on the device."""
        return nbytes(self.bounds)
