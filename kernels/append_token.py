"""The newest token of every sequence goes into its row, where it is needed before attention puts it there.

Shapes: rows and new token as in `kvcli.kernels.slot_attention`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvcli.kernels._triton import jit, launch, power_of_two, require, require_whole, same_strides, takes, tl
from kvcli.kernels.slot_layout import PagedKV, slot_of, slot_of_page


class NewToken(NamedTuple):
    """Keys and values [b, Hk, d] of the newest token of every sequence; `at` [b, Hk] int32, its rows where given."""

    k: Tensor
    v: Tensor
    at: Tensor | None = None

    def check(self, rows: PagedKV) -> None:
        """Raise ValueError where shapes, dtypes or strides are not those of a token of these rows."""
        b, num_kv_heads, _, d = rows.k.shape
        for name, x in (("new k", self.k), ("new v", self.v)):
            require(name, x, (b, num_kv_heads, d), rows.k.dtype)
        if not same_strides(self.k, self.v):
            raise ValueError(f"new k and v have different strides: {self.k.stride()} and {self.v.stride()}")
        if self.at is not None:
            require_whole("rows of the new token", self.at, (b, num_kv_heads), torch.int32)


def append_token_ref(rows: PagedKV, new: NewToken, heads: Tensor | None = None) -> None:
    """Put it there head by head, those of `heads` [b, Hk] alone where they are given."""
    size, newest = rows.layout.size, rows.lengths - 1
    row = newest if rows.in_place else slot_of_page(newest // size, rows.layout) * size + newest % size
    at = row[:, None].expand(rows.k.shape[:2]) if new.at is None else new.at
    asked = (newest >= 0)[:, None] if heads is None else heads & (newest >= 0)[:, None]
    for b, h in asked.expand(rows.k.shape[:2]).nonzero().tolist():
        rows.k[b, h, at[b, h]] = new.k[b, h]
        rows.v[b, h, at[b, h]] = new.v[b, h]
        if rows.layout.group > 1 and newest[b] < rows.layout.first:
            rows.k[b, h, newest[b]] = new.k[b, h]
            rows.v[b, h, newest[b]] = new.v[b, h]


@jit
def _append_kernel(
    k: tl.tensor,
    v: tl.tensor,
    new_k: tl.tensor,
    new_v: tl.tensor,
    new_at: tl.tensor,
    lengths: tl.tensor,
    kv_batch: tl.tensor,
    kv_head: tl.tensor,
    kv_row: tl.tensor,
    new_batch: tl.tensor,
    new_head: tl.tensor,
    first: tl.tensor,
    ring: tl.tensor,
    low: tl.tensor,
    HK: tl.constexpr,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    TWICE: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    pair = tl.program_id(0)  # a KV head of a sequence
    b, h = (pair // HK).to(tl.int64), (pair % HK).to(tl.int64)
    length = tl.load(lengths + b)
    if length == 0:
        return
    if new_at is not None:
        row = tl.load(new_at + pair)
    else:
        row = slot_of((length - 1) // SIZE, first, ring, low) * SIZE + (length - 1) % SIZE
    c = tl.arange(0, BLOCK_D)
    here = b * new_batch + h * new_head + c
    k += b * kv_batch + h * kv_head + c
    v += b * kv_batch + h * kv_head + c
    token_k, token_v = tl.load(new_k + here, mask=c < D), tl.load(new_v + here, mask=c < D)
    tl.store(k + row.to(tl.int64) * kv_row, token_k, mask=c < D)
    tl.store(v + row.to(tl.int64) * kv_row, token_v, mask=c < D)
    if TWICE:  # into the ring, and as long as there are slots of their own, into these
        if length <= first:
            own = (length - 1).to(tl.int64) * kv_row
            tl.store(k + own, token_k, mask=c < D)
            tl.store(v + own, token_v, mask=c < D)


def append_token(rows: PagedKV, new: NewToken) -> None:
    """Write the newest tokens to their rows, which are not in place; a sequence of length 0 has none.

    May be captured in a CUDA graph.

    Raises ValueError for shapes, dtypes or strides that the kernel cannot read.
    """
    rows.check()
    new.check(rows)
    if not takes(rows.k):
        return append_token_ref(rows, new)
    b, num_kv_heads, _, d = rows.k.shape
    launch(
        _append_kernel,
        (b * num_kv_heads,),
        *(rows.k, rows.v, *new, rows.lengths, *rows.k.stride()[:3], *new.k.stride()[:2]),
        *(rows.layout.first, rows.layout.ring, rows.layout.low),
        HK=num_kv_heads,
        SIZE=rows.layout.size,
        D=d,
        TWICE=rows.layout.group > 1,
        BLOCK_D=power_of_two(d),
    )
    return None
