"""Per-channel bounds of the keys of a page (Quest, section 3.2; FreeKV, section 3.2), or a cuboid about them (ArkVale).

    bounds    max_t k_t and min_t k_t
    cuboid    c + r and c - r      c = (max + min) / 2      r = mean_t |c - k_t|

The cuboid is narrower than the bounds: a single outlier moves its centre, but hardly its width.

Shapes: keys [Hk, n, p, d] -> summary [Hk, n, 2, d]; [:, :, 0] is the upper bound, [:, :, 1] the lower.
`kvcli.kernels.append` does it for the page that the newest token has filled.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.kernels._triton import jit, launch, power_of_two, require, rows_at_once, takes, tl

BLOCK_ELEMENTS = 4096  # of the keys that a program holds at once


def page_summary_ref(keys: Tensor) -> Tensor:
    """Plain torch."""
    # Not torch.aminmax, which takes five times as long on a CPU.
    return torch.stack((keys.amax(2), keys.amin(2)), dim=2)


def page_cuboid(keys: Tensor) -> Tensor:
    """Make the cuboids of full pages, in the dtype of the keys."""
    low, high = (bound.to(torch.promote_types(keys.dtype, torch.float32)) for bound in (keys.amin(2), keys.amax(2)))
    centre = (high + low) / 2  # [Hk, n, d]
    radius = (keys - centre[:, :, None]).abs().mean(2)
    return torch.stack((centre + radius, centre - radius), 2).to(keys.dtype)


@jit
def store_bounds(
    keys: tl.tensor,
    stride: tl.tensor,
    summary: tl.tensor,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CUBOID: tl.constexpr,
) -> None:
    """Summarise one page of keys, rows of D elements `stride` apart."""
    c = tl.arange(0, BLOCK_D)
    high = tl.full([BLOCK_D], float("-inf"), tl.float32)
    low = tl.full([BLOCK_D], float("inf"), tl.float32)
    for start in range(0, SIZE, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        inside = (row < SIZE)[:, None] & (c < D)[None, :]
        at = row.to(tl.int64)[:, None] * stride + c[None, :]
        some = tl.load(keys + at, mask=inside, other=0.0).to(tl.float32)
        high = tl.maximum(high, tl.max(tl.where(inside, some, float("-inf")), axis=0))
        low = tl.minimum(low, tl.min(tl.where(inside, some, float("inf")), axis=0))
    if CUBOID:
        centre = (high + low) / 2
        apart = tl.zeros([BLOCK_D], tl.float32)
        for start in range(0, SIZE, BLOCK_R):
            row = start + tl.arange(0, BLOCK_R)
            inside = (row < SIZE)[:, None] & (c < D)[None, :]
            at = row.to(tl.int64)[:, None] * stride + c[None, :]
            some = tl.load(keys + at, mask=inside, other=0.0).to(tl.float32)
            apart += tl.sum(tl.where(inside, tl.abs(some - centre[None, :]), 0.0), axis=0)
        high, low = centre + apart / SIZE, centre - apart / SIZE
    tl.store(summary + c, high.to(summary.dtype.element_ty), mask=c < D)
    tl.store(summary + D + c, low.to(summary.dtype.element_ty), mask=c < D)


@jit
def _prompt_kernel(
    keys: tl.tensor,
    summary: tl.tensor,
    keys_head: tl.tensor,
    keys_page: tl.tensor,
    keys_row: tl.tensor,
    num_pages: tl.tensor,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    page, h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    source = keys + h * keys_head + page * keys_page
    store_bounds(source, keys_row, summary + (h * num_pages + page) * 2 * D, SIZE, D, BLOCK_R, BLOCK_D, False)


def page_summary(keys: Tensor) -> Tensor:
    """Summarise full pages; a partly filled page has no summary. Any strides but the last dimension's.

    May be captured in a CUDA graph.
    """
    num_kv_heads, num_pages, size, d = keys.shape
    if not takes(keys) or keys.numel() == 0:
        return page_summary_ref(keys)
    require("keys", keys, keys.shape)
    summary = torch.empty(num_kv_heads, num_pages, 2, d, dtype=keys.dtype, device=keys.device)
    launch(_prompt_kernel, (num_pages, num_kv_heads), keys, summary, *keys.stride()[:3], num_pages, **blocks(size, d))
    return summary


def blocks(size: int, d: int) -> dict[str, int]:
    """Choose the constants of a kernel that goes through a page, some tokens at a time."""
    block_d = power_of_two(d)
    return {"SIZE": size, "D": d, "BLOCK_R": rows_at_once(size, block_d, BLOCK_ELEMENTS), "BLOCK_D": block_d}
