"""Keys as one bit a channel (FIER, section 3.1).

Per channel and group of g consecutive tokens:

    z = (max + min) / 2      s = (max - min) / 2      code = +1 where k >= z, else -1      k~ = code * s + z

Shapes: keys [Hk, n, g, d] -> codes [Hk, n, g, ceil(d / 8)] uint8, ranges [Hk, n, 2, d] in the dtype of the keys: s, z.
Bit b of byte j is set where the code of channel 8 * j + b is +1; the bits that stand for no channel are not set.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvcli.kernels._triton import jit, launch, power_of_two, require, rows_at_once, takes, tl

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
    keys += h * keys_head + group * keys_group
    codes += (h * num_groups + group) * GROUP * BYTES
    ranges += (h * num_groups + group) * 2 * D
    byte, bit = tl.arange(0, BLOCK_Y), tl.arange(0, 8)
    c = byte[:, None] * 8 + bit[None, :]  # [BLOCK_Y, 8]
    high = tl.full([BLOCK_Y, 8], float("-inf"), tl.float32)
    low = tl.full([BLOCK_Y, 8], float("inf"), tl.float32)
    for start in range(0, GROUP, BLOCK_R):
        i = start + tl.arange(0, BLOCK_R)
        inside = (i < GROUP)[:, None, None] & (c < D)[None, :, :]
        some = tl.load(keys + i.to(tl.int64)[:, None, None] * keys_row + c[None, :, :], mask=inside, other=0.0)
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
        inside = (i < GROUP)[:, None, None] & (c < D)[None, :, :]
        some = tl.load(keys + i.to(tl.int64)[:, None, None] * keys_row + c[None, :, :], mask=inside, other=0.0)
        positive = inside & (some.to(tl.float32) >= zero.to(tl.float32)[None, :, :])
        packed = tl.sum(tl.where(positive, 1 << bit[None, None, :], 0), axis=2)  # [BLOCK_R, BLOCK_Y]
        at = codes + i[:, None] * BYTES + byte[None, :]
        tl.store(at, packed.to(tl.uint8), mask=(i < GROUP)[:, None] & (byte < BYTES)[None, :])


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


def blocks(group: int, d: int) -> dict[str, int]:
    """Choose the constants of a kernel that goes through a group of tokens, some at a time."""
    size = -(-d // 8)
    block_y = power_of_two(size)
    block_r = rows_at_once(group, 8 * block_y, BLOCK_ELEMENTS)
    return {"GROUP": group, "D": d, "BYTES": size, "BLOCK_R": block_r, "BLOCK_Y": block_y}
