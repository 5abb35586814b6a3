"""Which selected pages are missing, and which resident ones make room for them.

The j-th missing page of a KV head, in the order of its selection, goes into its j-th slot whose page left the
selection. Two forms: `resolve_pages` lists all misses and so has to wait for the device; `resolve_pages_device` has
outputs of fixed size, and updates the page table.

Shapes: resident and selected [Hk, k], or [b, Hk, k] on the device, hold page numbers; -1 in `resident` is an empty
slot. A selection has no duplicates and no -1, so every head has as many slots to free as pages to fetch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvcli.kernels._triton import jit, launch, power_of_two, require_whole, rows_at_once, takes, tl

BLOCK_ELEMENTS = 8192  # of a table that compares all slots with some pages


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
    same = resident[:, :, None] == selected[:, None, :]  # [Hk, slots, pages]
    heads, slots = (~same.any(2)).nonzero(as_tuple=True)
    missing = ~same.any(1)
    return Misses(heads, slots, selected[missing])


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
def _resolve_kernel(
    resident: tl.tensor,
    selected: tl.tensor,
    heads: tl.tensor,
    pages: tl.tensor,
    slots: tl.tensor,
    count: tl.tensor,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    pair = tl.program_id(0)  # a KV head of a sequence
    slot = tl.arange(0, BLOCK_K)
    row = pair.to(tl.int64) * K
    if heads is not None:
        if tl.load(heads + pair) == 0:
            tl.store(pages + row + slot, -1, mask=slot < K)
            tl.store(slots + row + slot, -1, mask=slot < K)
            tl.store(count + pair, 0)
            return
    held = tl.load(resident + row + slot, mask=slot < K, other=-1)
    kept = tl.zeros([BLOCK_K], tl.int32)
    for start in range(0, K, BLOCK_N):
        i = start + tl.arange(0, BLOCK_N)
        page = tl.load(selected + row + i, mask=i < K, other=-1)
        same = (held[:, None] == page[None, :]) & (held >= 0)[:, None]
        kept = tl.maximum(kept, tl.max(same.to(tl.int32), axis=1))
    free = (kept == 0) & (slot < K)
    free_rank = tl.cumsum(free.to(tl.int32), axis=0) - 1
    incoming = tl.full([BLOCK_K], -1, tl.int32)
    found = 0  # misses so far
    for start in range(0, K, BLOCK_N):
        i = start + tl.arange(0, BLOCK_N)
        page = tl.load(selected + row + i, mask=i < K, other=-1)
        same = (held[:, None] == page[None, :]) & (held >= 0)[:, None]
        missing = (tl.max(same.to(tl.int32), axis=0) == 0) & (page >= 0)
        rank = found + tl.cumsum(missing.to(tl.int32), axis=0) - 1
        into = free[:, None] & missing[None, :] & (free_rank[:, None] == rank[None, :])
        incoming = tl.maximum(incoming, tl.max(tl.where(into, page[None, :], -1), axis=1))
        tl.store(pages + row + rank, page, mask=missing)
        found += tl.sum(missing.to(tl.int32), axis=0)
    tl.debug_barrier()  # all warps have read the table before one changes it
    tl.store(slots + row + free_rank, slot, mask=free & (free_rank < found))
    tl.store(pages + row + slot, -1, mask=(slot >= found) & (slot < K))
    tl.store(slots + row + slot, -1, mask=(slot >= found) & (slot < K))
    tl.store(count + pair, found)
    tl.store(resident + row + slot, tl.where(free, incoming, held), mask=slot < K)


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
    block_k = power_of_two(k)
    blocks = {"K": k, "BLOCK_K": block_k, "BLOCK_N": rows_at_once(k, block_k, BLOCK_ELEMENTS)}
    launch(_resolve_kernel, (b * num_kv_heads,), resident, selected, heads, *misses, **blocks)
    return None
