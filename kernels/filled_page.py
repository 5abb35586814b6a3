"""A page that the newest token has filled: its keys are summarised, it goes to pinned host memory, or both.

Every KV head's program looks at the length on the device and does nothing where no page was filled: a step takes no
decision on the host. Shapes: rows as in `kvcli.kernels.slot_layout`, summaries [b, Hk, n, 2, d] as in
`kvcli.kernels.page_summary`, host pages as in `kvcli.kernels.host_pages`, of values alone where keys are kept
elsewhere, or are the same.
"""

from __future__ import annotations

from torch import Tensor

from kvcli.kernels._triton import jit, launch, require_whole, takes, tl
from kvcli.kernels.host_pages import HostPages
from kvcli.kernels.page_summary import blocks, page_cuboid, page_summary_ref, store_bounds
from kvcli.kernels.slot_layout import PagedKV, filled_pages, slot_of
from kvcli.kernels.write_quantised import write_quantised


def take_in_filled_page_ref(
    rows: PagedKV, summary: Tensor | None = None, host: HostPages | None = None, cuboid: bool = False
) -> None:
    """Sequence by sequence, head by head."""
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
    """Take in the page of every sequence whose length is a whole number of pages; its newest token is appended.

    Writes `summary` and `host` at that page and nothing else, either where it is given. The slot is read until the
    kernel has finished, and the host's copy is valid from then on. May be captured in a CUDA graph. Raises ValueError
    for shapes, dtypes or strides that the kernel cannot read. Where the host's pages are quantised, it is the keys as
    they will be read that are summarised.
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
        **blocks(layout.size, d),
    )
    return None
