"""Recall: pages in host memory as kernels see them, and their transfer directly into slots.

    hnd   [pages, Hk, 2, p, d]   a page of one KV head is one contiguous block, keys then values
    nhd   [pages, 2, p, Hk, d]   a page of one KV head is 2*p pieces of d elements

Where keys are kept elsewhere, there is 1 in place of 2. Quantised, a page of one KV head is a block of bytes
(`kvcli.kernels.quant`): [pages, Hk, bytes] uint8. Its bytes cross the bus and are dequantised on arrival
(`gather_pages`).

A pool may lie in several pieces, so that it can be allocated in parts and sequences can share some of them. Kernels see
pieces of equally many pages (a sequence's last may be shorter): where those of a batch differ, they are split to a size
that divides all. Pinned memory has one address for the host and the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvcli.kernels._triton import jit, launch, power_of_two, rows_at_once, takes, tl
from kvcli.kernels.page_table import MissList, PagedKV, SlotLayout, misses_from, misses_of_heads, nth_miss
from kvcli.kernels.quant import BlockFormat

HostLayout = Literal["hnd", "nhd"]

ALIGNMENT = 16
"""Alignment of pieces in bytes, so that kernels read 16 at once."""


@dataclass(frozen=True)
class HostPages:
    """The `pieces` of every sequence, kept alive here, and their `addresses` [b, most pieces] int64 on the device.

    `per_piece` is the number of pages in every piece except a sequence's last, which may have fewer. If pages are
    quantised, by `format`, `held_keys` [b, Hk, p, d] receives the keys of the page that each sequence wrote last, as
    they will be read; `sizes` [b, Hk, d] fp32 are the channel sizes of keys quantised token by token.
    """

    pieces: Sequence[Sequence[Tensor]]
    addresses: Tensor
    per_piece: int
    layout: HostLayout
    format: BlockFormat | None = None
    held_keys: Tensor | None = None
    sizes: Tensor | None = None

    @classmethod
    def of(
        cls,
        pieces: Sequence[Sequence[Tensor]],
        layout: HostLayout,
        device: torch.device,
        quantised: tuple[BlockFormat, torch.dtype] | None = None,
        sizes: Tensor | None = None,
    ) -> HostPages:
        """Take one list of pieces per sequence of the batch; `quantised` is their format, and the model's dtype.

        Raises ValueError if pages differ in shape, have gaps, or are not aligned to 16 bytes, and if `sizes` are
        missing for keys quantised token by token.
        """
        first = pieces[0][0]
        for piece in (piece for row in pieces for piece in row):
            if piece.shape[1:] != first.shape[1:] or piece.dtype != first.dtype or not piece.is_contiguous():
                raise ValueError(f"a piece {tuple(piece.shape)} of {piece.dtype} does not go with the first one")
        per_piece = max(len(row[0]) for row in pieces)  # not the first sequence's: it may have one short piece
        full = [len(piece) for row in pieces for piece in row[:-1]]
        if any(size != per_piece for size in full) or any(len(row[-1]) > per_piece for row in pieces):
            per_piece = math.gcd(*full)
            pieces = [[part for piece in row for part in torch.split(piece, per_piece)] for row in pieces]
        if any(piece.data_ptr() % ALIGNMENT for row in pieces for piece in row):
            raise ValueError(f"a piece lies at an address that {ALIGNMENT} does not divide")
        most = max(len(row) for row in pieces)
        table = [[piece.data_ptr() for piece in row] + [0] * (most - len(row)) for row in pieces]
        addresses = torch.tensor(table, dtype=torch.int64, device=device)
        if quantised is None:
            return cls(pieces, addresses, per_piece, layout)
        form, dtype = quantised
        if form.sized != (sizes is not None):
            raise ValueError(f"pages of {form} {'have' if form.sized else 'take no'} sizes of channels")
        held = torch.empty(len(pieces), first.shape[1], form.size, form.d, dtype=dtype, device=device)
        return cls(pieces, addresses, per_piece, layout, form, held, sizes)

    @property
    def count(self) -> int:
        """Pages of the longest sequence."""
        return max(sum(len(piece) for piece in row) for row in self.pieces)

    @property
    def block_shape(self) -> tuple[int, int, int]:
        """KV heads, tokens in a page, head dimension."""
        shape = self.pieces[0][0].shape
        if self.format is not None:
            return shape[1], self.format.size, self.format.d
        num_kv_heads, size = (shape[1], shape[3]) if self.layout == "hnd" else (shape[3], shape[2])
        return num_kv_heads, size, shape[4]

    @property
    def parts(self) -> int:
        """Number of parts of a page: keys and values, or values alone."""
        if self.format is not None:
            return self.format.parts
        return self.pieces[0][0].shape[2 if self.layout == "hnd" else 1]

    @property
    def block_bytes(self) -> int:
        """Bytes of a page of one KV head."""
        if self.format is not None:
            return self.format.bytes
        _, size, d = self.block_shape
        return self.parts * size * d * self.pieces[0][0].element_size()

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """Elements from one page, head, half (keys, values) and token to the next."""
        num_kv_heads, size, d = self.block_shape
        page, parts = num_kv_heads * self.parts * size * d, self.parts
        if self.layout == "hnd":
            return page, parts * size * d, size * d, d
        return page, d, page // parts, num_kv_heads * d

    def block(self, sequence: int, page: int, head: int) -> Tensor:
        """View a page of one KV head: [2 or 1, p, d], or its bytes."""
        block = self.pieces[sequence][page // self.per_piece][page % self.per_piece]
        return block[head] if self.layout == "hnd" else block[:, :, head]

    def check(self, rows: PagedKV) -> None:
        """Raise ValueError where page size, dtype or number of sequences do not fit the rows."""
        b, num_kv_heads, _, d = rows.k.shape
        if self.block_shape != (num_kv_heads, rows.layout.size, d) or len(self.pieces) != b:
            raise ValueError(f"host pages {self.block_shape} of {len(self.pieces)} sequences do not fit {rows.k.shape}")
        dtype = self.pieces[0][0].dtype if self.held_keys is None else self.held_keys.dtype
        if dtype != rows.k.dtype:
            raise ValueError(f"host pages are {dtype}, not {rows.k.dtype}")

    def written(self, rows: PagedKV) -> PagedKV:
        """View the quantised pages that the newest tokens of `rows` have filled, once written, each in its own slot.

        Their keys, as they will be read, also take the place of values.
        """
        assert self.held_keys is not None
        return PagedKV(self.held_keys, self.held_keys, rows.lengths, SlotLayout(rows.layout.size, 0, 0, 1))


QUANTISED_ELEMENTS = 4096  # codes of keys, or of values, held at once per program

PROGRAM_TOKENS = 32
"""Tokens that a program should have in flight; pages that are brought one at a time take more programs if smaller."""


def gather_quantised_ref(host: HostPages, misses: MissList, rows: PagedKV) -> None:
    """Reference of `gather_quantised`: page by page."""
    size, sink, form = rows.layout.size, rows.layout.sink, host.format
    assert form is not None
    page = torch.empty(1, form.parts, form.size, form.d, dtype=rows.k.dtype)
    for b, h in (misses.counts > 0).nonzero().tolist():
        for j in range(int(misses.counts[b, h])):
            start = (sink + int(misses.slots[b, h, j])) * size
            block = host.block(b, int(misses.pages[b, h, j]), h)[None]
            form.dequantise(block, page, None if host.sizes is None else host.sizes[b, h, None])
            for target, source in zip((rows.k, rows.v)[-form.parts :], page[0], strict=True):
                target[b, h, start : start + size] = source


@jit
def _read_rows(
    block: tl.tensor,
    scales: tl.tensor,
    target: tl.tensor,
    sizes: tl.tensor,
    row: tl.tensor,
    group: tl.tensor,
    mine: tl.tensor,
    row_stride: tl.tensor,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BITS: tl.constexpr,
    SIZE: tl.constexpr,
    W: tl.constexpr,
    BLOCK_W: tl.constexpr,
    ONE_GROUP: tl.constexpr,
) -> None:
    """Dequantise rows [R], those that are `mine`, of a part of blocks: codes [SIZE, W] at `block`, s and z at `scales`.

    `block`, `scales`, `target` and `sizes` are those of one block, or of each row's, [R, 1]. `group` is the one of the
    groups of tokens that all rows are in (ONE_GROUP), or each row's, [R, 1]. Numbers are multiplied by the `sizes` of
    their channels, if there are any.
    """
    halves: tl.constexpr = 8 // BITS
    columns: tl.constexpr = halves * W // CHANNELS  # groups in a row of groups
    wide: tl.constexpr = [row.shape[0], W // CHANNELS, CHANNELS]
    by_column: tl.constexpr = (TOKENS == 1) & (CHANNELS < W) & (W == BLOCK_W) & ((CHANNELS & (CHANNELS - 1)) == 0)
    c = tl.arange(0, BLOCK_W)
    inside = mine[:, None] & (c < W)[None, :]
    codes = tl.load(block + row[:, None] * W + c[None, :], mask=inside, other=0)
    for half in tl.static_range(halves):
        column = half * W // CHANNELS + c // CHANNELS
        if TOKENS > 1:
            at = group * columns + column[None, :]
            there = (c < W)[None, :] if ONE_GROUP else inside
        elif CHANNELS == W:
            at = (row * columns + half)[:, None]
            there = mine[:, None]
        elif not by_column:
            at = row[:, None] * columns + column[None, :]
            there = inside
        else:  # a scale is read once, not for each of its channels: many threads would ask the host for it
            at = row[:, None] * columns + (half * W // CHANNELS + tl.arange(0, W // CHANNELS))[None, :]
            there = mine[:, None]
        scale = tl.load(scales + at, mask=there, other=0.0).to(tl.float32)
        zero = tl.load(scales + SIZE // TOKENS * columns + at, mask=there, other=0.0).to(tl.float32)
        if by_column:
            scale = tl.reshape(tl.broadcast_to(scale[:, :, None], wide), [row.shape[0], W])
            zero = tl.reshape(tl.broadcast_to(zero[:, :, None], wide), [row.shape[0], W])
        code = codes if BITS == 8 else (codes >> (4 * half)) & 15
        numbers = zero + scale * code.to(tl.float32)
        if sizes is not None:
            known = (c < W)[None, :] if ONE_GROUP else inside
            numbers *= tl.load(sizes + half * W + c[None, :], mask=known, other=0.0)
        here = row.to(tl.int64)[:, None] * row_stride + (half * W + c)[None, :]
        tl.store(target + here, numbers.to(target.dtype.element_ty), mask=inside)


@jit
def _gather_quantised_kernel(
    addresses: tl.tensor,
    pages: tl.tensor,
    slots: tl.tensor,
    count: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    sizes: tl.tensor,
    kv_batch: tl.tensor,
    kv_head: tl.tensor,
    kv_row: tl.tensor,
    per_piece: tl.tensor,
    most_pieces: tl.tensor,
    sink: tl.tensor,
    programs: tl.tensor,
    HK: tl.constexpr,
    PAIRS: tl.constexpr,
    K: tl.constexpr,
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
    TOGETHER: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_KEY_W: tl.constexpr,
    BLOCK_VALUE_W: tl.constexpr,
) -> None:
    """Bring a page at a time, or so many small ones TOGETHER that every thread has 16 bytes to read."""
    counts, ends, total = misses_of_heads(count, PAIRS, BLOCK_P)
    if TOGETHER == 1:
        for entry in range(tl.program_id(0), total, programs):
            b, h, page, slot = nth_miss(entry, counts, ends, pages, slots, HK, K, BLOCK_P)
            address = tl.load(addresses + b * most_pieces + page // per_piece)
            block = tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), 16)  # see `gather_pages`
            block += ((page % per_piece).to(tl.int64) * HK + h) * BYTES
            scales = (block + SCALES).to(tl.pointer_type(tl.float16))
            target = b * kv_batch + h * kv_head + (sink + slot).to(tl.int64) * SIZE * kv_row
            if PARTS == 2:
                own = sizes
                if sizes is not None:
                    own += (b * HK + h) * KEY_W * (8 // KEY_BITS)
                for start in range(0, SIZE, BLOCK_K):
                    # fmt: off
                    row = start + tl.arange(0, BLOCK_K)
                    _read_rows(block, scales, k + target, own, row, start // KEY_TOKENS, row < SIZE, kv_row,
                               KEY_TOKENS, KEY_CHANNELS, KEY_BITS, SIZE, KEY_W, BLOCK_KEY_W, True)
                    # fmt: on
                block += SIZE * KEY_W
                scales += 2 * KEY_SCALES
            for start in range(0, SIZE, BLOCK_R):
                row = start + tl.arange(0, BLOCK_R)
                # fmt: off
                _read_rows(block, scales, v + target, None, row, 0, row < SIZE, kv_row,
                           1, VALUE_CHANNELS, VALUE_BITS, SIZE, VALUE_W, BLOCK_VALUE_W, True)
                # fmt: on
    else:
        r = tl.arange(0, BLOCK_R)
        row = r % SIZE
        for first in range(tl.program_id(0) * TOGETHER, total, programs * TOGETHER):
            entry = first + r // SIZE
            mine = (r < TOGETHER * SIZE) & (entry < total)
            b, h, page, slot = misses_from(entry, total, counts, ends, pages, slots, HK, K, BLOCK_P)
            address = tl.load(addresses + b * most_pieces + page // per_piece, mask=mine, other=0)
            block = tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), 16)
            block = (block + ((page % per_piece).to(tl.int64) * HK + h) * BYTES)[:, None]
            scales = (block + SCALES).to(tl.pointer_type(tl.float16))
            target = (b * kv_batch + h * kv_head + (sink + slot).to(tl.int64) * SIZE * kv_row)[:, None]
            if PARTS == 2:
                own = sizes
                if sizes is not None:
                    own += ((b * HK + h) * KEY_W * (8 // KEY_BITS))[:, None]
                # fmt: off
                _read_rows(block, scales, k + target, own, row, (row // KEY_TOKENS)[:, None], mine, kv_row,
                           KEY_TOKENS, KEY_CHANNELS, KEY_BITS, SIZE, KEY_W, BLOCK_KEY_W, False)
                # fmt: on
                block += SIZE * KEY_W
                scales += 2 * KEY_SCALES
            # fmt: off
            _read_rows(block, scales, v + target, None, row, 0, mine, kv_row,
                       1, VALUE_CHANNELS, VALUE_BITS, SIZE, VALUE_W, BLOCK_VALUE_W, False)
            # fmt: on


def gather_quantised(host: HostPages, misses: MissList, rows: PagedKV, programs: int) -> None:
    """Implement `gather_pages`, which has checked the arguments, for quantised pages."""
    form = host.format
    assert form is not None
    if not takes(rows.k):
        return gather_quantised_ref(host, misses, rows)
    b, num_kv_heads, _, _ = rows.k.shape
    held = max(1, QUANTISED_ELEMENTS // power_of_two(max(form.widths)))
    by_token = [(w, each.channels) for w, each in zip(form.widths, form.groups, strict=True) if each.tokens == 1]
    shapes = [n for width, channels in by_token if channels < width for n in (width, channels)]  # of what is reshaped
    together = max(1, held // form.size) if all(n == power_of_two(n) for n in shapes) else 1
    if together == 1:
        programs = max(programs, programs * PROGRAM_TOKENS // form.size)
    launch(
        _gather_quantised_kernel,
        (programs,),
        *(host.addresses, *misses, rows.k, rows.v, host.sizes, *rows.k.stride()[:3]),
        *(host.per_piece, host.addresses.shape[1], rows.layout.sink, programs),
        HK=num_kv_heads,
        PAIRS=b * num_kv_heads,
        K=rows.layout.selected,
        TOGETHER=together,
        BLOCK_P=power_of_two(b * num_kv_heads),
        **(constants(form) | ({"BLOCK_R": held} if together > 1 else {})),
    )
    return None


def constants(form: BlockFormat) -> dict[str, int]:
    """Return the compile-time constants of a format; blocks of rows of keys do not cross groups."""
    key_w, value_w = (power_of_two(form.widths[part]) for part in (0, -1))
    key_rows, rows = (rows_at_once(form.size, w, QUANTISED_ELEMENTS) for w in (key_w, value_w))
    keys = form.key_groups
    return {
        "KEY_BITS": form.bits[0],
        "VALUE_BITS": form.bits[-1],
        "SIZE": form.size,
        "KEY_W": form.widths[0],
        "VALUE_W": form.widths[-1],
        "PARTS": form.parts,
        "BYTES": form.bytes,
        "SCALES": form.scales_at,
        "KEY_TOKENS": keys.tokens,
        "KEY_CHANNELS": keys.channels,
        "VALUE_CHANNELS": form.groups[-1].channels,
        "KEY_SCALES": form.scales[0],
        "BLOCK_K": min(key_rows, keys.tokens),
        "BLOCK_R": rows,
        "BLOCK_KEY_W": key_w,
        "BLOCK_VALUE_W": value_w,
    }


PROGRAMS = 32
"""Programs that share the list: with 16 KiB held by each, half a mebibyte is in flight."""

BLOCK_ELEMENTS = 4096  # of keys, and as many of values, held at once per program


def gather_pages_ref(host: HostPages, misses: MissList, rows: PagedKV) -> None:
    """Reference of `gather_pages`: page by page."""
    size, sink = rows.layout.size, rows.layout.sink
    for b, h in (misses.counts > 0).nonzero().tolist():
        for j in range(int(misses.counts[b, h])):
            start = (sink + int(misses.slots[b, h, j])) * size
            block = host.block(b, int(misses.pages[b, h, j]), h)
            for target, source in zip((rows.k, rows.v)[-len(block) :], block, strict=True):
                target[b, h, start : start + size] = source


@jit
def _bring_rows(
    there: tl.tensor,
    here: tl.tensor,
    inside: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    host_half: tl.tensor,
    PARTS: tl.constexpr,
) -> None:
    """Copy rows from host memory at `there` to the offsets `here`; all is read before anything is written."""
    if PARTS == 2:
        keys = tl.load(there, mask=inside)
        values = tl.load(there + host_half, mask=inside)
        tl.store(k + here, keys, mask=inside)
        tl.store(v + here, values, mask=inside)
    else:
        tl.store(v + here, tl.load(there, mask=inside), mask=inside)


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
    TOGETHER: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Bring a page at a time, or so many small ones TOGETHER that every thread has 16 bytes to read."""
    counts, ends, total = misses_of_heads(count, PAIRS, BLOCK_P)
    r, c = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    if TOGETHER == 1:
        for entry in range(tl.program_id(0), total, programs):
            b, h, page, slot = nth_miss(entry, counts, ends, pages, slots, HK, K, BLOCK_P)
            address = tl.load(addresses + b * most_pieces + page // per_piece)
            # A hint on the pointer: the compiler does not know the alignment, and would read element by element.
            source = tl.multiple_of(address.to(tl.pointer_type(k.dtype.element_ty)), 16)
            source += (page % per_piece).to(tl.int64) * host_page + h * host_head
            target = b * kv_batch + h * kv_head + (sink + slot).to(tl.int64) * SIZE * kv_row
            for start in range(0, SIZE, BLOCK_R):
                row = start + r
                inside = (row < SIZE)[:, None] & (c < D)[None, :]
                there = source + row.to(tl.int64)[:, None] * host_row + c[None, :]
                here = target + row.to(tl.int64)[:, None] * kv_row + c[None, :]
                _bring_rows(there, here, inside, k, v, host_half, PARTS)
    else:
        for first in range(tl.program_id(0) * TOGETHER, total, programs * TOGETHER):
            entry, row = first + r // SIZE, r % SIZE
            mine = (r < TOGETHER * SIZE) & (entry < total)
            b, h, page, slot = misses_from(entry, total, counts, ends, pages, slots, HK, K, BLOCK_P)
            address = tl.load(addresses + b * most_pieces + page // per_piece, mask=mine, other=0)
            source = tl.multiple_of(address.to(tl.pointer_type(k.dtype.element_ty)), 16)
            source += (page % per_piece).to(tl.int64) * host_page + h * host_head + row.to(tl.int64) * host_row
            target = b * kv_batch + h * kv_head + ((sink + slot).to(tl.int64) * SIZE + row) * kv_row
            inside = mine[:, None] & (c < D)[None, :]
            _bring_rows(source[:, None] + c[None, :], target[:, None] + c[None, :], inside, k, v, host_half, PARTS)


class Missing(NamedTuple):
    """Pages that are missing, and the host memory from which attention brings them before it reads their slots."""

    host: HostPages
    misses: MissList


LISTED = 64
"""Entries of a KV head's list of misses that a program looks at at once."""


@jit
def bring_missing(
    addresses: tl.tensor,
    pages: tl.tensor,
    slots: tl.tensor,
    count: tl.tensor,
    pair: tl.tensor,
    b: tl.tensor,
    h: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    kv_row: tl.tensor,
    host_page: tl.tensor,
    host_head: tl.tensor,
    host_half: tl.tensor,
    host_row: tl.tensor,
    per_piece: tl.tensor,
    most_pieces: tl.tensor,
    sink: tl.tensor,
    K: tl.constexpr,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Bring what one KV head misses into its rows begin .. end, at `k` and `v`; the program may read them afterwards.

    Others may bring other rows of the same page. All rows of a block are on their way at once.
    """
    missing = tl.load(count + pair)
    if missing > 0:
        c = tl.arange(0, BLOCK_D)
        for start in range(begin, end, BLOCK_R):
            row = start + tl.arange(0, BLOCK_R)
            entry = tl.full([BLOCK_R], -1, tl.int32)  # of the list
            for first in range(0, missing, BLOCK_K):
                listed = first + tl.arange(0, BLOCK_K)
                slot = tl.load(slots + pair.to(tl.int64) * K + listed, mask=listed < missing, other=0)
                same = ((row // SIZE - sink)[:, None] == slot[None, :]) & (listed < missing)[None, :]
                entry = tl.maximum(entry, tl.max(tl.where(same, listed[None, :], -1), axis=1))
            mine = (entry >= 0) & (row < end)
            page = tl.load(pages + pair.to(tl.int64) * K + entry, mask=mine, other=0)
            address = tl.load(addresses + b * most_pieces + page // per_piece, mask=mine, other=0)
            source = tl.multiple_of(address.to(tl.pointer_type(k.dtype.element_ty)), 16)  # see `_gather_kernel`
            source += (page % per_piece).to(tl.int64) * host_page + h * host_head
            source += (row % SIZE).to(tl.int64) * host_row
            here = row.to(tl.int64)[:, None] * kv_row + c[None, :]
            inside = mine[:, None] & (c < D)[None, :]
            _bring_rows(source[:, None] + c[None, :], here, inside, k, v, host_half, PARTS)
        tl.debug_barrier()


def gather_pages(host: HostPages, misses: MissList, rows: PagedKV, programs: int = PROGRAMS) -> None:
    """Bring the pages that `misses` lists into their slots.

    The page table is not changed (`resolve_pages_device` does that). Readers of the slots must have finished, and the
    pages must have been written out. Can be captured in a CUDA graph: the list's length is read on the device.

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
    rows_held = max(1, BLOCK_ELEMENTS // block_d)
    together = max(1, rows_held // layout.size)
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
        TOGETHER=together,
        BLOCK_P=power_of_two(b * num_kv_heads),
        BLOCK_R=rows_held,
        BLOCK_D=block_d,
    )
    return None
