"""Pooling of scores over the query heads that share a KV head.

`pooling` names what is pooled over the group and how (FreeKV, appendix B.2): the softmax over candidates of each head
(mean_s, max_s), the scores themselves (mean_qk, max_qk) or the queries (mean_q, max_q). With none, every query head
keeps its own scores and selects on its own.

On the device, scores and queries are pooled by the scoring kernel. Before a softmax, each of its programs stores the
scores of its block of candidates, with their maximum and the sum of their exponentials, both needed for pooling.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kvcli.kernels._triton import jit, launch, power_of_two, tl
from kvcli.kernels.page_table import SlotLayout, candidate_range

POOL_HEADS, POOL_SCORES = 8, 4096  # query heads that a program reads at once, and scores of all of them
NORM_BLOCK = 1024  # blocks of a query head whose maxima and sums a program merges at once
MANY = 512
"""Blocks of a query head up to which every program that pools merges their maxima and sums anew.

More are merged once, by a kernel before it, which costs more than the few instructions that it saves each program here.
"""

Pooling = Literal["mean_s", "max_s", "mean_qk", "max_qk", "mean_q", "max_q"]
HeadPooling = Literal[Pooling, "none"]


def pool_queries(q: Tensor, pooling: HeadPooling) -> Tensor:
    """Return the queries to score with, from a group's queries [Hk, G, d]: themselves, or one [Hk, 1, d]."""
    how, _, what = pooling.partition("_")
    return _pool(q, how)[:, None] if what == "q" else q


def pool_scores(scores: Tensor, pooling: HeadPooling) -> Tensor:
    """Pool the scores [Hk, G or 1, n] of the queries from `pool_queries` to [Hk, n]; with none to [H, n]."""
    if pooling == "none":
        return scores.flatten(0, 1)
    how, what = pooling.split("_")
    return _pool(scores.softmax(-1) if what == "s" else scores, how)


def pool_candidates(
    scores: Tensor,
    pooling: Pooling,
    allowed: Tensor,
    out: Tensor,
    heads: Tensor | None,
    excluded: Tensor | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Pool candidates in torch, as the kernels do: scores [b, Hk, G or 1, n], allowed [b, n] -> out [b, Hk or 1, n].

    Entries that are not allowed score -inf; those in `excluded` [b, Hk, n], left out of any softmax, score -1.
    """
    mask = allowed[:, None] if excluded is None else allowed[:, None] & ~excluded  # [b, Hk or 1, n]
    scores = scores.masked_fill(~mask[:, :, None], float("-inf")).view(*out.shape[:2], -1, out.shape[2])
    if sinks is not None:  # an extra logit in every softmax
        scores = torch.cat((scores, sinks.to(scores).view(1, *scores.shape[1:3], 1).expand(*scores.shape[:3], 1)), -1)
    pooled = pool_scores(scores.flatten(0, 1), pooling)[:, : out.shape[2]].view(out.shape)
    if excluded is not None:
        pooled = pooled.masked_fill(excluded, -1.0)
    asked = slice(None) if heads is None else heads[:, : out.shape[1]]
    out[asked] = pooled.masked_fill(~allowed[:, None], float("-inf"))[asked].to(out.dtype)


def _pool(values: Tensor, how: str) -> Tensor:
    return values.mean(1) if how == "mean" else values.amax(1)  # over the group


@jit
def leave_scores(
    scores: tl.tensor,
    candidate: tl.tensor,
    pair: tl.tensor,
    entry: tl.tensor,
    block: tl.tensor,
    num_entries: tl.tensor,
    num_blocks: tl.tensor,
    out: tl.tensor,
    tops: tl.tensor,
    totals: tl.tensor,
    G: tl.constexpr,
    HOW: tl.constexpr,
    WHAT: tl.constexpr,
    BLOCK_G: tl.constexpr,
) -> None:
    """Store scores [BLOCK_G, N] of a KV head's queries: pooled, or unpooled if a softmax comes first.

    If queries are pooled, only the first row counts.
    """
    g = tl.arange(0, BLOCK_G)
    inside = entry < num_entries
    if WHAT == "s":
        scores = tl.where(candidate[None, :], scores, float("-inf"))
        head = pair.to(tl.int64) * G + g
        tl.store(out + head[:, None] * num_entries + entry[None, :], scores, mask=(g < G)[:, None] & inside[None, :])
        if tops is not None:
            top = tl.max(scores, axis=1)
            total = tl.sum(tl.exp(scores - tl.where(top == float("-inf"), 0.0, top)[:, None]), axis=1)
            tl.store(tops + head * num_blocks + block, top, mask=g < G)
            tl.store(totals + head * num_blocks + block, total, mask=g < G)
    else:
        rows = 1 if WHAT == "q" else G
        if HOW == "max":
            pooled = tl.max(tl.where((g < rows)[:, None], scores, float("-inf")), axis=0)
        else:
            pooled = tl.sum(tl.where((g < rows)[:, None], scores, 0.0), axis=0) / rows
        row = out + pair.to(tl.int64) * num_entries
        tl.store(row + entry, tl.where(candidate, pooled, float("-inf")), mask=inside)


@jit
def merged_norms(
    tops: tl.tensor,
    totals: tl.tensor,
    sinks: tl.tensor,
    pair: tl.tensor,
    g: tl.tensor,
    num_blocks: tl.tensor,
    G: tl.constexpr,
    HK: tl.constexpr,
    BLOCK_B: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Merge maxima and sums of all blocks of some queries `g` of a KV head: the largest score, and 1 / the sum."""
    part = tl.arange(0, BLOCK_B)
    there = (g < G)[:, None] & (part < num_blocks)[None, :]
    at = (pair.to(tl.int64) * G + g)[:, None] * num_blocks + part[None, :]
    top = tl.load(tops + at, mask=there, other=float("-inf"))
    total = tl.load(totals + at, mask=there, other=0.0)
    highest = tl.max(top, axis=1)
    if sinks is not None:
        sink = tl.load(sinks + pair % HK * G + g, mask=g < G, other=float("-inf")).to(tl.float32)
        highest = tl.maximum(highest, sink)
    highest = tl.where(highest == float("-inf"), 0.0, highest)  # no candidates
    norm = tl.sum(total * tl.exp(top - highest[:, None]), axis=1)
    if sinks is not None:
        norm += tl.exp(sink - highest)
    return highest, 1.0 / tl.where(norm > 0, norm, 1.0)


@jit
def pooled_weights(
    scores: tl.tensor,
    tops: tl.tensor,
    totals: tl.tensor,
    highest: tl.tensor,
    share: tl.tensor,
    excluded: tl.tensor,
    sinks: tl.tensor,
    pair: tl.tensor,
    entry: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    num_entries: tl.tensor,
    num_blocks: tl.tensor,
    G: tl.constexpr,
    HOW: tl.constexpr,
    HK: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
) -> tl.tensor:
    """Pool the softmax of the scores from `leave_scores` over the queries of a KV head, for these entries [N].

    Entries that are no candidates get -inf. BLOCK_G queries are read at once, since each read waits for memory. If that
    is all of them, `highest` and `share` may be their `merged_norms`; otherwise both are None.
    """
    candidate = (entry >= low) & (entry < high)
    pooled = tl.zeros([BLOCK_N], tl.float32)  # weights are not negative
    for first in range(0, G, BLOCK_G):
        g = first + tl.arange(0, BLOCK_G)
        head = pair.to(tl.int64) * G + g
        read = (g < G)[:, None] & candidate[None, :]
        score = tl.load(scores + head[:, None] * num_entries + entry[None, :], mask=read, other=float("-inf"))
        if highest is None:
            top, part = merged_norms(tops, totals, sinks, pair, g, num_blocks, G, HK, BLOCK_B)
        else:
            top, part = highest, share
        weights = tl.exp(score - top[:, None])
        if HOW == "max":
            pooled = tl.maximum(pooled, tl.max(weights * part[:, None], axis=0))
        else:
            pooled += tl.sum(weights * (part / G)[:, None], axis=0)
    if excluded is not None:
        left_out = tl.load(excluded + pair.to(tl.int64) * num_entries + entry, mask=candidate, other=0)
        pooled = tl.where(left_out != 0, -1.0, pooled)
    return tl.where(candidate, pooled, float("-inf"))


def pooled_at_once(groups: int, entries: int) -> dict[str, int]:
    """Choose how many of a KV head's queries a program pools at once, and of how many entries."""
    block_g = min(POOL_HEADS, power_of_two(groups))
    return {"BLOCK_G": block_g, "BLOCK_N": min(power_of_two(entries), POOL_SCORES // block_g)}


@jit
def _norm_kernel(
    tops: tl.tensor,
    totals: tl.tensor,
    top_out: tl.tensor,
    total_out: tl.tensor,
    heads: tl.tensor,
    num_blocks: tl.tensor,
    G: tl.constexpr,
    BLOCK_B: tl.constexpr,
) -> None:
    """Merge the maxima and sums of all blocks of a query head."""
    head = tl.program_id(0).to(tl.int64)
    if heads is not None:
        if tl.load(heads + head // G) == 0:
            return
    highest = tl.full([BLOCK_B], float("-inf"), tl.float32)
    norm = tl.zeros([BLOCK_B], tl.float32)
    for start in range(0, num_blocks, BLOCK_B):
        part = start + tl.arange(0, BLOCK_B)
        top = tl.load(tops + head * num_blocks + part, mask=part < num_blocks, other=float("-inf"))
        total = tl.load(totals + head * num_blocks + part, mask=part < num_blocks, other=0.0)
        higher = tl.maximum(highest, top)
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        norm = norm * tl.exp(highest - shift) + total * tl.exp(top - shift)
        highest = higher
    top = tl.max(highest, axis=0)
    total = tl.sum(norm * tl.exp(highest - tl.where(top == float("-inf"), 0.0, top)), axis=0)
    tl.store(top_out + head, top)
    tl.store(total_out + head, total)


@jit
def _pool_kernel(
    scores: tl.tensor,
    tops: tl.tensor,
    totals: tl.tensor,
    excluded: tl.tensor,
    sinks: tl.tensor,
    lengths: tl.tensor,
    heads: tl.tensor,
    out: tl.tensor,
    num_entries: tl.tensor,
    sink: tl.tensor,
    window: tl.tensor,
    num_blocks: tl.tensor,
    heads_row: tl.tensor,
    HK: tl.constexpr,
    G: tl.constexpr,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HOW: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
) -> None:
    pair, block = tl.program_id(0), tl.program_id(1)
    if heads is not None:
        if tl.load(heads + pair * heads_row) == 0:
            return
    low, high, _ = candidate_range(lengths, pair // HK, num_entries, sink, window, SIZE, GROUP)
    entry = block * BLOCK_N + tl.arange(0, BLOCK_N)
    # fmt: off
    pooled = pooled_weights(scores, tops, totals, None, None, excluded, sinks, pair, entry, low, high, num_entries,
                            num_blocks, G, HOW, HK, BLOCK_G, BLOCK_N, BLOCK_B)
    # fmt: on
    tl.store(out + pair.to(tl.int64) * num_entries + entry, pooled, mask=entry < num_entries)


class GroupScores:
    """Intermediate results of scoring kernels: `values` and, before a softmax, maximum and sum of each block.

    `out` [b, Hk, n] fp32 is the final result; after a softmax also [b, 1, n], pooled over all query heads.
    """

    def __init__(self, shape: tuple[int, int, int, int], pooling: Pooling, blocks: int, out: Tensor):
        b, num_kv_heads, groups, _ = shape
        self.how, self.what = pooling.split("_")
        self.shape, self.out = shape, out
        self.values, self.tops, self.totals, self.blocks = out, None, None, blocks
        if self.what == "s":
            self.values = out.new_empty(shape, dtype=torch.float32)
            self.tops, self.totals = out.new_empty(2, b, num_kv_heads, groups, blocks, dtype=torch.float32)

    def pool(
        self,
        lengths: Tensor | None,
        layout: SlotLayout,
        heads: Tensor | None,
        excluded: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Finish pooling; needed only after a softmax."""
        if self.what != "s":
            return
        (b, num_kv_heads, groups, n), rows = self.shape, self.out.shape[1]
        groups = groups * num_kv_heads // rows
        at_once, tops, totals, blocks = pooled_at_once(groups, n), self.tops, self.totals, self.blocks
        if blocks > MANY:
            tops, totals = self.out.new_empty(2, *self.shape[:3], dtype=torch.float32)
            launch(
                _norm_kernel,
                (tops.numel(),),
                *(self.tops, self.totals, tops, totals, heads, blocks),
                G=self.shape[2],
                BLOCK_B=min(NORM_BLOCK, power_of_two(blocks)),
            )
            blocks = 1
        launch(
            _pool_kernel,
            (b * rows, -(-n // at_once["BLOCK_N"])),
            *(self.values, tops, totals, excluded, sinks, lengths, heads, self.out),
            *(n, layout.sink, layout.window),
            *(blocks, num_kv_heads // rows),
            HK=rows,
            G=groups,
            SIZE=layout.size,
            GROUP=layout.group,
            HOW=self.how,
            BLOCK_B=power_of_two(blocks),
            **at_once,
        )
