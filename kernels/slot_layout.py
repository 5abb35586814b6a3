"""Which page of its sequence every slot of the device holds: a function of the length and of the selection alone.

    slots    0 .. sink   |   sink .. first   |   first .. first + window           first = sink + selected
    hold     that page   |   resident page   |   the newest page <= P that is a multiple of window from the slot's

P = (length - 1) / p is the page of the newest token, p the tokens in a page. The last part is a ring, so that no page
ever moves: a new page takes the slot of the one that leaves the window. Until a sequence outgrows its slots, slot s
holds page s, in the ring too, whatever `resident` [b, Hk, selected] says. Row r of a slot is
token page * p + r; there is no token in an empty slot (page -1), nor at or beyond the length.

The one formula serves every kind of layer: pages under a budget; everything (`SlotLayout.everything`); a sliding
window (pages of one token, no sinks, nothing selected); sinks and a window.

Where tokens are indexed a `group` at a time, those of the unfilled group cannot be selected: the ring has slots for
them, they are attended to in any case, and so many less are selected. The ring then takes all tokens as they come, and
the first of them go into slots of their own as well. Where the oldest page leaves `early`, P = length / p: as soon as
the newest page is full its successor has a slot, an empty one, and what that held is attended to no more; attention
knows such rings. Rows may also lie `in_place`: k and v hold every token at its position, and the slots only say which
of them are attended to.

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
    """Slots of `size` tokens, a power of two: `sink` and `selected` ones and a ring of `window`, or of a `group`."""

    size: int
    sink: int
    selected: int
    window: int
    group: int = 1
    early: bool = False

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
        return self.first + (self.window if self.group == 1 else self.ring)

    @property
    def budget(self) -> int:
        """Pages that are attended to once a sequence has more of them."""
        return self.first + self.window

    @property
    def ring(self) -> int:
        """Period of the ring; one where there is none, since kernels divide by it."""
        return max(self.window, self.group)

    @property
    def low(self) -> int:
        """First page that goes into the ring, and its period counts from it."""
        return self.first if self.group == 1 else 0


class PagedKV(NamedTuple):
    """The slots of a layer and what they hold: k, v [b, Hk, layout.total * layout.size, d], any strides but the last.

    lengths [b] int32; resident [b, Hk, selected] int32, None where the layout selects nothing. `in_place`: k and v
    [b, Hk, tokens, d] hold every token at its position instead. `arrived` [b, Hk] int32 are zeros with which kernels
    count how many programs of a KV head have finished; each leaves zeros.
    """

    k: Tensor
    v: Tensor
    lengths: Tensor
    layout: SlotLayout
    resident: Tensor | None = None
    in_place: bool = False
    arrived: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Keys and values, or only one of them where both are the same memory."""
        return distinct(self.k, self.v)

    def check(self) -> None:
        """Raise ValueError where shapes, dtypes or strides are not what kernels read."""
        b, num_kv_heads, num_rows, d = self.k.shape
        num_rows = num_rows if self.in_place else self.layout.total * self.layout.size
        for name, x in (("k", self.k), ("v", self.v)):
            require(name, x, (b, num_kv_heads, num_rows, d), self.k.dtype)
        if not same_strides(self.k, self.v):
            raise ValueError(f"k and v have different strides: {self.k.stride()} and {self.v.stride()}")
        require_whole("lengths", self.lengths, (b,), torch.int32)
        if self.resident is not None:
            require_whole("resident", self.resident, (b, num_kv_heads, self.layout.selected), torch.int32)
        elif self.layout.selected:
            raise ValueError(f"a layout with {self.layout.selected} selected slots needs to know what is resident")

    def counts(self) -> Tensor:
        """Give `arrived`, or zeros that serve once."""
        if self.arrived is not None:
            return self.arrived
        return torch.zeros(self.k.shape[:2], dtype=torch.int32, device=self.k.device)


def distinct(k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Keys and values, or only one of them where both are the same memory."""
    return (k,) if k.data_ptr() == v.data_ptr() else (k, v)


def page_count(lengths: Tensor, layout: SlotLayout) -> Tensor:
    """Pages that each sequence occupies, the partly filled one included, or the empty one: lengths [b] -> [b]."""
    return lengths // layout.size + 1 if layout.early else -(-lengths // layout.size)


def active(lengths: Tensor, layout: SlotLayout) -> Tensor:
    """Tell which sequences have outgrown their slots, so that something is left out: [b] bool."""
    return page_count(lengths, layout) > layout.budget


def candidates_end(lengths: Tensor, layout: SlotLayout) -> Tensor:
    """Give the page behind the last that can be selected: lengths [b] -> [b]."""
    count = page_count(lengths, layout)
    return torch.minimum(count - layout.window, count // layout.group * layout.group)


def candidates(lengths: Tensor, layout: SlotLayout, pages: int) -> Tensor:
    """Flag the pages that can be selected, neither sink nor window, of the first `pages`: [b, pages] bool."""
    page = torch.arange(pages, device=lengths.device)
    return (page >= layout.sink) & (page < candidates_end(lengths, layout)[:, None])


def selected_count(lengths: Tensor, layout: SlotLayout) -> Tensor:
    """Give how many pages a sequence that has outgrown its slots selects: lengths [b] -> [b]."""
    return layout.budget - layout.sink - (page_count(lengths, layout) - candidates_end(lengths, layout))


def slot_of_page(pages: Tensor, layout: SlotLayout) -> Tensor:
    """Give the slot of pages that are in it as the newest tokens, not as selected ones: [b] -> [b]."""
    return pages.where(pages < layout.low, layout.first + (pages - layout.low) % layout.ring)


def slot_pages(lengths: Tensor, layout: SlotLayout, resident: Tensor | None = None) -> Tensor:
    """Tabulate the page in every slot, EMPTY or beyond the length where there is none: [b, Hk or 1, total]."""
    slot = torch.arange(layout.total, device=lengths.device)
    newest = page_count(lengths, layout)[:, None] - 1
    lowest = slot - layout.first + layout.low
    ring = lowest + (newest - lowest).clamp_min(0) // layout.ring * layout.ring
    outgrown = active(lengths, layout)[:, None]
    if layout.group > 1:  # what can be selected, or has a slot of its own, is not attended to as one of the newest
        end = candidates_end(lengths, layout)[:, None].where(outgrown, layout.first)
        ring = ring.masked_fill(ring < end, EMPTY)
    pages = torch.where(slot < layout.first, slot, ring)[:, None]  # [b, 1, total]
    if resident is None:
        return pages
    pages = pages.repeat(1, resident.shape[1], 1)
    selected = pages[:, :, layout.sink : layout.first]
    selected.copy_(resident.where(outgrown[:, None], selected))
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
    slot: tl.tensor,
    newest_page: tl.tensor,
    resident: tl.tensor,
    sink: tl.tensor,
    first: tl.tensor,
    ring: tl.tensor,
    window: tl.tensor,
    low: tl.tensor,
    GROUP: tl.constexpr,
) -> tl.tensor:
    """Look slots up as `slot_pages` does, inside a kernel; `resident` points to the row of one head, or is None."""
    lowest = slot - first + low
    page = tl.where(slot < first, slot, lowest + tl.maximum(newest_page - lowest, 0) // ring * ring)
    outgrown = newest_page >= first + window
    if GROUP > 1:
        end = tl.minimum(newest_page + 1 - window, (newest_page + 1) // GROUP * GROUP)
        page = tl.where((slot >= first) & (page < tl.where(outgrown, end, first)), -1, page)
    if resident is not None:
        selected = (slot >= sink) & (slot < tl.where(outgrown, first, 0))
        page = tl.where(selected, tl.load(resident + slot - sink, mask=selected, other=-1), page)
    return page


@jit
def slot_of(page: tl.tensor, first: tl.tensor, ring: tl.tensor, low: tl.tensor) -> tl.tensor:
    """Do what `slot_of_page` does, inside a kernel."""
    return tl.where(page < low, page, first + (page - low) % ring)


@jit
def candidate_range(
    lengths: tl.tensor,
    b: tl.tensor,
    num_pages: tl.tensor,
    sink: tl.tensor,
    window: tl.tensor,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
) -> tl.tensor:
    """Give the first page that can be selected, the one behind the last, and how many are attended to in any case
    beside sink and window; inside a kernel. Without lengths, all pages can.
    """
    low, high, beside = 0, num_pages, 0
    if lengths is not None:
        count = tl.cdiv(tl.load(lengths + b), SIZE)
        end = tl.minimum(count - window, count // GROUP * GROUP)
        low, high, beside = sink, tl.minimum(num_pages, end), count - end - window
    return low, high, beside
