"""Keys as one bit a channel, and scores from these bits (FIER, sections 3.1 and 3.3).

Per channel and group of g consecutive tokens:

    z = (max + min) / 2      s = (max - min) / 2      code = +1 where k >= z, else -1      k~ = code * s + z

so that a score needs the codes alone, with the query scaled once a group instead of the keys once a token:

    q . k~_t = sum_c (q_c s_c) code_tc + q . z
             = 2 * sum of q_c s_c over the channels whose bit is set + q . (z - s)

Shapes: keys [Hk, n, g, d] -> codes [Hk, n, g, ceil(d / 8)] uint8, ranges [Hk, n, 2, d] in the dtype of the keys: s, z.
Bit b of byte j is set where the code of channel 8 * j + b is +1; the bits that stand for no channel are not set. The
functions for a batch on the device have it in front: [b, Hk, ...].
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvcli.kernels._triton import jit, launch, power_of_two, require, require_whole, rows_at_once, takes, tl
from kvcli.kernels.slots import Rows, slot_of, slot_of_page

BLOCK_ELEMENTS = 4096  # of the keys, or of their bits, that a program holds at once


def quantise_keys_ref(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise and pack in plain torch.

    The codes are taken about the z that is stored, so that each is the nearer one of the two values it can mean.
    """
    low, high = (bound.to(_accumulating(keys)) for bound in torch.aminmax(keys, dim=2))  # [Hk, n, d]
    ranges = torch.stack(((high - low) / 2, (high + low) / 2), 2).to(keys.dtype)
    positive = pad(keys >= ranges[:, :, None, 1], (0, -keys.shape[-1] % 8)).view(torch.uint8)  # [Hk, n, g, 8 * bytes]
    codes = positive[..., ::8].clone()
    for bit in range(1, 8):
        codes |= positive[..., bit::8] << bit
    return codes, ranges


def quantise_filled_group_ref(rows: Rows, codes: Tensor, ranges: Tensor) -> None:
    """Quantise sequence by sequence."""
    group, size = codes.shape[3], rows.layout.size
    filled = (rows.lengths > 0) & (rows.lengths % group == 0)
    for b, length in [(b, int(rows.lengths[b])) for b in filled.nonzero()[:, 0].tolist()]:
        tokens = torch.arange(length - group, length, device=rows.k.device)
        at = slot_of_page(tokens // size, rows.layout) * size + tokens % size
        index = length // group - 1
        codes[b, :, index : index + 1], ranges[b, :, index : index + 1] = quantise_keys_ref(rows.k[b, :, None, at])


def one_bit_scores_ref(q: Tensor, codes: Tensor, ranges: Tensor) -> Tensor:
    """Score in plain torch, one plane of bits at a time: an eighth of what the quantised keys would take."""
    dtype = _accumulating(q)
    queries = q.to(dtype)[:, None]  # [Hk, 1, G, d]
    scale, zero = ranges.to(dtype)[:, :, :, None].unbind(2)  # [Hk, n, 1, d]
    scaled = pad(queries * scale, (0, -q.shape[-1] % 8))  # [Hk, n, G, 8 * bytes]
    scores = (queries * (zero - scale)).sum(-1)[..., None]  # [Hk, n, G, 1]
    for bit in range(8):
        plane = ((codes >> bit) & 1).to(dtype)  # [Hk, n, g, bytes]
        scores = scores + 2 * scaled[..., bit::8] @ plane.transpose(2, 3)
    return scores.transpose(1, 2).flatten(2)  # [Hk, n, G, g] before


def one_bit_scores_device_ref(q: Tensor, codes: Tensor, ranges: Tensor, lengths: Tensor, out: Tensor) -> None:
    """Score sequence by sequence."""
    out.fill_(float("-inf"))
    for b, groups in enumerate((lengths // codes.shape[3]).tolist()):
        heads = q[b].view(codes.shape[1], -1, q.shape[2])  # [Hk, G, d]
        scores = one_bit_scores_ref(heads, codes[b, :, :groups], ranges[b, :, :groups])
        out[b, :, : scores.shape[2]] = scores.flatten(0, 1)


def _accumulating(like: Tensor) -> torch.dtype:
    return torch.promote_types(like.dtype, torch.float32)


@jit
def _quantise_group(
    keys: tl.tensor,
    stride: tl.tensor,
    token: tl.tensor,
    first: tl.tensor,
    ring: tl.tensor,
    codes: tl.tensor,
    ranges: tl.tensor,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_Y: tl.constexpr,
) -> None:
    """Quantise the group of tokens from `token` on, which lie in slots of SIZE rows `stride` apart."""
    byte, bit = tl.arange(0, BLOCK_Y), tl.arange(0, 8)
    c = byte[:, None] * 8 + bit[None, :]  # [BLOCK_Y, 8]
    high = tl.full([BLOCK_Y, 8], float("-inf"), tl.float32)
    low = tl.full([BLOCK_Y, 8], float("inf"), tl.float32)
    for start in range(0, GROUP, BLOCK_R):
        i = start + tl.arange(0, BLOCK_R)
        row = slot_of((token + i) // SIZE, first, ring) * SIZE + (token + i) % SIZE
        inside = (i < GROUP)[:, None, None] & (c < D)[None, :, :]
        some = tl.load(keys + row.to(tl.int64)[:, None, None] * stride + c[None, :, :], mask=inside, other=0.0)
        some = some.to(tl.float32)
        high = tl.maximum(high, tl.max(tl.where(inside, some, float("-inf")), axis=0))
        low = tl.minimum(low, tl.min(tl.where(inside, some, float("inf")), axis=0))
    high, low = tl.where(c < D, high, 0.0), tl.where(c < D, low, 0.0)
    scale = ((high - low) / 2).to(ranges.dtype.element_ty)
    zero = ((high + low) / 2).to(ranges.dtype.element_ty)
    tl.store(ranges + c, scale, mask=c < D)
    tl.store(ranges + D + c, zero, mask=c < D)
    for start in range(0, GROUP, BLOCK_R):
        i = start + tl.arange(0, BLOCK_R)
        row = slot_of((token + i) // SIZE, first, ring) * SIZE + (token + i) % SIZE
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
    _quantise_group(source, keys_row, 0, GROUP, 1, to_codes, to_ranges, 1, GROUP, D, BYTES, BLOCK_R, BLOCK_Y)


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
    _quantise_group(source, k_row, token, first, ring, to_codes, to_ranges, SIZE, GROUP, D, BYTES, BLOCK_R, BLOCK_Y)


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


def quantise_keys(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise and pack full groups: keys [Hk, n, g, d], any strides but the last -> codes, ranges.

    May be captured in a CUDA graph.
    """
    num_kv_heads, num_groups, group, d = keys.shape
    if not takes(keys) or keys.numel() == 0:
        return quantise_keys_ref(keys)
    require("keys", keys, keys.shape)
    codes = torch.empty(num_kv_heads, num_groups, group, -(-d // 8), dtype=torch.uint8, device=keys.device)
    ranges = torch.empty(num_kv_heads, num_groups, 2, d, dtype=keys.dtype, device=keys.device)
    sizes = (*keys.stride()[:3], num_groups)
    launch(_quantise_kernel, (num_groups, num_kv_heads), keys, codes, ranges, *sizes, **_blocks(group, d))
    return codes, ranges


def quantise_filled_group(rows: Rows, codes: Tensor, ranges: Tensor) -> None:
    """Quantise the group of every sequence whose length is a whole number of groups; its newest token is appended.

    Its tokens must still lie where they came as the newest ones. codes [b, Hk, n, g, bytes] and ranges
    [b, Hk, n, 2, d] are written at that group and nowhere else. May be captured in a CUDA graph. Raises ValueError for
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
        *(rows.k, rows.lengths, codes, ranges, *rows.k.stride()[:3], num_groups, layout.first, layout.ring),
        HK=num_kv_heads,
        SIZE=layout.size,
        **_blocks(group, d),
    )
    return None


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
        **_blocks(group, d),
    )


def _blocks(group: int, d: int) -> dict[str, int]:
    size = -(-d // 8)
    block_y = power_of_two(size)
    block_r = rows_at_once(group, 8 * block_y, BLOCK_ELEMENTS)
    return {"GROUP": group, "D": d, "BYTES": size, "BLOCK_R": block_r, "BLOCK_Y": block_y}
