"""The gate of an MLP: y_c = silu(x_c) * x_{n + c}, of both halves of one product of gate and up.

Shapes: x [..., 2n] contiguous -> [..., n] in the dtype of x.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kvcli.kernels._triton import jit, launch, require_whole, takes, tl

BLOCK = 1024


def silu_mul_ref(x: Tensor) -> Tensor:
    """Plain torch, in at least fp32."""
    gate, up = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, -1)
    return (functional.silu(gate) * up).to(x.dtype)


@jit
def _silu_kernel(x: tl.tensor, out: tl.tensor, n: tl.tensor, BLOCK_N: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    gate = tl.load(x + row * 2 * n + c, mask=c < n, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * n + n + c, mask=c < n, other=0.0).to(tl.float32)
    tl.store(out + row * n + c, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=c < n)


def silu_mul(x: Tensor) -> Tensor:
    """Gate every row; may be captured in a CUDA graph. Raises ValueError where x has gaps."""
    if not takes(x):
        return silu_mul_ref(x)
    require_whole("x", x, x.shape)
    n = x.shape[-1] // 2
    out = torch.empty(*x.shape[:-1], n, dtype=x.dtype, device=x.device)
    launch(_silu_kernel, (out.numel() // n, -(-n // BLOCK)), x, out, n, BLOCK_N=BLOCK)
    return out
