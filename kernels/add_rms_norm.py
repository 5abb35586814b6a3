"""A sum of rows and its root-mean-square normalisation, in one kernel: the end of attention and the MLP's beginning.

    s_c = x_c + y_c      z_c = s_c / sqrt(mean_c s_c^2 + eps) * w_c      w_c is the weight, or 1 + the weight

Shapes: x and y [..., n], any strides but the last dimension's, weight [n] -> s and z [..., n] in the dtype of x,
contiguous; z is made of s as it is kept, rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.kernels._triton import jit, launch, power_of_two, require, require_whole, takes, tl
from kvcli.kernels.rms_norm import rms_norm_ref


def add_rms_norm_ref(x: Tensor, y: Tensor, weight: Tensor, eps: float, shift: float = 0.0) -> tuple[Tensor, Tensor]:
    """Plain torch, the norm in at least fp32; `shift` is added to the weight."""
    total = x + y
    return total, rms_norm_ref(total, weight, eps, shift)


@jit
def _add_norm_kernel(
    x: tl.tensor,
    y: tl.tensor,
    weight: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    x_row: tl.tensor,
    y_row: tl.tensor,
    eps: tl.tensor,
    shift: tl.tensor,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK_N)
    value = tl.load(x + row * x_row + c, mask=c < N, other=0.0).to(tl.float32)
    value += tl.load(y + row * y_row + c, mask=c < N, other=0.0).to(tl.float32)
    kept = value.to(total.dtype.element_ty)
    tl.store(total + row * N + c, kept, mask=c < N)
    value = kept.to(tl.float32)
    factor = tl.load(weight + c, mask=c < N, other=0.0).to(tl.float32) + shift
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / N + eps)
    tl.store(out + row * N + c, (value * scale * factor).to(out.dtype.element_ty), mask=c < N)


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float, shift: float = 0.0) -> tuple[Tensor, Tensor]:
    """Add and normalise every row; may be captured in a CUDA graph.

    Raises ValueError for shapes or dtypes that the kernel cannot read.
    """
    if not takes(x):
        return add_rms_norm_ref(x, y, weight, eps, shift)
    n = x.shape[-1]
    rows, others = x.reshape(-1, n), y.reshape(-1, n)
    require("x", rows, rows.shape)
    require("y", others, rows.shape, x.dtype)
    require_whole("weight", weight, (n,))
    total, out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    block_n = power_of_two(n)
    launch(
        _add_norm_kernel,
        (len(rows),),
        *(rows, others, weight, total, out, rows.stride(0), others.stride(0), eps, shift),
        N=n,
        BLOCK_N=block_n,
        warps=max(1, min(16, block_n // 512)),
    )
    return total, out
