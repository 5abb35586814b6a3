"""RMS norm, SwiGLU gate and rotary embedding: what stands between the linear layers, one kernel each.

    y_c = x_c / sqrt(mean_c x_c^2 + eps) * w_c      w_c is the weight, or 1 + the weight

Shapes of norms: x [..., n], any strides but the last dimension's, weight [n] -> [..., n] in the dtype of x, contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kvcli.kernels._numba import compiled, flat, prange, run, run_alone, serial
from kvcli.kernels._triton import jit, launch, power_of_two, require, require_whole, takes, tl


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float, shift: float = 0.0) -> Tensor:
    """Reference of `rms_norm` in plain torch, in at least fp32; `shift` is added to the weight."""
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
    """Normalise every row; can be captured in a CUDA graph. Raises ValueError for shapes the kernel cannot read."""
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


def add_rms_norm_ref(x: Tensor, y: Tensor, weight: Tensor, eps: float, shift: float = 0.0) -> tuple[Tensor, Tensor]:
    """Reference of `add_rms_norm` in plain torch, the norm in at least fp32; `shift` is added to the weight."""
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
    """Return x + y and its RMS norm, in one kernel; can be captured in a CUDA graph.

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


BLOCK = 1024


def silu_mul_ref(x: Tensor) -> Tensor:
    """Reference of `silu_mul` in plain torch, in at least fp32."""
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
    """Return the gate of an MLP, y_c = silu(x_c) * x_{n + c}, for rows that hold gate and up: [.., 2n] -> [.., n].

    Can be captured in a CUDA graph. Raises ValueError where x has gaps.
    """
    if not takes(x):
        return silu_mul_ref(x)
    require_whole("x", x, x.shape)
    n = x.shape[-1] // 2
    out = torch.empty(*x.shape[:-1], n, dtype=x.dtype, device=x.device)
    launch(_silu_kernel, (out.numel() // n, -(-n // BLOCK)), x, out, n, BLOCK_N=BLOCK)
    return out


def rotate_ref(q: Tensor, k: Tensor, rotation: Rotation) -> None:
    """Reference of `rotate` in plain torch, in at least fp32."""
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
    """Rotate q [b, H, n, d] and k [b, Hk, n, d] in place, in one kernel; can be captured in a CUDA graph.

    `rotation` has the cosines and sines of these positions, [b, n, w]. Raises ValueError for shapes, dtypes or strides
    that the kernel cannot read.
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


Arrays = tuple[tuple[Any, ...], tuple[Any, ...]]
"""Cosines and sines [positions, w]; partner, column and sign [d], as in `Rotation`."""


@serial
def _norms(x: Any, weight: Any, eps: Any, shift: Any, out: Any) -> None:
    for row in range(len(x)):
        total = np.float32(0)
        for c in range(x.shape[1]):
            total += x[row, c] * x[row, c]
        scale = np.float32(1) / np.sqrt(total / np.float32(x.shape[1]) + eps)
        for c in range(x.shape[1]):
            out[row, c] = x[row, c] * scale * (weight[c] + shift)


@serial
def _rotations(q: Any, k: Any, steps: Any, angles: Any, channels: Any, turned: Any) -> None:
    (batch, heads, kv_heads, n, q_steps, k_steps), (cos, sin), (partner, column, sign) = steps, angles, channels
    for i in range(batch * n):
        b, token = i // n, i % n
        for h in range(heads + kv_heads):
            x, own, (of_batch, of_head, of_token) = (q, h, q_steps) if h < heads else (k, h - heads, k_steps)
            row = x[b * of_batch + own * of_head + token * of_token :]
            for c in range(len(partner)):
                at = column[c]
                straight = cos[i, at] if at >= 0 else np.float32(1)
                crossed = sin[i, at] * sign[c] if at >= 0 else np.float32(0)
                turned[c] = row[c] * straight + row[partner[c]] * crossed
            for c in range(len(partner)):
                row[c] = turned[c]


@compiled
def _turns(x: Any, positions: Any, angles: Any, channels: Any, forth: Any, scale: Any, out: Any) -> None:
    (cos, sin), (partner, column, sign) = angles, channels
    rows, n, d = x.shape
    for i in prange(rows * n):
        row, token = i // n, i % n
        at, own, turned = positions[row % len(positions), token], x[row, token], out[row, token]
        for c in range(d):
            if column[c] >= 0:
                crossed = own[partner[c]] * sin[at, column[c]] * sign[c]
                turned[c] = (own[c] * cos[at, column[c]] + forth * crossed) * scale
            else:
                turned[c] = own[c]


def norm_cpu(x: Tensor, weight: Tensor, eps: float, shift: float = 0.0) -> Tensor:
    """Normalise every row of x [.., n] on a CPU; return [.., n] without gaps."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = x.new_empty(x.shape)
    run_alone(_norms, rows, weight, np.float32(eps), np.float32(shift), out.view(rows.shape))
    return out


def rotate_cpu(q: Tensor, k: Tensor, rotation: Rotation) -> None:
    """Rotate q [b, H, n, d] and k [b, Hk, n, d] in place on a CPU, by their cosines and sines [b, n, w]."""
    (b, heads, n, d), kv_heads = q.shape, k.shape[1]
    steps = b, heads, kv_heads, n, q.stride()[:3], k.stride()[:3]
    cos, sin = (angle.reshape(b * n, -1) for angle in (rotation.cos, rotation.sin))
    channels = rotation.partner, rotation.column, rotation.sign
    run_alone(_rotations, flat(q), flat(k), steps, (cos, sin), channels, q.new_empty(d))


def arrays_of(rotation: Rotation) -> Arrays:
    """Return the tables of a rotation as loops take them."""
    cos, sin, *channels = (table.numpy() for table in rotation)
    return (cos, sin), tuple(channels)


def rotate_at_cpu(x: Tensor, positions: Tensor, tables: Arrays, back: bool = False, scale: float = 1.0) -> Tensor:
    """Rotate x [.., n, d] to positions [n] or [.., n], or `back` from them, with rotated channels times `scale`.

    The tables have the cosines and sines of all positions.
    """
    rows, each = x.reshape(-1, *x.shape[-2:]).contiguous(), positions.reshape(-1, x.shape[-2]).contiguous()
    out = torch.empty_like(rows)
    run(_turns, rows.numel(), rows, each, *tables, np.float32(-1 if back else 1), np.float32(scale), out)
    return out.view(x.shape)


def rotate_newest_ref(x: Tensor, lengths: Tensor, rotation: Rotation, out: Tensor) -> None:
    """Reference of `rotate_newest`: sequence by sequence, in at least fp32."""
    for b, length in enumerate(lengths.tolist()):
        if length:
            wide = x[b].to(torch.promote_types(x.dtype, torch.float32))
            out[b] = rotated(wide, lengths[b] - 1, rotation)


def move_sinks_ref(k: Tensor, unrotated: Tensor, lengths: Tensor, held: int, rotation: Rotation) -> None:
    """Reference of `move_sinks`: sequence by sequence, in at least fp32."""
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
    """Read a row and rotate it to a position, or back from it."""
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
    """Rotate x [b, H, d] to the position of each sequence's newest token: `out` [b, H, d], which is not x.

    lengths [b] int32; a sequence of length 0 is skipped. Can be captured in a CUDA graph. Raises ValueError for shapes,
    dtypes or strides that the kernel cannot read.
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
    """Rotate the first keys of every sequence to right before its window, once tokens between them were dropped.

    k [b, Hk, rows, d] holds at most `held` tokens, the sinks in its first rows; lengths [b] int32 count the tokens
    seen, and those beyond `held` were dropped. unrotated [b, Hk, sinks, d] fp32 are the sinks without their rotation:
    taken from k as long as nothing was dropped, and rotated to their new positions from then on. The last sink must be
    there a step before the first one moves. Can be captured in a CUDA graph.

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


class Rotation(NamedTuple):
    """Cosines and sines [positions, w]; and for every channel [d]: its partner, its column of w, and its sine's sign.

    Channels that are not rotated have column -1. partner and column are int32, all else fp32.
    """

    cos: Tensor
    sin: Tensor
    partner: Tensor
    column: Tensor
    sign: Tensor

    @classmethod
    def of(
        cls, cos: Tensor, sin: Tensor, turn: Callable[[Tensor, Tensor, Tensor], Tensor], rotated: int, d: int
    ) -> Rotation:
        """Find out how `turn(x [1, 1, n, rotated], cos [1, n, w], sin [1, n, w])` pairs the first channels of d."""
        width, device = cos.shape[-1], cos.device
        # Columns are named by numbers from 2 on: channels that `turn` leaves unchanged come back as 1.
        names = torch.arange(2.0, width + 2, device=device).expand(1, rotated, width)
        units = torch.eye(rotated, device=device)[None, None]
        straight = turn(units, names, torch.zeros_like(names))[0, 0].diagonal()
        crossed = turn(units, torch.zeros_like(names), names)[0, 0]  # [from, to]
        partner = torch.arange(d, dtype=torch.int32, device=device)
        column = torch.full_like(partner, -1)
        sign = torch.zeros(d, device=device)
        partner[:rotated] = crossed.abs().argmax(0).int()
        column[:rotated] = straight.round().int() - 2
        sign[:rotated] = crossed.sum(0).sign() * (column[:rotated] >= 0)
        if not torch.equal(crossed.abs().sum(0), straight):
            raise ValueError("cosine and sine of a channel do not stand in the same column")
        return cls(cos, sin, partner, column, sign)

    def check(self, d: int) -> None:
        """Raise ValueError if these are not tables for d channels that kernels can read."""
        for name, x, dtype in zip(self._fields[2:], self[2:], (torch.int32, torch.int32, None), strict=True):
            require_whole(name, x, (d,), dtype)
        for name, x in zip(self._fields[:2], self[:2], strict=True):
            require_whole(name, x, self.cos.shape)


def rotated(keys: Tensor, positions: Tensor, rotation: Rotation) -> Tensor:
    """Rotate keys [.., n, d] to positions [n] in plain torch, in the precision of both."""
    cos, sin = at_positions(positions, rotation)
    return keys * cos + keys[..., rotation.partner] * sin


def at_positions(positions: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """Return cosines of all channels at positions [..], and sines with their signs, [.., d]; 1 and 0 if not rotated."""
    cos, sin = (table[positions][..., rotation.column.clamp_min(0)] for table in rotation[:2])
    return cos.masked_fill(rotation.column < 0, 1), sin * rotation.sign
