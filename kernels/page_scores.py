"""Page scores: summaries of pages, an upper bound of q.k per page from them, and the choice of pages by it.

    P_hj = scale * sum_c max(q_hc * min_jc, q_hc * max_jc) = scale * (relu(q_h) . max_j - relu(-q_h) . min_j)

The bound is pooled over the query heads that share a KV head. A summary has per-channel bounds of the keys of a page
(Quest, section 3.2; FreeKV, section 3.2), or a cuboid around them (ArkVale).

    bounds    max_t k_t and min_t k_t
    cuboid    c + r and c - r      c = (max + min) / 2      r = mean_t |c - k_t|

The cuboid is narrower than the bounds: a single outlier moves its centre, but hardly its width.

On the device the pages are split over programs. As long as one program can handle all pages of a KV head, the last
program to finish normalises a softmax over the candidates, chooses, and finds what is missing.

Shapes: keys [Hk, n, p, d] -> summary [Hk, n, 2, d]; [:, :, 0] is the upper bound, [:, :, 1] the lower. q [H, d],
summary -> scores [Hk, n], larger is better; functions for the device have the batch in front, and lengths [b] that
define the candidates. `kvcli.kernels.append` summarises the page that the newest token has filled.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.kernels._triton import (
    ALL_REGISTERS,
    jit,
    last_to_arrive,
    launch,
    power_of_two,
    require,
    require_whole,
    rows_at_once,
    takes,
    tl,
)
from kvcli.kernels.group_pooling import (
    GroupScores,
    HeadPooling,
    Pooling,
    merged_norms,
    pool_queries,
    pool_scores,
    pooled_at_once,
    pooled_weights,
)
from kvcli.kernels.page_table import SlotLayout, candidate_range, candidates, nothing_missing, resolve_head
from kvcli.kernels.token_scores import token_scores
from kvcli.kernels.topk import Selection, pick, topk_pages_device


def page_summary_ref(keys: Tensor) -> Tensor:
    """Reference of `page_summary` in plain torch."""
    # Not torch.aminmax, which takes five times as long on a CPU.
    return torch.stack((keys.amax(2), keys.amin(2)), dim=2)


def page_cuboid(keys: Tensor) -> Tensor:
    """Make the cuboids of full pages, in the dtype of the keys."""
    low, high = (bound.to(torch.promote_types(keys.dtype, torch.float32)) for bound in (keys.amin(2), keys.amax(2)))
    centre = (high + low) / 2  # [Hk, n, d]
    radius = (keys - centre[:, :, None]).abs().mean(2)
    return torch.stack((centre + radius, centre - radius), 2).to(keys.dtype)


@jit
def store_bounds(
    keys: tl.tensor,
    stride: tl.tensor,
    summary: tl.tensor,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CUBOID: tl.constexpr,
) -> None:
    """Summarise one page of keys, rows of D elements `stride` apart."""
    c = tl.arange(0, BLOCK_D)
    high = tl.full([BLOCK_D], float("-inf"), tl.float32)
    low = tl.full([BLOCK_D], float("inf"), tl.float32)
    for start in range(0, SIZE, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        inside = (row < SIZE)[:, None] & (c < D)[None, :]
        at = row.to(tl.int64)[:, None] * stride + c[None, :]
        some = tl.load(keys + at, mask=inside, other=0.0).to(tl.float32)
        high = tl.maximum(high, tl.max(tl.where(inside, some, float("-inf")), axis=0))
        low = tl.minimum(low, tl.min(tl.where(inside, some, float("inf")), axis=0))
    if CUBOID:
        centre = (high + low) / 2
        apart = tl.zeros([BLOCK_D], tl.float32)
        for start in range(0, SIZE, BLOCK_R):
            row = start + tl.arange(0, BLOCK_R)
            inside = (row < SIZE)[:, None] & (c < D)[None, :]
            at = row.to(tl.int64)[:, None] * stride + c[None, :]
            some = tl.load(keys + at, mask=inside, other=0.0).to(tl.float32)
            apart += tl.sum(tl.where(inside, tl.abs(some - centre[None, :]), 0.0), axis=0)
        high, low = centre + apart / SIZE, centre - apart / SIZE
    tl.store(summary + c, high.to(summary.dtype.element_ty), mask=c < D)
    tl.store(summary + D + c, low.to(summary.dtype.element_ty), mask=c < D)


@jit
def _prompt_kernel(
    keys: tl.tensor,
    summary: tl.tensor,
    keys_head: tl.tensor,
    keys_page: tl.tensor,
    keys_row: tl.tensor,
    num_pages: tl.tensor,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    page, h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    source = keys + h * keys_head + page * keys_page
    store_bounds(source, keys_row, summary + (h * num_pages + page) * 2 * D, SIZE, D, BLOCK_R, BLOCK_D, False)


def page_summary(keys: Tensor) -> Tensor:
    """Summarise full pages, keys [Hk, n, p, d] with any strides but the last: [Hk, n, 2, d].

    A partly filled page has no summary. Can be captured in a CUDA graph.
    """
    num_kv_heads, num_pages, size, d = keys.shape
    if not takes(keys) or keys.numel() == 0:
        return page_summary_ref(keys)
    require("keys", keys, keys.shape)
    summary = torch.empty(num_kv_heads, num_pages, 2, d, dtype=keys.dtype, device=keys.device)
    launch(_prompt_kernel, (num_pages, num_kv_heads), keys, summary, *keys.stride()[:3], num_pages, **blocks(size, d))
    return summary


def blocks(size: int, d: int) -> dict[str, int]:
    """Choose the compile-time constants of a kernel that iterates over the tokens of a page."""
    block_d = power_of_two(d)
    return {"SIZE": size, "D": d, "BLOCK_R": rows_at_once(size, block_d, BLOCK_ELEMENTS), "BLOCK_D": block_d}


BLOCK_ELEMENTS = 4096  # of keys, or of their maxima and as many minima, held at once per program
ALONE = 8192  # pages of a KV head that one program handles in about the time of two launches, in its registers
FEW = 1024  # pages of a KV head for which 4 warps are enough


def page_scores_ref(q: Tensor, summary: Tensor, scale: float, pooling: HeadPooling) -> Tensor:
    """Reference of `page_scores` in plain torch, in at least fp32."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    heads = pool_queries(q.to(dtype).view(summary.shape[0], -1, q.shape[-1]), pooling)  # [Hk, G or 1, d]
    signed = torch.cat((heads.clamp_min(0), heads.clamp_max(0)), -1)  # [Hk, G, 2d]
    bounds = token_scores(signed.flatten(0, 1), summary.flatten(2), scale)  # [Hk, G, n]
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
    """Reference of `page_scores_device`: sequence by sequence."""
    chosen = candidates(lengths, layout, summary.shape[2])
    for b, pages in enumerate(chosen):
        scores = torch.full_like(out[b], float("-inf"))
        if pages.any():
            scores[:, pages] = page_scores_ref(q[b], summary[b][:, pages], scale, pooling).to(out.dtype)
        mask = slice(None) if heads is None else heads[b]
        out[b, mask] = scores[mask]


@jit
def _score_kernel(
    q: tl.tensor,
    summary: tl.tensor,
    lengths: tl.tensor,
    heads: tl.tensor,
    out: tl.tensor,
    tops: tl.tensor,
    totals: tl.tensor,
    pooled_out: tl.tensor,
    arrived: tl.tensor,
    selected: tl.tensor,
    resident: tl.tensor,
    pages: tl.tensor,
    slots: tl.tensor,
    count: tl.tensor,
    marks: tl.tensor,
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
    K: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_B: tl.constexpr,
    POOL_G: tl.constexpr,
    POOL_N: tl.constexpr,
    PICK_N: tl.constexpr,
) -> None:
    block, pair = tl.program_id(0), tl.program_id(1)  # some pages, a KV head of a sequence
    chosen = pair.to(tl.int64) * K
    if heads is not None:
        if tl.load(heads + pair) == 0:
            if pages is not None:
                if block == 0:
                    nothing_missing(pages + chosen, slots + chosen, count + pair, K, BLOCK_K)
            return
    b, h = (pair // HK).to(tl.int64), (pair % HK).to(tl.int64)
    low, high, _ = candidate_range(lengths, b, num_pages, sink, window, SIZE, 1)
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
                tl.store(tops + head * BLOCKS + block, top)
                tl.store(totals + head * BLOCKS + block, tl.sum(tl.exp(scores - shift), axis=0))
    if WHAT != "s":
        tl.store(out + row, tl.where(candidate, pooled, float("-inf")), mask=page < num_pages)
    if arrived is not None:
        if last_to_arrive(arrived + pair, BLOCKS):
            scores_of = pair.to(tl.int64) * num_pages
            if WHAT == "s":
                stop, highest, share = num_pages, None, None
                if selected is not None:  # nobody reads the scores of the others
                    stop = high
                if POOL_G >= G:  # merged once, where all queries are pooled at once
                    every = tl.arange(0, POOL_G)
                    highest, share = merged_norms(tops, totals, None, pair, every, BLOCKS, G, HK, BLOCK_B)
                for start in range(0, stop, POOL_N):
                    some = start + tl.arange(0, POOL_N)
                    # fmt: off
                    weights = pooled_weights(out, tops, totals, highest, share, None, None, pair, some, low, high,
                                             num_pages, BLOCKS, G, HOW, HK, POOL_G, POOL_N, BLOCK_B)
                    # fmt: on
                    tl.store(pooled_out + scores_of + some, weights, mask=some < num_pages)
                tl.debug_barrier()
            if selected is not None:
                table = resident
                if resident is not None:
                    table = resident + chosen
                if FIRST:
                    marks += scores_of
                target, scored = selected + chosen, pooled_out + scores_of
                pick(scored, None, marks, table, low, low, high, K, target, None, K, FIRST, True, BLOCK_K, PICK_N)
                if pages is not None:
                    tl.debug_barrier()
                    resolve_head(table, target, pages + chosen, slots + chosen, count + pair, K, BLOCK_K)


@jit
def _bound(query: tl.tensor, maxima: tl.tensor, minima: tl.tensor) -> tl.tensor:
    """Bound query . key over pages: query [D], maxima and minima [N, D] -> [N]."""
    return tl.sum(query[None, :] * tl.where(query[None, :] > 0, maxima, minima), axis=1)


def page_scores(q: Tensor, summary: Tensor, scale: float, pooling: HeadPooling) -> Tensor:
    """Score every page of `summary` in fp32 for every KV head [Hk, n]; with pooling none by query head [H, n]."""
    if pooling == "none" or not takes(q):
        return page_scores_ref(q, summary, scale, pooling)
    out = torch.empty(1, *summary.shape[:2], dtype=torch.float32, device=q.device)
    everything = SlotLayout.everything(summary.shape[1])
    score_pages(q[None], summary[None], None, everything, scale, pooling, out, None, None, None)
    return out[0]


def page_scores_device(
    q: Tensor,
    summary: Tensor,
    lengths: Tensor,
    layout: SlotLayout,
    scale: float,
    pooling: Pooling,
    out: Tensor,
    heads: Tensor | None = None,
    arrived: Tensor | None = None,
) -> None:
    """Score the candidate pages, neither sink nor window, of a batch: `out` [b, Hk, n] fp32, -inf for other pages.

    q [b, H, d], summary [b, Hk, n, 2, d], lengths [b] int32. heads [b, Hk] bool: scores of other heads stay as they
    are. `arrived` as in `PagedKV`. Can be captured in a CUDA graph: launches and allocations (partial results, on the
    current stream) depend on shapes only. Raises ValueError for shapes, dtypes or strides that the kernel cannot read.
    """
    require_whole("out", out, summary.shape[:3], out.dtype)
    if not takes(q):
        return page_scores_device_ref(q, summary, lengths, layout, scale, pooling, out, heads)
    return score_pages(q, summary, lengths, layout, scale, pooling, out, heads, arrived, None)


def score_pages(
    q: Tensor,
    summary: Tensor,
    lengths: Tensor | None,
    layout: SlotLayout,
    scale: float,
    pooling: Pooling,
    out: Tensor,
    heads: Tensor | None,
    arrived: Tensor | None,
    selection: Selection | None,
) -> None:
    """Launch the scoring; with `selection` and at most `ALONE` pages, choose by the scores in the same kernel."""
    (b, num_heads, d), (_, num_kv_heads, num_pages, _, _) = q.shape, summary.shape
    require("q", q, (b, num_heads, d))
    require("summary", summary, (b, num_kv_heads, num_pages, 2, d))
    if summary.stride()[2:] != (2 * d, d, 1):
        raise ValueError(f"pages of a summary are not one behind the other: strides {summary.stride()}")
    if lengths is not None:
        require_whole("lengths", lengths, (b,), torch.int32)
    if heads is not None:
        require_whole("heads", heads, (b, num_kv_heads), torch.bool)
    pairs, block_d = b * num_kv_heads, power_of_two(d)
    finishes, marks = num_pages <= ALONE and (selection is not None or pooling.endswith("_s")), None
    warps = 8 if finishes and num_pages > FEW else 4
    block_n = rows_at_once(num_pages, block_d, BLOCK_ELEMENTS * warps // 4)
    left = GroupScores((b, num_kv_heads, num_heads // num_kv_heads, num_pages), pooling, -(-num_pages // block_n), out)
    if finishes and arrived is None:
        arrived = torch.zeros(pairs, dtype=torch.int32, device=q.device)
    if selection is not None and selection.first:
        marks = torch.empty(pairs, num_pages, dtype=torch.int8, device=q.device)
    selected, resident, misses, first = selection or (None, None, None, 0)
    pool_g, pool_n = pooled_at_once(num_heads // num_kv_heads, num_pages).values()
    k = 1 if selected is None else selected.shape[2]
    launch(
        _score_kernel,
        (left.blocks, pairs),  # the first dimension of a grid may be larger than 65,535
        *(q, summary, lengths, heads, left.values, left.tops, left.totals, out, arrived if finishes else None),
        *(selected, resident, *(misses or (None,) * 3), marks, *q.stride()[:2], *summary.stride()[:2]),
        *(num_pages, layout.sink, layout.window, scale),
        HK=num_kv_heads,
        G=num_heads // num_kv_heads,
        D=d,
        SIZE=layout.size,
        HOW=left.how,
        WHAT=left.what,
        K=k,
        FIRST=first,
        BLOCKS=left.blocks,
        BLOCK_N=block_n,
        BLOCK_D=block_d,
        BLOCK_K=power_of_two(k),
        BLOCK_B=power_of_two(left.blocks),
        POOL_G=pool_g,
        POOL_N=pool_n,
        # Neither sinks nor window are held; a sequence's last page may be one that has no summary yet.
        PICK_N=power_of_two(max(1, num_pages - layout.sink - max(0, layout.window - 1))),
        warps=warps,
        registers=ALL_REGISTERS if d > 128 else None,
    )
    if not finishes:
        left.pool(lengths, layout, heads)


def choose_pages_ref(
    q: Tensor,
    summary: Tensor,
    lengths: Tensor,
    layout: SlotLayout,
    scale: float,
    pooling: Pooling,
    selection: Selection,
    heads: Tensor | None = None,
    arrived: Tensor | None = None,
) -> None:
    """Reference of `choose_pages`: score, then choose."""
    out = torch.empty(summary.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    page_scores_device_ref(q, summary, lengths, layout, scale, pooling, out, heads)
    topk_pages_device(out.float(), lengths, layout, selection, heads, arrived=arrived)


def choose_pages(
    q: Tensor,
    summary: Tensor,
    lengths: Tensor,
    layout: SlotLayout,
    scale: float,
    pooling: Pooling,
    selection: Selection,
    heads: Tensor | None = None,
    arrived: Tensor | None = None,
) -> None:
    """Choose pages by their scores, like `page_scores_device` and `topk_pages_device`, if possible in one kernel."""
    selection.check(*summary.shape[:2])
    if not takes(q):
        return choose_pages_ref(q, summary, lengths, layout, scale, pooling, selection, heads)
    out = torch.empty(summary.shape[:3], dtype=torch.float32, device=q.device)
    alone = summary.shape[2] <= ALONE
    score_pages(q, summary, lengths, layout, scale, pooling, out, heads, arrived, selection if alone else None)
    if not alone:
        topk_pages_device(out, lengths, layout, selection, heads, arrived=arrived)
    return None
