"""Which selected pages are missing, and which resident ones make room for them.

The j-th missing page of a KV head, in the order of its selection, goes into its j-th slot whose page left the
selection. Two forms: `resolve_pages` lists all misses and so has to wait for the device; `resolve_pages_device` has
outputs of fixed size, and updates the page table. What chooses on the device can do it in one go (`resolve_head`).

Shapes: resident and selected [Hk, k], or [b, Hk, k] on the device, hold page numbers; -1 in `resident` is an empty
slot. A selection has no duplicates, so every head has as many slots to free as pages to fetch; on the device it is in
ascending order, with -1 behind it, and each resident page is looked up in it by halving: there may be thousands.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvcli.kernels._triton import jit, launch, power_of_two, require_whole, takes, tl

NO_PAGE = -2  # neither a page's number nor that of an empty slot


class Misses(NamedTuple):
    """Page `pages[i]` of head `heads[i]` belongs into slot `slots[i]`; all three are [m] int64."""

    heads: Tensor
    slots: Tensor
    pages: Tensor

    def by_head(self, num_kv_heads: int) -> list[int]:
        """How many there are of each KV head: [Hk]."""
        return self.heads.bincount(minlength=num_kv_heads).tolist()


class MissList(NamedTuple):
    """The first `counts` [b, Hk] entries of `pages` and `slots` [b, Hk, k] of every head; -1 behind them. int32."""

    pages: Tensor
    slots: Tensor
    counts: Tensor

    @classmethod
    def empty(cls, b: int, num_kv_heads: int, k: int, device: torch.device) -> MissList:
        """Allocate one for b sequences, uninitialised."""
        pages, slots = torch.empty(2, b, num_kv_heads, k, dtype=torch.int32, device=device)
        return cls(pages, slots, torch.empty(b, num_kv_heads, dtype=torch.int32, device=device))

    def check(self, b: int, num_kv_heads: int, k: int) -> None:
        """Raise ValueError where this is not such a list."""
        require_whole("pages of misses", self.pages, (b, num_kv_heads, k), torch.int32)
        require_whole("slots of misses", self.slots, (b, num_kv_heads, k), torch.int32)
        require_whole("counts of misses", self.counts, (b, num_kv_heads), torch.int32)


def resolve_pages(resident: Tensor, selected: Tensor) -> Misses:
    """Pair the j-th missing page of a head with its j-th slot whose page left the selection."""
    heads, slots = (~_among(resident, selected)).nonzero(as_tuple=True)
    return Misses(heads, slots, selected[~_among(selected, resident)])


def place_pages(resident: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Give every wanted page [k] a slot of resident [S]: its own, or the first that holds none of them -> slots [k].

    Returns also which of the wanted pages have come newly: [m]. `resident` stays as it is.
    """
    if not len(wanted):  # where there are no slots, there is no first one to look for
        return wanted, wanted
    same = wanted[:, None] == resident  # [k, S]
    chosen, absent = same.int().argmax(1), (~same.any(1)).nonzero()[:, 0]
    chosen[absent] = (~same.any(0)).nonzero()[: len(absent), 0]
    return chosen, absent


def _among(pages: Tensor, others: Tensor) -> Tensor:
    """Tell which `pages` [Hk, n] are among the `others` [Hk, k] of their head: bool [Hk, n]."""
    ascending = others.sort(-1).values
    at = torch.searchsorted(ascending, pages.contiguous())  # k where all others are lower
    return pad(ascending, (0, 1), value=NO_PAGE).gather(1, at) == pages


def resolve_pages_device_ref(resident: Tensor, selected: Tensor, misses: MissList, heads: Tensor | None = None) -> None:
    """Resolve head by head."""
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
    """Make a head's list of misses empty."""
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
    """Resolve one head; what the program itself has written to `selected` needs a barrier before."""
    slot = tl.arange(0, BLOCK_K)
    held = tl.load(resident + slot, mask=slot < K, other=-1)
    wanted = tl.load(selected + slot, mask=slot < K, other=-1)
    entries = tl.sum((wanted >= 0).to(tl.int32), axis=0)
    place = tl.zeros([BLOCK_K], tl.int32)  # how many of the selection come before the page that is held
    step = BLOCK_K
    while step > 0:
        probe = place + step
        inside = probe <= entries
        before = tl.load(selected + probe - 1, mask=inside, other=0)
        place = tl.where(inside & (before < held), probe, place)
        step = step // 2
    same = tl.load(selected + place, mask=place < entries, other=-1)
    kept = (held >= 0) & (same == held)
    tl.store(pages + slot, 0, mask=slot < K)  # for the moment, whether an entry of the selection is held
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
    """Count the misses of the KV heads of a batch: of each, up to each, both [BLOCK_P], and of all together."""
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
    """List what is missing in `misses` and make `resident` say what the slots will hold: page tables of int32.

    heads [b, Hk] bool: the others miss nothing and keep what they have. An entry of -1 in `selected` is no page; the
    slots that are left without one become empty. May be captured in a CUDA graph. From here to the end of the gather
    that `misses` is for, the slots may not be read by this table.

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
        _resolve_kernel, (b * num_kv_heads,), resident, selected, heads, *misses, **blocks, warps=4 if k <= 1024 else 8
    )
    return None
