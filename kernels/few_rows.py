"""Products of a few rows with long matrices on a CPU, which read these once and at the memory's rate.

    products      s_hgj = q_hg . k_hj              every key, for the query rows that share a KV head
    mixtures      o_hg = sum_j w_hgj v_hj          every value, weighted
    row_products  y_mi = x_m . W_i                 a linear layer

torch's own read at a half to a third of that rate for so few rows (`benchmarks/cpu_linear.py`). Where the heads of a
token lie side by side, they are read together: a head alone would take every few lines of memory, and streams so far
apart fall on the same places of a cache.

Shapes: q [Hk, G, d], k and v [Hk, n, d], w [Hk, G, n], x [m, in], W [out, in]; all fp32.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvcli.kernels._numba import compiled, flat, inlined, prange, run, serves
from kvcli.kernels.softmax import Softmax

MOST_ROWS = 8
"""For more rows a matrix product is faster, which keeps numbers in registers."""

PIECE = 1024  # keys or values that a thread takes at once; their number does not depend on the threads
TOKENS = 256  # with the keys or values of all heads
ROWS = 32  # of a weight


@compiled
def _products(q: Any, k: Any, head: int, at: Any, out: Any) -> None:
    heads, group, d = q.shape
    n = at.shape[1]
    pieces = (n + PIECE - 1) // PIECE
    for piece in prange(heads * pieces):
        h, first = piece // pieces, piece % pieces * PIECE
        last = min(first + PIECE, n)
        part = (last - first) // 4  # four streams: a processor reads ahead in each
        own, begins = k[h * head :], at[h % len(at)]
        for j in range(first, first + part):
            k0, k1, k2, k3 = (
                own[begins[j] :][:d],
                own[begins[j + part] :][:d],
                own[begins[j + 2 * part] :][:d],
                own[begins[j + 3 * part] :][:d],
            )
            for g in range(group):
                query = q[h, g]
                s0, s1, s2, s3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
                for c in range(d):
                    s0 += query[c] * k0[c]
                    s1 += query[c] * k1[c]
                    s2 += query[c] * k2[c]
                    s3 += query[c] * k3[c]
                row = out[h, g]
                row[j], row[j + part], row[j + 2 * part], row[j + 3 * part] = s0, s1, s2, s3
        for j in range(first + 4 * part, last):
            key = own[begins[j] :][:d]
            for g in range(group):
                total = np.float32(0)
                for c in range(d):
                    total += q[h, g, c] * key[c]
                out[h, g, j] = total


@compiled
def _mixtures(w: Any, v: Any, head: int, at: Any, d: int, parts: Any) -> None:
    heads, group, n = w.shape
    pieces = parts.shape[1]
    for piece in prange(heads * pieces):
        h, first = piece // pieces, piece % pieces * PIECE
        last = min(first + PIECE, n)
        part = (last - first) // 4
        parts[h, piece % pieces] = 0
        own, begins = v[h * head :], at[h % len(at)]
        for j in range(first, first + part):
            v0, v1, v2, v3 = (
                own[begins[j] :][:d],
                own[begins[j + part] :][:d],
                own[begins[j + 2 * part] :][:d],
                own[begins[j + 3 * part] :][:d],
            )
            for g in range(group):
                out, row = parts[h, piece % pieces, g], w[h, g]
                w0, w1, w2, w3 = row[j], row[j + part], row[j + 2 * part], row[j + 3 * part]
                for c in range(d):
                    out[c] += w0 * v0[c] + w1 * v1[c] + w2 * v2[c] + w3 * v3[c]
        for j in range(first + 4 * part, last):
            value = own[begins[j] :][:d]
            for g in range(group):
                for c in range(d):
                    parts[h, piece % pieces, g, c] += w[h, g, j] * value[c]


@inlined
def _mix(w: Any, v: Any, head: int, token: int, h: int, first: int, last: int, d: int, sums: Any) -> None:
    whole = last - (last - first) % 4
    for j in range(first, whole, 4):
        a0 = np.uint64(h * head + j * token)
        a1, a2, a3 = a0 + np.uint64(token), a0 + np.uint64(2 * token), a0 + np.uint64(3 * token)
        for g in range(len(sums)):
            w0, w1, w2, w3 = w[h, g, j], w[h, g, j + 1], w[h, g, j + 2], w[h, g, j + 3]
            for c in range(d):
                i = np.uint64(c)
                sums[np.uint64(g), i] += w0 * v[a0 + i] + w1 * v[a1 + i] + w2 * v[a2 + i] + w3 * v[a3 + i]
    for j in range(whole, last):
        for g in range(len(sums)):
            for c in range(d):
                sums[g, c] += w[h, g, j] * v[h * head + j * token + c]


@cache
def _loops(d: int) -> tuple[Any, Any, Any, Any]:
    """Make the loops over rows of d numbers that lie `head` and `token` numbers apart.

    With a size that is known a query or a sum stays in the processor's registers. The last two are for heads of a token
    that lie side by side. What they close over is numbers alone: numba names a compiled loop on the disk by that, and
    another loop among it has another name in every process.
    """

    @compiled
    def products(q: Any, k: Any, head: int, token: int, out: Any) -> None:
        heads, group, n = out.shape
        pieces = (n + PIECE - 1) // PIECE
        for piece in prange(heads * pieces):
            h, first = piece // pieces, piece % pieces * PIECE
            for j in range(first, min(first + PIECE, n)):
                at = np.uint64(h * head + j * token)  # what is below 0 would count from the end, and asking costs pace
                for g in range(group):
                    total = np.float32(0)
                    for c in range(d):
                        total += q[np.uint64(h), np.uint64(g), np.uint64(c)] * k[at + np.uint64(c)]
                    out[np.uint64(h), np.uint64(g), np.uint64(j)] = total

    @compiled
    def mixtures(w: Any, v: Any, head: int, token: int, parts: Any) -> None:
        n, pieces = w.shape[2], parts.shape[1]
        for piece in prange(len(w) * pieces):
            h, first = piece // pieces, piece % pieces * PIECE
            sums = parts[h, piece % pieces]  # on a line's edge, as torch allocates; numba's own memory need not be
            sums[:] = 0
            _mix(w, v, head, token, h, first, min(first + PIECE, n), d, sums)

    @compiled
    def products_by_token(q: Any, k: Any, head: int, token: int, out: Any) -> None:
        heads, group, n = out.shape
        for piece in prange((n + TOKENS - 1) // TOKENS):
            for j in range(piece * TOKENS, min(piece * TOKENS + TOKENS, n)):
                for h in range(heads):
                    at = np.uint64(h * head + j * token)
                    for g in range(group):
                        total = np.float32(0)
                        for c in range(d):
                            total += q[np.uint64(h), np.uint64(g), np.uint64(c)] * k[at + np.uint64(c)]
                        out[np.uint64(h), np.uint64(g), np.uint64(j)] = total

    @compiled
    def mixtures_by_token(w: Any, v: Any, head: int, token: int, parts: Any) -> None:
        heads, n = len(w), w.shape[2]
        for piece in prange(parts.shape[1]):
            parts[:, piece] = 0
            for first in range(piece * TOKENS, min(piece * TOKENS + TOKENS, n), ROWS):
                for h in range(heads):
                    _mix(w, v, head, token, h, first, min(first + ROWS, n), d, parts[h, piece])

    return products, mixtures, products_by_token, mixtures_by_token


@compiled
def _row_products(x: Any, weight: Any, out: Any) -> None:
    n, d = weight.shape
    for block in prange((n + ROWS - 1) // ROWS):
        first = block * ROWS
        last = min(first + ROWS, n)
        part = (last - first) // 4
        for i in range(first, first + part):
            w0, w1, w2, w3 = weight[i], weight[i + part], weight[i + 2 * part], weight[i + 3 * part]
            for m in range(len(x)):
                s0, s1, s2, s3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
                for c in range(d):
                    s0 += x[m, c] * w0[c]
                    s1 += x[m, c] * w1[c]
                    s2 += x[m, c] * w2[c]
                    s3 += x[m, c] * w3[c]
                row = out[m]
                row[i], row[i + part], row[i + 2 * part], row[i + 3 * part] = s0, s1, s2, s3
        for i in range(first + 4 * part, last):
            for m in range(len(x)):
                total = np.float32(0)
                for c in range(d):
                    total += x[m, c] * weight[i, c]
                out[m, i] = total


def suits(rows: Tensor, *matrices: Tensor) -> bool:
    """Tell whether `rows` [.., m, d] are few, and these loops can take them with the matrices."""
    return rows.shape[-2] <= MOST_ROWS and serves(rows, *matrices)


def products(q: Tensor, k: Tensor, rows: Tensor | None = None) -> Tensor:
    """Score every key, or those in `rows` [Hk, m]: [Hk, G, n or m]."""
    if rows is None and _is_whole(k):
        out, by_token = q.new_empty(*q.shape[:2], k.shape[1]), _by_token(k)
        run(_loops(k.shape[2])[2 * by_token], k.numel(), q.contiguous(), flat(k), *k.stride()[:2], out)
        return out
    at = _begins(k, rows)
    out = q.new_empty(*q.shape[:2], at.shape[1])
    run(_products, out[:, 0].numel() * k.shape[2], q.contiguous(), flat(k), k.stride(0), at, out)
    return out


def mixtures(w: Tensor, v: Tensor, rows: Tensor | None = None) -> Tensor:
    """Add values up, all or those in `rows` [Hk, m], by weights [Hk, G, n or m]: [Hk, G, d]."""
    (heads, group, n), d = w.shape, v.shape[2]
    if rows is None and _is_whole(v):
        by_token = _by_token(v)
        parts = w.new_empty(heads, -(-n // (TOKENS if by_token else PIECE)), group, d)
        run(_loops(d)[2 * by_token + 1], v.numel(), w.contiguous(), flat(v), *v.stride()[:2], parts)
        return parts.sum(1)
    parts = w.new_empty(heads, -(-n // PIECE), group, d)
    run(_mixtures, w[:, 0].numel() * d, w.contiguous(), flat(v), v.stride(0), _begins(v, rows), d, parts)
    return parts.sum(1)


def row_products(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply by a linear layer's weight, without gaps: [m, out]."""
    out = x.new_empty(len(x), len(weight))
    run(_row_products, weight.numel(), x.contiguous(), weight, out)
    return out


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax: Softmax,
    mask: Tensor | None = None,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend with few rows, to what mask [Hk, G, n] lets them, or to `rows` [Hk, m]: out [Hk, G, d] and lse [Hk, G]."""
    scores = softmax.scores(products(q, k, rows))
    if mask is not None:
        scores.masked_fill_(~mask, float("-inf"))
    top = scores.amax(-1, keepdim=True)
    weights = scores.sub_(top).exp_()
    total = weights.sum(-1)
    return mixtures(weights, v, rows) / total[..., None], top[..., 0] + torch.log(total)


def _begins(x: Tensor, rows: Tensor | None) -> Tensor:
    """Where rows of a KV head begin, in its memory: [1, n], the same for all heads, or [Hk, m]."""
    return (torch.arange(x.shape[1])[None] if rows is None else rows) * x.stride(1)


def _is_whole(x: Tensor) -> bool:
    """Tell whether rows are whole registers of sixteen numbers: other sizes are not worth loops of their own."""
    return x.shape[2] % 16 == 0


def _by_token(x: Tensor) -> bool:
    """Tell whether the heads of a token lie side by side: keys or values [Hk, n, d] of memory [n, Hk, d]."""
    return len(x) > 1 and x.stride(0) < x.stride(1)
