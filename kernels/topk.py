"""The k best pages of each KV head, ties to the lower page, so that every back end selects the same set.

Shapes: scores [Hk, n], 1 <= k <= n -> pages [Hk, k] int64, in no particular order; `topk_pages_device` has the batch in
front, and lengths [b] that say which pages are candidates.

On the device one program serves a head. Scores are read as integers of the same order; the largest threshold that k
of them reach is found bit by bit, and then everything above it is taken, and of what equals it the lowest pages.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.kernels._triton import jit, launch, power_of_two, require_whole, takes, tl
from kvcli.kernels.slots import SlotLayout, candidates

BLOCK = 4096  # scores that a program looks at together


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
    scores: Tensor, lengths: Tensor, layout: SlotLayout, selected: Tensor, heads: Tensor | None = None
) -> None:
    """Select among the candidates of one sequence after the other."""
    allowed = candidates(lengths, layout, scores.shape[2])
    for b, mask in enumerate(allowed):
        pages, rows = mask.nonzero()[:, 0], slice(None) if heads is None else heads[b]
        k = min(selected.shape[2], len(pages))
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
def _topk_kernel(
    scores: tl.tensor,
    lengths: tl.tensor,
    heads: tl.tensor,
    selected: tl.tensor,
    num_pages: tl.tensor,
    sink: tl.tensor,
    window: tl.tensor,
    HK: tl.constexpr,
    K: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    pair = tl.program_id(0)  # a KV head of a sequence
    if heads is not None:
        if tl.load(heads + pair) == 0:
            return
    low, high = 0, num_pages
    if lengths is not None:
        low = sink
        high = tl.minimum(num_pages, tl.cdiv(tl.load(lengths + pair // HK), SIZE) - window)
    row = scores + pair.to(tl.int64) * num_pages
    out = selected + pair.to(tl.int64) * K
    one = tl.full([], 1, tl.int32)
    threshold = one << 31  # the least integer
    first = low + tl.arange(0, BLOCK_N)
    keys = _ordered(tl.load(row + first, mask=first < high, other=0.0))  # read once: they are all, where all fit
    for bit in range(32):
        trial = threshold ^ (one << (31 - bit))
        reached = ((keys >= trial) & (first < high)).to(tl.int32)
        for start in range(low + BLOCK_N, high, BLOCK_N):
            page = start + tl.arange(0, BLOCK_N)
            key = _ordered(tl.load(row + page, mask=page < high, other=0.0))
            reached += ((key >= trial) & (page < high)).to(tl.int32)
        threshold = tl.where(tl.sum(reached, axis=0) >= K, trial, threshold)
    above = tl.zeros([BLOCK_N], tl.int32)
    for start in range(low, high, BLOCK_N):
        page = start + tl.arange(0, BLOCK_N)
        key = _ordered(tl.load(row + page, mask=page < high, other=0.0))
        above += ((key > threshold) & (page < high)).to(tl.int32)
    room = K - tl.sum(above, axis=0)  # for pages that equal the threshold
    taken, equal = 0, 0
    for start in range(low, high, BLOCK_N):
        page = start + tl.arange(0, BLOCK_N)
        key = _ordered(tl.load(row + page, mask=page < high, other=0.0))
        tie = ((key == threshold) & (page < high)).to(tl.int32)
        fits = (tie == 1) & (equal + tl.cumsum(tie, axis=0) <= room)
        chosen = (((key > threshold) & (page < high)) | fits).to(tl.int32)
        place = taken + tl.cumsum(chosen, axis=0) - 1
        tl.store(out + place, page.to(selected.dtype.element_ty), mask=chosen == 1)
        taken += tl.sum(chosen, axis=0)
        equal += tl.sum(tie, axis=0)
    rest = tl.arange(0, BLOCK_K)
    tl.store(out + rest, -1, mask=(rest >= taken) & (rest < K))


def topk_pages(scores: Tensor, k: int) -> Tensor:
    """Select k pages of every head, with the fastest means of the device."""
    if not takes(scores):
        return topk_pages_ref(scores, k)
    selected = torch.empty(scores.shape[0], k, dtype=torch.int64, device=scores.device)
    _select(scores.float().contiguous()[None], None, SlotLayout.everything(scores.shape[1]), selected[None], None)
    return selected


def topk_pages_device(
    scores: Tensor, lengths: Tensor, layout: SlotLayout, selected: Tensor, heads: Tensor | None = None
) -> None:
    """Select k candidate pages, neither sink nor window, of every head of a batch: `selected` [b, Hk, k] int32.

    scores [b, Hk, n] fp32, lengths [b] int32. The selection is in ascending order, with -1 behind it where there are
    less than k candidates. heads [b, Hk] bool: the others' selections are left as they are. May be captured in a CUDA
    graph. Raises ValueError for shapes or dtypes that the kernel cannot read.
    """
    b, num_kv_heads, _ = scores.shape
    require_whole("scores", scores, scores.shape, torch.float32)
    require_whole("lengths", lengths, (b,), torch.int32)
    require_whole("selected", selected, (b, num_kv_heads, selected.shape[2]), torch.int32)
    if heads is not None:
        require_whole("heads", heads, (b, num_kv_heads), torch.bool)
    if not takes(scores):
        return topk_pages_device_ref(scores, lengths, layout, selected, heads)
    return _select(scores, lengths, layout, selected, heads)


def _select(scores: Tensor, lengths: Tensor | None, layout: SlotLayout, selected: Tensor, heads: Tensor | None) -> None:
    (b, num_kv_heads, num_pages), k = scores.shape, selected.shape[2]
    block_n = min(BLOCK, power_of_two(num_pages))
    launch(
        _topk_kernel,
        (b * num_kv_heads,),
        *(scores, lengths, heads, selected, num_pages, layout.sink, layout.window),
        HK=num_kv_heads,
        K=k,
        SIZE=layout.size,
        BLOCK_K=power_of_two(k),
        BLOCK_N=block_n,
        warps=4 if block_n <= 1024 else 8,
    )
