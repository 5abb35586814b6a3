"""Kernels of FIER: quantise keys to one bit per channel (section 3.1), and score by them (section 3.3).

Per channel and group of g consecutive tokens:

    z = (max + min) / 2      s = (max - min) / 2      code = +1 where k >= z, else -1      k~ = code * s + z

Shapes: keys [Hk, n, g, d] -> codes [Hk, n, g, ceil(d / 8)] uint8, ranges [Hk, n, 2, d] in the dtype of the keys: s, z.
Bit b of byte j is set where the code of channel 8 * j + b is +1; padding bits are not set. The functions for a batch on
the device have the batch in front: [b, Hk, ...].
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from kvcli.kernels._numba import compiled, flat, prange, run, serves
from kvcli.kernels._triton import (
    interpreted,
    jit,
    launch,
    multiply,
    power_of_two,
    require,
    require_whole,
    rows_at_once,
    takes,
    tl,
)
from kvcli.kernels.group_pooling import GroupScores, Pooling, leave_scores, pool_candidates, pool_queries
from kvcli.kernels.page_table import PagedKV, SlotLayout, candidate_range, candidates, slot_of, slot_of_page

BLOCK_ELEMENTS = 4096  # of keys, or of their bits, held at once per program
WEIGHTS = 2048  # products of queries and scales per warp


def quantise_keys_ref(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Reference of `quantise_keys` in plain torch.

    A code is chosen against the rounded z that is stored, so that it means the nearer of its two possible values.
    """
    dtype = torch.promote_types(keys.dtype, torch.float32)
    low, high = (bound.to(dtype) for bound in torch.aminmax(keys, dim=2))  # [Hk, n, d]
    ranges = torch.stack(((high - low) / 2, (high + low) / 2), 2).to(keys.dtype)
    positive = pad(keys >= ranges[:, :, None, 1], (0, -keys.shape[-1] % 8)).view(torch.uint8)  # [Hk, n, g, 8 * bytes]
    codes = positive[..., ::8].clone()
    for bit in range(1, 8):
        codes |= positive[..., bit::8] << bit
    return codes, ranges


def quantise_filled_group_ref(rows: PagedKV, codes: Tensor, ranges: Tensor) -> None:
    """Reference of `quantise_filled_group`: sequence by sequence."""
    group, size = codes.shape[3], rows.layout.size
    filled = (rows.lengths > 0) & (rows.lengths % group == 0)
    for b, length in [(b, int(rows.lengths[b])) for b in filled.nonzero()[:, 0].tolist()]:
        tokens = torch.arange(length - group, length, device=rows.k.device)
        at = slot_of_page(tokens // size, rows.layout) * size + tokens % size
        index = length // group - 1
        codes[b, :, index : index + 1], ranges[b, :, index : index + 1] = quantise_keys_ref(rows.k[b, :, None, at])


@jit
def _quantise_group(
    keys: tl.tensor,
    stride: tl.tensor,
    token: tl.tensor,
    first: tl.tensor,
    ring: tl.tensor,
    low: tl.tensor,
    codes: tl.tensor,
    ranges: tl.tensor,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_Y: tl.constexpr,
) -> None:
    """Quantise the group of tokens from `token` on, which lie in slots of SIZE rows, `stride` apart."""
    byte, bit = tl.arange(0, BLOCK_Y), tl.arange(0, 8)
    c = byte[:, None] * 8 + bit[None, :]  # [BLOCK_Y, 8]
    high = tl.full([BLOCK_Y, 8], float("-inf"), tl.float32)
    least = tl.full([BLOCK_Y, 8], float("inf"), tl.float32)
    for start in range(0, GROUP, BLOCK_R):
        i = start + tl.arange(0, BLOCK_R)
        row = slot_of((token + i) // SIZE, first, ring, low) * SIZE + (token + i) % SIZE
        inside = (i < GROUP)[:, None, None] & (c < D)[None, :, :]
        some = tl.load(keys + row.to(tl.int64)[:, None, None] * stride + c[None, :, :], mask=inside, other=0.0)
        some = some.to(tl.float32)
        high = tl.maximum(high, tl.max(tl.where(inside, some, float("-inf")), axis=0))
        least = tl.minimum(least, tl.min(tl.where(inside, some, float("inf")), axis=0))
    high, least = tl.where(c < D, high, 0.0), tl.where(c < D, least, 0.0)
    scale = ((high - least) / 2).to(ranges.dtype.element_ty)
    zero = ((high + least) / 2).to(ranges.dtype.element_ty)
    tl.store(ranges + c, scale, mask=c < D)
    tl.store(ranges + D + c, zero, mask=c < D)
    for start in range(0, GROUP, BLOCK_R):
        i = start + tl.arange(0, BLOCK_R)
        row = slot_of((token + i) // SIZE, first, ring, low) * SIZE + (token + i) % SIZE
        inside = (i < GROUP)[:, None, None] & (c < D)[None, :, :]
        some = tl.load(keys + row.to(tl.int64)[:, None, None] * stride + c[None, :, :], mask=inside, other=0.0)
        positive = inside & (some.to(tl.float32) >= zero.to(tl.float32)[None, :, :])
        packed = tl.sum(tl.where(positive, 1 << bit[None, None, :], 0), axis=2)  # [BLOCK_R, BLOCK_Y]
        at = codes + i[:, None] * BYTES + byte[None, :]
        tl.store(at, packed.to(tl.uint8), mask=(i < GROUP)[:, None] & (byte < BYTES)[None, :])


@jit
def _quantise_kernel(
    keys: tl.tensor,
    codes: tl.tensor,
    ranges: tl.tensor,
    keys_head: tl.tensor,
    keys_group: tl.tensor,
    keys_row: tl.tensor,
    num_groups: tl.tensor,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_Y: tl.constexpr,
) -> None:
    group, h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    source = keys + h * keys_head + group * keys_group
    index = h * num_groups + group
    to_codes, to_ranges = codes + index * GROUP * BYTES, ranges + index * 2 * D
    _quantise_group(source, keys_row, 0, GROUP, 1, GROUP, to_codes, to_ranges, 1, GROUP, D, BYTES, BLOCK_R, BLOCK_Y)


@jit
def _quantise_filled_kernel(
    k: tl.tensor,
    lengths: tl.tensor,
    codes: tl.tensor,
    ranges: tl.tensor,
    k_batch: tl.tensor,
    k_head: tl.tensor,
    k_row: tl.tensor,
    num_groups: tl.tensor,
    first: tl.tensor,
    ring: tl.tensor,
    low: tl.tensor,
    HK: tl.constexpr,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_Y: tl.constexpr,
) -> None:
    pair = tl.program_id(0)  # a KV head of a sequence
    b, h = (pair // HK).to(tl.int64), (pair % HK).to(tl.int64)
    length = tl.load(lengths + b)
    if (length == 0) | (length % GROUP != 0):
        return
    source = k + b * k_batch + h * k_head
    index = pair.to(tl.int64) * num_groups + length // GROUP - 1
    to_codes, to_ranges = codes + index * GROUP * BYTES, ranges + index * 2 * D
    token = length - GROUP
    _quantise_group(
        source, k_row, token, first, ring, low, to_codes, to_ranges, SIZE, GROUP, D, BYTES, BLOCK_R, BLOCK_Y
    )


def quantise_keys(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise and pack full groups: keys [Hk, n, g, d], any strides but the last; return codes and ranges.

    Can be captured in a CUDA graph.
    """
    num_kv_heads, num_groups, group, d = keys.shape
    if not takes(keys) or keys.numel() == 0:
        return quantise_keys_ref(keys)
    require("keys", keys, keys.shape)
    codes = torch.empty(num_kv_heads, num_groups, group, -(-d // 8), dtype=torch.uint8, device=keys.device)
    ranges = torch.empty(num_kv_heads, num_groups, 2, d, dtype=keys.dtype, device=keys.device)
    sizes = (*keys.stride()[:3], num_groups)
    launch(_quantise_kernel, (num_groups, num_kv_heads), keys, codes, ranges, *sizes, **blocks(group, d))
    return codes, ranges


def quantise_filled_group(rows: PagedKV, codes: Tensor, ranges: Tensor) -> None:
    """Quantise the newest group of every sequence whose length, newest token included, is a multiple of the group size.

    The group's tokens must still lie in the rows that they were appended to. codes [b, Hk, n, g, bytes] and ranges [b,
    Hk, n, 2, d] are written at that group and nowhere else. Can be captured in a CUDA graph. Raises ValueError for
    shapes, dtypes or strides that the kernel cannot read.
    """
    (b, num_kv_heads, _, d), layout = rows.k.shape, rows.layout
    rows.check()
    num_groups, group = codes.shape[2:4]
    require_whole("codes", codes, (b, num_kv_heads, num_groups, group, -(-d // 8)), torch.uint8)
    require_whole("ranges", ranges, (b, num_kv_heads, num_groups, 2, d), rows.k.dtype)
    if not takes(rows.k):
        return quantise_filled_group_ref(rows, codes, ranges)
    launch(
        _quantise_filled_kernel,
        (b * num_kv_heads,),
        *(rows.k, rows.lengths, codes, ranges, *rows.k.stride()[:3], num_groups, layout.first, layout.ring, layout.low),
        HK=num_kv_heads,
        SIZE=layout.size,
        **blocks(group, d),
    )
    return None


def blocks(group: int, d: int) -> dict[str, int]:
    """Choose the compile-time constants of a kernel that iterates over a group of tokens."""
    size = -(-d // 8)
    block_y = power_of_two(size)
    block_r = rows_at_once(group, 8 * block_y, BLOCK_ELEMENTS)
    return {"GROUP": group, "D": d, "BYTES": size, "BLOCK_R": block_r, "BLOCK_Y": block_y}


GROUPS = 16  # groups per thread at once, in the CPU loop


@cache
def _loop(d: int, size: int, queries: int) -> Any:
    """Make the loop for a head size, a group size and a number of queries; see `gemv` for what it may close over."""
    width = (d + 7) // 8

    @compiled
    def one_bit_scores_cpu(q: Any, codes: Any, head: int, ranges: Any, ranges_head: int, out: Any) -> None:
        heads, n = len(q), out.shape[2] // size
        pieces = (n + GROUPS - 1) // GROUPS
        for piece in prange(heads * pieces):
            h, first = piece // pieces, piece % pieces * GROUPS
            bits, sums = np.empty(size, np.int32), np.empty((queries, size), np.float32)
            weights, none = np.zeros((queries, 8 * width), np.float32), np.float32(0)
            for group in range(first, min(first + GROUPS, n)):
                scale = ranges[h * ranges_head + 2 * group * d :][:d]
                zero = ranges[h * ranges_head + (2 * group + 1) * d :][:d]
                for g in range(queries):
                    base = np.float32(0)
                    for c in range(d):
                        weights[g, c] = np.float32(2) * q[h, g, c] * scale[c]
                        base += q[h, g, c] * (zero[c] - scale[c])
                    sums[g] = base
                at = np.uint64(h * head + group * size * width)
                for byte in range(width):
                    for t in range(size):
                        bits[t] = codes[at + np.uint64(t * width + byte)]
                    for g in range(queries):
                        w = weights[g, 8 * byte :]
                        w0, w1, w2, w3, w4, w5, w6, w7 = w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]
                        for t in range(size):
                            b = bits[t]
                            x = w0 if b & 1 else none
                            x += w1 if b & 2 else none
                            x += w2 if b & 4 else none
                            x += w3 if b & 8 else none
                            x += w4 if b & 16 else none
                            x += w5 if b & 32 else none
                            x += w6 if b & 64 else none
                            x += w7 if b & 128 else none
                            sums[g, t] += x
                for g in range(queries):
                    for t in range(size):
                        out[h, g, group * size + t] = sums[g, t]

    return one_bit_scores_cpu


def suits(q: Tensor, codes: Tensor, ranges: Tensor) -> bool:
    """Return whether `one_bit_scores_cpu` can score these: on the CPU, groups contiguous."""
    size, width = codes.shape[2:]
    together = codes.stride()[1:] == (size * width, width, 1) and ranges.stride()[1:] == (2 * q.shape[2], q.shape[2], 1)
    return together and serves(q, ranges)


def one_bit_scores_cpu(q: Tensor, codes: Tensor, ranges: Tensor) -> Tensor:
    """Score every token of every group on the CPU, unscaled; see `one_bit_scores`."""
    (heads, queries, d), (groups, size) = q.shape, codes.shape[1:3]
    out, loop = q.new_empty(heads, queries, groups * size), _loop(d, size, queries)
    run(loop, out.numel(), q.contiguous(), flat(codes), codes.stride(0), flat(ranges), ranges.stride(0), out)
    return out


BLOCK_BITS = 1 << 17  # bits expanded to fp32 at once: 512 KiB
BITS = (np.arange(256)[:, None] >> np.arange(8) & 1).astype(np.float32)  # the bits of every byte value


def one_bit_scores_ref(q: Tensor, codes: Tensor, ranges: Tensor) -> Tensor:
    """Reference of `one_bit_scores` in plain torch.

    Bits are expanded one block of groups at a time, so that they fit into a CPU's cache.
    """
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
    if codes.device.type == "cpu":  # torch cannot index by bytes, and widening them takes twice as long
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
    """Reference of `one_bit_scores_device`: score everything, then mask what is not a candidate."""
    (b, num_kv_heads), (_, _, d) = codes.shape[:2], q.shape
    wide = q.to(torch.promote_types(q.dtype, torch.float32))
    queries = pool_queries(wide.reshape(b * num_kv_heads, -1, d), pooling)
    scores = scale * one_bit_scores_ref(queries, codes.flatten(0, 1), ranges.flatten(0, 1))
    allowed = candidates(lengths, layout, out.shape[2])
    pool_candidates(scores.view(b, num_kv_heads, -1, out.shape[2]), pooling, allowed, out, heads)


@jit
def _by_bit(x: tl.tensor, BLOCK_Y: tl.constexpr, BLOCK_G: tl.constexpr) -> Any:
    """Take numbers of all channels [BLOCK_Y, BLOCK_G, 8] apart: for each bit those of its channels.

    They are read 16 bytes at a time, where the channels of a bit would be read number by number.
    """
    even, odd = tl.split(tl.reshape(x, [BLOCK_Y, BLOCK_G, 2, 2, 2]))
    at_0, at_2 = tl.split(even)
    at_1, at_3 = tl.split(odd)
    b0, b4 = tl.split(at_0)
    b2, b6 = tl.split(at_2)
    b1, b5 = tl.split(at_1)
    b3, b7 = tl.split(at_3)
    return b0, b1, b2, b3, b4, b5, b6, b7


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
    WIDE: tl.constexpr,
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
    byte, bit, row = tl.arange(0, BLOCK_Y), tl.arange(0, 8), tl.arange(0, BLOCK_G)
    ranges += b * ranges_batch + h * ranges_head + group.to(tl.int64) * 2 * D
    codes += b * codes_batch + h * codes_head + group.to(tl.int64) * GROUP * BYTES
    c = byte[:, None, None] * 8 + bit[None, None, :]  # [BLOCK_Y, 1, 8]
    at = q + b * q_batch + (h * G + row)[None, :, None] * q_head + c
    query = tl.load(at, mask=(row < G)[None, :, None] & (c < D), other=0.0).to(tl.float32)  # [BLOCK_Y, BLOCK_G, 8]
    if WHAT == "q":
        if HOW == "max":
            pooled = tl.max(tl.where((row < G)[None, :, None], query, float("-inf")), axis=1)
        else:
            pooled = tl.sum(query, axis=1) / G
        query = tl.where((row == 0)[None, :, None], pooled[:, None, :], 0.0)
    scale = tl.load(ranges + c, mask=c < D, other=0.0).to(tl.float32)
    zero = tl.load(ranges + D + c, mask=c < D, other=0.0).to(tl.float32)
    base = tl.sum(tl.sum(query * (zero - scale), axis=2), axis=0)
    # Weights made of half precisions are the sum of two numbers of bf16, which keep 16 bits; others of three. Each is
    # 2^63 times as large, for a bit that is moved into the exponent of bf16 then needs no further operation.
    weights = 2.0**64 * query * scale
    first = weights.to(tl.bfloat16)
    rest = weights - first.to(tl.float32)
    second = rest.to(tl.bfloat16)
    firsts, seconds = _by_bit(first, BLOCK_Y, BLOCK_G), _by_bit(second, BLOCK_Y, BLOCK_G)
    if q.dtype.element_ty == tl.float32:
        thirds = _by_bit((rest - second.to(tl.float32)).to(tl.bfloat16), BLOCK_Y, BLOCK_G)
    blocks_of = tl.cdiv(GROUP, BLOCK_R)
    for start in range(0, GROUP, BLOCK_R):
        i = start + tl.arange(0, BLOCK_R)
        token = group * GROUP + i
        candidate = (i < GROUP) & (token >= low) & (token < high)
        there = candidate[:, None] & (byte < BYTES)[None, :]
        packed = tl.load(codes + i[:, None] * BYTES + byte[None, :], mask=there, other=0).to(tl.int32)
        scores = tl.zeros([BLOCK_R, BLOCK_G], tl.float32)
        for one in tl.static_range(8):  # one channel of each byte: bits stay where their bytes are
            bits = ((packed << (13 - one)) & 0x2000).to(tl.int16).to(tl.bfloat16, bitcast=True)  # 0 or 2^-63
            scores += multiply(bits, firsts[one], WIDE)
            scores += multiply(bits, seconds[one], WIDE)
            if q.dtype.element_ty == tl.float32:
                scores += multiply(bits, thirds[one], WIDE)
        scores = tl.trans(factor * (scores + base[None, :]))
        block = group * blocks_of + start // BLOCK_R
        here = tl.where(i < GROUP, token, num_tokens)
        num_blocks = num_groups * blocks_of
        # fmt: off
        leave_scores(scores, candidate, pair, here, block, num_tokens, num_blocks, out, tops, totals,
                     G, HOW, WHAT, BLOCK_G)
        # fmt: on


def _score_blocks(group: int, d: int) -> dict[str, int]:
    """Choose the compile-time constants of scoring: at least 16 rows and bytes, as matrix products need them."""
    chosen = blocks(group, d)
    return chosen | {"BLOCK_R": max(16, chosen["BLOCK_R"]), "BLOCK_Y": max(16, chosen["BLOCK_Y"])}


def one_bit_scores(q: Tensor, codes: Tensor, ranges: Tensor) -> Tensor:
    """Score every token of every group: q [Hk, G, d] -> [Hk, G, n * g] in at least fp32, unscaled."""
    if suits(q, codes, ranges):
        return one_bit_scores_cpu(q, codes, ranges)
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

    heads [b, Hk] bool: scores of other KV heads are left as they are. Can be captured in a CUDA graph. Raises
    ValueError for shapes, dtypes or strides that the kernel cannot read.
    """
    (b, num_heads, d), (_, num_kv_heads, num_groups, group, _) = q.shape, codes.shape
    require_whole("lengths", lengths, (b,), torch.int32)
    require_whole("out", out, (b, num_kv_heads, num_groups * group), out.dtype)
    if heads is not None:
        require_whole("heads", heads, (b, num_kv_heads), torch.bool)
    if not takes(q):
        return one_bit_scores_device_ref(q, codes, ranges, lengths, layout, scale, pooling, out, heads)
    num_blocks = num_groups * -(-group // _score_blocks(group, d)["BLOCK_R"])
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
    chosen, block_g = _score_blocks(group, d), max(8, power_of_two(num_heads // num_kv_heads))
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
        WIDE=interpreted(),
        BLOCK_G=block_g,
        **chosen,
        warps=max(2 if what == "q" else 1, min(8, 8 * chosen["BLOCK_Y"] * block_g // WEIGHTS)),
    )
