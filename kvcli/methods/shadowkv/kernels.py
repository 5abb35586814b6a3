"""Kernels of ShadowKV: rebuild keys from low-rank factors (section 4.1), and store a leaving chunk (appendix A.1).

Rebuilt keys are rotated to their positions and written directly to their slots:

    x_t = A_t B_h      k_tc = x_tc * cos(t, c) + x_t,partner(c) * sign(c) * sin(t, c)

The partner of a channel is the other one of its rotary pair. Columns of the product are exchanged after it, without
leaving the multiprocessor, so that one product serves any layout of the pairs and the factor is read once, in order.

Shapes: a [b, n, c, r], factor B [b, Hk, r, d], misses [b, Hk, k] as in `kvcli.kernels.page_table`, cos and sin
[positions, w] fp32 with the attention scaling in them -> rows of k [b, Hk, rows, d].

ShadowKV+ stores the mean key and the low-rank keys of the chunk that leaves the local window with the next token.

With c tokens in a chunk and a ring of w chunks, including the one that the next token goes into, a sequence of L tokens
loses chunk

    j = (L + 1) / c - w        where that is a whole number and the sequence has outgrown its slots

and stores (arXiv 2410.21465, appendix A.1), x_t being the chunk's keys without their rotation to positions j*c and on,

    mean_h = 1/c sum_t k_ht      A_t = sum_h x_ht B_h^T
    x_tc = (k_tc * cos(t, c) - k_t,partner(c) * sign(c) * sin(t, c)) / (cos^2(t, c) + sin^2(t, c))

The divisor removes the attention scaling with which the keys were rotated. Every program reads the length on the
device: a step takes no decision on the host.

Shapes: rows as in `kvcli.kernels.page_table`, whose ring is left `early`; factor B [b, Hk, r, d], rotation as above ->
a [b, n, c, r], means [b, Hk, n, d], and numbers [b].
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvcli.kernels._numba import compiled, flat, inlined, prange, run, serves
from kvcli.kernels._triton import ALL_REGISTERS, jit, launch, power_of_two, require, require_whole, takes, tl
from kvcli.kernels.norm_rope import Rotation, at_positions, rotated
from kvcli.kernels.page_table import Misses, MissList, PagedKV, active, slot_of, slot_of_page

BLOCK_ELEMENTS = 4096  # of keys rebuilt per program
BLOCK_R = 32  # of the rank, per iteration or program


def rebuild_missing_keys_ref(
    a: Tensor, factor: Tensor, misses: MissList, rotation: Rotation | None, k: Tensor, first: int
) -> None:
    """Reference of `rebuild_missing_keys`: head by head in at least fp32."""
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
    key = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)  # among all keys that the head misses
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
        partner = tl.load(partners + c, mask=c < D, other=0)
        other = tl.gather(keys, tl.broadcast_to(partner[None, :], [BLOCK_M, BLOCK_D]), axis=1)
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
    """Rebuild the keys of the chunks that `misses` lists and write them to their slots; `first` is slot 0.

    a [b, n, c, r] and factor [b, Hk, r, d] hold un-rotated keys; chunk j starts at position j*c. rotation is None in a
    layer without rotary positions. Can be captured in a CUDA graph: the list's length is read on the device.

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


PIECE = 8  # chunks per thread at once
LINE = 16  # numbers in a cache line


@inlined
def _multiply(a: Any, row: int, b: Any, factor: int, size: int, rank: int, d: int, out: Any) -> None:
    # Take eight rows of the factor at once, for all tokens of the chunk: a sum is then read and written once per eight
    # products, and the factor, which fills the L1 cache, is read once per chunk.
    out[:] = 0
    whole = rank - rank % 8
    for r in range(0, whole, 8):
        b0 = np.uint64(factor + r * d)
        b1, b2, b3, b4 = b0 + np.uint64(d), b0 + np.uint64(2 * d), b0 + np.uint64(3 * d), b0 + np.uint64(4 * d)
        b5, b6, b7 = b0 + np.uint64(5 * d), b0 + np.uint64(6 * d), b0 + np.uint64(7 * d)
        for t in range(size):
            i, to = np.uint64(row + t * rank + r), np.uint64(t * d)
            a0, a1, a2, a3 = a[i], a[i + np.uint64(1)], a[i + np.uint64(2)], a[i + np.uint64(3)]
            a4, a5, a6, a7 = a[i + np.uint64(4)], a[i + np.uint64(5)], a[i + np.uint64(6)], a[i + np.uint64(7)]
            for column in range(d):
                c = np.uint64(column)
                low = a0 * b[b0 + c] + a1 * b[b1 + c] + a2 * b[b2 + c] + a3 * b[b3 + c]
                high = a4 * b[b4 + c] + a5 * b[b5 + c] + a6 * b[b6 + c] + a7 * b[b7 + c]
                out[to + c] += low + high
    for r in range(whole, rank):
        for t in range(size):
            for column in range(d):
                out[t * d + column] += a[row + t * rank + r] * b[factor + r * d + column]


@inlined
def _are_halves(partner: Any, column: Any, turned: int) -> bool:
    # Whether a channel's partner is half the width away, and its cosine at the channel's own index: then no look-up is
    # needed and vector loads can be used.
    half, found = turned // 2, True
    for c in range(half):
        found &= partner[c] == c + half and partner[c + half] == c
    for c in range(turned):
        found &= column[c] == c
    return found


@cache
def _loop(d: int) -> Any:
    """Make the loop over keys of d numbers; a size known at compile time lets them stay in registers."""

    @compiled
    def rebuild(
        a: Any,
        b: Any,
        sizes: Any,
        heads: Any,
        slots: Any,
        chunks: Any,
        cos: Any,
        sin: Any,
        partner: Any,
        column: Any,
        sign: Any,
        k: Any,
        strides: Any,
        keys: Any,
    ) -> None:
        size, rank, turned = sizes
        half = turned // 2
        for piece in prange(len(keys)):
            own, halves = keys[piece], _are_halves(partner, column, turned)
            first = piece * PIECE
            last = min(first + PIECE, len(chunks))
            touched = np.float32(0)  # prefetches: all cache lines are requested at once
            for i in range(first, last):
                for c in range(chunks[i] * size * rank, (chunks[i] + 1) * size * rank, LINE):
                    touched += a[c]
                for t in range(chunks[i] * size, (chunks[i] + 1) * size if turned else 0):
                    for c in range(0, cos.shape[1], LINE):
                        touched += cos[t, c] + sin[t, c]
            own[0] = touched
            for i in range(first, last):
                _multiply(a, chunks[i] * size * rank, b, heads[i] * rank * d, size, rank, d, own)
                for t in range(size):
                    position, key = chunks[i] * size + t, own[t * d :][:d]
                    out = k[heads[i] * strides[0] + slots[i] * strides[1] + t * strides[2] :][:d]
                    if halves:
                        cosine, sine = cos[position], sin[position]
                        for c in range(half):
                            out[c] = key[c] * cosine[c] + key[half + c] * sign[c] * sine[c]
                        for c in range(half):
                            out[half + c] = key[half + c] * cosine[half + c] + key[c] * sign[half + c] * sine[half + c]
                    else:
                        for c in range(turned):
                            at, other = np.uint32(column[c]), key[np.uint32(partner[c])]
                            out[c] = key[c] * cos[position, at] + other * sign[c] * sin[position, at]
                    for c in range(turned, d):
                        out[c] = key[c]

    return rebuild


def rebuild_loops_suit(a: Tensor, b: Tensor, k: Tensor) -> bool:
    """Return whether `rebuild_keys_cpu` can rebuild keys of these factors into k."""
    return serves(a, b, k) and a.is_contiguous() and b.is_contiguous()


def rebuild_keys_cpu(a: Tensor, b: Tensor, misses: Misses, rotation: Rotation | None, k: Tensor) -> None:
    """Rebuild the keys of the chunks that `misses` lists, each in its slot; without a rotation they are not rotated."""
    (_, size, rank), d, count = a.shape, b.shape[2], len(misses.pages)
    if rotation is None:
        nothing, none = a.new_empty(0, 0), torch.empty(0, dtype=torch.int32)
        rotation = Rotation(nothing, nothing, none, none, a.new_empty(0))
    sizes = size, rank, int((rotation.column >= 0).sum())  # rotated channels come first
    keys = a.new_empty(-(-count // PIECE), size * d)
    strides = np.array(k.stride()[:3])
    run(_loop(d), count * size * rank * d, flat(a), flat(b), sizes, *misses, *rotation, flat(k), strides, keys)


CHUNK_ELEMENTS = 512  # of keys held at once per program: fp32 products take many registers


class StoredChunks(NamedTuple):
    """The chunks before the window: a [b, n, c, r], means [b, Hk, n, d], and three counts [b] int32.

    `chunks` counts the selectable chunks, `room` those there is room for, and `left` the tokens up to the end of the
    leaving chunk, 0 where none leaves.
    """

    a: Tensor
    means: Tensor
    chunks: Tensor
    room: Tensor
    left: Tensor

    def check(self, rows: PagedKV, factor: Tensor) -> None:
        """Raise ValueError where shapes, dtypes or strides do not fit these rows."""
        (b, num_kv_heads, _, d), n, size, rank = rows.k.shape, self.a.shape[1], rows.layout.size, factor.shape[2]
        require("a", self.a, (b, n, size, rank), factor.dtype)
        if self.a.stride()[1:] != (size * rank, rank, 1):
            raise ValueError(f"chunks of a are not one behind the other: strides {self.a.stride()}")
        require_whole("means", self.means, (b, num_kv_heads, n, d), rows.k.dtype)
        for name, x in zip(self._fields[2:], self[2:], strict=True):
            require_whole(name, x, (b,), torch.int32)


def keep_leaving_chunk_ref(rows: PagedKV, factor: Tensor, rotation: Rotation | None, stored: StoredChunks) -> None:
    """Reference of `keep_leaving_chunk`: sequence by sequence, in at least fp32."""
    dtype, size = torch.promote_types(rows.k.dtype, torch.float32), rows.layout.size
    chunk = (rows.lengths + 1) // size - rows.layout.window
    leaves = active(rows.lengths, rows.layout) & ((rows.lengths + 1) % size == 0) & (chunk < stored.room)
    stored.left.copy_((chunk + 1) * size * leaves)
    slot = slot_of_page(chunk, rows.layout)
    for b in leaves.nonzero()[:, 0].tolist():
        j, start = int(chunk[b]), int(slot[b]) * size
        keys = rows.k[b, :, start : start + size].to(dtype)  # [Hk, c, d]
        stored.means[b, :, j] = keys.mean(1).to(stored.means.dtype)
        if rotation is not None:
            keys = unrotated(keys, torch.arange(j * size, j * size + size, device=keys.device), rotation)
        stored.a[b, j] = torch.einsum("hcd,hrd->cr", keys, factor[b].to(dtype)).to(stored.a.dtype)
        stored.chunks[b] = j + 1


def unrotated(keys: Tensor, positions: Tensor, rotation: Rotation) -> Tensor:
    """Undo the rotation of keys [.., n, d] at positions [n] in plain torch, in the precision of both."""
    cos, sin = at_positions(positions, rotation)
    return (keys * cos - keys[..., rotation.partner] * sin) / (cos.square() + sin.square())


@jit
def _leaving_kernel(
    k: tl.tensor,
    lengths: tl.tensor,
    factor: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    partners: tl.tensor,
    columns: tl.tensor,
    signs: tl.tensor,
    a: tl.tensor,
    means: tl.tensor,
    chunks: tl.tensor,
    room: tl.tensor,
    left: tl.tensor,
    k_batch: tl.tensor,
    k_head: tl.tensor,
    k_row: tl.tensor,
    a_batch: tl.tensor,
    num_chunks: tl.tensor,
    width: tl.tensor,
    first: tl.tensor,
    window: tl.tensor,
    HK: tl.constexpr,
    SIZE: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    b, part = tl.program_id(0).to(tl.int64), tl.program_id(1)  # a sequence, a part of the rank
    length = tl.load(lengths + b)
    chunk = (length + 1) // SIZE - window
    leaves = (length // SIZE >= first + window) & ((length + 1) % SIZE == 0) & (chunk < tl.load(room + b))
    if part == 0:
        tl.store(left + b, tl.where(leaves, (chunk + 1) * SIZE, 0))
    if leaves == 0:
        return
    t, r = tl.arange(0, BLOCK_M), part * BLOCK_R + tl.arange(0, BLOCK_R)
    row = slot_of(chunk, first, window, first) * SIZE + t
    position = chunk.to(tl.int64) * SIZE + t
    k += b * k_batch
    found = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    for h in range(0, HK):
        pair = b * HK + h
        for start in range(0, D, BLOCK_D):
            c = start + tl.arange(0, BLOCK_D)
            inside = (t < SIZE)[:, None] & (c < D)[None, :]
            at = k + h * k_head + row.to(tl.int64)[:, None] * k_row
            keys = tl.load(at + c[None, :], mask=inside, other=0.0).to(tl.float32)
            if part == 0:
                mean = tl.sum(keys, axis=0) / SIZE
                tl.store(means + (pair * num_chunks + chunk) * D + c, mean.to(means.dtype.element_ty), mask=c < D)
            if partners is not None:
                partner = tl.load(partners + c, mask=c < D, other=0)
                column = tl.load(columns + c, mask=c < D, other=-1)
                sign = tl.load(signs + c, mask=c < D, other=0.0)
                other = tl.load(at + partner[None, :], mask=inside, other=0.0).to(tl.float32)
                angle = position[:, None] * width + column[None, :]
                turned = inside & (column >= 0)[None, :]
                cosine = tl.load(cosines + angle, mask=turned, other=1.0)
                sine = tl.load(sines + angle, mask=turned, other=0.0)
                keys = (keys * cosine - other * sine * sign[None, :]) / (cosine * cosine + sine * sine)
            in_factor = (r < R)[:, None] & (c < D)[None, :]
            right = tl.load(factor + (pair * R + r[:, None]) * D + c[None, :], mask=in_factor, other=0.0)
            # Un-rotated keys use the full fp32 precision, and so few of them can afford it.
            found += tl.dot(keys, tl.trans(right.to(tl.float32)), input_precision="ieee")
    target = a + b * a_batch + position[:, None] * R + r[None, :]
    tl.store(target, found.to(a.dtype.element_ty), mask=(t < SIZE)[:, None] & (r < R)[None, :])
    if part == 0:
        tl.store(chunks + b, chunk + 1)


def keep_leaving_chunk(rows: PagedKV, factor: Tensor, rotation: Rotation | None, stored: StoredChunks) -> None:
    """Store mean key and low-rank keys of the chunk that the next token pushes out, for every sequence that loses one.

    Its values are written as the page that ends at `stored.left` tokens, see `kvcli.kernels.append`. rotation is None
    in a layer without rotary positions. The rows are read until the kernel has finished. Can be captured in a CUDA
    graph.

    Raises ValueError for shapes, dtypes or strides that the kernel cannot read, and for rings that are not left early.
    """
    (b, num_kv_heads, _, d), layout, rank = rows.k.shape, rows.layout, factor.shape[2]
    rows.check()
    require_whole("factor", factor, (b, num_kv_heads, rank, d), rows.k.dtype)
    stored.check(rows, factor)
    if rotation is not None:
        rotation.check(d)
    if not layout.early or layout.group > 1:
        raise ValueError(f"chunks do not leave {layout} before the next token")
    if not takes(rows.k):
        return keep_leaving_chunk_ref(rows, factor, rotation, stored)
    block_m = max(16, power_of_two(layout.size))
    launch(
        _leaving_kernel,
        (b, -(-rank // BLOCK_R)),
        *(rows.k, rows.lengths, factor, *(rotation or (None,) * 5), *stored, *rows.k.stride()[:3], stored.a.stride(0)),
        *(stored.means.shape[2], 0 if rotation is None else rotation.cos.shape[1], layout.first, layout.window),
        HK=num_kv_heads,
        SIZE=layout.size,
        R=rank,
        D=d,
        BLOCK_M=block_m,
        BLOCK_R=BLOCK_R,
        BLOCK_D=max(16, min(power_of_two(d), CHUNK_ELEMENTS // block_m)),
        registers=ALL_REGISTERS,
    )
    return None
