"""Scores of single tokens for every query head: s_gj = scale * q_g . k_j, over all channels or the first few of them.

Shapes: q [H, d], keys [Hk, n, c], c <= d channels that q has too (its first c) -> scores [Hk, G, n] in at least fp32.
`token_scores_device` has the batch in front, and lengths [b] that say how many tokens there are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.kernels._triton import jit, launch, power_of_two, require, require_whole, takes, tl

BLOCK_ELEMENTS = 8192  # of the keys that a program holds


def token_scores(q: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Score every token; G query heads share a KV head."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    heads = scale * q[:, : keys.shape[2]].to(dtype).view(keys.shape[0], -1, keys.shape[2])  # [Hk, G, c]
    # The long factor first: the product then reads the keys, which are the bulk, row by row.
    return (keys.to(dtype) @ heads.transpose(1, 2)).transpose(1, 2)


def token_scores_device_ref(
    q: Tensor, keys: Tensor, lengths: Tensor, scale: float, out: Tensor, heads: Tensor | None = None
) -> None:
    """Score one sequence after the other."""
    for b, length in enumerate(lengths.tolist()):
        asked = slice(None) if heads is None else heads[b]
        scores = torch.full_like(out[b], float("-inf"))
        scores[..., :length] = token_scores(q[b], keys[b, :, :length], scale).to(out.dtype)
        out[b, asked] = scores[asked]


@jit
def _token_kernel(
    q: tl.tensor,
    keys: tl.tensor,
    lengths: tl.tensor,
    heads: tl.tensor,
    out: tl.tensor,
    q_batch: tl.tensor,
    q_head: tl.tensor,
    keys_batch: tl.tensor,
    keys_head: tl.tensor,
    keys_row: tl.tensor,
    num_tokens: tl.tensor,
    scale: tl.tensor,
    HK: tl.constexpr,
    G: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    pair = tl.program_id(0)  # a KV head of a sequence
    if heads is not None:
        if tl.load(heads + pair) == 0:
            return
    b, h = (pair // HK).to(tl.int64), (pair % HK).to(tl.int64)
    length = tl.load(lengths + b)
    token = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    g, c = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_C)
    in_q = (g < G)[:, None] & (c < C)[None, :]
    queries = tl.load(q + b * q_batch + (h * G + g)[:, None] * q_head + c[None, :], mask=in_q, other=0.0)
    at = b * keys_batch + h * keys_head + token.to(tl.int64)[:, None] * keys_row + c[None, :]
    known = tl.load(keys + at, mask=(token < length)[:, None] & (c < C)[None, :], other=0.0).to(tl.float32)
    scores = tl.dot(queries.to(tl.float32), tl.trans(known), input_precision=PRECISION) * scale
    scores = tl.where((token < length)[None, :], scores, float("-inf"))
    target = (pair.to(tl.int64) * G + g)[:, None] * num_tokens + token[None, :]
    tl.store(out + target, scores, mask=(g < G)[:, None] & (token < num_tokens)[None, :])


def token_scores_device(
    q: Tensor, keys: Tensor, lengths: Tensor, scale: float, out: Tensor, heads: Tensor | None = None
) -> None:
    """Score the tokens of a batch: q [b, H, d], keys [b, Hk, n, c] -> `out` [b, Hk, G, n] fp32, -inf beyond lengths.

    heads [b, Hk] bool: the others' scores are left as they are. May be captured in a CUDA graph. Raises ValueError for
    shapes, dtypes or strides that the kernel cannot read.
    """
    (b, num_heads, d), (_, num_kv_heads, num_tokens, channels) = q.shape, keys.shape
    groups = num_heads // num_kv_heads
    require("q", q, (b, num_heads, d))
    require("keys", keys, (b, num_kv_heads, num_tokens, channels))
    require_whole("lengths", lengths, (b,), torch.int32)
    require_whole("out", out, (b, num_kv_heads, groups, num_tokens), out.dtype)
    if heads is not None:
        require_whole("heads", heads, (b, num_kv_heads), torch.bool)
    if not takes(q):
        return token_scores_device_ref(q, keys, lengths, scale, out, heads)
    block_c = max(16, power_of_two(channels))
    block_n = max(16, min(128, BLOCK_ELEMENTS // block_c))
    half = torch.float32 not in (q.dtype, keys.dtype)
    launch(
        _token_kernel,
        (b * num_kv_heads, -(-num_tokens // block_n)),
        *(q, keys, lengths, heads, out, *q.stride()[:2], *keys.stride()[:3], num_tokens, scale),
        HK=num_kv_heads,
        G=groups,
        C=channels,
        PRECISION="tf32" if half else "ieee",  # tf32 holds every bit of the half precisions
        BLOCK_G=max(16, power_of_two(groups)),
        BLOCK_N=block_n,
        BLOCK_C=block_c,
    )
    return None
