"""Keys as one bit a channel (FIER, section 3.1).

Per channel and group of g consecutive tokens:

    z = (max + min) / 2      s = (max - min) / 2      code = +1 where k >= z, else -1      k~ = code * s + z

Shapes: keys [Hk, n, g, d] -> codes [Hk, n, g, ceil(d / 8)] uint8, ranges [Hk, n, 2, d] in the dtype of the keys: s, z.
Bit b of byte j is set where the code of channel 8 * j + b is +1; the bits that stand for no channel are not set. The
function for a batch on the device has it in front: [b, Hk, ...].
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvcli.kernels._triton import jit, launch, power_of_two, require, require_whole, rows_at_once, takes, tl
from kvcli.kernels.slot_layout import PagedKV, slot_of, slot_of_page

BLOCK_ELEMENTS = 4096  # of the keys, or of their bits, that a program holds at once


def quantise_keys_ref(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise and pack in plain torch.

    The codes are taken about the z that is stored, so that each is the nearer one of the two values it can mean.
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
    """Quantise sequence by sequence."""
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
    """Quantise the group of tokens from `token` on, which lie in slots of SIZE rows `stride` apart."""
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
    launch(_quantise_kernel, (num_groups, num_kv_heads), keys, codes, ranges, *sizes, **blocks(group, d))
    return codes, ranges


def quantise_filled_group(rows: PagedKV, codes: Tensor, ranges: Tensor) -> None:
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
        *(rows.k, rows.lengths, codes, ranges, *rows.k.stride()[:3], num_groups, layout.first, layout.ring, layout.low),
        HK=num_kv_heads,
        SIZE=layout.size,
        **blocks(group, d),
    )
    return None


def blocks(group: int, d: int) -> dict[str, int]:
    """Choose the constants of a kernel that goes through a group of tokens, some at a time."""
    size = -(-d // 8)
    block_y = power_of_two(size)
    block_r = rows_at_once(group, 8 * block_y, BLOCK_ELEMENTS)
    return {"GROUP": group, "D": d, "BYTES": size, "BLOCK_R": block_r, "BLOCK_Y": block_y}
