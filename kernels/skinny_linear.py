"""Skinny products on a GPU: a few rows times the weight of a linear layer, with what stands before and after it.

    y_n = sum_c x_c W_nc + bias_n + residual_n      or      silu(sum_c x_c W_nc) * sum_c x_c V_nc

A row x may be normalised before, as in `kvcli.kernels.norm_rope`: its scale is the same for all products of the row, so
that a program multiplies before it knows it, and every program finds it out from the x that it reads anyway.

For so few rows a product takes as long as it takes to read the weight. A program is one warp. It multiplies some rows
of the weight on tensor cores, and copies those of its next steps to shared memory meanwhile. Programs of a `dependent`
kernel may start before the kernel in front is done. They wait for x, and fetch the weights of their first steps until
then.

Shapes: x [.., K], weight [N, K] without gaps, bias [N], residual [.., N] -> [.., N] in the dtype of x. A gated weight
has the rows of the gate in front of as many of the other factor: [2 * N, K] -> [.., N].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kvcli.kernels._triton import interpreted, jit, launch, multiply, power_of_two, require, require_whole, takes, tl
from kvcli.kernels.norm_rope import rms_norm_ref

MOST_ROWS = 8
"""Columns of the smallest product of matrices; for more rows, a library's products keep up with memory."""

BLOCK_N = 16  # rows of the weight per program, of a gated one half from either factor
BLOCK_BYTES = 512  # of such a row at once
STAGES = 4  # steps whose weights are in shared memory, or on their way to it


class InputNorm(NamedTuple):
    """The norm of the input: weight [K], eps, and what is added to the weight."""

    weight: Tensor
    eps: float
    shift: float = 0.0


def skinny_linear_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm: InputNorm | None = None,
    gated: bool = False,
) -> Tensor:
    """Reference of `skinny_linear` in plain torch, in at least fp32."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if norm is not None:
        wide = rms_norm_ref(wide, *norm)
    found = functional.linear(wide, weight.to(wide.dtype), None if bias is None else bias.to(wide.dtype))
    if gated:
        gate, other = found.chunk(2, -1)
        found = functional.silu(gate) * other
    return (found if residual is None else found + residual).to(x.dtype)


@jit
def _fetch(at: tl.tensor) -> None:
    """Fetch what lies at these addresses into the cache of the device."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@jit
def _skinny_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    norm: tl.tensor,
    out: tl.tensor,
    x_row: tl.tensor,
    residual_row: tl.tensor,
    n: tl.tensor,
    eps: tl.tensor,
    shift: tl.tensor,
    M: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
    DEPENDENT: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
) -> None:
    own: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N  # columns of the output
    i, m, c = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    first = tl.program_id(0) * own
    row = (first + i % own).to(tl.int64) + i // own * n
    inside = (first + i % own < n)[:, None]
    at = weight + row[:, None] * K
    if DEPENDENT:
        line: tl.constexpr = 128 // (weight.dtype.element_ty.primitive_bitwidth // 8)
        for start in range(0, tl.minimum(AHEAD * BLOCK_K, K), BLOCK_K):
            each = start + tl.arange(0, BLOCK_K // line) * line
            _fetch(tl.where(inside & (each < K)[None, :], at + each[None, :], weight))
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    rows_at = x + m.to(tl.int64)[:, None] * x_row
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if norm is not None:
        squares = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for start in range(0, K, BLOCK_K):
        there = (start + c < K)[None, :]
        some = tl.load(at + start + c[None, :], mask=inside & there, other=0.0)
        rows = tl.load(rows_at + start + c[None, :], mask=(m < M)[:, None] & there, other=0.0)
        if norm is not None:
            wide = rows.to(tl.float32)
            squares += wide * wide
            factor = tl.load(norm + start + c, mask=start + c < K, other=0.0).to(tl.float32) + shift
            rows = (wide * factor[None, :]).to(weight.dtype.element_ty)
        sums += multiply(some, tl.trans(rows), WIDE)
    if norm is not None:
        sums *= tl.rsqrt(tl.sum(squares, axis=1) / K + eps)[None, :]
    if bias is not None:
        sums += tl.load(bias + row[:, None], mask=inside, other=0.0).to(tl.float32)
    if GATED:
        gate, other = tl.split(tl.permute(tl.reshape(sums, [2, own, BLOCK_M]), (1, 2, 0)))
        sums = gate / (1.0 + tl.exp(-gate)) * other
    column = first + tl.arange(0, own)
    written = (column < n)[:, None] & (m < M)[None, :]
    if residual is not None:
        more = tl.load(residual + m.to(tl.int64)[None, :] * residual_row + column[:, None], mask=written, other=0.0)
        sums += more.to(tl.float32)
    tl.store(out + m.to(tl.int64)[None, :] * n + column[:, None], sums.to(out.dtype.element_ty), mask=written)


def starts_early(x: Tensor) -> bool:
    """Return whether the device of x can start a kernel before the one in front of it is done."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm: InputNorm | None = None,
    gated: bool = False,
    dependent: bool = False,
) -> Tensor:
    """Multiply at most `MOST_ROWS` rows by the weight of a linear layer, in one kernel.

    `dependent` asks for a launch that does not wait for the kernel in front of it, on a device for which `starts_early`
    holds. What that kernel writes is read only after it is done; the weight must not change meanwhile. Can be captured
    in a CUDA graph. Raises ValueError for shapes or dtypes that the kernel cannot read.
    """
    if not takes(x):
        return skinny_linear_ref(x, weight, bias, residual, norm, gated)
    k, parts = x.shape[-1], 2 if gated else 1
    n = len(weight) // parts
    rows = x.reshape(-1, k)
    if len(rows) > MOST_ROWS:
        raise ValueError(f"there are {len(rows)} rows, and the kernel takes {MOST_ROWS} at most")
    require("x", rows, rows.shape)
    require_whole("weight", weight, (parts * n, k), x.dtype)
    if bias is not None:
        require_whole("bias", bias, (parts * n,), x.dtype)
    added = None
    if residual is not None:
        added = residual.reshape(-1, n)
        require("residual", added, (len(rows), n), x.dtype)
    if norm is not None:
        require_whole("weight of the norm", norm.weight, (k,))
    out = torch.empty(*x.shape[:-1], n, dtype=x.dtype, device=x.device)
    block_k = min(BLOCK_BYTES // x.element_size(), max(16, power_of_two(k)))
    launch(
        _skinny_kernel,
        (-(-parts * n // BLOCK_N),),
        *(rows, weight, bias, added, None if norm is None else norm.weight, out),
        *(rows.stride(0), 0 if added is None else added.stride(0), n, *((0.0, 0.0) if norm is None else norm[1:])),
        M=len(rows),
        K=k,
        GATED=gated,
        DEPENDENT=dependent,
        WIDE=interpreted(),
        BLOCK_M=MOST_ROWS,
        BLOCK_N=BLOCK_N,
        BLOCK_K=block_k,
        AHEAD=STAGES,
        warps=1,
        stages=STAGES,
    )
    return out
