"""The k best pages of each KV head, ties to the lower page, so that every back end selects the same set.

Shapes: scores [Hk, n], 1 <= k <= n -> pages [Hk, k] int64, in no particular order; `topk_pages_device` has the batch in
front, and lengths [b] that say which pages are candidates.

On the device one program serves a head, or as many of its pages as it can hold; then another one chooses from what
these chose. Scores are read as integers of the same order; the largest threshold that k of them reach is found bit by
bit, and then everything above it is taken, and of what equals it the lowest pages.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvcli.kernels._triton import jit, launch, power_of_two, require_whole, takes, tl
from kvcli.kernels.slot_layout import SlotLayout, candidates, selected_count

BLOCK = 4096  # scores that a program holds; more of them it would have to read for every bit anew


def topk_pages_ref(scores: Tensor, k: int) -> Tensor:
    """Select by threshold: everything above the k-th best, then the lowest pages that equal it.

    Where no page outside equals the k-th best, and that is the rule, the plain top-k is the answer.
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
    selected: Tensor,
    heads: Tensor | None = None,
    wanted: Tensor | None = None,
) -> None:
    """Select among the candidates of one sequence after the other."""
    allowed = candidates(lengths, layout, scores.shape[2])
    most = selected_count(lengths, layout) if wanted is None else wanted
    for b, mask in enumerate(allowed):
        pages, rows = mask.nonzero()[:, 0], slice(None) if heads is None else heads[b]
        k = max(0, min(selected.shape[2], len(pages), int(most[b])))
        chosen = torch.full_like(selected[b, rows], -1)
        if k and len(chosen):
            chosen[:, :k] = pages[topk_pages_ref(scores[b, rows][:, pages], k)].sort(-1).values
        selected[b, rows] = chosen


@jit
def _ordered(scores: tl.tensor) -> tl.tensor:
    """Turn fp32 into int32 of the same order; both zeros are one."""
    bits = tl.where(scores == 0, 0.0, scores).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def _entries(row: tl.tensor, names: tl.tensor, entry: tl.tensor, high: tl.tensor) -> tl.tensor:
    """Read scores as ordered integers, and say which of these entries are any."""
    there = entry < high
    if names is not None:
        there = there & (tl.load(names + entry, mask=there, other=-1) >= 0)
    return _ordered(tl.load(row + entry, mask=there, other=0.0)), there


@jit
def _topk_kernel(
    scores: tl.tensor,
    names: tl.tensor,
    lengths: tl.tensor,
    heads: tl.tensor,
    wanted: tl.tensor,
    selected: tl.tensor,
    best: tl.tensor,
    num_entries: tl.tensor,
    sink: tl.tensor,
    window: tl.tensor,
    HK: tl.constexpr,
    K: tl.constexpr,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Choose among the entries of one part: pages, or what `names` calls them, where it calls them anything.

    Writes what was chosen to `selected`, and its scores to `best` where there is one.
    """
    pair, part = tl.program_id(0), tl.program_id(1)  # a KV head of a sequence, some of its entries
    if heads is not None:
        if tl.load(heads + pair) == 0:
            return
    low, high, k = 0, num_entries, K
    if lengths is not None:
        count = tl.cdiv(tl.load(lengths + pair // HK), SIZE)
        end = tl.minimum(count - window, count // GROUP * GROUP)
        k = K - (count - end - window)  # the tokens of an unfilled group take the places of so many
        if names is None:
            low = sink
            high = tl.minimum(num_entries, end)
    if wanted is not None:
        k = tl.load(wanted + pair // HK)
    low, high = tl.maximum(low, part * PART), tl.minimum(high, (part + 1) * PART)
    row = scores + pair.to(tl.int64) * num_entries
    if names is not None:
        names += pair.to(tl.int64) * num_entries
    out = (pair.to(tl.int64) * tl.num_programs(1) + part) * K
    one = tl.full([], 1, tl.int32)
    threshold = one << 31  # the least integer
    keys, there = _entries(row, names, low + tl.arange(0, BLOCK_N), high)  # read once: they are all, where all fit
    for bit in range(32):
        trial = threshold ^ (one << (31 - bit))
        reached = ((keys >= trial) & there).to(tl.int32)
        for start in range(low + BLOCK_N, high, BLOCK_N):
            key, inside = _entries(row, names, start + tl.arange(0, BLOCK_N), high)
            reached += ((key >= trial) & inside).to(tl.int32)
        threshold = tl.where(tl.sum(reached, axis=0) >= k, trial, threshold)
    above = tl.zeros([BLOCK_N], tl.int32)
    for start in range(low, high, BLOCK_N):
        key, inside = _entries(row, names, start + tl.arange(0, BLOCK_N), high)
        above += ((key > threshold) & inside).to(tl.int32)
    room = k - tl.sum(above, axis=0)  # for entries that equal the threshold
    taken, equal = 0, 0
    for start in range(low, high, BLOCK_N):
        entry = start + tl.arange(0, BLOCK_N)
        key, inside = _entries(row, names, entry, high)
        tie = ((key == threshold) & inside).to(tl.int32)
        fits = (tie == 1) & (equal + tl.cumsum(tie, axis=0) <= room)
        chosen = ((key > threshold) & inside) | fits
        place = out + taken + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
        page = entry
        if names is not None:
            page = tl.load(names + entry, mask=chosen, other=-1)
        tl.store(selected + place, page.to(selected.dtype.element_ty), mask=chosen)
        if best is not None:
            tl.store(best + place, tl.load(row + entry, mask=chosen, other=0.0), mask=chosen)
        taken += tl.sum(chosen.to(tl.int32), axis=0)
        equal += tl.sum(tie, axis=0)
    rest = tl.arange(0, BLOCK_K)
    tl.store(selected + out + rest, -1, mask=(rest >= taken) & (rest < K))


def topk_pages(scores: Tensor, k: int) -> Tensor:
    """Select k pages of every head, with the fastest means of the device."""
    if not takes(scores):
        return topk_pages_ref(scores, k)
    selected = torch.empty(scores.shape[0], k, dtype=torch.int64, device=scores.device)
    _select(scores.float().contiguous()[None], None, SlotLayout.everything(scores.shape[1]), selected[None], None)
    return selected


def topk_pages_device(
    scores: Tensor,
    lengths: Tensor,
    layout: SlotLayout,
    selected: Tensor,
    heads: Tensor | None = None,
    wanted: Tensor | None = None,
) -> None:
    """Select k candidate pages, neither sink nor window, of every head of a batch: `selected` [b, Hk, k] int32.

    scores [b, Hk, n] fp32, lengths [b] int32. The selection is in ascending order, with -1 behind it where there are
    less than k candidates, or less are wanted: `wanted` [b] int32, from 1 to k, by default as many as the layout has
    places for. heads [b, Hk] bool: the others' selections are left as they are. May be captured in a CUDA graph.

    Raises ValueError for shapes or dtypes that the kernel cannot read.
    """
    b, num_kv_heads, _ = scores.shape
    require_whole("scores", scores, scores.shape, torch.float32)
    require_whole("lengths", lengths, (b,), torch.int32)
    require_whole("selected", selected, (b, num_kv_heads, selected.shape[2]), torch.int32)
    if heads is not None:
        require_whole("heads", heads, (b, num_kv_heads), torch.bool)
    if wanted is not None:
        require_whole("wanted", wanted, (b,), torch.int32)
    if not takes(scores):
        return topk_pages_device_ref(scores, lengths, layout, selected, heads, wanted)
    return _select(scores, lengths, layout, selected, heads, wanted)


def _select(
    scores: Tensor,
    lengths: Tensor | None,
    layout: SlotLayout,
    selected: Tensor,
    heads: Tensor | None,
    wanted: Tensor | None = None,
) -> None:
    """Launch, in two stages where a head has more pages than a program holds; ties go to the lower page in both."""
    (b, num_kv_heads, num_pages), k = scores.shape, selected.shape[2]
    pairs, parts = b * num_kv_heads, -(-num_pages // BLOCK)
    rule = {"HK": num_kv_heads, "K": k, "SIZE": layout.size, "GROUP": layout.group, "BLOCK_K": power_of_two(k)}
    candidate = num_pages, layout.sink, layout.window
    if parts == 1:
        _launch((pairs, 1), num_pages, scores, None, lengths, heads, wanted, selected, None, *candidate, **rule)
        return
    best = torch.empty(pairs, parts * k, dtype=torch.float32, device=scores.device)
    pages = torch.empty(pairs, parts * k, dtype=torch.int32, device=scores.device)
    _launch((pairs, parts), BLOCK, scores, None, lengths, heads, wanted, pages, best, *candidate, **rule)
    again = parts * k, *candidate[1:]
    _launch((pairs, 1), parts * k, best, pages, lengths, heads, wanted, selected, None, *again, **rule)


def _launch(grid: tuple[int, int], part: int, *args: Any, **constants: int) -> None:
    part = power_of_two(part)
    block_n = min(BLOCK, part)
    warps = 4 if block_n <= 1024 else 8
    launch(_topk_kernel, grid, *args, PART=part, BLOCK_N=block_n, warps=warps, **constants)
