"""Pages of consecutive tokens: budgets in pages, candidates for selection, tensors viewed by pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcli.kernels.page_table import SlotLayout


@dataclass(frozen=True)
class PageBudget:
    """How many pages of `size` tokens a layer and KV head attends to: sink, selected and window.

    The window is the newest `window` pages, including the partly filled one, so that no token is ever hidden between
    the window and the pages that can be selected, and the total never exceeds the budget.
    """

    size: int
    sink: int
    window: int
    selected: int

    @classmethod
    def of(cls, *, budget: int, sink: int, window: int, page_size: int) -> PageBudget:
        """Split a `budget` in tokens: sink and window are rounded up to whole pages, the rest is selected."""
        sink_pages, window_pages = -(-sink // page_size), -(-window // page_size)
        return cls(page_size, sink_pages, window_pages, budget // page_size - sink_pages - window_pages)

    @property
    def total(self) -> int:
        """Pages attended to once the context has outgrown the budget."""
        return self.sink + self.selected + self.window

    @property
    def slots(self) -> SlotLayout:
        """The layout in slots of the pages attended to."""
        return SlotLayout(self.size, self.sink, self.selected, self.window)

    def count(self, length: int) -> int:
        """Return the number of pages that `length` tokens occupy."""
        return -(-length // self.size)

    def active(self, length: int) -> bool:
        """Return whether something has to be left out at this length."""
        return self.count(length) > self.total

    def tokens(self, length: int) -> int:
        """Return how many of `length` tokens are attended to; a partly filled page counts the tokens that it has."""
        return length - max(0, self.count(length) - self.total) * self.size

    def candidates(self, length: int) -> range:
        """Return the pages that can be selected: neither sink nor window."""
        return range(self.sink, self.count(length) - self.window)


class PagedCache:
    """Shared part of caches with a page budget, whether their KV is on the device or offloaded."""

    budget: PageBudget
    length: int

    @property
    def active(self) -> bool:
        """Whether the context has outgrown the budget."""
        return self.budget.active(self.length)

    @property
    def candidates(self) -> range:
        """Pages that can be selected."""
        return self.budget.candidates(self.length)

    @property
    def selected(self) -> int:
        """Number of pages to select, once the context has outgrown the budget."""
        return self.budget.selected

    def attended_pages(self, pages: Tensor, readers: int = 1) -> Tensor:
        """Mark the tokens of sink, window and `pages` [Hk * readers, k], by KV head: bool [Hk, length]."""
        num_kv_heads = len(pages) // readers
        mask = pages.new_zeros(num_kv_heads, self.budget.count(self.length), self.budget.size, dtype=torch.bool)
        mask[kv_heads(pages, num_kv_heads)[:, None], pages] = True
        mask[:, : self.candidates.start] = True
        mask[:, self.candidates.stop :] = True
        return mask.flatten(1)[:, : self.length]


def kv_heads(rows: Tensor, num_kv_heads: int) -> Tensor:
    """Return the KV head of each of `rows` [Hk, ..], or of rows [H, ..] of query heads: [len(rows)]."""
    return torch.arange(len(rows), device=rows.device) // (len(rows) // num_kv_heads)


def take(x: Tensor, index: Tensor) -> Tensor:
    """Take entries `index` [Hk, k] of the second dimension of x [Hk, n, ..], each head its own: [Hk, k, ..].

    An index [H, k] has a row for each query head, which takes from its KV head: [H, k, ..].
    """
    heads = kv_heads(index, len(x))
    if x.device.type != "cpu":
        return x[heads[:, None], index]
    taken = x.new_empty(*index.shape, *x.shape[2:])
    for row, (head, chosen) in enumerate(zip(heads.tolist(), index, strict=True)):  # each entry copied in one piece
        torch.index_select(x[head], 0, chosen, out=taken[row])
    return taken


def beside(x: Tensor, taken: Tensor) -> Tensor:
    """Expand tokens x [Hk, n, d] to the rows of `taken`, [Hk, ..] or [H, ..]."""
    return x if len(taken) == len(x) else x[kv_heads(taken, len(x))]


def distinct(index: Tensor, num_kv_heads: int) -> list[int]:
    """Count what each KV head reads: its row of `index` [Hk, k], or the union of its query heads' rows [H, k]."""
    if len(index) == num_kv_heads:
        return [index.shape[1]] * num_kv_heads
    return [len(torch.unique(rows)) for rows in index.view(num_kv_heads, -1)]


def numbered(marked: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """List the marked entries, bool [Hk, n], head by head: heads, entries, and their places within their head."""
    heads, entries = marked.nonzero(as_tuple=True)
    counts = marked.sum(1)
    first = counts.cumsum(0) - counts  # start of each head in the list
    return heads, entries, torch.arange(len(heads), device=heads.device) - first[heads]


def paged(kv: Tensor, size: int) -> Tensor:
    """View whole pages of tokens: [Hk, n * size, d] -> [Hk, n, size, d]."""
    return kv.unflatten(1, (-1, size))  # type: ignore[no-untyped-call, no-any-return]


Digest = Callable[[Tensor], Tensor]
"""A function from the keys of full pages [Hk, n, p, d] to their upper and lower bounds [Hk, n, 2, d]."""
