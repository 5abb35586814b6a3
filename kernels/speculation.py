"""Speculation on a CPU: correction, choice and page table of a step in one loop (FreeKV, arXiv 2505.13109, section 3).

With a short context each of these operations takes less time than calling it. The loop does what `query_similarity`,
`page_scores`, `topk_pages` and `resolve_pages` do one after another, which remain the reference.

Shapes: q [H, d], bounds [Hk, n, 2, d] of the candidates, resident [Hk, k].
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvcli.kernels import gemv
from kvcli.kernels._llvm import exp
from kvcli.kernels._numba import compiled, flat, inlined, prange, run, serves
from kvcli.kernels.gemv import FAR, PIECE, apart, dot, dots
from kvcli.kernels.group_pooling import Pooling
from kvcli.kernels.page_table import EMPTY, Misses, resolve_row
from kvcli.kernels.topk import keys_of, kth_best, places_of

_LEAST_NORM = np.float32(np.finfo(np.float32).tiny)


class Speculated(NamedTuple):
    """Which heads are `corrected` [Hk] bool, the pages `selected` [Hk, k], and how many of them are missing, by head.

    Attention needs those in `now`, of corrected heads; those in `later` are for the next step.
    """

    corrected: Tensor
    selected: Tensor
    missing: list[int]
    now: Misses
    later: Misses


_NOTHING = Misses(*torch.empty(3, 0, dtype=torch.int64))


@inlined
def _similarity(q: Any, previous: Any, of_mean: bool) -> Any:
    """Return the cosine of the queries [G, d] of a KV head with the previous ones, pooled."""
    pooled = np.float32(0) if of_mean else np.float32(-np.inf)
    for g in range(len(q)):
        new, old, both = np.float32(0), np.float32(0), np.float32(0)
        for c in range(q.shape[1]):
            x, y = q[g, c], previous[g, c]
            new += x * x
            old += y * y
            both += x * y
        norms = new * old
        cosine = both / np.sqrt(norms if norms > _LEAST_NORM else _LEAST_NORM)
        pooled = pooled + cosine if of_mean else (cosine if cosine > pooled else pooled)
    return pooled / np.float32(len(q)) if of_mean else pooled


@inlined
def _signed(q: Any, scale: Any, of_mean: bool, out: Any) -> None:
    """Separate the positive and the negative numbers of the queries [G, d]: out [G, 2d], or pooled [1, 2d]."""
    d, pools = q.shape[1], len(out) < len(q)
    for g in range(len(out)):
        for c in range(d):
            x = q[g, c]
            for other in range(1, len(q) if pools else 1):
                y = q[other, c]
                x = x + y if of_mean else (y if y > x else x)
            x *= scale / np.float32(len(q)) if pools and of_mean else scale
            out[g, c] = x if x > 0 else np.float32(0)
            out[g, d + c] = x if x < 0 else np.float32(0)


@inlined
def _pool(scores: Any, of_mean: bool, after_softmax: bool) -> None:
    """Pool scores [G, n] of a KV head to the first row."""
    rows, pooled = len(scores), scores[0]
    for g in range(rows):
        row, share = scores[g], np.float32(1)
        if after_softmax:
            top, total = row[0], np.float32(0)
            for j in range(len(row)):
                top = row[j] if row[j] > top else top
            for j in range(len(row)):
                row[j] = exp(row[j] - top)
                total += row[j]
            share /= total
        if of_mean:
            share /= np.float32(rows)
        for j in range(len(row)):
            x = share * row[j]
            if g == 0:
                pooled[j] = x
            elif of_mean:
                pooled[j] += x
            else:
                pooled[j] = x if x > pooled[j] else pooled[j]


@inlined
def _list(h: int, count: int, slots: Any, pages: Any, at: int, out: Any) -> int:
    """Append a head's misses to a list [3, m]."""
    for i in range(count):
        out[0, at + i], out[1, at + i], out[2, at + i] = h, slots[i], pages[i]
    return at + count


@cache
def _loop(d: int, rows: int) -> Any:
    """Make the loop over bounds of 2d numbers, for `rows` queries that share a KV head; see `gemv`."""

    @compiled
    def speculate_cpu(turn: Any, index: Any, table: Any, scores: Any, into: Any) -> None:
        (q, previous, below, cosine_of_mean), (bounds, head, far, scale, of_mean, after_softmax) = turn, index
        (resident, first, pages, empty), (corrected, selected, counts, listed, lengths) = table, into
        heads, _, n = scores.shape
        signed = np.empty((heads, rows, 2 * d), np.float32)
        for h in range(heads):
            _signed(q[h], scale, of_mean, signed[h])
        pieces = (n + PIECE - 1) // PIECE
        for piece in prange(heads * pieces):
            h, begin = piece // pieces, piece % pieces * PIECE
            end = min(begin + PIECE, n)
            part = (end - begin) // 4
            for j in range(begin, begin + part):
                at = apart(bounds, h * head + j * 2 * d, 2 * d, part, 2 * d, far)
                dots(signed, bounds, h, j, part, at, 2 * d, rows, scores)
            for j in range(begin + 4 * part, end):
                dot(signed, bounds, h, j, np.uint64(h * head + j * 2 * d), 2 * d, rows, scores)
        slots, tokens = np.empty_like(selected), np.empty_like(selected)
        for h in prange(heads):
            corrected[h] = len(previous) == 0 or _similarity(q[h], previous[h], cosine_of_mean) < below
            _pool(scores[h], of_mean, after_softmax)
            keys = np.empty(n, np.uint32)
            keys_of(scores[h, 0].view(np.int32), keys)
            best, wanted = kth_best(keys, 32, selected.shape[1])
            places_of(keys, best, wanted, selected[h])
            for i in range(selected.shape[1]):
                selected[h, i] += first
            counts[h] = resolve_row(resident[h], selected[h], pages, empty, tokens[h], slots[h])
        lengths[0] = lengths[1] = 0
        for h in range(heads):
            when = 0 if corrected[h] else 1
            lengths[when] = _list(h, counts[h], slots[h], tokens[h], lengths[when], listed[when])

    return speculate_cpu


def suits(q: Tensor, bounds: Tensor, resident: Tensor, numbers: int) -> bool:
    """Return whether the loop serves for queries, bounds and a table of what holds so many `numbers`."""
    return (
        serves(q, bounds, numbers=numbers)
        and serves(resident, dtype=torch.int64, numbers=numbers)
        and resident.is_contiguous()
        and len(q) <= gemv.MOST_ROWS * len(resident)
    )


def speculate(
    q: Tensor,
    previous: Tensor | None,
    below: float,
    similarity: Literal["mean", "max"],
    bounds: Tensor,
    scale: float,
    pooling: Pooling,
    resident: Tensor,
    first: int,
    pages: int,
) -> Speculated:
    """Flag heads whose query turned, choose the best candidates for all heads, and update `resident` to them.

    A head is corrected where its cosine with `previous` [H, d], pooled by `similarity`, is lower than `below`; all are
    without a previous query. Candidates are numbered from `first` on, and all of them are lower than `pages`.
    """
    (heads, k), n, d = resident.shape, bounds.shape[1], q.shape[1]
    how, _, what = pooling.partition("_")
    q = q.contiguous().view(heads, -1, d)
    rows = 1 if what == "q" else q.shape[1]
    scores, corrected = q.new_empty(heads, rows, n), torch.empty(heads, dtype=torch.bool)
    selected, listed = torch.empty(heads, k, dtype=torch.int64), torch.empty(2, 3, heads * k, dtype=torch.int64)
    counts, lengths = np.empty(heads, np.int64), np.empty(2, np.int64)
    before = q[:0] if previous is None else previous.contiguous().view(q.shape)
    turn = q, before, np.float32(below), similarity == "mean"
    index = flat(bounds), bounds.stride(0), bounds.numel() >= FAR, np.float32(scale), how == "mean", what == "s"
    into = corrected, selected, counts, listed, lengths
    run(_loop(d, rows), bounds.numel(), turn, index, (resident, first, pages, EMPTY), scores, into)
    misses = [Misses(*listed[when, :, :m]) if m else _NOTHING for when, m in enumerate(lengths.tolist())]
    return Speculated(corrected, selected, counts.tolist(), *misses)
