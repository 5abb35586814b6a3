"""Products of a few rows with long matrices on a CPU, which read these once and at the memory's rate.

    products      s_hgj = q_hg . k_hj              every key, for the query rows that share a KV head
    mixtures      o_hg = sum_j w_hgj v_hj          every value, weighted

torch's own read at a half to a third of that rate for so few rows; for linear layers there is `weight_rows`. Where the
heads of a token lie side by side, they are read together: a head alone would take every few lines of memory, and
streams so far apart fall on the same places of a cache.

Shapes: q [Hk, G, d], k and v [Hk, n, d], w [Hk, G, n]; all fp32.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvcli.kernels._numba import compiled, flat, inlined, prange, run, serves
from kvcli.kernels.softmax import Softmax

MOST_ROWS = 8
"""For more rows a matrix product is faster, which keeps numbers in registers."""

PIECE = 1024  # keys or values that a thread takes at once; their number does not depend on the threads
TOKENS = 256  # with the keys or values of all heads


class Loops(NamedTuple):
    """Loops for one head size and one number of queries a KV head."""

    products: Any
    mixtures: Any
    products_by_token: Any
    mixtures_by_token: Any
    products_of: Any
    mixtures_of: Any


@inlined
def _apart(first: int, step: int) -> Any:
    # Where four rows begin; what is below 0 would count from the end, and asking costs pace.
    a, b = np.uint64(first), np.uint64(step)
    return a, a + b, a + b + b, a + b + b + b


@inlined
def _begins(begins: Any, start: int, j: int, part: int) -> Any:
    # The same of rows that lie anywhere.
    return (
        np.uint64(start + begins[j]),
        np.uint64(start + begins[j + part]),
        np.uint64(start + begins[j + 2 * part]),
        np.uint64(start + begins[j + 3 * part]),
    )


@inlined
def _dots(q: Any, k: Any, h: int, j: int, part: int, at: Any, d: int, group: int, out: Any) -> None:
    a0, a1, a2, a3 = at
    for g in range(group):
        s0, s1, s2, s3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        for c in range(d):
            i = np.uint64(c)
            x = q[np.uint64(h), np.uint64(g), i]
            s0 += x * k[a0 + i]
            s1 += x * k[a1 + i]
            s2 += x * k[a2 + i]
            s3 += x * k[a3 + i]
        row = out[h, g]
        row[j], row[j + part], row[j + 2 * part], row[j + 3 * part] = s0, s1, s2, s3


@inlined
def _dot(q: Any, k: Any, h: int, j: int, at: int, d: int, group: int, out: Any) -> None:
    for g in range(group):
        total = np.float32(0)
        for c in range(d):
            total += q[np.uint64(h), np.uint64(g), np.uint64(c)] * k[at + np.uint64(c)]
        out[np.uint64(h), np.uint64(g), np.uint64(j)] = total


@inlined
def _mix(w: Any, v: Any, h: int, j: int, part: int, at: Any, d: int, group: int, sums: Any) -> None:
    a0, a1, a2, a3 = at
    for g in range(group):
        w0, w1, w2, w3 = w[h, g, j], w[h, g, j + part], w[h, g, j + 2 * part], w[h, g, j + 3 * part]
        for c in range(d):
            i = np.uint64(c)
            sums[np.uint64(g), i] += w0 * v[a0 + i] + w1 * v[a1 + i] + w2 * v[a2 + i] + w3 * v[a3 + i]


@inlined
def _mix_one(w: Any, v: Any, h: int, j: int, at: int, d: int, group: int, sums: Any) -> None:
    for g in range(group):
        for c in range(d):
            sums[g, c] += w[h, g, j] * v[at + np.uint64(c)]


@cache
def _loops(d: int, group: int) -> Loops:
    """Make the loops over rows of d numbers, for so many queries that share a KV head.

    With sizes that are known queries and sums stay in the processor's registers. Rows lie `head` and `token` numbers
    apart; where the heads of a token lie side by side they are read by token; or they begin `at` [1 or Hk, n] places
    of their head. What loops close over is numbers alone: numba names a compiled loop on the disk by that, and another
    loop among it has another name in every process.
    """

    @compiled
    def products(q: Any, k: Any, head: int, token: int, out: Any) -> None:
        heads, _, n = out.shape
        pieces = (n + PIECE - 1) // PIECE
        for piece in prange(heads * pieces):
            h, first = piece // pieces, piece % pieces * PIECE
            last = min(first + PIECE, n)
            part = (last - first) // 4  # four streams: a processor reads ahead in each
            for j in range(first, first + part):
                _dots(q, k, h, j, part, _apart(h * head + j * token, part * token), d, group, out)
            for j in range(first + 4 * part, last):
                _dot(q, k, h, j, np.uint64(h * head + j * token), d, group, out)

    @compiled
    def mixtures(w: Any, v: Any, head: int, token: int, parts: Any) -> None:
        n, pieces = w.shape[2], parts.shape[1]
        for piece in prange(len(w) * pieces):
            h, first = piece // pieces, piece % pieces * PIECE
            sums = parts[h, piece % pieces]  # on a line's edge, as torch allocates; numba's own memory need not be
            sums[:] = 0
            last = min(first + PIECE, n)
            part = (last - first) // 4
            for j in range(first, first + part):
                _mix(w, v, h, j, part, _apart(h * head + j * token, part * token), d, group, sums)
            for j in range(first + 4 * part, last):
                _mix_one(w, v, h, j, np.uint64(h * head + j * token), d, group, sums)

    @compiled
    def products_by_token(q: Any, k: Any, head: int, token: int, out: Any) -> None:
        heads, _, n = out.shape
        for piece in prange((n + TOKENS - 1) // TOKENS):
            first, last = piece * TOKENS, min(piece * TOKENS + TOKENS, n)
            whole = last - (last - first) % 4
            for j in range(first, whole, 4):  # of all heads, so that memory is read in its order
                for h in range(heads):
                    _dots(q, k, h, j, 1, _apart(h * head + j * token, token), d, group, out)
            for j in range(whole, last):
                for h in range(heads):
                    _dot(q, k, h, j, np.uint64(h * head + j * token), d, group, out)

    @compiled
    def mixtures_by_token(w: Any, v: Any, head: int, token: int, parts: Any) -> None:
        heads, n = len(w), w.shape[2]
        for piece in prange(parts.shape[1]):
            parts[:, piece] = 0
            first, last = piece * TOKENS, min(piece * TOKENS + TOKENS, n)
            whole = last - (last - first) % 4
            for j in range(first, whole, 4):
                for h in range(heads):
                    _mix(w, v, h, j, 1, _apart(h * head + j * token, token), d, group, parts[h, piece])
            for j in range(whole, last):
                for h in range(heads):
                    _mix_one(w, v, h, j, np.uint64(h * head + j * token), d, group, parts[h, piece])

    @compiled
    def products_of(q: Any, k: Any, head: int, at: Any, out: Any) -> None:
        heads, _, n = out.shape
        pieces = (n + PIECE - 1) // PIECE
        for piece in prange(heads * pieces):
            h, first = piece // pieces, piece % pieces * PIECE
            last, begins = min(first + PIECE, n), at[h % len(at)]
            part = (last - first) // 4
            for j in range(first, first + part):
                _dots(q, k, h, j, part, _begins(begins, h * head, j, part), d, group, out)
            for j in range(first + 4 * part, last):
                _dot(q, k, h, j, np.uint64(h * head + begins[j]), d, group, out)

    @compiled
    def mixtures_of(w: Any, v: Any, head: int, at: Any, parts: Any) -> None:
        n, pieces = w.shape[2], parts.shape[1]
        for piece in prange(len(w) * pieces):
            h, first = piece // pieces, piece % pieces * PIECE
            last, begins, sums = min(first + PIECE, n), at[h % len(at)], parts[h, piece % pieces]
            sums[:] = 0
            part = (last - first) // 4
            for j in range(first, first + part):
                _mix(w, v, h, j, part, _begins(begins, h * head, j, part), d, group, sums)
            for j in range(first + 4 * part, last):
                _mix_one(w, v, h, j, np.uint64(h * head + begins[j]), d, group, sums)

    return Loops(products, mixtures, products_by_token, mixtures_by_token, products_of, mixtures_of)


@compiled
def _products_of_odd_rows(q: Any, k: Any, head: int, token: int, out: Any) -> None:
    # Of rows that fill no register, a loop that knows their size is the slower one.
    heads, group, d = q.shape
    n = out.shape[2]
    pieces = (n + PIECE - 1) // PIECE
    for piece in prange(heads * pieces):
        h, first = piece // pieces, piece % pieces * PIECE
        last, own = min(first + PIECE, n), k[h * head :]
        part = (last - first) // 4
        for j in range(first, first + part):
            k0, k1 = own[j * token :][:d], own[(j + part) * token :][:d]
            k2, k3 = own[(j + 2 * part) * token :][:d], own[(j + 3 * part) * token :][:d]
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
            key = own[j * token :][:d]
            for g in range(group):
                total = np.float32(0)
                for c in range(d):
                    total += q[h, g, c] * key[c]
                out[h, g, j] = total


def suits(rows: Tensor, *matrices: Tensor) -> bool:
    """Tell whether `rows` [.., m, d] are few, and these loops can take them with the matrices."""
    return rows.shape[-2] <= MOST_ROWS and serves(rows, *matrices)


def products(q: Tensor, k: Tensor, rows: Tensor | None = None) -> Tensor:
    """Score every key, or those in `rows` [1 or Hk, m]: [Hk, G, n or m]."""
    loops, q = _loops(k.shape[2], q.shape[1]), q.contiguous()
    out = q.new_empty(*q.shape[:2], k.shape[1] if rows is None else rows.shape[1])
    if rows is None:
        by_size = loops.products_by_token if _by_token(k) else loops.products
        run(_products_of_odd_rows if k.shape[2] % 8 else by_size, k.numel(), q, flat(k), *k.stride()[:2], out)
    else:
        run(loops.products_of, out[:, 0].numel() * k.shape[2], q, flat(k), k.stride(0), rows * k.stride(1), out)
    return out


def mixtures(w: Tensor, v: Tensor, rows: Tensor | None = None) -> Tensor:
    """Add values up, all or those in `rows` [1 or Hk, m], by weights [Hk, G, n or m]: [Hk, G, d]."""
    (heads, group, n), d = w.shape, v.shape[2]
    loops, w, by_token = _loops(d, group), w.contiguous(), rows is None and _by_token(v)
    parts = w.new_empty(heads, -(-n // (TOKENS if by_token else PIECE)), group, d)
    if rows is None:
        run(loops.mixtures_by_token if by_token else loops.mixtures, v.numel(), w, flat(v), *v.stride()[:2], parts)
    else:
        run(loops.mixtures_of, w[:, 0].numel() * d, w, flat(v), v.stride(0), rows * v.stride(1), parts)
    return parts.sum(1)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax: Softmax,
    mask: Tensor | None = None,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend with few rows, to what mask [Hk, G, n] lets them, or to `rows`: out [Hk, G, d] and lse [Hk, G]."""
    scores = softmax.scores(products(q, k, rows))
    if mask is not None:
        scores.masked_fill_(~mask, float("-inf"))
    top = scores.amax(-1, keepdim=True)
    weights = scores.sub_(top).exp_()
    total = weights.sum(-1)
    return mixtures(weights, v, rows) / total[..., None], top[..., 0] + torch.log(total)


def _by_token(x: Tensor) -> bool:
    """Tell whether the heads of a token lie side by side: keys or values [Hk, n, d] of memory [n, Hk, d]."""
    return len(x) > 1 and x.stride(0) < x.stride(1)
