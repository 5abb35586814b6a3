"""Top-k: the k best pages of each KV head, ties to the lower page, so that every back end selects the same set.

Shapes: scores [Hk, n], 1 <= k <= n -> pages [Hk, k] int64, in no particular order; `topk_pages_device` has the batch in
front, and lengths [b] that define the candidates.

On the device one program serves a head or a part of its pages, and holds their scores in its registers. If there are
several, the last one to finish chooses from what the others chose.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kvcli.kernels._llvm import LOT, first_one, without_first
from kvcli.kernels._numba import compiled, inlined, prange, run, serves
from kvcli.kernels._triton import jit, last_to_arrive, launch, power_of_two, require_whole, takes, tl
from kvcli.kernels.page_table import (
    MissList,
    SlotLayout,
    candidate_range,
    candidates,
    nothing_missing,
    resolve_head,
    resolve_pages_device_ref,
    selected_count,
)

BLOCK = 16384  # scores of a program, all of them in its registers
HELD = 512  # scores that a warp holds, 16 to a thread


@jit
def _ordered(scores: tl.tensor) -> tl.tensor:
    """Turn fp32 into int32 of the same order; both zeros are equal."""
    bits = tl.where(scores == 0, 0.0, scores).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def _held(
    row: tl.tensor,
    names: tl.tensor,
    marks: tl.tensor,
    which: tl.tensor,
    first: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """Read the scores of the entries from `first` on as ordered integers [BLOCK_N].

    What is not there gets the least one: entries outside low .. high, without a name, or not marked `which`.
    """
    entry = first + tl.arange(0, BLOCK_N)
    there = (entry >= low) & (entry < high)
    if names is not None:
        there = there & (tl.load(names + entry, mask=there, other=-1) >= 0)
    if marks is not None:
        there = there & (tl.load(marks + entry, mask=there, other=-1) == which)
    return tl.where(there, _ordered(tl.load(row + entry, mask=there, other=0.0)), -2147483648)


@jit
def _reach(
    key: tl.tensor,
    bound: tl.tensor,
    row: tl.tensor,
    names: tl.tensor,
    marks: tl.tensor,
    which: tl.tensor,
    first: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    ONE: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """Count the keys from `bound` on: those given, and unless these are all (ONE), those that `_held` reads further."""
    count = tl.sum((key >= bound).to(tl.int32), axis=0)
    if not ONE:
        for start in range(first + BLOCK_N, high, BLOCK_N):
            more = _held(row, names, marks, which, start, low, high, BLOCK_N)
            count += tl.sum((more >= bound).to(tl.int32), axis=0)
    return count


@jit
def _threshold(
    row: tl.tensor,
    names: tl.tensor,
    marks: tl.tensor,
    which: tl.tensor,
    first: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    k: tl.tensor,
    ONE: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """Find the k-th largest of the keys that `_held` reads, and how many equal to it are among the k largest.

    Bit by bit, until as many keys reach what is found so far as are wanted: of scores that differ, about half of the
    bits decide. A pass over keys in registers costs little beside its sum over threads; if BLOCK_N do not hold all,
    each pass reads the rest again.
    """
    least: tl.constexpr = -2147483648  # of what is not there
    key = _held(row, names, marks, which, first, low, high, BLOCK_N)
    there = _reach(key, least + 1, row, names, marks, which, first, low, high, ONE, BLOCK_N)
    k = tl.maximum(tl.minimum(k, there), 0)
    found, bit = tl.full([], 0, tl.int32), tl.full([], 31, tl.int32)
    while bit >= 0:
        bound = found | (tl.full([], 1, tl.int32) << bit)  # unsigned; the sign bit orders the other way
        reach = _reach(key, bound ^ least, row, names, marks, which, first, low, high, ONE, BLOCK_N)
        found = tl.where(reach >= k, bound, found)
        bit = tl.where(reach == k, -1, bit - 1)
    last = found ^ least
    more = tl.minimum(last, 2147483646) + 1  # no score is the largest integer
    return last, k - _reach(key, more, row, names, marks, which, first, low, high, ONE, BLOCK_N)


@jit
def _mark(
    row: tl.tensor,
    marks: tl.tensor,
    resident: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    K: tl.constexpr,
    FIRST: tl.constexpr,
    ONE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """Mark the FIRST best entries and the resident ones with 1, all others with 0; return the number of ones."""
    some: tl.constexpr = min(BLOCK_N, 4096)  # as in `pick`
    threshold, room = _threshold(row, None, None, 0, low, low, high, FIRST, ONE, BLOCK_N)
    equal = 0
    for start in range(low, high, some):
        entry = start + tl.arange(0, some)
        there = entry < high
        own = _ordered(tl.load(row + entry, mask=there, other=0.0))
        tie = ((own == threshold) & there).to(tl.int32)
        best = ((own > threshold) & there) | ((tie == 1) & (equal + tl.cumsum(tie, axis=0) <= room))
        tl.store(marks + entry, best.to(tl.int8), mask=there)
        equal += tl.sum(tie, axis=0)
    tl.debug_barrier()
    page = tl.load(resident + tl.arange(0, BLOCK_K), mask=tl.arange(0, BLOCK_K) < K, other=-1)
    tl.store(marks + page, tl.full([BLOCK_K], 1, tl.int8), mask=(page >= low) & (page < high))
    tl.debug_barrier()
    count = 0
    for start in range(low, high, some):
        entry = start + tl.arange(0, some)
        count += tl.sum(tl.load(marks + entry, mask=entry < high, other=0).to(tl.int32), axis=0)
    return count


@jit
def pick(
    row: tl.tensor,
    names: tl.tensor,
    marks: tl.tensor,
    resident: tl.tensor,
    first: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    k: tl.tensor,
    selected: tl.tensor,
    best: tl.tensor,
    K: tl.constexpr,
    FIRST: tl.constexpr,
    ONE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Choose k of the entries low .. high of a row of scores: pages, or what `names` calls them if given.

    BLOCK_N of them, from `first` on, are held in registers to find the k-th best, which should be all of them (ONE).
    Then they are read again, some at a time, as to number those that are chosen takes more registers. With FIRST, so
    many of the best are chosen, then `resident` pages by score, then others by score; `marks` are then bytes, one for
    each page.

    Writes the choice to `selected` [K], ascending, and its scores to `best` if given.
    """
    some: tl.constexpr = min(BLOCK_N, 4096)  # numbered without spilling registers
    which, need = 0, k  # the mark whose entries compete, and the number of places
    if FIRST:
        count = _mark(row, marks, resident, low, high, K, FIRST, ONE, BLOCK_K, BLOCK_N)
        which = (count >= k).to(tl.int32)
        need = tl.where(which == 1, k, k - count)
        threshold, room = _threshold(row, names, marks, which, first, low, high, need, ONE, BLOCK_N)
    else:
        threshold, room = _threshold(row, names, None, 0, first, low, high, need, ONE, BLOCK_N)
    taken, equal = 0, 0  # entries that are chosen whatever the ties, and ties
    for start in range(low, high, some):
        entry = start + tl.arange(0, some)
        there = entry < high
        if names is not None:
            there = there & (tl.load(names + entry, mask=there, other=-1) >= 0)
        own = _ordered(tl.load(row + entry, mask=there, other=0.0))
        competes = there
        if FIRST:
            mark = tl.load(marks + entry, mask=there, other=-1)
            competes = there & (mark == which)
        sure, tie = (own > threshold) & competes, (own == threshold) & competes
        if FIRST:
            sure = sure | (there & (mark > which))  # marked entries that need not compete
        # Both are counted in halves of one number: sums over threads are what this takes longest for.
        both = sure.to(tl.int32) + (tie.to(tl.int32) << 16)
        upto = tl.cumsum(both, axis=0)
        ties = equal + (upto >> 16)
        chosen = sure | (tie & (ties <= room))
        place = taken + (upto & 0xFFFF) + tl.minimum(ties, room) - 1
        page = entry
        if names is not None:
            page = tl.load(names + entry, mask=chosen, other=-1)
        tl.store(selected + place, page.to(selected.dtype.element_ty), mask=chosen)
        if best is not None:
            tl.store(best + place, tl.load(row + entry, mask=chosen, other=0.0), mask=chosen)
        counted = tl.sum(both, axis=0)
        taken += counted & 0xFFFF
        equal += counted >> 16
    taken += tl.minimum(equal, room)
    rest = tl.arange(0, BLOCK_K)
    tl.store(selected + rest, -1, mask=(rest >= taken) & (rest < K))


AT_ONCE = 11  # bits found on one set of keys, before it is narrowed
PORTION = 192  # keys counted at once: a byte holds their number, and registers of any width divide them

KEY = 64  # numbers that a score is computed from, about
LOOKS = 4  # cost of selecting from a score, in numbers read

_NO_NAMES = np.empty((0, 0), np.int64)


@inlined
def at_least(keys: Any, j: int, bound: int) -> Any:
    """Flag those of a LOT of keys from j on that are not below a bound: compiled to a comparison of registers."""
    mask = np.uint64(0)
    for i in range(min(LOT, len(keys) - j)):
        mask |= np.uint64(keys[np.uint64(j + i)] >= bound) << np.uint64(i)
    return mask


@inlined
def above(keys: Any, j: int, bound: int) -> Any:
    """Flag those that exceed a bound."""
    mask = np.uint64(0)
    for i in range(min(LOT, len(keys) - j)):
        mask |= np.uint64(keys[np.uint64(j + i)] > bound) << np.uint64(i)
    return mask


@inlined
def _reaching(keys: Any, bound: int) -> int:
    """Count the keys that are not below a bound.

    Counters of the keys' own width let a register compare and count as many keys as it holds.
    """
    own, total = keys.dtype.type, 0
    least, whole = own(bound), len(keys) - len(keys) % PORTION
    for j in range(0, whole, PORTION):
        count = own(0)
        for i in range(PORTION):
            count = own(count + own(keys[np.uint64(j + i)] >= least))
        total += count
    for j in range(whole, len(keys)):
        total += keys[np.uint64(j)] >= least
    return total


@inlined
def kth_best(keys: Any, bits: int, wanted: int) -> tuple[int, int]:
    """Find the `wanted`-th best of keys with `bits` bits by bisection, and how many equal to it are among the best."""
    best = 0
    while bits > 0:
        rest, better = max(0, bits - AT_ONCE), 0
        while bits > rest:
            bits -= 1
            bound = best | 1 << bits
            count = _reaching(keys, bound)
            if count >= wanted:
                best = bound
            else:
                better = count
        wanted -= better
        if rest:
            keys = _between(keys, best, best | (1 << rest) - 1)
    return best, wanted


@inlined
def _between(keys: Any, least: int, most: int) -> Any:
    """List the keys from `least` to `most`, both included."""
    taken, at = np.empty(len(keys), keys.dtype), 0
    for j in range(0, len(keys), LOT):
        mask = at_least(keys, j, least) & ~above(keys, j, most)
        while mask:
            taken[np.uint64(at)] = keys[np.uint64(j + first_one(mask))]
            mask = without_first(mask)
            at += 1
    return taken[:at]


@inlined
def places_of(keys: Any, least: int, wanted: int, out: Any) -> None:
    """List the indices of keys above `least`, and of the first `wanted` keys equal to it, as many as `out` holds."""
    at, j = 0, 0
    while at < len(out):
        mask = above(keys, j, least)
        equal = at_least(keys, j, least) & ~mask if wanted else np.uint64(0)
        while equal and wanted:
            mask |= equal & ~without_first(equal)
            equal = without_first(equal)
            wanted -= 1
        while mask:
            out[np.uint64(at)] = j + first_one(mask)
            mask = without_first(mask)
            at += 1
        j += LOT


@inlined
def keys_of(bits: Any, keys: Any) -> None:
    """Turn the bits of fp32 scores into unsigned numbers of the same order; both zeros are equal."""
    for i in range(len(bits)):
        b = np.uint32(bits[i])
        b = np.uint32(0) if b == np.uint32(0x80000000) else b
        keys[i] = b ^ (np.uint32(0x80000000) | np.uint32(np.int32(b) >> np.int32(31)))


@compiled
def _select(bits: Any, k: int, names: Any, first: int, out: Any) -> None:
    heads, n = bits.shape
    for h in prange(heads):
        keys, taken = np.empty(n, np.uint32), out[h]
        keys_of(bits[h], keys)
        best, wanted = kth_best(keys, 32, k)
        places_of(keys, best, wanted, taken)
        for i in range(k):
            taken[i] = first + (names[h, taken[i]] if len(names) else taken[i])


def suits(scores: Tensor) -> bool:
    """Return whether `select_best` serves for these scores; their computation counts as work for the loop as well."""
    return serves(scores, numbers=KEY * scores.numel())


def select_best(scores: Tensor, k: int, names: Tensor | None = None, first: int = 0) -> Tensor:
    """Select the k best of each row: their indices or `names` [Hk, n], plus `first`."""
    out = torch.empty(scores.shape[0], k, dtype=torch.int64)
    bits, known = scores.contiguous().view(torch.int32), _NO_NAMES if names is None else names.contiguous()
    run(_select, LOOKS * scores.numel(), bits, k, known, first, out)
    return out


LONG = 64
"""Scores per row from which on a CPU loop is faster than partitioning."""


class Selection(NamedTuple):
    """The target of a choice: `selected` [b, Hk, k] int32, ascending, padded with -1.

    Where pages come from the host, `resident` [b, Hk, k] is the page table, updated to the selection, and `misses`
    lists what it did not hold. With `first`, so many of the best are chosen; then resident pages by score; then others
    by score.
    """

    selected: Tensor
    resident: Tensor | None = None
    misses: MissList | None = None
    first: int = 0

    @classmethod
    def empty(cls, like: Tensor, k: int, *table: Any) -> Selection:
        """Make a selection of k pages for the KV heads of like [b, Hk, ...]."""
        return cls(torch.empty(*like.shape[:2], k, dtype=torch.int32, device=like.device), *table)

    def check(self, b: int, num_kv_heads: int) -> None:
        """Raise ValueError where shapes or dtypes are not what kernels write."""
        k = self.selected.shape[2]
        require_whole("selected", self.selected, (b, num_kv_heads, k), torch.int32)
        if self.resident is not None:
            require_whole("resident", self.resident, (b, num_kv_heads, k), torch.int32)
        if self.misses is not None:
            self.misses.check(b, num_kv_heads, k)


def topk_pages_ref(scores: Tensor, k: int) -> Tensor:
    """Select by threshold: everything above the k-th best, then the lowest pages equal to it.

    If no page outside equals the k-th best, which is the usual case, the plain top-k is the answer.
    """
    if k == scores.shape[-1]:
        return torch.arange(k, device=scores.device).expand(scores.shape)
    best = scores.topk(k + 1, dim=-1)
    if torch.all(best.values[:, k - 1] > best.values[:, k]):
        return best.indices[:, :k]
    threshold = best.values[:, k - 1 : k]  # [Hk, 1]
    above, equal = scores > threshold, scores == threshold
    room = k - above.sum(-1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(-1) <= room))
    return chosen.nonzero()[:, 1].view(scores.shape[0], k)


def topk_pages_device_ref(
    scores: Tensor,
    lengths: Tensor,
    layout: SlotLayout,
    selection: Selection,
    heads: Tensor | None = None,
    wanted: Tensor | None = None,
    arrived: Tensor | None = None,  # noqa: ARG001 - used by the kernel only
) -> None:
    """Reference of `topk_pages_device`: sequence by sequence."""
    selected = selection.selected
    if selection.first:
        scores = _resident_after_first(scores, lengths, layout, selection)
    allowed = candidates(lengths, layout, scores.shape[2])
    most = selected_count(lengths, layout) if wanted is None else wanted
    for b, mask in enumerate(allowed):
        pages, rows = mask.nonzero()[:, 0], slice(None) if heads is None else heads[b]
        k = max(0, min(selected.shape[2], len(pages), int(most[b])))
        chosen = torch.full_like(selected[b, rows], -1)
        if k and len(chosen):
            chosen[:, :k] = pages[topk_pages_ref(scores[b, rows][:, pages], k)].sort(-1).values
        selected[b, rows] = chosen
    if selection.misses is not None:
        assert selection.resident is not None
        resolve_pages_device_ref(selection.resident, selected, selection.misses, heads)


def _resident_after_first(scores: Tensor, lengths: Tensor, layout: SlotLayout, selection: Selection) -> Tensor:
    """Return ranks as scores [b, Hk, n]: the `first` best and the resident pages come before all others."""
    assert selection.resident is not None
    n = scores.shape[2]
    allowed = candidates(lengths, layout, n)[:, None]
    order = scores.masked_fill(~allowed, float("-inf")).argsort(dim=2, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(2, order, torch.arange(n, device=order.device).expand_as(order))
    held = torch.zeros(*scores.shape[:2], n + 1, dtype=torch.bool, device=scores.device)
    # An empty slot marks the extra column in front; short sequences have slots for pages that never come.
    resident = selection.resident.long()
    held.scatter_(2, resident.where(resident < n, -1) + 1, True)
    return -(rank + n * ~((rank < selection.first) | held[:, :, 1:])).float()


@jit
def _topk_kernel(
    scores: tl.tensor,
    lengths: tl.tensor,
    heads: tl.tensor,
    wanted: tl.tensor,
    selected: tl.tensor,
    resident: tl.tensor,
    pages: tl.tensor,
    slots: tl.tensor,
    count: tl.tensor,
    marks: tl.tensor,
    best: tl.tensor,
    named: tl.tensor,
    arrived: tl.tensor,
    num_entries: tl.tensor,
    sink: tl.tensor,
    window: tl.tensor,
    HK: tl.constexpr,
    K: tl.constexpr,
    FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    ONE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
) -> None:
    """Choose among the pages of one part; the last program of a head chooses from the parts' choices."""
    pair, part = tl.program_id(0), tl.program_id(1)  # a KV head of a sequence, a part of its pages
    at = pair.to(tl.int64) * K
    if heads is not None:
        if tl.load(heads + pair) == 0:
            if pages is not None:
                if part == 0:
                    nothing_missing(pages + at, slots + at, count + pair, K, BLOCK_K)
            return
    low, high, beside = candidate_range(lengths, pair // HK, num_entries, sink, window, SIZE, GROUP)
    k = K - beside  # the tokens of an unfilled group take places
    if wanted is not None:
        k = tl.load(wanted + pair // HK)
    row = scores + pair.to(tl.int64) * num_entries
    table = resident
    if resident is not None:
        table = resident + at
    if FIRST:
        marks += pair.to(tl.int64) * num_entries
    is_last = True
    if PARTS == 1:
        pick(row, None, marks, table, 0, low, high, k, selected + at, None, K, FIRST, ONE, BLOCK_K, BLOCK_N)
    else:
        chosen = pair.to(tl.int64) * PARTS * K
        here = chosen + part * K
        first = part * BLOCK_N
        begin, stop = tl.maximum(low, first), tl.minimum(high, first + BLOCK_N)
        pick(row, None, None, None, first, begin, stop, k, named + here, best + here, K, 0, True, BLOCK_K, BLOCK_N)
        is_last = last_to_arrive(arrived + pair, PARTS)
        if is_last:
            row, names = best + chosen, named + chosen
            pick(row, names, None, None, 0, 0, PARTS * K, k, selected + at, None, K, 0, ONE, BLOCK_K, BLOCK_P)
    if pages is not None:
        if is_last:
            tl.debug_barrier()
            resolve_head(table, selected + at, pages + at, slots + at, count + pair, K, BLOCK_K)


def topk_pages(scores: Tensor, k: int) -> Tensor:
    """Select k pages of every head: scores [Hk, n] -> [Hk, k], with the fastest means of the device."""
    if not takes(scores):
        if scores.shape[1] >= LONG and suits(scores):
            return select_best(scores, k)
        known = scores.device.type == "cpu" and scores.dtype in (torch.float32, torch.float64)
        selected = _partitioned(scores.numpy(), k) if known and k < scores.shape[1] else None
        return topk_pages_ref(scores, k) if selected is None else selected
    selected = torch.empty(scores.shape[0], k, dtype=torch.int64, device=scores.device)
    everything = SlotLayout.everything(scores.shape[1])
    _select_topk(scores.float().contiguous()[None], None, everything, Selection(selected[None]), None, None, None)
    return selected


def topk_named(scores: Tensor, k: int, names: Tensor, first: int = 0) -> Tensor:
    """Select k of `names` [Hk, n] for every head by their scores, and add `first`."""
    if scores.shape[1] >= LONG and not takes(scores) and suits(scores):
        return select_best(scores, k, names, first)
    return names.gather(1, topk_pages(scores, k)) + first


def _partitioned(scores: np.ndarray, k: int) -> Tensor | None:
    """Select on a CPU, up to five times as fast as torch sorts; None if a page outside equals the k-th best."""
    selected = np.argpartition(scores, -k, axis=-1)[:, -k:]  # the k-th best is in column 0
    least = np.take_along_axis(scores, selected[:, :1], -1)
    return torch.from_numpy(selected) if np.all(np.count_nonzero(scores >= least, axis=-1) == k) else None


def topk_pages_device(
    scores: Tensor,
    lengths: Tensor,
    layout: SlotLayout,
    selection: Selection,
    heads: Tensor | None = None,
    wanted: Tensor | None = None,
    arrived: Tensor | None = None,
) -> None:
    """Select k candidate pages, neither sink nor window, of every head of a batch, and write them to `selection`.

    scores [b, Hk, n] fp32, lengths [b] int32. The selection is padded with -1 where there are fewer than k candidates,
    or fewer are wanted: `wanted` [b] int32, from 1 to k, by default as many as the layout has places for. heads [b, Hk]
    bool: other heads miss nothing, and their selections stay as they are. `arrived` as in `PagedKV`. Can be captured in
    a CUDA graph. The slots may not be read from here until the gather of the misses has finished.

    Raises ValueError for shapes or dtypes that the kernel cannot read.
    """
    b, num_kv_heads, _ = scores.shape
    require_whole("scores", scores, scores.shape, torch.float32)
    require_whole("lengths", lengths, (b,), torch.int32)
    selection.check(b, num_kv_heads)
    if heads is not None:
        require_whole("heads", heads, (b, num_kv_heads), torch.bool)
    if wanted is not None:
        require_whole("wanted", wanted, (b,), torch.int32)
    if scores.shape[2] == 0:  # there was never anything to choose
        selection.selected.fill_(-1)
        if selection.misses is not None:
            selection.misses.counts.zero_()
        return None
    if not takes(scores):
        return topk_pages_device_ref(scores, lengths, layout, selection, heads, wanted)
    return _select_topk(scores, lengths, layout, selection, heads, wanted, arrived)


def _select_topk(
    scores: Tensor,
    lengths: Tensor | None,
    layout: SlotLayout,
    selection: Selection,
    heads: Tensor | None,
    wanted: Tensor | None,
    arrived: Tensor | None,
) -> None:
    """Launch, with several programs per head if it has many pages; ties always go to the lower page."""
    (b, num_kv_heads, num_pages), k = scores.shape, selection.selected.shape[2]
    pairs, device = b * num_kv_heads, scores.device
    block, marks, best, named = min(BLOCK, power_of_two(num_pages)), None, None, None
    parts, last = -(-num_pages // block), num_pages  # entries that the last program of a head chooses from
    if selection.first:
        parts, marks = 1, torch.empty(pairs, num_pages, dtype=torch.int8, device=device)
    if parts > 1:
        last = parts * k
        best = torch.empty(pairs, parts * k, dtype=torch.float32, device=device)
        named = torch.empty(pairs, parts * k, dtype=torch.int32, device=device)
        if arrived is None:
            arrived = torch.zeros(pairs, dtype=torch.int32, device=device)
    block_p = min(BLOCK, power_of_two(last))
    launch(
        _topk_kernel,
        (pairs, parts),
        *(scores, lengths, heads, wanted, *selection[:2], *(selection.misses or (None,) * 3), marks, best, named),
        *(arrived, num_pages, layout.sink, layout.window),
        HK=num_kv_heads,
        K=k,
        FIRST=selection.first,
        SIZE=layout.size,
        GROUP=layout.group,
        PARTS=parts,
        ONE=last <= BLOCK,
        BLOCK_K=power_of_two(k),
        BLOCK_N=block,
        BLOCK_P=block_p,
        warps=max(4, min(16, power_of_two(max(block, block_p, 2 * k)) // HELD)),
    )


def kept_tokens(scores: Tensor, recent: int, k: int) -> Tensor:
    """Select the k tokens that an eviction leaves, ascending: the `recent` newest, then the best of scores [Hk, n]."""
    return topk_pages(functional.pad(scores, (0, recent), value=float("inf")), k).sort(-1).values
