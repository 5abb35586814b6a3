"""Keys and queries turned to positions that only the device knows, by tables of all positions.

    y_c = x_c * cos(t, c) + x_partner(c) * sign(c) * sin(t, c)
    x_c = (y_c * cos(t, c) - y_partner(c) * sign(c) * sin(t, c)) / (cos(t, c)^2 + sin(t, c)^2)

The tables have the attention scaling in them, hence the division. `Rotation` is that of `kvcli.kernels.rebuild_keys`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.kernels._triton import jit, launch, power_of_two, require, require_whole, takes, tl
from kvcli.kernels.rebuild_keys import Rotation, rotated


def rotate_newest_ref(x: Tensor, lengths: Tensor, rotation: Rotation, out: Tensor) -> None:
    """Sequence by sequence, in at least fp32."""
    for b, length in enumerate(lengths.tolist()):
        if length:
            wide = x[b].to(torch.promote_types(x.dtype, torch.float32))
            out[b] = rotated(wide, lengths[b] - 1, rotation)


def move_sinks_ref(k: Tensor, unrotated: Tensor, lengths: Tensor, held: int, rotation: Rotation) -> None:
    """Sequence by sequence, in at least fp32."""
    for b, length in enumerate(lengths.tolist()):
        dropped, sinks = max(length - held, 0), slice(min(length, unrotated.shape[2]))
        positions = torch.arange(sinks.stop, device=k.device) + dropped
        if dropped:
            k[b, :, sinks] = rotated(unrotated[b, :, sinks], positions, rotation).to(k.dtype)
        else:
            there = k[b, :, sinks].to(torch.promote_types(k.dtype, torch.float32))
            cos, sin = (table[positions][..., rotation.column.clamp_min(0)] for table in rotation[:2])
            scaling = (cos.square() + sin.square()).masked_fill(rotation.column < 0, 1)
            unrotated[b, :, sinks] = rotated(there, positions, rotation._replace(sin=-rotation.sin)) / scaling


@jit
def _turned(
    x: tl.tensor,
    position: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    partners: tl.tensor,
    columns: tl.tensor,
    signs: tl.tensor,
    width: tl.tensor,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BACK: tl.constexpr,
) -> tl.tensor:
    """Read a row and turn it to a position, or back from it."""
    c = tl.arange(0, BLOCK_D)
    column = tl.load(columns + c, mask=c < D, other=-1)
    partner = tl.load(partners + c, mask=c < D, other=0)
    sign = tl.load(signs + c, mask=c < D, other=0.0)
    at = position.to(tl.int64) * width + column
    cosine = tl.load(cosines + at, mask=column >= 0, other=1.0)
    sine = tl.load(sines + at, mask=column >= 0, other=0.0)
    own = tl.load(x + c, mask=c < D, other=0.0).to(tl.float32)
    other = tl.load(x + partner, mask=c < D, other=0.0).to(tl.float32) * sign
    if BACK:
        return (own * cosine - other * sine) / (cosine * cosine + sine * sine)
    return own * cosine + other * sine


@jit
def _rotate_newest_kernel(
    x: tl.tensor,
    out: tl.tensor,
    lengths: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    partners: tl.tensor,
    columns: tl.tensor,
    signs: tl.tensor,
    x_batch: tl.tensor,
    x_head: tl.tensor,
    width: tl.tensor,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    b, h = (tl.program_id(0) // H).to(tl.int64), (tl.program_id(0) % H).to(tl.int64)
    length = tl.load(lengths + b)
    if length == 0:
        return
    row = x + b * x_batch + h * x_head
    y = _turned(row, length - 1, cosines, sines, partners, columns, signs, width, D, BLOCK_D, False)
    c = tl.arange(0, BLOCK_D)
    tl.store(out + tl.program_id(0).to(tl.int64) * D + c, y.to(out.dtype.element_ty), mask=c < D)


@jit
def _move_kernel(
    k: tl.tensor,
    unrotated: tl.tensor,
    lengths: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    partners: tl.tensor,
    columns: tl.tensor,
    signs: tl.tensor,
    k_batch: tl.tensor,
    k_head: tl.tensor,
    k_row: tl.tensor,
    plain_batch: tl.tensor,
    held: tl.tensor,
    width: tl.tensor,
    HK: tl.constexpr,
    SINK: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    b, h = (tl.program_id(0) // HK).to(tl.int64), (tl.program_id(0) % HK).to(tl.int64)
    i = tl.program_id(1)  # a sink
    length = tl.load(lengths + b)
    if i >= length:
        return
    dropped = tl.maximum(length - held, 0)
    row, plain = k + b * k_batch + h * k_head + i * k_row, unrotated + b * plain_batch + (h * SINK + i) * D
    c = tl.arange(0, BLOCK_D)
    if dropped > 0:
        y = _turned(plain, i + dropped, cosines, sines, partners, columns, signs, width, D, BLOCK_D, False)
        tl.store(row + c, y.to(k.dtype.element_ty), mask=c < D)
    else:
        y = _turned(row, i, cosines, sines, partners, columns, signs, width, D, BLOCK_D, True)
        tl.store(plain + c, y, mask=c < D)


def rotate_newest(x: Tensor, lengths: Tensor, rotation: Rotation, out: Tensor) -> None:
    """Turn x [b, H, d] to the position of each sequence's newest token: `out` [b, H, d], which is not x.

    lengths [b] int32; a sequence of length 0 is left out. May be captured in a CUDA graph. Raises ValueError for
    shapes, dtypes or strides that the kernel cannot read.
    """
    b, num_heads, d = x.shape
    require("x", x, x.shape)
    require_whole("lengths", lengths, (b,), torch.int32)
    require_whole("out", out, x.shape)
    rotation.check(d)
    if not takes(x):
        return rotate_newest_ref(x, lengths, rotation, out)
    launch(
        _rotate_newest_kernel,
        (b * num_heads,),
        *(x, out, lengths, *rotation, *x.stride()[:2], rotation.cos.shape[1]),
        H=num_heads,
        D=d,
        BLOCK_D=power_of_two(d),
        warps=1,
    )
    return None


def move_sinks(k: Tensor, unrotated: Tensor, lengths: Tensor, held: int, rotation: Rotation) -> None:
    """Let the first keys of every sequence stand right before its window, where tokens between them were dropped.

    k [b, Hk, rows, d] holds `held` tokens at most, the sinks in its first rows; lengths [b] int32 are the tokens seen,
    and what is beyond `held` was dropped. unrotated [b, Hk, sinks, d] fp32 are the sinks without their rotation: taken
    from k as long as nothing was dropped, and turned to their new positions from then on. The last of them has to be
    there a step before the first one moves. May be captured in a CUDA graph.

    Raises ValueError for shapes, dtypes or strides that the kernel cannot read.
    """
    (b, num_kv_heads, _, d), sinks = k.shape, unrotated.shape[2]
    require("k", k, k.shape)
    require("unrotated", unrotated, (b, num_kv_heads, sinks, d))
    if unrotated.stride()[1:] != (sinks * d, d, 1):
        raise ValueError(f"sinks of a sequence are not one behind the other: strides {unrotated.stride()}")
    require_whole("lengths", lengths, (b,), torch.int32)
    rotation.check(d)
    if not takes(k):
        return move_sinks_ref(k, unrotated, lengths, held, rotation)
    launch(
        _move_kernel,
        (b * num_kv_heads, sinks),
        *(k, unrotated, lengths, *rotation, *k.stride()[:3], unrotated.stride(0), held, rotation.cos.shape[1]),
        HK=num_kv_heads,
        SINK=sinks,
        D=d,
        BLOCK_D=power_of_two(d),
        warps=1,
    )
    return None
