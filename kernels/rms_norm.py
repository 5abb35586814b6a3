"""Root-mean-square normalisation of rows, in one kernel where a model launches six.

    y_c = x_c / sqrt(mean_c x_c^2 + eps) * w_c      w_c is the weight, or 1 + the weight

Shapes: x [..., n], any strides but the last dimension's, weight [n] -> [..., n] in the dtype of x, contiguous.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.kernels._triton import jit, launch, power_of_two, require, require_whole, takes, tl


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float, shift: float = 0.0) -> Tensor:
    """Plain torch, in at least fp32; `shift` is added to the weight."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * (weight.to(wide.dtype) + shift)).to(x.dtype)


@jit
def _norm_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    x_row: tl.tensor,
    eps: tl.tensor,
    shift: tl.tensor,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK_N)
    value = tl.load(x + row * x_row + c, mask=c < N, other=0.0).to(tl.float32)
    factor = tl.load(weight + c, mask=c < N, other=0.0).to(tl.float32) + shift
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / N + eps)
    tl.store(out + row * N + c, (value * scale * factor).to(out.dtype.element_ty), mask=c < N)


def rms_norm(x: Tensor, weight: Tensor, eps: float, shift: float = 0.0) -> Tensor:
    """Normalise every row; may be captured in a CUDA graph. Raises ValueError for shapes the kernel cannot read."""
    if not takes(x):
        return rms_norm_ref(x, weight, eps, shift)
    n = x.shape[-1]
    rows = x.reshape(-1, n)
    require("x", rows, rows.shape)
    require_whole("weight", weight, (n,))
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block_n = power_of_two(n)
    warps = max(1, min(16, block_n // 512))
    launch(_norm_kernel, (len(rows),), rows, weight, out, rows.stride(0), eps, shift, N=n, BLOCK_N=block_n, warps=warps)
    return out
