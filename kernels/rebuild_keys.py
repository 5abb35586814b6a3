"""Keys made of their low-rank factors, turned to their positions, straight into their slots (ShadowKV, section 4.1).

    x_t = A_t B_h      k_tc = x_tc * cos(t, c) + x_t,partner(c) * sign(c) * sin(t, c)

The partner of a channel is the other one of its rotary pair, and x_t,partner = A_t (B_h with its columns exchanged): so
any layout of the pairs is two products and no exchange of results.

Shapes: a [b, n, c, r], factor B [b, Hk, r, d], misses [b, Hk, k] as in `kvcli.kernels.page_table`, cos and sin
[positions, w] fp32 with the attention scaling in them -> rows of k [b, Hk, rows, d].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kvcli.kernels._triton import jit, launch, power_of_two, require, require_whole, takes, tl
from kvcli.kernels.page_table import MissList

BLOCK_ELEMENTS = 4096  # of the keys that a program rebuilds
BLOCK_R = 32  # of the rank that it multiplies at once


class Rotation(NamedTuple):
    """Cosines and sines [positions, w], and for every channel [d]: its partner, its column of w, and its sine's sign.

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
        # Each column by its number, from 2 on: what `turn` itself leaves as it is comes back as 1.
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
        """Raise ValueError where these are not tables for d channels that kernels can read."""
        for name, x, dtype in zip(self._fields[2:], self[2:], (torch.int32, torch.int32, None), strict=True):
            require_whole(name, x, (d,), dtype)
        for name, x in zip(self._fields[:2], self[:2], strict=True):
            require_whole(name, x, self.cos.shape)


def rebuild_missing_keys_ref(
    a: Tensor, factor: Tensor, misses: MissList, rotation: Rotation | None, k: Tensor, first: int
) -> None:
    """Rebuild head by head in at least fp32."""
    dtype, size = torch.promote_types(a.dtype, torch.float32), a.shape[2]
    for b, h in (misses.counts > 0).nonzero().tolist():
        count = int(misses.counts[b, h])
        chunks, slots = misses.pages[b, h, :count].long(), misses.slots[b, h, :count].long()
        keys = a[b, chunks].to(dtype) @ factor[b, h].to(dtype)  # [m, c, d]
        if rotation is not None:
            positions = chunks[:, None] * size + torch.arange(size, device=k.device)
            keys = rotated(keys, positions, rotation)
        rows = (first + slots)[:, None] * size + torch.arange(size, device=k.device)
        k[b, h, rows] = keys.to(k.dtype)


def rotated(keys: Tensor, positions: Tensor, rotation: Rotation) -> Tensor:
    """Turn keys [.., n, d] to positions [n] in plain torch; in the precision of both."""
    cos, sin = at_positions(positions, rotation)
    return keys * cos + keys[..., rotation.partner] * sin


def at_positions(positions: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """Cosines of all channels at positions [..] and sines with their signs, [.., d]; 1 and 0 where nothing turns."""
    cos, sin = (table[positions][..., rotation.column.clamp_min(0)] for table in rotation[:2])
    return cos.masked_fill(rotation.column < 0, 1), sin * rotation.sign


@jit
def _rebuild_kernel(
    a: tl.tensor,
    factor: tl.tensor,
    pages: tl.tensor,
    slots: tl.tensor,
    count: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    partners: tl.tensor,
    columns: tl.tensor,
    signs: tl.tensor,
    k: tl.tensor,
    a_batch: tl.tensor,
    k_batch: tl.tensor,
    k_head: tl.tensor,
    k_row: tl.tensor,
    width: tl.tensor,
    first: tl.tensor,
    HK: tl.constexpr,
    K: tl.constexpr,
    SIZE: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    pair = tl.program_id(0)  # a KV head of a sequence
    missed = tl.load(count + pair)
    key = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)  # of all keys that the head misses
    if tl.program_id(1) * BLOCK_M >= missed * SIZE:
        return
    b, h = (pair // HK).to(tl.int64), (pair % HK).to(tl.int64)
    c = tl.arange(0, BLOCK_D)
    mine = key < missed * SIZE
    page = tl.load(pages + pair * K + key // SIZE, mask=mine, other=0)
    slot = tl.load(slots + pair * K + key // SIZE, mask=mine, other=0)
    position = page.to(tl.int64) * SIZE + key % SIZE
    inside = mine[:, None] & (c < D)[None, :]
    factor += pair.to(tl.int64) * R * D
    if partners is not None:
        partner = tl.load(partners + c, mask=c < D, other=0)
        other = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    keys = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(0, R, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        left = tl.load(
            a + b * a_batch + position[:, None] * R + r[None, :], mask=mine[:, None] & (r < R)[None, :], other=0.0
        ).to(tl.float32)
        in_factor = (r < R)[:, None] & (c < D)[None, :]
        right = tl.load(factor + r[:, None] * D + c[None, :], mask=in_factor, other=0.0).to(tl.float32)
        keys += tl.dot(left, right, input_precision=PRECISION)
        if partners is not None:
            right = tl.load(factor + r[:, None] * D + partner[None, :], mask=in_factor, other=0.0).to(tl.float32)
            other += tl.dot(left, right, input_precision=PRECISION)
    if partners is not None:
        column = tl.load(columns + c, mask=c < D, other=-1)
        sign = tl.load(signs + c, mask=c < D, other=0.0)
        at = position[:, None] * width + column[None, :]
        turned = mine[:, None] & (column >= 0)[None, :]
        cosine = tl.load(cosines + at, mask=turned, other=1.0)
        sine = tl.load(sines + at, mask=turned, other=0.0)
        keys = keys * cosine + other * sine * sign[None, :]
    row = (first + slot).to(tl.int64) * SIZE + key % SIZE
    target = k + b * k_batch + h * k_head + row[:, None] * k_row + c[None, :]
    tl.store(target, keys.to(k.dtype.element_ty), mask=inside)


def rebuild_missing_keys(
    a: Tensor, factor: Tensor, misses: MissList, rotation: Rotation | None, k: Tensor, first: int
) -> None:
    """Rebuild the keys of the chunks that `misses` lists and write them to their slots, of which `first` is slot 0.

    a [b, n, c, r] and factor [b, Hk, r, d] hold un-rotated keys; chunk j stands at positions j*c and on. rotation is
    None in a layer without rotary positions. May be captured in a CUDA graph: the list's length is read on the device.

    Raises ValueError for shapes, dtypes or strides that the kernel cannot read.
    """
    (b, _, size, rank), (_, num_kv_heads, _, d) = a.shape, factor.shape
    require("a", a, a.shape)
    if a.stride()[1:] != (size * rank, rank, 1):
        raise ValueError(f"chunks of a are not one behind the other: strides {a.stride()}")
    require_whole("factor", factor, (b, num_kv_heads, rank, d), a.dtype)
    require("k", k, (b, num_kv_heads, k.shape[2], d))
    misses.check(b, num_kv_heads, misses.pages.shape[2])
    if rotation is not None:
        rotation.check(d)
    if not takes(a):
        return rebuild_missing_keys_ref(a, factor, misses, rotation, k, first)
    selected, block_d = misses.pages.shape[2], max(16, power_of_two(d))
    block_m = max(16, min(32, BLOCK_ELEMENTS // block_d))
    launch(
        _rebuild_kernel,
        (b * num_kv_heads, -(-selected * size // block_m)),
        *(a, factor, *misses, *(rotation or (None,) * 5), k, a.stride(0), *k.stride()[:3]),
        *((0 if rotation is None else rotation.cos.shape[1]), first),
        HK=num_kv_heads,
        K=selected,
        SIZE=size,
        R=rank,
        D=d,
        PRECISION="ieee" if a.dtype == torch.float32 else "tf32",  # tf32 holds every bit of the half precisions
        BLOCK_M=block_m,
        BLOCK_R=BLOCK_R,
        BLOCK_D=block_d,
        warps=8,
    )
    return None
