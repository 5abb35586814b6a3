"""Queries and keys in a basis of their KV head (InfiniGen's skewed columns, Loki's principal axes).

    y_hj = sum_c x_hc * basis_cj of the KV head that h belongs to

Shapes: x [b, n, d], n a multiple of Hk, and basis [b, Hk, d, c] fp32 -> y [b, n, c]; summed in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.kernels._triton import jit, launch, power_of_two, require, require_whole, takes, tl

BLOCK_C, BLOCK_D = 32, 128  # of a basis that a program multiplies at once: columns, and channels


def project_heads_ref(x: Tensor, basis: Tensor, out: Tensor) -> None:
    """All heads of a KV head at once, in at least fp32."""
    heads = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(1, (basis.shape[1], -1))  # type: ignore[no-untyped-call]
    out.copy_((heads @ basis).flatten(1, 2))


def project_newest_ref(k: Tensor, basis: Tensor, lengths: Tensor, out: Tensor) -> None:
    """Sequence by sequence."""
    found = torch.empty(*k.shape[:2], basis.shape[3], dtype=basis.dtype, device=k.device)
    project_heads_ref(k, basis, found)
    for b, length in enumerate(lengths.tolist()):
        if length:
            out[b, :, length - 1] = found[b].to(out.dtype)


@jit
def _project_kernel(
    x: tl.tensor,
    basis: tl.tensor,
    lengths: tl.tensor,
    out: tl.tensor,
    x_batch: tl.tensor,
    x_head: tl.tensor,
    out_batch: tl.tensor,
    out_head: tl.tensor,
    out_row: tl.tensor,
    N: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    b, h = (tl.program_id(0) // N).to(tl.int64), (tl.program_id(0) % N).to(tl.int64)
    out += b * out_batch + h * out_head
    if lengths is not None:
        length = tl.load(lengths + b)
        if length == 0:
            return
        out += (length - 1).to(tl.int64) * out_row
    x += b * x_batch + h * x_head
    basis += (b * (N // G) + h // G) * D * C
    j = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    found = tl.zeros([BLOCK_C], tl.float32)
    for start in range(0, D, BLOCK_D):
        c = start + tl.arange(0, BLOCK_D)
        channels = tl.load(x + c, mask=c < D, other=0.0).to(tl.float32)
        inside = (c < D)[:, None] & (j < C)[None, :]
        columns = tl.load(basis + c[:, None] * C + j[None, :], mask=inside, other=0.0).to(tl.float32)
        found += tl.sum(channels[:, None] * columns, axis=0)
    tl.store(out + j, found.to(out.dtype.element_ty), mask=j < C)


def project_heads(x: Tensor, basis: Tensor, out: Tensor) -> None:
    """Write x in the basis to `out` [b, n, c], which is not x; may be captured in a CUDA graph.

    Raises ValueError for shapes, dtypes or strides that the kernel cannot read.
    """
    b, num_heads, _ = x.shape
    _check(x, basis)
    require("out", out, (b, num_heads, basis.shape[3]))
    if not takes(x):
        return project_heads_ref(x, basis, out)
    return _project(x, basis, None, out, (*out.stride()[:2], 0))


def project_newest(k: Tensor, basis: Tensor, lengths: Tensor, out: Tensor) -> None:
    """Write the newest keys k [b, Hk, d] in the basis to their place in out [b, Hk, tokens, c].

    lengths [b] int32 count them; a sequence of length 0 has none. May be captured in a CUDA graph. Raises ValueError
    for shapes, dtypes or strides that the kernel cannot read.
    """
    b, num_kv_heads, _ = k.shape
    _check(k, basis)
    require_whole("lengths", lengths, (b,), torch.int32)
    require("out", out, (b, num_kv_heads, out.shape[2], basis.shape[3]))
    if not takes(k):
        return project_newest_ref(k, basis, lengths, out)
    return _project(k, basis, lengths, out, out.stride()[:3])


def _check(x: Tensor, basis: Tensor) -> None:
    (b, num_heads, d), num_kv_heads = x.shape, basis.shape[1]
    require("x", x, (b, num_heads, d))
    require_whole("basis", basis, (b, num_kv_heads, d, basis.shape[3]))
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} heads do not belong to {num_kv_heads} KV heads")


def _project(x: Tensor, basis: Tensor, lengths: Tensor | None, out: Tensor, strides: tuple[int, ...]) -> None:
    (b, num_heads, d), (_, num_kv_heads, _, columns) = x.shape, basis.shape
    launch(
        _project_kernel,
        (b * num_heads, -(-columns // BLOCK_C)),
        *(x, basis, lengths, out, *x.stride()[:2], *strides),
        N=num_heads,
        G=num_heads // num_kv_heads,
        D=d,
        C=columns,
        BLOCK_C=BLOCK_C,
        BLOCK_D=min(BLOCK_D, power_of_two(d)),
    )
