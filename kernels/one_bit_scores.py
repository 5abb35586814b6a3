"""Scores of keys that are kept as one bit a channel (FIER, section 3.3): see `kvcli.kernels.one_bit_keys`.

A score needs the codes alone, with the query scaled once a group instead of the keys once a token:

    q . k~_t = sum_c (q_c s_c) code_tc + q . z
             = 2 * sum of q_c s_c over the channels whose bit is set + q . (z - s)

Shapes: q [Hk, G, d], codes [Hk, n, g, bytes], ranges [Hk, n, 2, d] -> scores [Hk, G, n * g]. The function for a batch
on the device has it in front, all query heads in a row, lengths [b] that say which tokens are candidates, and pools
over the group.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvcli.kernels import one_bit_rows
from kvcli.kernels._triton import jit, launch, power_of_two, require, require_whole, takes, tl
from kvcli.kernels.group_pooling import GroupScores, Pooling, leave_scores, pool_candidates, pool_queries
from kvcli.kernels.one_bit_keys import blocks
from kvcli.kernels.slot_layout import SlotLayout, candidate_range, candidates

BLOCK_BITS = 1 << 17  # that are numbers at once: 512 KiB of them
BITS = (np.arange(256)[:, None] >> np.arange(8) & 1).astype(np.float32)  # of every byte


def one_bit_scores_ref(q: Tensor, codes: Tensor, ranges: Tensor) -> Tensor:
    """Score in plain torch; bits become numbers a block of groups at a time, which a processor's cache can hold."""
    (num_kv_heads, heads, d), (num_groups, group) = q.shape, codes.shape[1:3]
    dtype = torch.promote_types(q.dtype, torch.float32)
    queries, (scale, zero) = q.to(dtype), ranges.to(dtype).unbind(2)  # scale [Hk, n, d]
    weights = 2 * queries[:, None] * scale[:, :, None]  # [Hk, n, G, d]
    base = ((zero - scale) @ queries.transpose(1, 2))[..., None]  # [Hk, n, G, 1]
    scores = weights.new_empty(num_kv_heads, num_groups, heads, group)
    at_once = max(1, BLOCK_BITS // (group * d))
    for head in range(num_kv_heads):
        for start in range(0, num_groups, at_once):
            part = (head, slice(start, start + at_once))
            bits = _bits(codes[part], d).to(dtype)  # [groups of the block, g, d]
            torch.baddbmm(base[part], weights[part], bits.transpose(1, 2), out=scores[part])
    return scores.transpose(1, 2).flatten(2)


def _bits(codes: Tensor, d: int) -> Tensor:
    """Unpack codes [..., bytes] to zeros and ones [..., d] in fp32."""
    if codes.device.type == "cpu":  # torch has no lookup by bytes; by one that widens them first it takes twice as long
        return torch.from_numpy(BITS.take(codes.numpy(), axis=0, mode="clip")).flatten(-2)[..., :d]
    return ((codes[..., None] >> torch.arange(8, device=codes.device)) & 1).flatten(-2)[..., :d].float()


def one_bit_scores_device_ref(
    q: Tensor,
    codes: Tensor,
    ranges: Tensor,
    lengths: Tensor,
    layout: SlotLayout,
    scale: float,
    pooling: Pooling,
    out: Tensor,
    heads: Tensor | None = None,
) -> None:
    """Score everything, then leave out what is no candidate."""
    (b, num_kv_heads), (_, _, d) = codes.shape[:2], q.shape
    wide = q.to(torch.promote_types(q.dtype, torch.float32))
    queries = pool_queries(wide.reshape(b * num_kv_heads, -1, d), pooling)
    scores = scale * one_bit_scores_ref(queries, codes.flatten(0, 1), ranges.flatten(0, 1))
    allowed = candidates(lengths, layout, out.shape[2])
    pool_candidates(scores.view(b, num_kv_heads, -1, out.shape[2]), pooling, allowed, out, heads)


@jit
def _one_bit_kernel(
    q: tl.tensor,
    codes: tl.tensor,
    ranges: tl.tensor,
    lengths: tl.tensor,
    heads: tl.tensor,
    out: tl.tensor,
    tops: tl.tensor,
    totals: tl.tensor,
    q_batch: tl.tensor,
    q_head: tl.tensor,
    codes_batch: tl.tensor,
    codes_head: tl.tensor,
    ranges_batch: tl.tensor,
    ranges_head: tl.tensor,
    num_groups: tl.tensor,
    sink: tl.tensor,
    window: tl.tensor,
    factor: tl.tensor,
    HK: tl.constexpr,
    G: tl.constexpr,
    SIZE: tl.constexpr,
    TOGETHER: tl.constexpr,
    HOW: tl.constexpr,
    WHAT: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_Y: tl.constexpr,
) -> None:
    group, pair = tl.program_id(0), tl.program_id(1)  # a group of tokens, a KV head of a sequence
    if heads is not None:
        if tl.load(heads + pair) == 0:
            return
    b, h = (pair // HK).to(tl.int64), (pair % HK).to(tl.int64)
    num_tokens = num_groups * GROUP
    low, high, _ = candidate_range(lengths, b, num_tokens, sink, window, SIZE, TOGETHER)
    byte, bit = tl.arange(0, BLOCK_Y), tl.arange(0, 8)
    c = byte[:, None] * 8 + bit[None, :]  # [BLOCK_Y, 8]
    at = ranges + b * ranges_batch + h * ranges_head + group.to(tl.int64) * 2 * D + c
    scale = tl.load(at, mask=c < D, other=0.0).to(tl.float32)
    zero = tl.load(at + D, mask=c < D, other=0.0).to(tl.float32)
    source = codes + b * codes_batch + h * codes_head + group.to(tl.int64) * GROUP * BYTES
    queries = q + b * q_batch + h * G * q_head + c
    row = tl.arange(0, BLOCK_G)
    blocks_of = tl.cdiv(GROUP, BLOCK_R)
    for start in range(0, GROUP, BLOCK_R):
        i = start + tl.arange(0, BLOCK_R)
        token = group * GROUP + i
        candidate = (i < GROUP) & (token >= low) & (token < high)
        packed = tl.load(
            source + i[:, None] * BYTES + byte[None, :], mask=candidate[:, None] & (byte < BYTES)[None, :], other=0
        ).to(tl.int32)
        bits = (packed[:, :, None] >> bit[None, None, :]) & 1  # [BLOCK_R, BLOCK_Y, 8]
        scores = tl.zeros([BLOCK_G, BLOCK_R], tl.float32)
        pooled = tl.full([BLOCK_Y, 8], float("-inf") if HOW == "max" else 0.0, tl.float32)
        for g in range(G):
            query = tl.load(queries + g * q_head, mask=c < D, other=0.0).to(tl.float32)
            if WHAT == "q":
                pooled = tl.maximum(pooled, query) if HOW == "max" else pooled + query / G
            else:
                scores = tl.where((row == g)[:, None], _one_bit(query, bits, scale, zero)[None, :], scores)
        if WHAT == "q":
            scores = tl.where((row == 0)[:, None], _one_bit(pooled, bits, scale, zero)[None, :], scores)
        block = group * blocks_of + start // BLOCK_R
        here = tl.where(i < GROUP, token, num_tokens)
        num_blocks = num_groups * blocks_of
        scores *= factor
        # fmt: off
        leave_scores(scores, candidate, pair, here, block, num_tokens, num_blocks, out, tops, totals,
                     G, HOW, WHAT, BLOCK_G)
        # fmt: on


@jit
def _one_bit(query: tl.tensor, bits: tl.tensor, scale: tl.tensor, zero: tl.tensor) -> tl.tensor:
    """Score tokens: query, scale and zero [Y, 8], bits [N, Y, 8] -> [N]."""
    base = tl.sum(tl.sum(query * (zero - scale), axis=1), axis=0)
    picked = tl.where(bits == 1, (query * scale)[None, :, :], 0.0)
    return 2.0 * tl.sum(tl.sum(picked, axis=2), axis=1) + base


def one_bit_scores(q: Tensor, codes: Tensor, ranges: Tensor) -> Tensor:
    """Score every token of every group: q [Hk, G, d] -> [Hk, G, n * g] in at least fp32, unscaled."""
    if one_bit_rows.suits(q, codes, ranges):
        return one_bit_rows.one_bit_rows(q, codes, ranges)
    if not takes(q) or codes.numel() == 0:
        return one_bit_scores_ref(q, codes, ranges)
    (num_kv_heads, groups, d), tokens = q.shape, codes.shape[1] * codes.shape[2]
    out = torch.empty(num_kv_heads, groups, tokens, dtype=torch.float32, device=q.device)
    everything = SlotLayout.everything(tokens)
    _score(q.reshape(1, -1, d), codes[None], ranges[None], None, everything, 1.0, "max", "s", (out, None, None), None)
    return out


def one_bit_scores_device(
    q: Tensor,
    codes: Tensor,
    ranges: Tensor,
    lengths: Tensor,
    layout: SlotLayout,
    scale: float,
    pooling: Pooling,
    out: Tensor,
    heads: Tensor | None = None,
) -> None:
    """Score the candidates of a batch: q [b, H, d] -> out [b, Hk, n * g] fp32, -inf elsewhere.

    heads [b, Hk] bool: the others' scores are left as they are. May be captured in a CUDA graph. Raises ValueError for
    shapes, dtypes or strides that the kernel cannot read.
    """
    (b, num_heads, d), (_, num_kv_heads, num_groups, group, _) = q.shape, codes.shape
    require_whole("lengths", lengths, (b,), torch.int32)
    require_whole("out", out, (b, num_kv_heads, num_groups * group), out.dtype)
    if heads is not None:
        require_whole("heads", heads, (b, num_kv_heads), torch.bool)
    if not takes(q):
        return one_bit_scores_device_ref(q, codes, ranges, lengths, layout, scale, pooling, out, heads)
    num_blocks = num_groups * -(-group // blocks(group, d)["BLOCK_R"])
    left = GroupScores((b, num_kv_heads, num_heads // num_kv_heads, num_groups * group), pooling, num_blocks, out)
    parts = left.values, left.tops, left.totals
    _score(q, codes, ranges, lengths, layout, scale, left.how, left.what, parts, heads)
    left.pool(lengths, layout, heads)
    return None


def _score(
    q: Tensor,
    codes: Tensor,
    ranges: Tensor,
    lengths: Tensor | None,
    layout: SlotLayout,
    scale: float,
    how: str,
    what: str,
    out: tuple[Tensor, Tensor | None, Tensor | None],
    heads: Tensor | None,
) -> None:
    (b, num_heads, d), (_, num_kv_heads, num_groups, group, size) = q.shape, codes.shape
    require("q", q, (b, num_heads, d))
    require("codes", codes, (b, num_kv_heads, num_groups, group, -(-d // 8)), torch.uint8)
    require("ranges", ranges, (b, num_kv_heads, num_groups, 2, d))
    if codes.stride()[2:] != (group * size, size, 1) or ranges.stride()[2:] != (2 * d, d, 1):
        raise ValueError(f"groups are not one behind the other: strides {codes.stride()} and {ranges.stride()}")
    launch(
        _one_bit_kernel,
        (num_groups, b * num_kv_heads),
        *(q, codes, ranges, lengths, heads, *out, *q.stride()[:2], *codes.stride()[:2], *ranges.stride()[:2]),
        *(num_groups, layout.sink, layout.window, scale),
        HK=num_kv_heads,
        G=num_heads // num_kv_heads,
        SIZE=layout.size,
        TOGETHER=layout.group,
        HOW=how,
        WHAT=what,
        BLOCK_G=power_of_two(num_heads // num_kv_heads),
        **blocks(group, d),
    )
