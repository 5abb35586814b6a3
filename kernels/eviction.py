"""Eviction: the row or page that makes room for the newest token, by lowest score (H2O, TOVA) or oldest stamp (RaaS).

Tokens: as long as there is room, the newest token takes the next row; then the row with the lowest score, the newest in
a tie, among tokens that are not the `recent` newest.

Shapes: positions [b, Hk, rows] int64 and scores fp32, seen [b] int32 including the newest token, and most [b], the rows
of each sequence -> at [b, Hk] int32.

Pages: the page with the oldest timestamp leaves when a new one needs its slot (RaaS, section 3). The page that leaves
the window, in its first slot, takes the slot of the stalest page, which may be itself; the other pages of the window
move on by a slot, and the last slot is the new page's.

Shapes: k and v [b, Hk, slots * p, d], bounds [b, Hk, slots, 2, d], stamps and pages [b, Hk, slots] int64; protected and
slots [b], seen [b] int32 including the newest token -> held [b], the tokens held then, and full [b], those in full
pages.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvcli.kernels._triton import (
    jit,
    launch,
    power_of_two,
    require,
    require_whole,
    rows_at_once,
    same_strides,
    takes,
    tl,
)

BLOCK = 1024


def make_room_ref(positions: Tensor, scores: Tensor, seen: Tensor, most: Tensor, recent: int, at: Tensor) -> None:
    """Reference of `make_room`: all KV heads at once."""
    row, newest = torch.arange(scores.shape[2], device=scores.device), seen - 1  # newest [b], its position
    evictable = positions <= (newest - recent)[:, None, None]
    evictable &= row < most[:, None, None]
    open_scores = scores.where(evictable, torch.inf)
    least = evictable & (open_scores == open_scores.amin(2, keepdim=True))
    lowest = positions.where(least, -1).argmax(2)  # [b, Hk]
    at.copy_(newest[:, None].where((seen <= most)[:, None], lowest).clamp_min(0))
    mine = (row == at[..., None]) & (newest >= 0)[:, None, None]
    positions.copy_(newest[:, None, None].where(mine, positions))
    scores.masked_fill_(mine, 0)


@jit
def _room_kernel(
    positions: tl.tensor,
    scores: tl.tensor,
    seen: tl.tensor,
    most: tl.tensor,
    at: tl.tensor,
    recent: tl.tensor,
    num_rows: tl.tensor,
    HK: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    pair = tl.program_id(0)  # a KV head of a sequence
    length, rows = tl.load(seen + pair // HK), tl.load(most + pair // HK).to(tl.int32)
    newest = length - 1
    if length == 0:
        tl.store(at + pair, 0)
        return
    positions += pair.to(tl.int64) * num_rows
    scores += pair.to(tl.int64) * num_rows
    row = newest
    if length > rows:
        least = tl.full([BLOCK_N], float("inf"), tl.float32)
        for start in range(0, rows, BLOCK_N):
            i = start + tl.arange(0, BLOCK_N)
            position = tl.load(positions + i, mask=i < rows, other=newest)
            score = tl.load(scores + i, mask=i < rows, other=float("inf"))
            least = tl.minimum(least, tl.where((i < rows) & (position <= newest - recent), score, float("inf")))
        lowest = tl.min(least, axis=0)
        latest = tl.full([BLOCK_N], -1, tl.int64)
        found = tl.zeros([BLOCK_N], tl.int32)
        for start in range(0, rows, BLOCK_N):
            i = start + tl.arange(0, BLOCK_N)
            position = tl.load(positions + i, mask=i < rows, other=newest)
            score = tl.load(scores + i, mask=i < rows, other=float("inf"))
            better = (i < rows) & (position <= newest - recent) & (score == lowest) & (position > latest)
            latest, found = tl.where(better, position, latest), tl.where(better, i, found)
        row = tl.min(tl.where(latest == tl.max(latest, axis=0), found, num_rows), axis=0)
        tl.debug_barrier()  # all threads have read before one writes
    tl.store(positions + row, newest.to(tl.int64))
    tl.store(scores + row, 0.0)
    tl.store(at + pair, row)


def make_room(positions: Tensor, scores: Tensor, seen: Tensor, most: Tensor, recent: int, at: Tensor) -> None:
    """Write the row of every KV head's newest token to `at`, and its position and a score of zero to that row.

    Can be captured in a CUDA graph. Raises ValueError for shapes or dtypes that the kernel cannot read.
    """
    b, num_kv_heads, num_rows = scores.shape
    require_whole("positions", positions, scores.shape, torch.int64)
    require_whole("scores", scores, scores.shape, torch.float32)
    require_whole("seen", seen, (b,), torch.int32)
    require_whole("most", most, (b,))
    require_whole("at", at, (b, num_kv_heads), torch.int32)
    if not takes(scores):
        return make_room_ref(positions, scores, seen, most, recent, at)
    launch(
        _room_kernel,
        (b * num_kv_heads,),
        *(positions, scores, seen, most, at, recent, num_rows),
        HK=num_kv_heads,
        BLOCK_N=min(BLOCK, power_of_two(num_rows)),
    )
    return None


BLOCK_ELEMENTS = 4096  # of keys, and as many of values, moved at once per program


class StampedPages(NamedTuple):
    """The slots of a layer: keys, values and bounds, and timestamp and number of the page in each."""

    k: Tensor
    v: Tensor
    bounds: Tensor
    stamps: Tensor
    pages: Tensor


class PageCounts(NamedTuple):
    """Counts per sequence [b]: protected slots, all slots, tokens seen, tokens held, tokens in full pages."""

    protected: Tensor
    slots: Tensor
    seen: Tensor
    held: Tensor
    full: Tensor


def replace_page_ref(held: StampedPages, counts: PageCounts, window: int) -> None:
    """Reference of `replace_page`: sequence by sequence, head by head."""
    size = held.k.shape[2] // held.stamps.shape[2]
    for b, seen in enumerate(counts.seen.tolist()):
        page, slots, protected = (seen - 1) // size, int(counts.slots[b]), int(counts.protected[b])
        counts.held[b] = seen - max(page + 1 - slots, 0) * size
        counts.full[b] = counts.held[b] // size * size
        if seen == 0 or (seen - 1) % size:
            continue
        for h in range(held.k.shape[1]):
            k, v = (x[b, h].unflatten(0, (-1, size)) for x in held[:2])  # type: ignore[no-untyped-call]
            parts = (k, v, *(x[b, h] for x in held[2:]))
            if page >= slots:
                leaving = slots - window
                stale = slice(protected, leaving + 1)
                victim = protected + int((parts[3][stale] * (page + 1) + parts[4][stale]).argmin())
                for x in parts:
                    x[victim] = x[leaving].clone()
                    x[leaving : slots - 1] = x[leaving + 1 : slots].clone()
            slot = min(page, slots - 1)
            parts[4][slot], parts[3][slot] = page, seen


@jit
def _replace_kernel(
    k: tl.tensor,
    v: tl.tensor,
    bounds: tl.tensor,
    stamps: tl.tensor,
    pages: tl.tensor,
    protected: tl.tensor,
    slots: tl.tensor,
    seen: tl.tensor,
    held: tl.tensor,
    full: tl.tensor,
    kv_batch: tl.tensor,
    kv_head: tl.tensor,
    kv_row: tl.tensor,
    num_slots: tl.tensor,
    window: tl.tensor,
    HK: tl.constexpr,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
) -> None:
    pair = tl.program_id(0)  # a KV head of a sequence
    b, h = (pair // HK).to(tl.int64), (pair % HK).to(tl.int64)
    length, own = tl.load(seen + b), tl.load(slots + b).to(tl.int32)
    page = (length - 1) // SIZE
    if h == 0:
        tokens = length - tl.maximum(page + 1 - own, 0) * SIZE
        tl.store(held + b, tokens)
        tl.store(full + b, tokens // SIZE * SIZE)
    if (length == 0) | ((length - 1) % SIZE != 0):
        return
    k += b * kv_batch + h * kv_head
    v += b * kv_batch + h * kv_head
    bounds += pair.to(tl.int64) * num_slots * 2 * D
    stamps += pair.to(tl.int64) * num_slots
    pages += pair.to(tl.int64) * num_slots
    if page >= own:
        leaving, begin = own - window, tl.load(protected + b).to(tl.int32)
        oldest = tl.full([BLOCK_S], 0x7FFFFFFFFFFFFFFF, tl.int64)
        where = tl.zeros([BLOCK_S], tl.int32)
        for start in range(begin, leaving + 1, BLOCK_S):
            slot = start + tl.arange(0, BLOCK_S)
            stale = slot <= leaving
            age = tl.load(stamps + slot, mask=stale, other=0) * (page + 1) + tl.load(pages + slot, mask=stale, other=0)
            older = stale & (age < oldest)
            oldest, where = tl.where(older, age, oldest), tl.where(older, slot, where)
        to = tl.min(tl.where(oldest == tl.min(oldest, axis=0), where, num_slots), axis=0)
        c = tl.arange(0, BLOCK_D)
        for source in range(leaving, own):
            stamp, number = tl.load(stamps + source), tl.load(pages + source)
            high = tl.load(bounds + source * 2 * D + c, mask=c < D)
            low = tl.load(bounds + source * 2 * D + D + c, mask=c < D)
            for start in range(0, SIZE, BLOCK_R):
                row = start + tl.arange(0, BLOCK_R)
                inside = (row < SIZE)[:, None] & (c < D)[None, :]
                here = (source * SIZE + row).to(tl.int64)[:, None] * kv_row + c[None, :]
                there = (to * SIZE + row).to(tl.int64)[:, None] * kv_row + c[None, :]
                keys, values = tl.load(k + here, mask=inside), tl.load(v + here, mask=inside)
                tl.store(k + there, keys, mask=inside)
                tl.store(v + there, values, mask=inside)
            tl.debug_barrier()  # all threads have read what this and the next iteration overwrite
            tl.store(stamps + to, stamp)
            tl.store(pages + to, number)
            tl.store(bounds + to * 2 * D + c, high, mask=c < D)
            tl.store(bounds + to * 2 * D + D + c, low, mask=c < D)
            tl.debug_barrier()
            to = source
    slot = tl.minimum(page, own - 1)
    tl.store(pages + slot, page.to(tl.int64))
    tl.store(stamps + slot, length.to(tl.int64))


def replace_page(held: StampedPages, counts: PageCounts, window: int) -> None:
    """Make room for a page that the newest token starts; sequences that start none are only counted.

    Writes `held` and `full` of the counts. Can be captured in a CUDA graph. Raises ValueError for shapes, dtypes or
    strides that the kernel cannot read.
    """
    (b, num_kv_heads, num_rows, d), num_slots = held.k.shape, held.stamps.shape[2]
    for name, x in (("k", held.k), ("v", held.v)):
        require(name, x, held.k.shape, held.k.dtype)
    require_whole("bounds", held.bounds, (b, num_kv_heads, num_slots, 2, d), held.k.dtype)
    for name, x in (("stamps", held.stamps), ("pages", held.pages)):
        require_whole(name, x, (b, num_kv_heads, num_slots), torch.int64)
    for name, x in zip(counts._fields, counts, strict=True):
        require_whole(name, x, (b,))
    if not same_strides(held.k, held.v):
        raise ValueError(f"k and v have different strides: {held.k.stride()} and {held.v.stride()}")
    if not takes(held.k):
        return replace_page_ref(held, counts, window)
    size, block_d = num_rows // num_slots, power_of_two(d)
    launch(
        _replace_kernel,
        (b * num_kv_heads,),
        *(*held, *counts, *held.k.stride()[:3], num_slots, window),
        HK=num_kv_heads,
        SIZE=size,
        D=d,
        BLOCK_R=rows_at_once(size, block_d, BLOCK_ELEMENTS),
        BLOCK_D=block_d,
        BLOCK_S=min(1024, power_of_two(num_slots)),
    )
    return None
