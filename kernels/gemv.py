"""Matrix-vector products on a CPU: a few rows times long matrices, read once and at memory speed.

    s_hgj = q_hg . k_hj              every key, for the query rows that share a KV head

For so few rows, torch's own products read at a half to a third of that speed. Attention uses them by
`decode_attention`, linear layers by `matrix_of`. If the heads of a token are adjacent, they are read together: a
single head would read every few cache lines, and such strides map to the same sets of a cache.

Shapes: q [Hk, G, d], k [Hk, n, d]; all fp32.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from torch import Tensor

from kvcli.kernels._llvm import AHEAD, FlatArrays, prefetch
from kvcli.kernels._numba import compiled, flat, inlined, intrinsic, prange, run, serves
from kvcli.kernels.chain import Matrix, floats, loop_of_rows

MOST_ROWS = 8
"""For more rows a matrix product, which keeps numbers in registers, is faster."""

PIECE = 1024  # keys or values per thread at once, for any number of threads
TOKENS = 256  # tokens per thread at once, with the keys or values of all heads
LANES = 16  # numbers per AVX-512 register
FAR = 1 << 19
"""Numbers from which data is assumed to lie in memory: prefetched, it comes up to 1.8 times as fast.

For less data, which may lie in a cache, prefetching would cost a sixth of the time.
"""


@inlined
def apart(x: Any, first: int, token: int, part: int, d: int, far: bool) -> Any:
    """Return the offsets of four rows of d numbers, `part` tokens apart; with `far`, prefetch rows some tokens later.

    Offsets are unsigned, because checks for negative indices cost time.
    """
    if far:
        for turn in range(4):
            prefetch(x, first + (turn * part + AHEAD) * token, d)
    a, b = np.uint64(first), np.uint64(part * token)
    return a, a + b, a + b + b, a + b + b + b


@inlined
def dots(q: Any, k: Any, h: int, j: int, part: int, at: Any, d: int, group: int, out: Any) -> None:
    """Multiply four rows of a head, `part` apart, with its queries; `d` and `group` are compile-time constants."""
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
def dot(q: Any, k: Any, h: int, j: int, at: int, d: int, group: int, out: Any) -> None:
    """Multiply a single row."""
    for g in range(group):
        total = np.float32(0)
        for c in range(d):
            total += q[np.uint64(h), np.uint64(g), np.uint64(c)] * k[at + np.uint64(c)]
        out[np.uint64(h), np.uint64(g), np.uint64(j)] = total


@cache
def _loops(d: int, group: int) -> tuple[Any, Any]:
    """Make the loops over keys of d numbers, for `group` queries that share a KV head.

    Sizes known at compile time keep queries and sums in registers. Keys are `head` and `token` numbers apart; if the
    heads of a token are adjacent, the second loop reads them by token. Loops close over numbers only: numba's cache key
    includes what a loop closes over, and another compiled loop has a new key in every process.
    """

    @compiled
    def products(q: Any, k: Any, head: int, token: int, far: bool, out: Any) -> None:
        heads, _, n = out.shape
        pieces = (n + PIECE - 1) // PIECE
        for piece in prange(heads * pieces):
            h, first = piece // pieces, piece % pieces * PIECE
            last = min(first + PIECE, n)
            part = (last - first) // 4  # four streams: a processor prefetches in each
            for j in range(first, first + part):
                dots(q, k, h, j, part, apart(k, h * head + j * token, token, part, d, far), d, group, out)
            for j in range(first + 4 * part, last):
                dot(q, k, h, j, np.uint64(h * head + j * token), d, group, out)

    @compiled
    def products_by_token(q: Any, k: Any, head: int, token: int, far: bool, out: Any) -> None:
        heads, _, n = out.shape
        for piece in prange((n + TOKENS - 1) // TOKENS):
            first, last = piece * TOKENS, min(piece * TOKENS + TOKENS, n)
            part = (last - first) // 4
            for j in range(first, first + part):  # of all heads, so that memory is read in its order
                for h in range(heads):
                    dots(q, k, h, j, part, apart(k, h * head + j * token, token, part, d, far), d, group, out)
            for j in range(first + 4 * part, last):
                for h in range(heads):
                    dot(q, k, h, j, np.uint64(h * head + j * token), d, group, out)

    return products, products_by_token


@intrinsic
def _dot_odd(_: Any, queries: Any, query: Any, ends: Any, end: Any, keys: Any, key: Any, d: Any, lanes: Any) -> Any:
    """Multiply a row whose d numbers do not fill registers of `lanes` numbers; the last two registers overlap.

    For the overlap, the `ends` of the queries hold zeros.
    """
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils

    def multiply(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        held, flags = FlatArrays(context, builder, signature, given), ("contract", "reassoc")
        count = lanes.literal_value
        last = d.literal_value - count
        total = builder.fmul(held.load(2, count), held.load(4, count, last), flags=flags)
        for at in range(0, last, count):
            product = builder.fmul(held.load(0, count, at), held.load(4, count, at), flags=flags)
            total = builder.fadd(total, product, flags=flags)
        kind = ir.FunctionType(ir.FloatType(), [ir.FloatType(), total.type])
        declare: Any = cgutils.get_or_insert_function
        add_up = declare(builder.module, kind, f"llvm.vector.reduce.fadd.v{count}f32")
        return builder.call(add_up, [ir.Constant(ir.FloatType(), 0.0), total], fastmath=flags)

    if not isinstance(d, types.Literal) or not isinstance(lanes, types.Literal):
        return None
    return types.float32(queries, query, ends, end, keys, key, d, lanes), multiply


@cache
def _loop_of_odd_rows(d: int, group: int) -> Any:
    """Make the loop over keys whose d numbers do not fill registers; a compiler would handle the rest one by one."""
    lanes = LANES if d > LANES else LANES // 2

    @compiled
    def products(q: Any, ends: Any, k: Any, head: int, token: int, out: Any) -> None:
        heads, _, n = out.shape
        pieces = (n + PIECE - 1) // PIECE
        for piece in prange(heads * pieces):
            h, first = piece // pieces, piece % pieces * PIECE
            for j in range(first, min(first + PIECE, n)):
                key = np.uint64(h * head + j * token)
                for g in range(group):
                    row = h * group + g
                    out[h, g, j] = _dot_odd(q, np.uint64(row * d), ends, np.uint64(row * lanes), k, key, d, lanes)

    return products


def suits(rows: Tensor, *matrices: Tensor, numbers: int = 0) -> bool:
    """Return whether `rows` [.., m, d] are few, and these loops can take them with the matrices.

    `numbers`: how many numbers a loop reads, if more than the tensors have.
    """
    return rows.shape[-2] <= MOST_ROWS and serves(rows, *matrices, numbers=numbers)


def products(q: Tensor, k: Tensor) -> Tensor:
    """Score every key: q [Hk, G, d], k [Hk, n, d] -> [Hk, G, n]."""
    out = q.new_empty(*q.shape[:2], k.shape[1])
    q, held, d = q.contiguous(), (flat(k), *k.stride()[:2]), k.shape[2]
    if d % 8 and d > 8:
        lanes = LANES if d > LANES else LANES // 2
        ends = q[..., -lanes:].clone()  # zeros where they overlap whole registers
        ends[..., : -(d % lanes)] = 0
        run(_loop_of_odd_rows(d, q.shape[1]), k.numel(), flat(q), flat(ends), *held, out)
    else:
        loop = _loops(d, q.shape[1])[heads_side_by_side(k)]
        run(loop, k.numel(), q, *held, k.numel() >= FAR, out)
    return out


def heads_side_by_side(x: Tensor) -> bool:
    """Return whether the heads of a token are adjacent: keys or values [Hk, n, d] of memory [n, Hk, d]."""
    return len(x) > 1 and x.stride(0) < x.stride(1)


@inlined
def _products(x: Any, weight: Any, first: int, last: int, out: Any, at: int) -> None:
    """Multiply x by some rows of a weight; write the products to `out` from column `at` on."""
    part = (last - first) // 4
    for i in range(first, first + part):
        w0, w1, w2, w3 = weight[i], weight[i + part], weight[i + 2 * part], weight[i + 3 * part]
        for m in range(len(x)):
            s0, s1, s2, s3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
            for c in range(x.shape[1]):
                s0 += x[m, c] * w0[c]
                s1 += x[m, c] * w1[c]
                s2 += x[m, c] * w2[c]
                s3 += x[m, c] * w3[c]
            row = out[m, at:]
            row[i], row[i + part], row[i + 2 * part], row[i + 3 * part] = s0, s1, s2, s3
    for i in range(first + 4 * part, last):
        for m in range(len(x)):
            total = np.float32(0)
            for c in range(x.shape[1]):
                total += x[m, c] * weight[i, c]
            out[m, at + i] = total


@cache
def _multiplying() -> int:
    """Make the loop that multiplies rows of x by rows of a weight, see `kvcli.kernels.chain`."""

    def multiply(
        weight: int, x: int, out: int, first: int, last: int, columns: int, stride: int, at: int, rows: int
    ) -> None:
        given, target = floats(x, rows, columns), floats(out, rows, stride)
        _products(given, floats(weight, last, columns), first, last, target, at)

    return loop_of_rows(multiply)


def matrix_of(weight: Any, bias: Any = None) -> Matrix:
    """Describe a weight, an array without gaps, with an array as its bias, to `kvcli.kernels.chain`."""
    rows, columns = weight.shape
    return Matrix(lambda _: _multiplying(), weight, rows, columns, False, bias)
