"""Attention of many queries by a kernel of our own, where the device has no fused one that serves: with a softcap, with
a mask, in fp32. No scores are stored.

    s_ij = softcap(scale * q_i . k_j)      out_i = sum_j softmax(s_i)_j v_j      lse_i = log sum_j exp(s_ij)

Shapes: q [H, m, d], k and v [Hk, n, d], mask [m, n] or [Hk, m, n] (True: attend) -> out [H, m, d], lse [H, m] in fp32.
Causal, query i stands at position n - m + i and sees what is not behind it, or the last `window` keys of that.

A program holds a tile of queries and goes over the keys that any of them sees, tile by tile, with a running softmax.
Half precisions are multiplied as they are, and weights rounded to them, as in other flash attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.kernels._triton import interpreted, jit, launch, power_of_two, require, takes, tl
from kvcli.kernels.softmax import Softmax, capped

WIDEST = 256  # channels; of wider heads a tile does not fit into registers
FEWEST = 64  # queries; with fewer, programs that go over all keys leave most of the device idle


def serves(q: Tensor, v: Tensor) -> bool:
    """Tell whether the kernel is there for such queries and values, and better than storing scores."""
    return takes(q) and q.shape[2] == v.shape[2] <= WIDEST and q.shape[1] >= FEWEST


def tile_attention_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax: Softmax,
    causal: bool = False,
    window: int | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Plain torch with all scores, in at least fp32; a query that sees nothing gets zeros, and -inf."""
    (num_heads, m, _), n = q.shape, k.shape[1]
    dtype, groups = torch.promote_types(q.dtype, torch.float32), num_heads // len(k)
    keys, values = (x.to(dtype).repeat_interleave(groups, 0) for x in (k, v))
    scores = softmax.scores(q.to(dtype) @ keys.transpose(1, 2))  # [H, m, n]
    seen = torch.ones(m, n, dtype=torch.bool, device=q.device)
    if causal:
        seen = seen.tril(n - m)
    if window is not None:
        seen = seen.triu(n - m - window + 1)
    if mask is not None:
        seen = seen & (mask if mask.dim() == 2 else mask.repeat_interleave(groups, 0))
    scores = scores.masked_fill(~seen, float("-inf"))
    lse = scores.logsumexp(2)
    return (scores.softmax(2).nan_to_num() @ values).to(q.dtype), lse


@jit
def _tile_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    seen_by: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    q_head: tl.tensor,
    q_row: tl.tensor,
    k_head: tl.tensor,
    k_row: tl.tensor,
    v_head: tl.tensor,
    v_row: tl.tensor,
    mask_head: tl.tensor,
    mask_row: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    G: tl.constexpr,
    D: tl.constexpr,
    CAUSAL: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    head = tl.program_id(1)
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M  # those that see most begin first
    i, j, c = first + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    inside = (i < m)[:, None] & (c < D)[None, :]
    q += head.to(tl.int64) * q_head
    k += (head // G).to(tl.int64) * k_head
    v += (head // G).to(tl.int64) * v_head
    queries = tl.load(q + i.to(tl.int64)[:, None] * q_row + c[None, :], mask=inside, other=0.0)
    if WIDE:
        queries = queries.to(tl.float32)
    position = n - m + i
    begin, end = 0, n
    if CAUSAL:
        end = tl.minimum(n, n - m + first + BLOCK_M)
    if window is not None:
        begin = tl.maximum(0, n - m + first - window + 1) // BLOCK_N * BLOCK_N
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    found = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(begin, end, BLOCK_N):
        there = start + j < n
        at = tl.full([], 0, tl.int64) + start
        keys = tl.load(
            k + at * k_row + j[None, :] * k_row + c[:, None], mask=there[None, :] & (c < D)[:, None], other=0.0
        )
        values = tl.load(
            v + at * v_row + j[:, None] * v_row + c[None, :], mask=there[:, None] & (c < D)[None, :], other=0.0
        )
        if WIDE:
            keys, values = keys.to(tl.float32), values.to(tl.float32)
        scores = capped(tl.dot(queries, keys, input_precision="ieee") * scale, softcap)
        seen = (i < m)[:, None] & there[None, :]
        if CAUSAL:
            seen = seen & (start + j[None, :] <= position[:, None])
        if window is not None:
            seen = seen & (start + j[None, :] > position[:, None] - window)
        if seen_by is not None:
            row = seen_by + (head // G).to(tl.int64) * mask_head + i.to(tl.int64)[:, None] * mask_row
            seen = seen & (tl.load(row + at + j[None, :], mask=seen, other=0) != 0)
        scores = tl.where(seen, scores, float("-inf"))
        top = tl.maximum(highest, tl.max(scores, axis=1))
        shift = tl.where(top == float("-inf"), 0.0, top)
        weights = tl.exp(scores - shift[:, None])
        fade = tl.exp(highest - shift)
        total = total * fade + tl.sum(weights, axis=1)
        found = found * fade[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        highest = top
    norm = tl.where(total > 0, highest + tl.log(tl.where(total > 0, total, 1.0)), float("-inf"))
    tl.store(lse + head.to(tl.int64) * m + i, norm, mask=i < m)
    found = found / tl.where(total > 0, total, 1.0)[:, None]
    row = out + (head.to(tl.int64) * m + i.to(tl.int64))[:, None] * D
    tl.store(row + c[None, :], found.to(out.dtype.element_ty), mask=inside)


def tile_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax: Softmax,
    causal: bool = False,
    window: int | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend; sinks are left to the caller, who has the log-sum-exp. A window goes with `causal`.

    Raises ValueError for shapes, dtypes or strides that the kernel cannot read.
    """
    (num_heads, m, d), (num_kv_heads, n, _) = q.shape, k.shape
    require("q", q, q.shape)
    for name, x in (("k", k), ("v", v)):
        require(name, x, (num_kv_heads, n, d), q.dtype)
    if mask is not None:
        require("mask", mask, (*mask.shape[:-2], m, n), torch.bool)
    if not takes(q):
        return tile_attention_ref(q, k, v, softmax, causal, window, mask)
    out = torch.empty(num_heads, m, d, dtype=q.dtype, device=q.device)
    lse = torch.empty(num_heads, m, dtype=torch.float32, device=q.device)
    mask_strides = (0, 0) if mask is None else (mask.stride(0) if mask.dim() == 3 else 0, mask.stride(-2))
    block_d = max(16, power_of_two(d))
    side = 32 if q.dtype == torch.float32 else 64  # no registers are spilt
    launch(
        _tile_kernel,
        (-(-m // side), num_heads),
        *(q, k, v, mask, out, lse, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *mask_strides),
        *(m, n, softmax.scale, softmax.softcap, window),
        G=num_heads // num_kv_heads,
        D=d,
        CAUSAL=causal,
        WIDE=interpreted(),
        BLOCK_M=side,
        BLOCK_N=side,
        BLOCK_D=block_d,
        warps=4 if side == 64 and block_d <= 128 else 8,
    )
    return out, lse
