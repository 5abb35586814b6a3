"""Recall: the missing pages of every KV head go from pinned host memory straight into their slots.

The kernel itself reads host memory: no call a page, no copy in between. A few programs share the list of all heads'
misses, each moves a whole page of one KV head at a time, keys and values, all of it in flight before any of it is
stored. That is what hides the latency of the bus with few multiprocessors, so that computation keeps the others.

Shapes: host pages as in `kvcli.kernels.host_pages`, misses as in `kvcli.kernels.resolve_pages`, rows k and v
[b, Hk, rows, d] as in `kvcli.kernels.slot_layout`; slot j of a miss is the j-th selected one.
"""

from __future__ import annotations

from kvcli.kernels._triton import jit, launch, power_of_two, rows_at_once, takes, tl
from kvcli.kernels.gather_quantised import gather_quantised
from kvcli.kernels.host_pages import HostPages
from kvcli.kernels.resolve_pages import MissList, misses_of_heads, nth_miss
from kvcli.kernels.slot_layout import PagedKV

PROGRAMS = 32
"""Programs that share the list: 16 KiB a page and program keep about half a mebibyte in flight."""

BLOCK_ELEMENTS = 4096  # of the keys, and as many of the values, that a program holds at once


def gather_pages_ref(host: HostPages, misses: MissList, rows: PagedKV) -> None:
    """Copy page by page."""
    size, sink = rows.layout.size, rows.layout.sink
    for b, h in (misses.counts > 0).nonzero().tolist():
        for j in range(int(misses.counts[b, h])):
            start = (sink + int(misses.slots[b, h, j])) * size
            block = host.block(b, int(misses.pages[b, h, j]), h)
            for target, source in zip((rows.k, rows.v)[-len(block) :], block, strict=True):
                target[b, h, start : start + size] = source


@jit
def _gather_kernel(
    addresses: tl.tensor,
    pages: tl.tensor,
    slots: tl.tensor,
    count: tl.tensor,
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
    sink: tl.tensor,
    programs: tl.tensor,
    HK: tl.constexpr,
    PAIRS: tl.constexpr,
    K: tl.constexpr,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    counts, ends, total = misses_of_heads(count, PAIRS, BLOCK_P)
    r, c = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    for entry in range(tl.program_id(0), total, programs):
        b, h, page, slot = nth_miss(entry, counts, ends, pages, slots, HK, K, BLOCK_P)
        address = tl.load(addresses + b * most_pieces + page // per_piece)
        # Said of the pointer: the compiler knows nothing of a number's alignment, and would read element by element.
        source = tl.multiple_of(address.to(tl.pointer_type(k.dtype.element_ty)), 16)
        source += (page % per_piece).to(tl.int64) * host_page + h * host_head
        target = b * kv_batch + h * kv_head + (sink + slot).to(tl.int64) * SIZE * kv_row
        for start in range(0, SIZE, BLOCK_R):
            row = start + r
            inside = (row < SIZE)[:, None] & (c < D)[None, :]
            there = row.to(tl.int64)[:, None] * host_row + c[None, :]
            here = target + row.to(tl.int64)[:, None] * kv_row + c[None, :]
            if PARTS == 2:
                keys = tl.load(source + there, mask=inside)
                values = tl.load(source + host_half + there, mask=inside)
                tl.store(k + here, keys, mask=inside)
                tl.store(v + here, values, mask=inside)
            else:
                tl.store(v + here, tl.load(source + there, mask=inside), mask=inside)


def gather_pages(host: HostPages, misses: MissList, rows: PagedKV, programs: int = PROGRAMS) -> None:
    """Bring the pages that `misses` lists into their slots; does nothing for a head that misses none.

    The page table is not touched (`resolve_pages_device` has done it). What reads the slots must have finished, and
    the pages must have been written out. May be captured in a CUDA graph: the list's length is read on the device.

    Raises ValueError for shapes, dtypes or strides that the kernel cannot read.
    """
    (b, num_kv_heads, _, d), layout = rows.k.shape, rows.layout
    rows.check()
    host.check(rows)
    misses.check(b, num_kv_heads, layout.selected)
    if host.format is not None:
        return gather_quantised(host, misses, rows, programs)
    if not takes(rows.k):
        return gather_pages_ref(host, misses, rows)
    block_d = power_of_two(d)
    launch(
        _gather_kernel,
        (programs,),
        *(host.addresses, *misses, rows.k, rows.v, *rows.k.stride()[:3], *host.strides),
        *(host.per_piece, host.addresses.shape[1], layout.sink, programs),
        HK=num_kv_heads,
        PAIRS=b * num_kv_heads,
        K=layout.selected,
        SIZE=layout.size,
        D=d,
        PARTS=host.parts,
        BLOCK_P=power_of_two(b * num_kv_heads),
        BLOCK_R=rows_at_once(layout.size, block_d, BLOCK_ELEMENTS),
        BLOCK_D=block_d,
    )
    return None
