"""Write-out of a page that the newest token has filled, quantised on its way (`filled_page`).

Shapes as in `kvcli.kernels.filled_page`, blocks, of values alone or of keys as well, as in
`kvcli.kernels.quantised_blocks`. The keys as they will be read go to `HostPages.held_keys` as well, for what scores
pages has to know them.
"""

from __future__ import annotations

from kvcli.kernels._triton import jit, launch, power_of_two, takes, tl
from kvcli.kernels.gather_quantised import constants
from kvcli.kernels.host_pages import HostPages
from kvcli.kernels.slot_layout import PagedKV, filled_pages, slot_of


def write_quantised_ref(rows: PagedKV, host: HostPages) -> None:
    """Write head by head."""
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
    """Write rows x of SIZE tokens by groups of TOKENS and one channel."""
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
    """Write rows x of SIZE tokens by groups of one token and CHANNELS, divided by `sizes` where there are any."""
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
    BITS: tl.constexpr,
    SIZE: tl.constexpr,
    W: tl.constexpr,
    PARTS: tl.constexpr,
    BYTES: tl.constexpr,
    KEY_TOKENS: tl.constexpr,
    KEY_CHANNELS: tl.constexpr,
    KEY_SCALES: tl.constexpr,
    BLOCK_K: tl.constexpr,  # noqa: ARG001 - of reading
    BLOCK_R: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
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
    scales = (block + PARTS * SIZE * W).to(tl.pointer_type(tl.float16))
    source = b * kv_batch + h * kv_head + slot_of(page, first, ring, low).to(tl.int64) * SIZE * kv_row
    if PARTS == 2:
        if KEY_TOKENS > 1:
            target = held + pair.to(tl.int64) * SIZE * W * (8 // BITS)
            _write_by_channel(k + source, kv_row, block, scales, target, KEY_TOKENS, BITS, SIZE, W, BLOCK_W)
        else:
            own = sizes
            if sizes is not None:
                own += pair.to(tl.int64) * W * (8 // BITS)
            _write_by_token(k + source, kv_row, block, scales, own, KEY_CHANNELS, BITS, SIZE, W, BLOCK_R, BLOCK_C)
        block += SIZE * W
        scales += 2 * KEY_SCALES
    _write_by_token(v + source, kv_row, block, scales, None, W, BITS, SIZE, W, BLOCK_R, BLOCK_W)


def write_quantised(rows: PagedKV, host: HostPages) -> None:
    """Quantise for `kvcli.kernels.filled_page.take_in_filled_page`, which has checked all this.

    `host.held_keys` gets the keys of the page, as they will be read, where it has keys and several tokens.
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
        BLOCK_C=power_of_two(form.key_groups.channels),
        **constants(form),
    )
    return None
