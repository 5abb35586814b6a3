"""The chunk that leaves the local window with the next token: its mean key and its low-rank keys (ShadowKV+).

With c tokens in a chunk and a ring of w chunks, the one that the next token goes into among them, a sequence of L
tokens loses chunk

    j = (L + 1) / c - w        where that is a whole number and the sequence has outgrown its slots

of which is kept (arXiv 2410.21465, appendix A.1), x_t being its keys without their rotation to positions j*c and on,

    mean_h = 1/c sum_t k_ht      A_t = sum_h x_ht B_h^T
    x_tc = (k_tc * cos(t, c) - k_t,partner(c) * sign(c) * sin(t, c)) / (cos^2(t, c) + sin^2(t, c))

The divisor takes the attention scaling out, with which the keys were rotated. Every program looks at the length on the
device: a step takes no decision on the host.

Shapes: rows as in `kvcli.kernels.page_table`, whose ring is left `early`; factor B [b, Hk, r, d], rotation as in
`kvcli.kernels.rebuild_keys` -> a [b, n, c, r], means [b, Hk, n, d], and numbers [b].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvcli.kernels._triton import jit, launch, power_of_two, require, require_whole, takes, tl
from kvcli.kernels.page_table import PagedKV, active, slot_of, slot_of_page
from kvcli.kernels.rebuild_keys import Rotation, at_positions

BLOCK_ELEMENTS = 512  # of the keys that a program holds at once: in fp32 products take many registers
BLOCK_R = 32  # of the rank that it computes


class StoredChunks(NamedTuple):
    """The chunks before the window: a [b, n, c, r], means [b, Hk, n, d], and [b] int32 each, how many can be selected,
    how many there is room for, and the tokens up to the end of the one that leaves, 0 where none does.
    """

    a: Tensor
    means: Tensor
    chunks: Tensor
    room: Tensor
    left: Tensor

    def check(self, rows: PagedKV, factor: Tensor) -> None:
        """Raise ValueError where shapes, dtypes or strides are not those of chunks of these rows."""
        (b, num_kv_heads, _, d), n, size, rank = rows.k.shape, self.a.shape[1], rows.layout.size, factor.shape[2]
        require("a", self.a, (b, n, size, rank), factor.dtype)
        if self.a.stride()[1:] != (size * rank, rank, 1):
            raise ValueError(f"chunks of a are not one behind the other: strides {self.a.stride()}")
        require_whole("means", self.means, (b, num_kv_heads, n, d), rows.k.dtype)
        for name, x in zip(self._fields[2:], self[2:], strict=True):
            require_whole(name, x, (b,), torch.int32)


def keep_leaving_chunk_ref(rows: PagedKV, factor: Tensor, rotation: Rotation | None, stored: StoredChunks) -> None:
    """Sequence by sequence, in at least fp32."""
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
    """Undo the rotation of keys [.., n, d] to positions [n] in plain torch; in the precision of both."""
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
    b, part = tl.program_id(0).to(tl.int64), tl.program_id(1)  # a sequence, some of the rank
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
            # Keys without their rotation have all digits of fp32, and so few of them have time for it.
            found += tl.dot(keys, tl.trans(right.to(tl.float32)), input_precision="ieee")
    target = a + b * a_batch + position[:, None] * R + r[None, :]
    tl.store(target, found.to(a.dtype.element_ty), mask=(t < SIZE)[:, None] & (r < R)[None, :])
    if part == 0:
        tl.store(chunks + b, chunk + 1)


def keep_leaving_chunk(rows: PagedKV, factor: Tensor, rotation: Rotation | None, stored: StoredChunks) -> None:
    """Store what is kept of the keys of the chunk that leaves, of every sequence that loses one with its next token.

    Its values are the pages that `stored.left` tokens have filled, see `kvcli.kernels.append`. rotation is None in
    a layer without rotary positions. The rows are read until the kernel has finished. May be captured in a CUDA graph.

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
        BLOCK_D=max(16, min(power_of_two(d), BLOCK_ELEMENTS // block_m)),
    )
    return None
