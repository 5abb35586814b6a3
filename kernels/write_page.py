"""Write-out: a page that the newest token has filled goes from its slot to pinned host memory.

Every KV head's program looks at the length on the device and does nothing where no page was filled: a step takes no
decision on the host. Shapes: rows as in `kvcli.kernels.slot_layout`, host pages as in `kvcli.kernels.host_pages`.
"""

from __future__ import annotations

from kvcli.kernels._triton import jit, launch, power_of_two, rows_at_once, takes, tl
from kvcli.kernels.host_pages import HostPages
from kvcli.kernels.slot_layout import PagedKV, filled_pages, slot_of

BLOCK_ELEMENTS = 4096  # of the keys, and as many of the values, that a program holds at once


def write_filled_page_ref(rows: PagedKV, host: HostPages) -> None:
    """Copy head by head."""
    for b, page, start in filled_pages(rows):
        for h in range(rows.k.shape[1]):
            block = host.block(b, page, h)
            for target, source in zip(block, (rows.k, rows.v), strict=True):
                target.copy_(source[b, h, start : start + rows.layout.size])


@jit
def _write_kernel(
    addresses: tl.tensor,
    lengths: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    kv_batch: tl.tensor,
    kv_head: tl.tensor,
    kv_row: tl.tensor,
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
    address = tl.load(addresses + b * most_pieces + page // per_piece)
    target = tl.multiple_of(address.to(tl.pointer_type(k.dtype.element_ty)), 16)  # see `gather_pages`
    target += (page % per_piece).to(tl.int64) * host_page + h * host_head
    source = b * kv_batch + h * kv_head + slot_of(page, first, ring, low).to(tl.int64) * SIZE * kv_row
    c = tl.arange(0, BLOCK_D)
    for start in range(0, SIZE, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        inside = (row < SIZE)[:, None] & (c < D)[None, :]
        here = source + row.to(tl.int64)[:, None] * kv_row + c[None, :]
        there = row.to(tl.int64)[:, None] * host_row + c[None, :]
        keys = tl.load(k + here, mask=inside)
        values = tl.load(v + here, mask=inside)
        tl.store(target + there, keys, mask=inside)
        tl.store(target + host_half + there, values, mask=inside)


def write_filled_page(rows: PagedKV, host: HostPages) -> None:
    """Write the page of every sequence whose length is a whole number of pages; the newest token must be appended.

    The slot is read until the kernel has finished, and the host's copy is valid from then on. May be captured in a
    CUDA graph. Raises ValueError for shapes, dtypes or strides that the kernel cannot read.
    """
    (b, num_kv_heads, _, d), layout = rows.k.shape, rows.layout
    rows.check()
    host.check(rows)
    if not takes(rows.k):
        return write_filled_page_ref(rows, host)
    block_d = power_of_two(d)
    launch(
        _write_kernel,
        (b * num_kv_heads,),
        *(host.addresses, rows.lengths, rows.k, rows.v, *rows.k.stride()[:3], *host.strides),
        *(host.per_piece, host.addresses.shape[1], layout.first, layout.ring, layout.low),
        HK=num_kv_heads,
        SIZE=layout.size,
        D=d,
        BLOCK_R=rows_at_once(layout.size, block_d, BLOCK_ELEMENTS),
        BLOCK_D=block_d,
    )
    return None
