"""The page table: which page of its sequence every slot holds, as a function of the length and the selection alone.

    slots    0 .. sink   |   sink .. first   |   first .. first + window           first = sink + selected
    hold     that page   |   resident page   |   the newest page <= P that is a multiple of window from the slot's

P = (length - 1) / p is the page of the newest token, p the tokens in a page. The last part is a ring, so that no page
ever moves: a new page takes the slot of the one that leaves the window. Until a sequence outgrows its slots, slot s
holds page s, also in the ring, whatever `resident` [b, Hk, selected] says. Row r of a slot is token page * p + r. There
is no token in an empty slot (page -1), nor at or beyond the length.

The one formula serves every kind of layer: pages under a budget; everything (`SlotLayout.everything`); a sliding window
(pages of one token, no sinks, nothing selected); sinks and a window.

Where tokens are indexed a `group` at a time, those of the unfilled group cannot be selected: the ring has slots for
them, they are always attended to, and fewer tokens are selected in exchange. The ring then takes all tokens as they
come, and the first of them go into slots of their own as well. If the oldest page leaves `early`, P = length / p: as
soon as the newest page is full, its successor has an empty slot, and the previous page of that slot is no longer
attended to; attention knows such rings. Rows may also lie `in_place`: k and v hold every token at its position, and the
slots only tell which tokens are attended to.

Lengths [b] are int32 and include the newest token; a sequence of length 0 takes no part. Page numbers are int32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from kvcli.kernels._numba import compiled, inlined, prange, run, run_alone, serial, serves
from kvcli.kernels._triton import (
    ALL_REGISTERS,
    jit,
    launch,
    power_of_two,
    require,
    require_whole,
    same_strides,
    takes,
    tl,
)

EMPTY = -1
"""The page of an empty slot."""


class SlotLayout(NamedTuple):
    """Slots of `size` tokens, a power of two: `sink` and `selected` slots, and a ring of `window`, or of a `group`."""

    size: int
    sink: int
    selected: int
    window: int
    group: int = 1
    early: bool = False

    @classmethod
    def everything(cls, slots: int, size: int = 1) -> SlotLayout:
        """Make a layout in which every page has its own slot."""
        return cls(size, slots, 0, 0)

    @property
    def first(self) -> int:
        """First slot of the ring."""
        return self.sink + self.selected

    @property
    def total(self) -> int:
        """Number of slots."""
        return self.first + (self.window if self.group == 1 else self.ring)

    @property
    def budget(self) -> int:
        """Pages that are attended to once a sequence has more of them."""
        return self.first + self.window

    @property
    def ring(self) -> int:
        """Period of the ring; one without a ring, since kernels divide by it."""
        return max(self.window, self.group)

    @property
    def low(self) -> int:
        """First page that goes into the ring; the period counts from it."""
        return self.first if self.group == 1 else 0


class PagedKV(NamedTuple):
    """The slots of a layer and their contents: k, v [b, Hk, layout.total * layout.size, d], any strides but the last.

    lengths [b] int32; resident [b, Hk, selected] int32, None where the layout selects nothing. With `in_place`, k and v
    [b, Hk, tokens, d] hold every token at its position instead. `arrived` [b, Hk] int32 are counters of finished
    programs per KV head; kernels find zeros and leave zeros.
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
        """Keys and values, or only one tensor if both are the same memory."""
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
        """Return `arrived`, or new zeros."""
        if self.arrived is not None:
            return self.arrived
        return torch.zeros(self.k.shape[:2], dtype=torch.int32, device=self.k.device)


def distinct(k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Return keys and values, or only one tensor if both are the same memory."""
    return (k,) if k.data_ptr() == v.data_ptr() else (k, v)


def page_count(lengths: Tensor, layout: SlotLayout) -> Tensor:
    """Return the pages that each sequence occupies, including the partly filled or empty one: lengths [b] -> [b]."""
    return lengths // layout.size + 1 if layout.early else -(-lengths // layout.size)


def active(lengths: Tensor, layout: SlotLayout) -> Tensor:
    """Return which sequences have outgrown their slots, so that something is left out: [b] bool."""
    return page_count(lengths, layout) > layout.budget


def candidates_end(lengths: Tensor, layout: SlotLayout) -> Tensor:
    """Return the page after the last that can be selected: lengths [b] -> [b]."""
    count = page_count(lengths, layout)
    return torch.minimum(count - layout.window, count // layout.group * layout.group)


def candidates(lengths: Tensor, layout: SlotLayout, pages: int) -> Tensor:
    """Mark the pages that can be selected, neither sink nor window, of the first `pages`: [b, pages] bool."""
    page = torch.arange(pages, device=lengths.device)
    return (page >= layout.sink) & (page < candidates_end(lengths, layout)[:, None])


def selected_count(lengths: Tensor, layout: SlotLayout) -> Tensor:
    """Return how many pages a sequence that has outgrown its slots selects: lengths [b] -> [b]."""
    return layout.budget - layout.sink - (page_count(lengths, layout) - candidates_end(lengths, layout))


def slot_of_page(pages: Tensor, layout: SlotLayout) -> Tensor:
    """Return the slots of pages that are held as newest tokens, not as selected ones: [b] -> [b]."""
    return pages.where(pages < layout.low, layout.first + (pages - layout.low) % layout.ring)


def slot_pages(lengths: Tensor, layout: SlotLayout, resident: Tensor | None = None) -> Tensor:
    """Return the page in every slot, EMPTY or beyond the length where there is none: [b, Hk or 1, total]."""
    slot = torch.arange(layout.total, device=lengths.device)
    newest = page_count(lengths, layout)[:, None] - 1
    lowest = slot - layout.first + layout.low
    ring = lowest + (newest - lowest).clamp_min(0) // layout.ring * layout.ring
    outgrown = active(lengths, layout)[:, None]
    if layout.group > 1:  # pages that are selectable or have their own slot do not count as newest
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
    """Return the position of the token in every row of the slots, -1 for none: [b, Hk or 1, total * size]."""
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
    """Look slots up like `slot_pages`, inside a kernel; `resident` points to the row of one head, or is None."""
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
    """Compute `slot_of_page` inside a kernel."""
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
    """Return, inside a kernel, the first page that can be selected and the page after the last.

    Also returns how many further pages are always attended to, besides sink and window. Without lengths, all pages can
    be selected.
    """
    low, high, beside = 0, num_pages, 0
    if lengths is not None:
        count = tl.cdiv(tl.load(lengths + b), SIZE)
        end = tl.minimum(count - window, count // GROUP * GROUP)
        low, high, beside = sink, tl.minimum(num_pages, end), count - end - window
    return low, high, beside


ASKED, HERE = 1, 2  # states of a token


@inlined
def resolve_row(resident: Any, selected: Any, n: int, empty: int, tokens: Any, slots: Any) -> int:
    """Assign one head's missing tokens, below n, to its free slots; list both, and return how many are missing."""
    known = np.zeros(n, np.uint8)
    for i in range(len(selected)):
        if selected[i] != empty:
            known[selected[i]] = ASKED
    free = 0
    for slot in range(len(resident)):
        token = resident[slot]
        if token != empty and known[token] == ASKED:
            known[token] = HERE
        else:
            resident[slot] = empty
            if free < len(selected):
                slots[free] = slot
                free += 1
    missing = 0
    for i in range(len(selected)):
        token = selected[i]
        if token != empty and known[token] == ASKED:
            tokens[missing] = resident[slots[missing]] = token
            missing += 1
    return missing


@compiled
def _resolve(resident: Any, selected: Any, n: int, empty: int, tokens: Any, slots: Any, out: Any) -> None:
    for h in prange(len(resident)):
        out[h] = resolve_row(resident[h], selected[h], n, empty, tokens[h], slots[h])


@serial
def _list(counts: Any, slots: Any, pages: Any, out: Any) -> int:
    at = 0
    for h in range(len(counts)):
        for i in range(counts[h]):
            out[0, at], out[1, at], out[2, at] = h, slots[h, i], pages[h, i]
            at += 1
    return at


@serial
def _place(resident: Any, wanted: Any, n: int, empty: int, chosen: Any, missing: Any) -> int:
    place, taken = np.empty(n, np.int32), np.zeros(len(resident), np.uint8)
    for i in range(len(wanted)):
        place[wanted[i]] = i
        chosen[i] = empty
    for slot in range(len(resident)):
        page = resident[slot]
        if page != empty:
            i = place[page]  # arbitrary for a page that is not wanted
            if 0 <= i < len(wanted) and wanted[i] == page:
                chosen[i] = slot
                taken[slot] = 1
    count, slot = 0, 0
    for i in range(len(wanted)):
        if chosen[i] == empty:
            while taken[slot]:
                slot += 1
            chosen[i] = slot
            missing[count] = i
            count += 1
            slot += 1
    return count


def suits(resident: Tensor, selected: Tensor, numbers: int) -> bool:
    """Return whether the CPU loops serve, for a table of what holds so many `numbers`."""
    return serves(resident, selected, dtype=torch.int64, numbers=numbers)


def resolve(resident: Tensor, selected: Tensor, length: int) -> Misses:
    """Assign missing tokens to free slots, both in order, and put them into `resident`."""
    counts = torch.empty(len(resident), dtype=torch.int64)
    tokens, slots = torch.empty(2, *selected.shape, dtype=torch.int64)
    run(_resolve, 8 * resident.numel(), resident, selected, length, EMPTY, tokens, slots, counts)
    return listed(counts, slots, tokens)


def listed(counts: Tensor, slots: Tensor, pages: Tensor) -> Misses:
    """List the first `counts` [Hk] slots and pages [Hk, k] of each head."""
    out = torch.empty(3, slots.numel(), dtype=torch.int64)
    found = out[:, : run_alone(_list, counts, slots, pages, out)]
    return Misses(found[0], found[1], found[2])


def place(resident: Tensor, wanted: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Compute `place_pages` on a CPU, for pages below n."""
    chosen, missing = torch.empty(2, wanted.shape[0], dtype=torch.int64)
    count = run_alone(_place, resident, wanted, n, EMPTY, chosen, missing)
    return chosen, missing[:count]


NO_PAGE = -2  # neither a page nor EMPTY


class Misses(NamedTuple):
    """Missing pages: page `pages[i]` of head `heads[i]` belongs into slot `slots[i]`; all three are [m] int64."""

    heads: Tensor
    slots: Tensor
    pages: Tensor

    def by_head(self, num_kv_heads: int) -> list[int]:
        """Count the misses of each KV head: [Hk]."""
        return self.heads.bincount(minlength=num_kv_heads).tolist()


class MissList(NamedTuple):
    """Missing pages of a batch: the first `counts` [b, Hk] of `pages` and `slots` [b, Hk, k], padded with -1; int32."""

    pages: Tensor
    slots: Tensor
    counts: Tensor

    @classmethod
    def empty(cls, b: int, num_kv_heads: int, k: int, device: torch.device) -> MissList:
        """Allocate an uninitialised list for b sequences."""
        pages, slots = torch.empty(2, b, num_kv_heads, k, dtype=torch.int32, device=device)
        return cls(pages, slots, torch.empty(b, num_kv_heads, dtype=torch.int32, device=device))

    def check(self, b: int, num_kv_heads: int, k: int) -> None:
        """Raise ValueError where shapes or dtypes are wrong."""
        require_whole("pages of misses", self.pages, (b, num_kv_heads, k), torch.int32)
        require_whole("slots of misses", self.slots, (b, num_kv_heads, k), torch.int32)
        require_whole("counts of misses", self.counts, (b, num_kv_heads), torch.int32)


def resolve_pages(resident: Tensor, selected: Tensor) -> Misses:
    """Assign the j-th missing page of a head to its j-th slot whose page left the selection."""
    heads, slots = (~_among(resident, selected)).nonzero(as_tuple=True)
    return Misses(heads, slots, selected[~_among(selected, resident)])


def place_pages(resident: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Assign every wanted page [k] a slot of resident [S]: its own, or the first without a wanted page; return [k].

    Also returns the indices of the missing pages: [m]. `resident` stays as it is.
    """
    if not len(wanted):  # argmax needs at least one slot
        return wanted, wanted
    same = wanted[:, None] == resident  # [k, S]
    chosen, absent = same.int().argmax(1), (~same.any(1)).nonzero()[:, 0]
    chosen[absent] = (~same.any(0)).nonzero()[: len(absent), 0]
    return chosen, absent


def _among(pages: Tensor, others: Tensor) -> Tensor:
    """Mark the `pages` [Hk, n] that are among the `others` [Hk, k] of their head: bool [Hk, n]."""
    ascending = others.sort(-1).values
    at = torch.searchsorted(ascending, pages.contiguous())  # k where all others are lower
    return pad(ascending, (0, 1), value=NO_PAGE).gather(1, at) == pages


def resolve_pages_device_ref(resident: Tensor, selected: Tensor, misses: MissList, heads: Tensor | None = None) -> None:
    """Reference of `resolve_pages_device`: head by head."""
    for part in misses[:2]:
        part.fill_(-1)
    misses.counts.zero_()
    heads = torch.ones_like(misses.counts, dtype=torch.bool) if heads is None else heads
    for b, h in heads.nonzero().tolist():
        kept = (resident[b, h][:, None] == selected[b, h]) & (resident[b, h] >= 0)[:, None]  # [slots, pages]
        pages, free = selected[b, h][~kept.any(0) & (selected[b, h] >= 0)], (~kept.any(1)).nonzero()[:, 0]
        misses.counts[b, h] = len(pages)
        misses.pages[b, h, : len(pages)] = pages
        misses.slots[b, h, : len(pages)] = free[: len(pages)].int()
        resident[b, h, free] = -1
        resident[b, h, free[: len(pages)]] = pages


@jit
def nothing_missing(
    pages: tl.tensor, slots: tl.tensor, count: tl.tensor, K: tl.constexpr, BLOCK_K: tl.constexpr
) -> None:
    """Empty a head's list of misses."""
    slot = tl.arange(0, BLOCK_K)
    tl.store(pages + slot, -1, mask=slot < K)
    tl.store(slots + slot, -1, mask=slot < K)
    tl.store(count, 0)


@jit
def resolve_head(
    resident: tl.tensor,
    selected: tl.tensor,
    pages: tl.tensor,
    slots: tl.tensor,
    count: tl.tensor,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Resolve one head; if the program itself has written `selected`, it needs a barrier before."""
    slot = tl.arange(0, BLOCK_K)
    held = tl.load(resident + slot, mask=slot < K, other=-1)
    wanted = tl.load(selected + slot, mask=slot < K, other=-1)
    if BLOCK_K <= 64:  # few enough to compare each with each, which waits for memory once, not at every bisection
        same = (held[:, None] == wanted[None, :]) & (wanted >= 0)[None, :]
        kept = tl.max(same.to(tl.int32), axis=1) != 0
        missing = (wanted >= 0) & (tl.max(same.to(tl.int32), axis=0) == 0)
    else:
        entries = tl.sum((wanted >= 0).to(tl.int32), axis=0)
        place = tl.zeros([BLOCK_K], tl.int32)  # number of selected pages below the held one
        step = BLOCK_K
        while step > 0:
            probe = place + step
            inside = probe <= entries
            before = tl.load(selected + probe - 1, mask=inside, other=0)
            place = tl.where(inside & (before < held), probe, place)
            step = step // 2
        same = tl.load(selected + place, mask=place < entries, other=-1)
        kept = (held >= 0) & (same == held)
        tl.store(pages + slot, 0, mask=slot < K)  # temporarily: whether a selected page is held
        tl.debug_barrier()
        tl.store(pages + place, tl.full([BLOCK_K], 1, tl.int32), mask=kept)
        tl.debug_barrier()
        missing = (wanted >= 0) & (tl.load(pages + slot, mask=slot < K, other=0) == 0)
    free = (kept == 0) & (slot < K)
    rank, free_rank = tl.cumsum(missing.to(tl.int32), axis=0) - 1, tl.cumsum(free.to(tl.int32), axis=0) - 1
    found = tl.sum(missing.to(tl.int32), axis=0)
    tl.debug_barrier()  # all threads have read before one writes anything else
    tl.store(pages + rank, wanted, mask=missing)
    tl.store(slots + free_rank, slot, mask=free & (free_rank < found))
    tl.store(pages + slot, -1, mask=(slot >= found) & (slot < K))
    tl.store(slots + slot, -1, mask=(slot >= found) & (slot < K))
    tl.store(count, found)
    tl.debug_barrier()
    incoming = tl.load(pages + free_rank, mask=free & (free_rank < found), other=-1)
    tl.store(resident + slot, incoming, mask=free)


@jit
def misses_of_heads(count: tl.tensor, PAIRS: tl.constexpr, BLOCK_P: tl.constexpr) -> tl.tensor:
    """Count the misses of the KV heads of a batch: of each, cumulated, both [BLOCK_P], and in total."""
    pairs = tl.arange(0, BLOCK_P)
    counts = tl.load(count + pairs, mask=pairs < PAIRS, other=0)
    return counts, tl.cumsum(counts, axis=0), tl.sum(counts, axis=0)


@jit
def nth_miss(
    entry: tl.tensor,
    counts: tl.tensor,
    ends: tl.tensor,
    pages: tl.tensor,
    slots: tl.tensor,
    HK: tl.constexpr,
    K: tl.constexpr,
    BLOCK_P: tl.constexpr,
) -> tl.tensor:
    """Look up an entry of the list of all heads' misses (`misses_of_heads`): its sequence, KV head, page and slot."""
    pair = tl.sum((ends <= entry).to(tl.int32), axis=0)
    at = pair * K + entry - tl.sum(tl.where(tl.arange(0, BLOCK_P) < pair, counts, 0), axis=0)
    return (pair // HK).to(tl.int64), (pair % HK).to(tl.int64), tl.load(pages + at), tl.load(slots + at)


@jit
def misses_from(
    entry: tl.tensor,
    total: tl.tensor,
    counts: tl.tensor,
    ends: tl.tensor,
    pages: tl.tensor,
    slots: tl.tensor,
    HK: tl.constexpr,
    K: tl.constexpr,
    BLOCK_P: tl.constexpr,
) -> tl.tensor:
    """Look several entries up like `nth_miss`; of those beyond the `total` page and slot are 0."""
    pair = tl.sum((ends[None, :] <= entry[:, None]).to(tl.int32), axis=1)
    before = tl.sum(tl.where(tl.arange(0, BLOCK_P)[None, :] < pair[:, None], counts[None, :], 0), axis=1)
    at, there = pair * K + entry - before, entry < total
    page, slot = tl.load(pages + at, mask=there, other=0), tl.load(slots + at, mask=there, other=0)
    return tl.where(there, pair // HK, 0).to(tl.int64), (pair % HK).to(tl.int64), page, slot


@jit
def _resolve_kernel(
    resident: tl.tensor,
    selected: tl.tensor,
    heads: tl.tensor,
    pages: tl.tensor,
    slots: tl.tensor,
    count: tl.tensor,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    pair = tl.program_id(0)  # a KV head of a sequence
    row = pair.to(tl.int64) * K
    if heads is not None:
        if tl.load(heads + pair) == 0:
            nothing_missing(pages + row, slots + row, count + pair, K, BLOCK_K)
            return
    resolve_head(resident + row, selected + row, pages + row, slots + row, count + pair, K, BLOCK_K)


def resolve_pages_device(resident: Tensor, selected: Tensor, misses: MissList, heads: Tensor | None = None) -> None:
    """List the missing pages in `misses`, and update the page tables `resident` (int32) to the selection.

    heads [b, Hk] bool: other heads miss nothing and stay as they are. An entry of -1 in `selected` is no page; slots
    left without a page become empty. Can be captured in a CUDA graph. The slots may not be read by this table from here
    until the gather of `misses` has finished.

    Raises ValueError for shapes or dtypes that the kernel cannot read.
    """
    b, num_kv_heads, k = resident.shape
    require_whole("resident", resident, resident.shape, torch.int32)
    require_whole("selected", selected, resident.shape, torch.int32)
    misses.check(b, num_kv_heads, k)
    if heads is not None:
        require_whole("heads", heads, (b, num_kv_heads), torch.bool)
    if not takes(resident):
        return resolve_pages_device_ref(resident, selected, misses, heads)
    blocks = {"K": k, "BLOCK_K": power_of_two(k)}
    launch(
        _resolve_kernel,
        (b * num_kv_heads,),
        *(resident, selected, heads, *misses),
        **blocks,
        warps=4 if k <= 1024 else 8,
        registers=ALL_REGISTERS,
    )
    return None
