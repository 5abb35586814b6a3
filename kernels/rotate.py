"""Queries and keys turned to their positions in place, both in one kernel.

    y_c = x_c * cos_{column(c)} + x_{partner(c)} * sign(c) * sin_{column(c)}

Shapes: q [b, H, n, d] and k [b, Hk, n, d], any strides but the last, cos and sin [b, n, w] of their positions; partner,
column and sign [d] as in `kvcli.kernels.rebuild_keys`, channels of column -1 stay.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.kernels._triton import jit, launch, power_of_two, require, require_whole, takes, tl
from kvcli.kernels.rebuild_keys import Rotation


def rotate_ref(q: Tensor, k: Tensor, rotation: Rotation) -> None:
    """Plain torch, in at least fp32; `rotation` has the cosines and sines of these positions."""
    still, column = rotation.column < 0, rotation.column.clamp_min(0)
    cos, sin = (table[:, None, :, column] for table in rotation[:2])  # [b, 1, n, d]
    for x in (q, k):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        turned = wide * cos.masked_fill(still, 1) + wide[..., rotation.partner] * (sin * rotation.sign)
        x.copy_(turned.where(~still, wide))


@jit
def _rotate_kernel(
    q: tl.tensor,
    k: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    partners: tl.tensor,
    columns: tl.tensor,
    signs: tl.tensor,
    q_batch: tl.tensor,
    q_head: tl.tensor,
    q_row: tl.tensor,
    k_batch: tl.tensor,
    k_head: tl.tensor,
    k_row: tl.tensor,
    n: tl.tensor,
    width: tl.tensor,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    token, h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    b, i = token // n, token % n
    c = tl.arange(0, BLOCK_D)
    column = tl.load(columns + c, mask=c < D, other=-1)
    partner = tl.load(partners + c, mask=c < D, other=0)
    sign = tl.load(signs + c, mask=c < D, other=0.0)
    turned = column >= 0
    cosine = tl.load(cosines + token * width + column, mask=turned, other=1.0).to(tl.float32)
    sine = tl.load(sines + token * width + column, mask=turned, other=0.0).to(tl.float32)
    row = k + b * k_batch + (h - H) * k_head + i * k_row
    if h < H:
        row = q + b * q_batch + h * q_head + i * q_row
    x = tl.load(row + c, mask=c < D, other=0.0).to(tl.float32)
    other = tl.load(row + partner, mask=c < D, other=0.0).to(tl.float32)
    tl.debug_barrier()  # all threads have read before one writes
    tl.store(row + c, (x * cosine + other * sine * sign).to(q.dtype.element_ty), mask=c < D)


def rotate(q: Tensor, k: Tensor, rotation: Rotation) -> None:
    """Turn q and k; may be captured in a CUDA graph.

    Raises ValueError for shapes, dtypes or strides that the kernel cannot read.
    """
    if not takes(q):
        return rotate_ref(q, k, rotation)
    (b, num_heads, n, d), num_kv_heads = q.shape, k.shape[1]
    require("q", q, (b, num_heads, n, d))
    require("k", k, (b, num_kv_heads, n, d), q.dtype)
    cos, sin, *channels = rotation
    for name, x in (("cos", cos), ("sin", sin)):
        require_whole(name, x, (b, n, cos.shape[2]))
    launch(
        _rotate_kernel,
        (b * n, num_heads + num_kv_heads),
        *(q, k, cos, sin, *channels, *q.stride()[:3], *k.stride()[:3], n, cos.shape[2]),
        H=num_heads,
        D=d,
        BLOCK_D=power_of_two(d),
        warps=1,
    )
    return None
