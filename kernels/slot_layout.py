"""Which page of its sequence every slot of the device holds: a function of the length and of the selection alone.

    slots    0 .. sink   |   sink .. first   |   first .. first + window           first = sink + selected
    hold     that page   |   resident page   |   the newest page <= P that is a multiple of window from the slot's

P = (length - 1) / p is the page of the newest token, p the tokens in a page. The last part is a ring, so that no page
ever moves: a new page takes the slot of the one that leaves the window. Until a sequence outgrows its slots, slot s
holds page s, in the ring too, and `resident` [b, Hk, selected] must say so (sink + j in entry j). Row r of a slot is
token page * p + r; there is no token in an empty slot (page -1), nor at or beyond the length.

The one formula serves every kind of layer: pages under a budget; everything (`SlotLayout.everything`); a sliding
window (pages of one token, no sinks, nothing selected); sinks and a window.

Lengths [b] are int32 and count the newest token; a sequence of length 0 takes no part. Page numbers are int32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvcli.kernels._triton import jit, require, require_whole, same_strides, tl

EMPTY = -1
"""The page of a slot that holds none."""


class SlotLayout(NamedTuple):
    """Slots of `size` tokens, a power of two: `sink` and `selected` ones and a ring of `window`."""

    size: int
    sink: int
    selected: int
    window: int

    @classmethod
    def everything(cls, slots: int, size: int = 1) -> SlotLayout:
        """Give every page its own slot."""
        return cls(size, slots, 0, 0)

    @property
    def first(self) -> int:
        """First slot of the ring."""
        return self.sink + self.selected

    @property
    def total(self) -> int:
        """How many slots there are."""
        return self.first + self.window

    @property
    def ring(self) -> int:
        """Period of the ring; one where there is none, since kernels divide by it."""
        return max(1, self.window)


class PagedKV(NamedTuple):
    """The slots of a layer and what they hold: k, v [b, Hk, layout.total * layout.size, d], any strides but the last.

    lengths [b] int32; resident [b, Hk, selected] int32, None where the layout selects nothing.
    """

    k: Tensor
    v: Tensor
    lengths: Tensor
    layout: SlotLayout
    resident: Tensor | None = None

    def check(self) -> None:
        """Raise ValueError where shapes, dtypes or strides are not what kernels read."""
        b, num_kv_heads, _, d = self.k.shape
        for name, x in (("k", self.k), ("v", self.v)):
            require(name, x, (b, num_kv_heads, self.layout.total * self.layout.size, d), self.k.dtype)
        if not same_strides(self.k, self.v):
            raise ValueError(f"k and v have different strides: {self.k.stride()} and {self.v.stride()}")
        require_whole("lengths", self.lengths, (b,), torch.int32)
        if self.resident is not None:
            require_whole("resident", self.resident, (b, num_kv_heads, self.layout.selected), torch.int32)
        elif self.layout.selected:
            raise ValueError(f"a layout with {self.layout.selected} selected slots needs to know what is resident")


def page_count(lengths: Tensor, layout: SlotLayout) -> Tensor:
    """Pages that each sequence occupies, the partly filled one included: lengths [b] -> [b]."""
    return -(-lengths // layout.size)


def active(lengths: Tensor, layout: SlotLayout) -> Tensor:
    """Tell which sequences have outgrown their slots, so that something is left out: [b] bool."""
    return page_count(lengths, layout) > layout.total


def candidates(lengths: Tensor, layout: SlotLayout, pages: int) -> Tensor:
    """Flag the pages that can be selected, neither sink nor window, of the first `pages`: [b, pages] bool."""
    page = torch.arange(pages, device=lengths.device)
    return (page >= layout.sink) & (page < page_count(lengths, layout)[:, None] - layout.window)


def slot_of_page(pages: Tensor, layout: SlotLayout) -> Tensor:
    """Give the slot of pages that are in it as the newest tokens, not as selected ones: [b] -> [b]."""
    return pages.where(pages < layout.first, layout.first + (pages - layout.first) % layout.ring)


def slot_pages(lengths: Tensor, layout: SlotLayout, resident: Tensor | None = None) -> Tensor:
    """Tabulate the page in every slot, EMPTY or beyond the length where there is none: [b, Hk or 1, total]."""
    slot = torch.arange(layout.total, device=lengths.device)
    newest = (lengths[:, None] - 1) // layout.size
    ring = slot + (newest - slot).clamp_min(0) // layout.ring * layout.ring
    pages = torch.where(slot < layout.first, slot, ring)[:, None]  # [b, 1, total]
    if resident is None:
        return pages
    pages = pages.repeat(1, resident.shape[1], 1)
    pages[:, :, layout.sink : layout.first] = resident
    return pages


def row_positions(lengths: Tensor, layout: SlotLayout, resident: Tensor | None = None) -> Tensor:
    """Give the position of the token in every row of the slots, -1 where there is none: [b, Hk or 1, total * size]."""
    pages = slot_pages(lengths, layout, resident)[..., None]
    positions = (pages * layout.size + torch.arange(layout.size, device=lengths.device)).flatten(2)
    return positions.masked_fill((positions < 0) | (positions >= lengths[:, None, None]), -1)


def filled_pages(rows: PagedKV) -> list[tuple[int, int, int]]:
    """List the pages that the newest tokens have filled: sequence, page, first row of its slot. Waits for a device."""
    size = rows.layout.size
    filled = ((rows.lengths > 0) & (rows.lengths % size == 0)).nonzero()[:, 0]
    pages = rows.lengths[filled] // size - 1
    return list(zip(filled.tolist(), pages.tolist(), (slot_of_page(pages, rows.layout) * size).tolist(), strict=True))


@jit
def page_in_slot(
    slot: tl.tensor, newest_page: tl.tensor, resident: tl.tensor, sink: tl.tensor, first: tl.tensor, ring: tl.tensor
) -> tl.tensor:
    """Look slots up as `slot_pages` does, inside a kernel; `resident` points to the row of one head, or is None."""
    page = tl.where(slot < first, slot, slot + tl.maximum(newest_page - slot, 0) // ring * ring)
    if resident is not None:
        selected = (slot >= sink) & (slot < first)
        page = tl.where(selected, tl.load(resident + slot - sink, mask=selected, other=-1), page)
    return page


@jit
def slot_of(page: tl.tensor, first: tl.tensor, ring: tl.tensor) -> tl.tensor:
    """Do what `slot_of_page` does, inside a kernel."""
    return tl.where(page < first, page, first + (page - first) % ring)
