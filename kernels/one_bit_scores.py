"""Scores of keys that are kept as one bit a channel (FIER, section 3.3): see `kvcli.kernels.one_bit_keys`.

A score needs the codes alone, with the query scaled once a group instead of the keys once a token:

    q . k~_t = sum_c (q_c s_c) code_tc + q . z
             = 2 * sum of q_c s_c over the channels whose bit is set + q . (z - s)

Shapes: q [Hk, G, d], codes [Hk, n, g, bytes], ranges [Hk, n, 2, d] -> scores [Hk, G, n * g]. The function for a batch
on the device has it in front, and all query heads in a row.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvcli.kernels._triton import jit, launch, require, require_whole, takes, tl
from kvcli.kernels.one_bit_keys import blocks

BLOCK_BITS = 1 << 17  # that are numbers at once: 512 KiB of them


def one_bit_scores_ref(q: Tensor, codes: Tensor, ranges: Tensor) -> Tensor:
    """Score in plain torch; bits become numbers a block of groups at a time, which a processor's cache can hold."""
    (num_kv_heads, heads, d), (num_groups, group) = q.shape, codes.shape[1:3]
    dtype = torch.promote_types(q.dtype, torch.float32)
    queries, (scale, zero) = q.to(dtype)[:, None], ranges.to(dtype)[:, :, :, None].unbind(2)  # scale [Hk, n, 1, d]
    weights = 2 * queries * scale  # [Hk, n, G, d]
    base = (queries * (zero - scale)).sum(-1)[..., None]  # [Hk, n, G, 1]
    scores = weights.new_empty(num_kv_heads, num_groups, heads, group)
    at_once = max(1, BLOCK_BITS // (group * d))
    for head in range(num_kv_heads):
        for start in range(0, num_groups, at_once):
            part = (head, slice(start, start + at_once))
            bits = _bits(codes[part], d).to(dtype)  # [groups of the block, g, d]
            scores[part] = torch.baddbmm(base[part], weights[part], bits.transpose(1, 2))
    return scores.transpose(1, 2).flatten(2)


def _bits(codes: Tensor, d: int) -> Tensor:
    """Unpack codes [..., bytes] to zeros and ones [..., d] of one byte each."""
    if codes.device.type == "cpu":  # numpy goes by a table, several times faster than shifts
        return torch.from_numpy(np.unpackbits(codes.numpy(), axis=-1, count=d, bitorder="little"))
    return ((codes[..., None] >> torch.arange(8, device=codes.device)) & 1).flatten(-2)[..., :d]


def one_bit_scores_device_ref(q: Tensor, codes: Tensor, ranges: Tensor, lengths: Tensor, out: Tensor) -> None:
    """Score sequence by sequence."""
    out.fill_(float("-inf"))
    for b, groups in enumerate((lengths // codes.shape[3]).tolist()):
        heads = q[b].view(codes.shape[1], -1, q.shape[2])  # [Hk, G, d]
        scores = one_bit_scores_ref(heads, codes[b, :, :groups], ranges[b, :, :groups])
        out[b, :, : scores.shape[2]] = scores.flatten(0, 1)


@jit
def _one_bit_kernel(
    q: tl.tensor,
    codes: tl.tensor,
    ranges: tl.tensor,
    lengths: tl.tensor,
    out: tl.tensor,
    q_batch: tl.tensor,
    q_head: tl.tensor,
    codes_batch: tl.tensor,
    codes_head: tl.tensor,
    ranges_batch: tl.tensor,
    ranges_head: tl.tensor,
    num_groups: tl.tensor,
    HK: tl.constexpr,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_Y: tl.constexpr,
) -> None:
    group, pair = tl.program_id(0), tl.program_id(1)  # a group of tokens, a KV head of a sequence
    b, h = (pair // HK).to(tl.int64), (pair % HK).to(tl.int64)
    rows = GROUP  # that are quantised
    if lengths is not None:
        rows = tl.where(group < tl.load(lengths + b) // GROUP, GROUP, 0)
    byte, bit = tl.arange(0, BLOCK_Y), tl.arange(0, 8)
    c = byte[:, None] * 8 + bit[None, :]  # [BLOCK_Y, 8]
    at = ranges + b * ranges_batch + h * ranges_head + group.to(tl.int64) * 2 * D + c
    scale = tl.load(at, mask=c < D, other=0.0).to(tl.float32)
    zero = tl.load(at + D, mask=c < D, other=0.0).to(tl.float32)
    source = codes + b * codes_batch + h * codes_head + group.to(tl.int64) * GROUP * BYTES
    for start in range(0, GROUP, BLOCK_R):
        i = start + tl.arange(0, BLOCK_R)
        inside = (i < rows)[:, None] & (byte < BYTES)[None, :]
        packed = tl.load(source + i[:, None] * BYTES + byte[None, :], mask=inside, other=0).to(tl.int32)
        bits = (packed[:, :, None] >> bit[None, None, :]) & 1  # [BLOCK_R, BLOCK_Y, 8]
        for g in range(G):
            query = tl.load(q + b * q_batch + (h * G + g) * q_head + c, mask=c < D, other=0.0).to(tl.float32)
            base = tl.sum(tl.sum(query * (zero - scale), axis=1), axis=0)
            picked = tl.where(bits == 1, (query * scale)[None, :, :], 0.0)
            score = 2.0 * tl.sum(tl.sum(picked, axis=2), axis=1) + base  # [BLOCK_R]
            target = (pair.to(tl.int64) * G + g) * num_groups * GROUP + group * GROUP + i
            tl.store(out + target, tl.where(i < rows, score, float("-inf")), mask=i < GROUP)


def one_bit_scores(q: Tensor, codes: Tensor, ranges: Tensor) -> Tensor:
    """Score every token of every group: q [Hk, G, d] -> [Hk, G, n * g] in at least fp32, unscaled."""
    if not takes(q) or codes.numel() == 0:
        return one_bit_scores_ref(q, codes, ranges)
    (num_kv_heads, groups, d), tokens = q.shape, codes.shape[1] * codes.shape[2]
    out = torch.empty(num_kv_heads, groups, tokens, dtype=torch.float32, device=q.device)
    _score(q.reshape(1, -1, d), codes[None], ranges[None], None, out.view(1, -1, tokens))
    return out


def one_bit_scores_device(q: Tensor, codes: Tensor, ranges: Tensor, lengths: Tensor, out: Tensor) -> None:
    """Score the tokens of full groups of a batch: q [b, H, d], lengths [b] int32 -> out [b, H, n * g] fp32, unscaled.

    Tokens of other groups get -inf. May be captured in a CUDA graph. Raises ValueError for shapes, dtypes or strides
    that the kernel cannot read.
    """
    (b, num_heads, _), (_, _, num_groups, group, _) = q.shape, codes.shape
    require_whole("lengths", lengths, (b,), torch.int32)
    require_whole("out", out, (b, num_heads, num_groups * group), out.dtype)
    if not takes(q):
        return one_bit_scores_device_ref(q, codes, ranges, lengths, out)
    return _score(q, codes, ranges, lengths, out)


def _score(q: Tensor, codes: Tensor, ranges: Tensor, lengths: Tensor | None, out: Tensor) -> None:
    (b, num_heads, d), (_, num_kv_heads, num_groups, group, size) = q.shape, codes.shape
    require("q", q, (b, num_heads, d))
    require("codes", codes, (b, num_kv_heads, num_groups, group, -(-d // 8)), torch.uint8)
    require("ranges", ranges, (b, num_kv_heads, num_groups, 2, d))
    if codes.stride()[2:] != (group * size, size, 1) or ranges.stride()[2:] != (2 * d, d, 1):
        raise ValueError(f"groups are not one behind the other: strides {codes.stride()} and {ranges.stride()}")
    launch(
        _one_bit_kernel,
        (num_groups, b * num_kv_heads),
        *(q, codes, ranges, lengths, out, *q.stride()[:2], *codes.stride()[:2], *ranges.stride()[:2], num_groups),
        HK=num_kv_heads,
        G=num_heads // num_kv_heads,
        **blocks(group, d),
    )
