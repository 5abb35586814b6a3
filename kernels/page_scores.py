"""Upper bound of q.k over a page, pooled over the query heads that share a KV head.

    P_hj = scale * sum_c max(q_hc * min_jc, q_hc * max_jc) = scale * (relu(q_h) . max_j - relu(-q_h) . min_j)

On the device the pages are split over programs. Where a softmax over the candidate pages comes before pooling, each
program leaves its scores with their maximum and sum of exponentials, and a second kernel normalises and pools.

Shapes: q [H, d], summary [Hk, n, 2, d] (see `page_summary`) -> scores [Hk, n], larger is better; `page_scores_device`
has the batch in front, and lengths [b] that say which pages are candidates.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvcli.kernels._triton import jit, launch, power_of_two, require, require_whole, rows_at_once, takes, tl
from kvcli.kernels.group_pooling import Pooling, pool_queries, pool_scores
from kvcli.kernels.slot_layout import SlotLayout, candidates

BLOCK_ELEMENTS = 4096  # of the maxima, and as many of the minima, that a program holds at once
POOL_PAGES = 1024  # that a program of the second kernel pools


def page_scores_ref(q: Tensor, summary: Tensor, scale: float, pooling: Pooling) -> Tensor:
    """Plain torch, in at least fp32."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    heads = pool_queries(q.to(dtype).view(summary.shape[0], -1, q.shape[-1]), pooling)  # [Hk, G or 1, d]
    signed = scale * torch.cat((heads.clamp_min(0), heads.clamp_max(0)), -1)  # [Hk, G, 2d]
    # The long factor first: the product then reads the summaries, which are the bulk, row by row.
    bounds = (summary.flatten(2).to(signed.dtype) @ signed.transpose(1, 2)).transpose(1, 2)  # [Hk, G, n]
    return pool_scores(bounds, pooling)


def page_scores_device_ref(
    q: Tensor,
    summary: Tensor,
    lengths: Tensor,
    layout: SlotLayout,
    scale: float,
    pooling: Pooling,
    out: Tensor,
    heads: Tensor | None = None,
) -> None:
    """Score the candidates of one sequence after the other."""
    chosen = candidates(lengths, layout, summary.shape[2])
    for b, pages in enumerate(chosen):
        scores = torch.full_like(out[b], float("-inf"))
        if pages.any():
            scores[:, pages] = page_scores_ref(q[b], summary[b][:, pages], scale, pooling).to(out.dtype)
        mask = slice(None) if heads is None else heads[b]
        out[b, mask] = scores[mask]


@jit
def _candidate_range(
    lengths: tl.tensor, b: tl.tensor, num_pages: tl.tensor, sink: tl.tensor, window: tl.tensor, SIZE: tl.constexpr
) -> tl.tensor:
    """Give the first candidate page and the one behind the last: all pages where there are no lengths."""
    low, high = 0, num_pages
    if lengths is not None:
        low = sink
        high = tl.minimum(num_pages, tl.cdiv(tl.load(lengths + b), SIZE) - window)
    return low, high


@jit
def _score_kernel(
    q: tl.tensor,
    summary: tl.tensor,
    lengths: tl.tensor,
    heads: tl.tensor,
    out: tl.tensor,
    tops: tl.tensor,
    totals: tl.tensor,
    q_batch: tl.tensor,
    q_head: tl.tensor,
    summary_batch: tl.tensor,
    summary_head: tl.tensor,
    num_pages: tl.tensor,
    sink: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    HK: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    HOW: tl.constexpr,
    WHAT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    pair, block = tl.program_id(0), tl.program_id(1)  # a KV head of a sequence, some pages
    if heads is not None:
        if tl.load(heads + pair) == 0:
            return
    b, h = (pair // HK).to(tl.int64), (pair % HK).to(tl.int64)
    low, high = _candidate_range(lengths, b, num_pages, sink, window, SIZE)
    page, c = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    candidate = (page >= low) & (page < high)
    inside = candidate[:, None] & (c < D)[None, :]
    at = summary + b * summary_batch + h * summary_head + page.to(tl.int64)[:, None] * 2 * D + c[None, :]
    maxima = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    minima = tl.load(at + D, mask=inside, other=0.0).to(tl.float32)
    queries = q + b * q_batch + h * G * q_head + c
    row = pair.to(tl.int64) * num_pages + page
    pooled = tl.full([BLOCK_N], float("-inf") if HOW == "max" else 0.0, tl.float32)
    if WHAT == "q":
        query = tl.full([BLOCK_D], float("-inf") if HOW == "max" else 0.0, tl.float32)
        for g in range(G):
            one = tl.load(queries + g * q_head, mask=c < D, other=0.0).to(tl.float32)
            query = tl.maximum(query, one) if HOW == "max" else query + one / G
        pooled = scale * _bound(query, maxima, minima)
    else:
        for g in range(G):
            query = tl.load(queries + g * q_head, mask=c < D, other=0.0).to(tl.float32)
            scores = scale * _bound(query, maxima, minima)
            if WHAT == "qk":
                pooled = tl.maximum(pooled, scores) if HOW == "max" else pooled + scores / G
            else:
                head = pair.to(tl.int64) * G + g  # of all query heads in a row
                scores = tl.where(candidate, scores, float("-inf"))
                top = tl.max(scores, axis=0)
                shift = tl.where(top == float("-inf"), 0.0, top)
                tl.store(out + head * num_pages + page, scores, mask=page < num_pages)
                tl.store(tops + head * tl.num_programs(1) + block, top)
                tl.store(totals + head * tl.num_programs(1) + block, tl.sum(tl.exp(scores - shift), axis=0))
    if WHAT != "s":
        tl.store(out + row, tl.where(candidate, pooled, float("-inf")), mask=page < num_pages)


@jit
def _bound(query: tl.tensor, maxima: tl.tensor, minima: tl.tensor) -> tl.tensor:
    """Bound query . key over pages: query [D], maxima and minima [N, D] -> [N]."""
    return tl.sum(query[None, :] * tl.where(query[None, :] > 0, maxima, minima), axis=1)


@jit
def _pool_kernel(
    scores: tl.tensor,
    tops: tl.tensor,
    totals: tl.tensor,
    lengths: tl.tensor,
    heads: tl.tensor,
    out: tl.tensor,
    num_pages: tl.tensor,
    sink: tl.tensor,
    window: tl.tensor,
    num_blocks: tl.tensor,
    HK: tl.constexpr,
    G: tl.constexpr,
    SIZE: tl.constexpr,
    HOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
) -> None:
    pair, block = tl.program_id(0), tl.program_id(1)
    if heads is not None:
        if tl.load(heads + pair) == 0:
            return
    low, high = _candidate_range(lengths, pair // HK, num_pages, sink, window, SIZE)
    page, part = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_B)
    candidate = (page >= low) & (page < high)
    pooled = tl.zeros([BLOCK_N], tl.float32)  # weights are not negative
    for g in range(G):
        head = pair.to(tl.int64) * G + g
        top = tl.load(tops + head * num_blocks + part, mask=part < num_blocks, other=float("-inf"))
        total = tl.load(totals + head * num_blocks + part, mask=part < num_blocks, other=0.0)
        highest = tl.max(top, axis=0)
        highest = tl.where(highest == float("-inf"), 0.0, highest)  # there are no candidates
        norm = tl.sum(total * tl.exp(top - highest), axis=0)
        score = tl.load(scores + head * num_pages + page, mask=candidate, other=float("-inf"))
        weight = tl.exp(score - highest) / tl.where(norm > 0, norm, 1.0)
        pooled = tl.maximum(pooled, weight) if HOW == "max" else pooled + weight / G
    row = pair.to(tl.int64) * num_pages + page
    tl.store(out + row, tl.where(candidate, pooled, float("-inf")), mask=page < num_pages)


def page_scores(q: Tensor, summary: Tensor, scale: float, pooling: Pooling) -> Tensor:
    """Score every page of `summary` in fp32 for every KV head."""
    if not takes(q):
        return page_scores_ref(q, summary, scale, pooling)
    out = torch.empty(summary.shape[:2], dtype=torch.float32, device=q.device)
    _score(q[None], summary[None], None, SlotLayout.everything(summary.shape[1]), scale, pooling, out[None], None)
    return out


def page_scores_device(
    q: Tensor,
    summary: Tensor,
    lengths: Tensor,
    layout: SlotLayout,
    scale: float,
    pooling: Pooling,
    out: Tensor,
    heads: Tensor | None = None,
) -> None:
    """Score the candidate pages, neither sink nor window, of a batch: `out` [b, Hk, n] fp32, -inf for other pages.

    q [b, H, d], summary [b, Hk, n, 2, d], lengths [b] int32. heads [b, Hk] bool: the others' scores are left as they
    are. May be captured in a CUDA graph: shapes alone decide what is launched and allocated (partial results, on the
    current stream). Raises ValueError for shapes, dtypes or strides that the kernel cannot read.
    """
    b, num_kv_heads, num_pages, _, _ = summary.shape
    require_whole("lengths", lengths, (b,), torch.int32)
    require_whole("out", out, (b, num_kv_heads, num_pages), out.dtype)
    if heads is not None:
        require_whole("heads", heads, (b, num_kv_heads), torch.bool)
    if not takes(q):
        return page_scores_device_ref(q, summary, lengths, layout, scale, pooling, out, heads)
    return _score(q, summary, lengths, layout, scale, pooling, out, heads)


def _score(
    q: Tensor,
    summary: Tensor,
    lengths: Tensor | None,
    layout: SlotLayout,
    scale: float,
    pooling: Pooling,
    out: Tensor,
    heads: Tensor | None,
) -> None:
    (b, num_heads, d), (_, num_kv_heads, num_pages, _, _) = q.shape, summary.shape
    require("q", q, (b, num_heads, d))
    require("summary", summary, (b, num_kv_heads, num_pages, 2, d))
    if summary.stride()[2:] != (2 * d, d, 1):
        raise ValueError(f"pages of a summary are not one behind the other: strides {summary.stride()}")
    how, what = pooling.split("_")
    groups, pairs, block_d = num_heads // num_kv_heads, b * num_kv_heads, power_of_two(d)
    block_n = rows_at_once(num_pages, block_d, BLOCK_ELEMENTS)
    num_blocks = -(-num_pages // block_n)
    shared: dict[str, Any] = {"HK": num_kv_heads, "G": groups, "SIZE": layout.size, "HOW": how}
    scores, tops, totals = out, None, None
    if what == "s":
        scores = torch.empty(pairs * groups, num_pages, dtype=torch.float32, device=q.device)
        tops, totals = torch.empty(2, pairs * groups, num_blocks, dtype=torch.float32, device=q.device)
    launch(
        _score_kernel,
        (pairs, num_blocks),
        *(q, summary, lengths, heads, scores, tops, totals, *q.stride()[:2], *summary.stride()[:2]),
        *(num_pages, layout.sink, layout.window, scale),
        **shared,
        D=d,
        WHAT=what,
        BLOCK_N=block_n,
        BLOCK_D=block_d,
    )
    if what == "s":
        block_n = min(POOL_PAGES, power_of_two(num_pages))
        launch(
            _pool_kernel,
            (pairs, -(-num_pages // block_n)),
            *(scores, tops, totals, lengths, heads, out, num_pages, layout.sink, layout.window, num_blocks),
            **shared,
            BLOCK_N=block_n,
            BLOCK_B=power_of_two(num_blocks),
        )
