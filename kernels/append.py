"""Append the newest token of every sequence to its row, and take in pages that it has filled.

`append_token` serves where a token is needed before attention, which otherwise stores it. A filled page is summarised,
written to pinned host memory (quantised if its format says so), or both.

Shapes: rows and new token as in `kvcli.kernels.paged_attention`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvcli.kernels._triton import (
    ALL_REGISTERS,
    jit,
    launch,
    power_of_two,
    require,
    require_whole,
    same_strides,
    takes,
    tl,
)
from kvcli.kernels.page_scores import blocks, page_cuboid, page_summary_ref, store_bounds
from kvcli.kernels.page_table import PagedKV, filled_pages, slot_of, slot_of_page
from kvcli.kernels.recall import HostPages, constants


class NewToken(NamedTuple):
    """Keys and values [b, Hk, d] of the newest token of every sequence; `at` [b, Hk] int32 are its rows, if given."""

    k: Tensor
    v: Tensor
    at: Tensor | None = None

    def check(self, rows: PagedKV) -> None:
        """Raise ValueError if shapes, dtypes or strides are not those of a token of these rows."""
        b, num_kv_heads, _, d = rows.k.shape
        for name, x in (("new k", self.k), ("new v", self.v)):
            require(name, x, (b, num_kv_heads, d), rows.k.dtype)
        if not same_strides(self.k, self.v):
            raise ValueError(f"new k and v have different strides: {self.k.stride()} and {self.v.stride()}")
        if self.at is not None:
            require_whole("rows of the new token", self.at, (b, num_kv_heads), torch.int32)


def append_token_ref(rows: PagedKV, new: NewToken, heads: Tensor | None = None) -> None:
    """Reference of `append_token`: head by head; only KV heads in `heads` [b, Hk], if given."""
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
    if TWICE:  # into the ring and, for the first tokens, also into slots of their own
        if length <= first:
            own = (length - 1).to(tl.int64) * kv_row
            tl.store(k + own, token_k, mask=c < D)
            tl.store(v + own, token_v, mask=c < D)


def append_token(rows: PagedKV, new: NewToken) -> None:
    """Write the newest tokens to their rows, which must not be in place; a sequence of length 0 has none.

    Can be captured in a CUDA graph.

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


def write_quantised_ref(rows: PagedKV, host: HostPages) -> None:
    """Reference of `write_quantised`: head by head."""
    form, held = host.format, host.held_keys
    assert form is not None
    assert held is not None
    for b, page, start in filled_pages(rows):
        for h in range(rows.k.shape[1]):
            parts = [x[b, h, start : start + form.size] for x in (rows.k, rows.v)[-form.parts :]]
            sizes = None if host.sizes is None else host.sizes[b, h, None]
            form.quantise(parts, host.block(b, page, h), sizes)
            if form.parts == 2:
                held[b, h] = form.rounded(parts[0], sizes=sizes)


@jit
def _scale_of(low: tl.tensor, high: tl.tensor, MOST: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    low, high = tl.maximum(low, -65504.0), tl.minimum(high, 65504.0)
    zero = low.to(tl.float16)
    return tl.div_rn(high - zero.to(tl.float32), tl.full(high.shape, MOST, tl.float32)).to(tl.float16), zero


@jit
def _codes_of(x: tl.tensor, scale: tl.tensor, zero: tl.tensor, MOST: tl.constexpr) -> tl.tensor:
    step = tl.where(scale == 0.0, 1.0, scale.to(tl.float32))
    step = tl.broadcast_to(step, x.shape)
    codes = tl.floor(tl.div_rn(x - zero.to(tl.float32), step) + 0.5)
    return tl.minimum(tl.maximum(codes, 0.0), MOST)


@jit
def _write_by_channel(
    x: tl.tensor,
    stride: tl.tensor,
    block: tl.tensor,
    scales: tl.tensor,
    held: tl.tensor,
    TOKENS: tl.constexpr,
    BITS: tl.constexpr,
    SIZE: tl.constexpr,
    W: tl.constexpr,
    BLOCK_W: tl.constexpr,
) -> None:
    """Write rows x of SIZE tokens in groups of TOKENS and one channel."""
    halves: tl.constexpr = 8 // BITS
    most: tl.constexpr = (1 << BITS) - 1
    r, c = tl.arange(0, TOKENS), tl.arange(0, BLOCK_W)
    for start in range(0, SIZE, TOKENS):
        row = start + r
        inside = ((row < SIZE)[:, None]) & (c < W)[None, :]
        packed = tl.zeros([TOKENS, BLOCK_W], tl.int32)
        for half in tl.static_range(halves):
            channel = half * W + c
            at = row.to(tl.int64)[:, None] * stride + channel[None, :]
            some = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
            scale, zero = _scale_of(tl.min(some, axis=0), tl.max(some, axis=0), most)
            group = start // TOKENS * halves * W + channel
            tl.store(scales + group, scale, mask=c < W)
            tl.store(scales + SIZE // TOKENS * halves * W + group, zero, mask=c < W)
            codes = _codes_of(some, scale[None, :], zero[None, :], most)
            packed |= codes.to(tl.int32) << (4 * half)
            again = zero.to(tl.float32)[None, :] + scale.to(tl.float32)[None, :] * codes
            there = row[:, None] * halves * W + channel[None, :]
            tl.store(held + there, again.to(held.dtype.element_ty), mask=inside)
        tl.store(block + row[:, None] * W + c[None, :], packed.to(tl.uint8), mask=inside)


@jit
def _write_by_token(
    x: tl.tensor,
    stride: tl.tensor,
    block: tl.tensor,
    scales: tl.tensor,
    sizes: tl.tensor,
    CHANNELS: tl.constexpr,
    BITS: tl.constexpr,
    SIZE: tl.constexpr,
    W: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    """Write rows x of SIZE tokens in groups of one token and CHANNELS, divided by `sizes` if there are any."""
    halves: tl.constexpr = 8 // BITS
    most: tl.constexpr = (1 << BITS) - 1
    columns: tl.constexpr = halves * W // CHANNELS
    r, c = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_C)
    for start in range(0, SIZE, BLOCK_R):
        row = start + r
        inside = (row < SIZE)[:, None] & (c < CHANNELS)[None, :]
        for first in tl.static_range(0, W, CHANNELS):
            packed = tl.zeros([BLOCK_R, BLOCK_C], tl.int32)
            for half in tl.static_range(halves):
                at = row.to(tl.int64)[:, None] * stride + (half * W + first + c)[None, :]
                some = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
                if sizes is not None:  # powers of two
                    some /= tl.load(sizes + half * W + first + c, mask=c < CHANNELS, other=1.0)[None, :]
                low = tl.min(tl.where(inside, some, float("inf")), axis=1)
                high = tl.max(tl.where(inside, some, float("-inf")), axis=1)
                scale, zero = _scale_of(low, high, most)
                group = row * columns + (half * W + first) // CHANNELS
                tl.store(scales + group, scale, mask=row < SIZE)
                tl.store(scales + SIZE * columns + group, zero, mask=row < SIZE)
                codes = _codes_of(some, scale[:, None], zero[:, None], most)
                packed |= codes.to(tl.int32) << (4 * half)
            tl.store(block + row[:, None] * W + first + c[None, :], packed.to(tl.uint8), mask=inside)


@jit
def _write_quantised_kernel(
    addresses: tl.tensor,
    lengths: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    held: tl.tensor,
    sizes: tl.tensor,
    kv_batch: tl.tensor,
    kv_head: tl.tensor,
    kv_row: tl.tensor,
    per_piece: tl.tensor,
    most_pieces: tl.tensor,
    first: tl.tensor,
    ring: tl.tensor,
    low: tl.tensor,
    HK: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    SIZE: tl.constexpr,
    KEY_W: tl.constexpr,
    VALUE_W: tl.constexpr,
    PARTS: tl.constexpr,
    BYTES: tl.constexpr,
    SCALES: tl.constexpr,
    KEY_TOKENS: tl.constexpr,
    KEY_CHANNELS: tl.constexpr,
    VALUE_CHANNELS: tl.constexpr,
    KEY_SCALES: tl.constexpr,
    BLOCK_K: tl.constexpr,  # noqa: ARG001 - used when reading
    BLOCK_R: tl.constexpr,
    BLOCK_KEY_W: tl.constexpr,
    BLOCK_VALUE_W: tl.constexpr,  # noqa: ARG001 - the same
    BLOCK_KEY_C: tl.constexpr,
    BLOCK_VALUE_C: tl.constexpr,
) -> None:
    pair = tl.program_id(0)  # a KV head of a sequence
    b, h = (pair // HK).to(tl.int64), (pair % HK).to(tl.int64)
    length = tl.load(lengths + b)
    if (length == 0) | (length % SIZE != 0):
        return
    page = length // SIZE - 1
    address = tl.load(addresses + b * most_pieces + page // per_piece)
    block = tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), 16)  # see `gather_pages`
    block += ((page % per_piece).to(tl.int64) * HK + h) * BYTES
    scales = (block + SCALES).to(tl.pointer_type(tl.float16))
    source = b * kv_batch + h * kv_head + slot_of(page, first, ring, low).to(tl.int64) * SIZE * kv_row
    if PARTS == 2:
        # fmt: off
        if KEY_TOKENS > 1:
            target = held + pair.to(tl.int64) * SIZE * KEY_W * (8 // KEY_BITS)
            _write_by_channel(k + source, kv_row, block, scales, target,
                              KEY_TOKENS, KEY_BITS, SIZE, KEY_W, BLOCK_KEY_W)
        else:
            own = sizes
            if sizes is not None:
                own += pair.to(tl.int64) * KEY_W * (8 // KEY_BITS)
            _write_by_token(k + source, kv_row, block, scales, own,
                            KEY_CHANNELS, KEY_BITS, SIZE, KEY_W, BLOCK_R, BLOCK_KEY_C)
        # fmt: on
        block += SIZE * KEY_W
        scales += 2 * KEY_SCALES
    _write_by_token(
        v + source, kv_row, block, scales, None, VALUE_CHANNELS, VALUE_BITS, SIZE, VALUE_W, BLOCK_R, BLOCK_VALUE_C
    )


def write_quantised(rows: PagedKV, host: HostPages) -> None:
    """Write out filled pages quantised, for `take_in_filled_page`, which has checked the arguments.

    `host.held_keys` receives the keys of the page, as they will be read, if it has keys and several tokens.
    """
    form = host.format
    assert form is not None
    if not takes(rows.k):
        return write_quantised_ref(rows, host)
    (b, num_kv_heads, _, _), layout = rows.k.shape, rows.layout
    launch(
        _write_quantised_kernel,
        (b * num_kv_heads,),
        *(host.addresses, rows.lengths, rows.k, rows.v, host.held_keys, host.sizes, *rows.k.stride()[:3]),
        *(host.per_piece, host.addresses.shape[1], layout.first, layout.ring, layout.low),
        HK=num_kv_heads,
        BLOCK_KEY_C=power_of_two(form.key_groups.channels),
        BLOCK_VALUE_C=power_of_two(form.groups[-1].channels),
        **constants(form),
    )
    return None


def take_in_filled_page_ref(
    rows: PagedKV, summary: Tensor | None = None, host: HostPages | None = None, cuboid: bool = False
) -> None:
    """Reference of `take_in_filled_page`: sequence by sequence, head by head."""
    digest = page_cuboid if cuboid else page_summary_ref
    for b, page, start in filled_pages(rows):
        k, v = (x[b, :, start : start + rows.layout.size] for x in (rows.k, rows.v))  # [Hk, p, d]
        if summary is not None:
            summary[b, :, page] = digest(k[:, None])[:, 0]
        for h in range(len(k) if host is not None else 0):
            block = host.block(b, page, h)  # type: ignore[union-attr]
            for target, source in zip(block, (k[h], v[h])[-len(block) :], strict=True):
                target.copy_(source)


@jit
def _filled_kernel(
    k: tl.tensor,
    v: tl.tensor,
    lengths: tl.tensor,
    summary: tl.tensor,
    addresses: tl.tensor,
    kv_batch: tl.tensor,
    kv_head: tl.tensor,
    kv_row: tl.tensor,
    num_pages: tl.tensor,
    host_page: tl.tensor,
    host_head: tl.tensor,
    host_half: tl.tensor,
    host_row: tl.tensor,
    per_piece: tl.tensor,
    most_pieces: tl.tensor,
    first: tl.tensor,
    ring: tl.tensor,
    low: tl.tensor,
    HK: tl.constexpr,
    CUBOID: tl.constexpr,
    PARTS: tl.constexpr,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    pair = tl.program_id(0)  # a KV head of a sequence
    b, h = (pair // HK).to(tl.int64), (pair % HK).to(tl.int64)
    length = tl.load(lengths + b)
    if (length == 0) | (length % SIZE != 0):
        return
    page = length // SIZE - 1
    source = b * kv_batch + h * kv_head + slot_of(page, first, ring, low).to(tl.int64) * SIZE * kv_row
    if addresses is not None:
        address = tl.load(addresses + b * most_pieces + page // per_piece)
        target = tl.multiple_of(address.to(tl.pointer_type(k.dtype.element_ty)), 16)  # see `gather_pages`
        target += (page % per_piece).to(tl.int64) * host_page + h * host_head
        c = tl.arange(0, BLOCK_D)
        for start in range(0, SIZE, BLOCK_R):
            row = start + tl.arange(0, BLOCK_R)
            inside = (row < SIZE)[:, None] & (c < D)[None, :]
            here = source + row.to(tl.int64)[:, None] * kv_row + c[None, :]
            there = row.to(tl.int64)[:, None] * host_row + c[None, :]
            values = tl.load(v + here, mask=inside)
            if PARTS == 2:
                keys = tl.load(k + here, mask=inside)
                tl.store(target + host_half + there, values, mask=inside)
                tl.store(target + there, keys, mask=inside)
            else:
                tl.store(target + there, values, mask=inside)
    if summary is not None:
        to = summary + (pair.to(tl.int64) * num_pages + page) * 2 * D
        store_bounds(k + source, kv_row, to, SIZE, D, BLOCK_R, BLOCK_D, CUBOID)


def take_in_filled_page(
    rows: PagedKV, summary: Tensor | None = None, host: HostPages | None = None, cuboid: bool = False
) -> None:
    """Take in the newest page of every sequence whose length, newest token included, is a multiple of the page size.

    Writes that page to `summary` and `host`, whichever are given, and nothing else. The slot is read until the kernel
    has finished, and the host's copy is valid from then on. If the host's pages are quantised, the keys as they will be
    read are summarised. Can be captured in a CUDA graph. Raises ValueError for shapes, dtypes or strides that the
    kernel cannot read.
    """
    (b, num_kv_heads, _, d), layout = rows.k.shape, rows.layout
    rows.check()
    if summary is not None:
        require_whole("summary", summary, (b, num_kv_heads, summary.shape[2], 2, d), rows.k.dtype)
    if host is not None:
        host.check(rows)
    if host is not None and host.format is not None:
        write_quantised(rows, host)
        return None if summary is None else take_in_filled_page(host.written(rows), summary, None, cuboid)
    if not takes(rows.k):
        return take_in_filled_page_ref(rows, summary, host, cuboid)
    launch(
        _filled_kernel,
        (b * num_kv_heads,),
        *(rows.k, rows.v, rows.lengths, summary, None if host is None else host.addresses, *rows.k.stride()[:3]),
        *(0 if summary is None else summary.shape[2], *((0,) * 4 if host is None else host.strides)),
        *((1, 1) if host is None else (host.per_piece, host.addresses.shape[1])),
        *(layout.first, layout.ring, layout.low),
        HK=num_kv_heads,
        CUBOID=cuboid,
        PARTS=2 if host is None else host.parts,
        registers=ALL_REGISTERS,
        **blocks(layout.size, d),
    )
    return None
