"""Speculation on a CPU: correction, choice and page table of a step in loops (FreeKV, arXiv 2505.13109, section 3).

With a short context each of these operations takes less time than calling it. The loops do what `query_similarity`,
`page_scores`, `topk_pages` and `resolve_pages` do one after another, which remain the reference. They are stages of a
`kvcli.kernels.chain`, and there bring the missing pages as well; or `speculate` runs them for a layer by itself.

Shapes: q [H, d], bounds [Hk, n, 2, d] of the candidates, resident [Hk, k].
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvcli.kernels import chain, gemv
from kvcli.kernels._llvm import at_address, exp, highest
from kvcli.kernels._numba import inlined, serves
from kvcli.kernels.chain import floats
from kvcli.kernels.gemv import FAR, PIECE, apart, dot, dots
from kvcli.kernels.group_pooling import Pooling
from kvcli.kernels.page_table import EMPTY, Misses, listed, resolve_row
from kvcli.kernels.topk import keys_of, kth_best, places_of

_LEAST_NORM = np.float32(np.finfo(np.float32).tiny)


class SpeculationSettings(NamedTuple):
    """How a layer speculates.

    A KV head is corrected where the cosine of its queries with the previous ones, pooled by `similarity`, is lower than
    `below`. Products with bounds are multiplied by `scale`, and pooled over the query heads of a KV head.
    """

    below: float
    similarity: Literal["mean", "max"]
    scale: float
    pooling: Pooling


class Pages(NamedTuple):
    """The pages of a layer that speculates, as a step finds them.

    `previous` [H, d] is the query of the step before; without one, all heads are corrected. Candidates with `bounds`
    [Hk, n, 2, d] are numbered from `first` on, and all of them are lower than `total`. A page is in the slot of `slots`
    [2, Hk, k, p, d] that `resident` [Hk, k] names, and all are among `blocks` [.., Hk, 2, p, d] of host memory: both
    are None where the caller brings what is missing.
    """

    how: SpeculationSettings
    previous: Tensor | None
    bounds: Tensor
    first: int
    total: int
    resident: Tensor
    slots: Tensor | None = None
    blocks: Tensor | None = None


class Speculated(NamedTuple):
    """What a layer's speculation found: which heads are `corrected` [Hk] bool, and the pages `selected` [Hk, k].

    Of each head so many are `missing` [Hk]; `places` [2, Hk, k] are the slots that they go to, and the pages. `query`
    [H, d] chose them.
    """

    corrected: Tensor
    selected: Tensor
    missing: Tensor
    places: Tensor
    query: Tensor

    def misses(self, corrected: bool) -> Misses:
        """List what is missing of corrected heads, which this attention needs, or of the others, for the next step."""
        return listed(self.missing * (self.corrected == corrected), *self.places)


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
            top, total = highest(row), np.float32(0)
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


# What the loops are told: sizes, how to speculate, and addresses of what a step reads and writes. `_BELOW` and `_SCALE`
# are the bits of fp32 numbers. `_HEADS`, `_PIECES` and `_SHARES` count the blocks of the loops.
_HEADS, _PIECES, _SHARES, _GROUP, _SIZE, _CANDIDATES, _FIRST, _TOTAL, _PLACES, _FRESH = range(10)
_BELOW, _SCALE, _COSINE_OF_MEAN, _OF_MEAN, _AFTER_SOFTMAX, _PREVIOUS, _BOUNDS, _NEXT_BOUNDS, _RESIDENT = range(10, 19)
_CORRECTED, _SELECTED, _MISSING, _SLOTS, _PAGES, _SCORES = range(19, 25)
_HOST, _KEYS, _VALUES, _NEXT_SLOTS, _HALF, TOLD = range(25, 31)  # where missing pages are brought

SHARES = 4
"""Parts in which the missing pages of a head are brought, so that all threads have some."""


@inlined
def _integers(place: Any, *shape: Any) -> Any:
    return at_address(place, np.int64(0), shape)


@cache
def _loops(d: int, rows: int) -> tuple[int, int]:
    """Make the loops over bounds of 2d numbers, for `rows` queries that share a KV head: scores, and choice."""

    def score(place: int, x: int, _: int, unit: int) -> None:
        told = _integers(place, TOLD)
        heads, n, of_mean = told[_HEADS], told[_CANDIDATES], told[_OF_MEAN] != 0
        pieces = told[_PIECES] // heads
        h, begin = unit // pieces, unit % pieces * PIECE
        end, signed = min(begin + PIECE, n), np.empty((1, rows, 2 * d), np.float32)
        _signed(floats(x, heads, told[_GROUP], d)[h], floats(place + 8 * _SCALE, 1)[0], of_mean, signed[0])
        bounds = floats(told[_BOUNDS] + 4 * h * told[_NEXT_BOUNDS], 2 * d * n)
        scores = floats(told[_SCORES], heads, rows, n)
        part, own, far = (end - begin) // 4, scores[h : h + 1], 2 * d * heads * n >= FAR
        for j in range(begin, begin + part):
            dots(signed, bounds, 0, j, part, apart(bounds, j * 2 * d, 2 * d, part, 2 * d, far), 2 * d, rows, own)
        for j in range(begin + 4 * part, end):
            dot(signed, bounds, 0, j, np.uint64(j * 2 * d), 2 * d, rows, own)

    def choose(place: int, x: int, _: int, h: int) -> None:
        told = _integers(place, TOLD)
        heads, group, n, k = told[_HEADS], told[_GROUP], told[_CANDIDATES], told[_PLACES]
        turned = told[_FRESH] != 0
        if not turned:
            q, previous = floats(x, heads, group, d)[h], floats(told[_PREVIOUS], heads, group, d)[h]
            turned = _similarity(q, previous, told[_COSINE_OF_MEAN] != 0) < floats(place + 8 * _BELOW, 1)[0]
        at_address(told[_CORRECTED], np.uint8(0), heads)[h] = turned
        scores, keys = floats(told[_SCORES], heads, rows, n)[h], np.empty(n, np.uint32)
        _pool(scores, told[_OF_MEAN] != 0, told[_AFTER_SOFTMAX] != 0)
        keys_of(scores[0].view(np.int32), keys)
        best, wanted = kth_best(keys, 32, k)
        selected, missing = _integers(told[_SELECTED], heads, k)[h], _integers(told[_PAGES], heads, k)[h]
        places_of(keys, best, wanted, selected)
        for i in range(k):
            selected[i] += told[_FIRST]
        resident, slots = _integers(told[_RESIDENT], heads, k)[h], _integers(told[_SLOTS], heads, k)[h]
        count = resolve_row(resident, selected, told[_TOTAL], EMPTY, missing, slots)
        _integers(told[_MISSING], heads)[h] = count

    return chain.called_loop(score), chain.called_loop(choose)


def _loops_for(pooling: Pooling, heads: int, kv_heads: int, size: int) -> tuple[tuple[int, int], int]:
    """Return the loops of scores and choice, and how many rows of scores all KV heads have."""
    rows = 1 if pooling.endswith("_q") else heads // kv_heads
    return _loops(size, rows), kv_heads * rows


@cache
def _bringing(later: bool) -> int:
    """Make the loop that brings missing pages of corrected heads or, `later`, of the others and keeps the query."""

    def bring(place: int, x: int, _: int, unit: int) -> None:
        told = _integers(place, TOLD)
        heads, k, half, h, share = told[_HEADS], told[_PLACES], told[_HALF], unit // SHARES, unit % SHARES
        if later and share == 0:
            width = told[_GROUP] * told[_SIZE]
            new, previous = floats(x, heads, width)[h], floats(told[_PREVIOUS], heads, width)[h]
            for c in range(width):
                previous[c] = new[c]
        if (at_address(told[_CORRECTED], np.uint8(0), heads)[h] != 0) == later:
            return
        pages, slots = _integers(told[_PAGES], heads, k)[h], _integers(told[_SLOTS], heads, k)[h]
        count = _integers(told[_MISSING], heads)[h]
        for i in range(share * count // SHARES, (share + 1) * count // SHARES):
            source = floats(told[_HOST] + 8 * half * (pages[i] * heads + h), 2 * half)
            to = 4 * (h * told[_NEXT_SLOTS] + slots[i] * half)
            keys, values = floats(told[_KEYS] + to, half), floats(told[_VALUES] + to, half)
            for c in range(half):
                keys[c] = source[c]
                values[c] = source[half + c]

    return chain.called_loop(bring)


@cache
def _bits(x: float) -> int:
    """Return the bits of a number in fp32."""
    return int(np.float32(x).view(np.int32))


def _tell(row: Any, pages: Pages, previous: Tensor, room: int) -> Speculated:
    """Write what the loops are told [TOLD], with the address of room for scores; return what they will find.

    `previous` [H, d] is that of the pages, without gaps, or any tensor where they have none.
    """
    (heads, k), n, (q, d), how = pages.resident.shape, pages.bounds.shape[1], previous.shape, pages.how
    corrected, selected = torch.empty(heads, dtype=torch.bool), torch.empty(heads, k, dtype=torch.int64)
    missing, places = torch.empty(heads, dtype=torch.int64), torch.empty(2, heads, k, dtype=torch.int64)
    pool, _, what = how.pooling.partition("_")
    sizes = heads, heads * -(-n // PIECE), heads * SHARES, q // heads, d, n, pages.first, pages.total, k
    choosing = pages.previous is None, _bits(how.below), _bits(how.scale), how.similarity == "mean"
    reads = previous.data_ptr(), pages.bounds.data_ptr(), pages.bounds.stride(0), pages.resident.data_ptr()
    writes = corrected.data_ptr(), selected.data_ptr(), missing.data_ptr(), *(each.data_ptr() for each in places), room
    row[:_HOST] = *sizes, *choosing, pool == "mean", what == "s", *reads, *writes
    return Speculated(corrected, selected, missing, places, previous)


class SpeculationInChain:
    """Speculation of a layer with `heads` queries of `size` numbers, in a `Chain`, around its attention."""

    def __init__(self, heads: int, kv_heads: int, size: int, pooling: Pooling):
        self._loops, self._rows = _loops_for(pooling, heads, kv_heads, size)
        self._shape = heads, size

    def before(self, x: str, told: int) -> list[chain.Stage]:
        """List the stages before attention, which choose and bring what corrected heads are missing."""
        score, choose = self._loops
        now = chain.Called(x, _bringing(False), told, _SHARES)
        return [chain.Called(x, score, told, _PIECES), chain.Called(x, choose, told, _HEADS), now]

    def after(self, x: str, told: int) -> list[chain.Stage]:
        """List the stages after attention, which bring what the other heads will need."""
        return [chain.Called(x, _bringing(True), told, _SHARES)]

    def room(self, pages: Pages) -> int:
        """Return the numbers that the stages write down besides their result."""
        return self._rows * pages.bounds.shape[1]

    def tell(self, row: Any, pages: Pages, room: int) -> Speculated:
        """Write what the stages are told [TOLD], with the address of their room; return what they will find."""
        assert pages.slots is not None
        assert pages.blocks is not None
        begin, (part, head, half, *_) = pages.slots.data_ptr(), pages.slots.stride()
        row[_HOST:TOLD] = pages.blocks.data_ptr(), begin, begin + 4 * part, head, half
        before = pages.previous
        return _tell(row, pages, torch.empty(self._shape) if before is None else before.contiguous(), room)


def suits(q: Tensor, bounds: Tensor, resident: Tensor, numbers: int) -> bool:
    """Return whether the loops serve for queries, bounds and a table of what holds so many `numbers`."""
    return (
        serves(q, bounds, numbers=numbers)
        and serves(resident, dtype=torch.int64, numbers=numbers)
        and resident.is_contiguous()
        and len(q) <= gemv.MOST_ROWS * len(resident)
    )


def speculate(q: Tensor, pages: Pages) -> Speculated:
    """Flag heads whose query turned, choose the best candidates for all heads, and update `pages.resident` to them."""
    q, row, numbers = q.contiguous(), np.zeros(TOLD, np.int64), pages.bounds.numel()
    (score, choose), rows = _loops_for(pages.how.pooling, len(q), len(pages.resident), q.shape[1])
    scores = q.new_empty(rows * pages.bounds.shape[1])
    found = _tell(row, pages, q if pages.previous is None else pages.previous.contiguous(), scores.data_ptr())
    chain.call(score, row, q, row[_PIECES], numbers)
    chain.call(choose, row, q, row[_HEADS], numbers)
    return found._replace(query=q.clone())
