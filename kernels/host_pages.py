"""The host pools of a batch, as kernels see them: pages in pinned memory, reached by address.

    hnd   [pages, Hk, 2, p, d]   a page of one KV head is one contiguous block, keys then values
    nhd   [pages, 2, p, Hk, d]   a page of one KV head is 2*p pieces of d elements

Where keys are kept elsewhere, there is 1 in place of 2. Quantised, a page of one KV head is a block of bytes
(`kvcli.kernels.quant`): [pages, Hk, bytes] uint8.

A pool may lie in several pieces, so that it can be allocated bit by bit and sequences can share some of them. Kernels
see pieces of equally many pages (a sequence's last may be shorter): where those of a batch differ, they are cut to a
size that divides all. Pinned memory has one address for the host and the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvcli.kernels.page_table import PagedKV, SlotLayout
from kvcli.kernels.quant import BlockFormat

HostLayout = Literal["hnd", "nhd"]

ALIGNMENT = 16
"""Bytes to which every piece is aligned, so that kernels read 16 at once."""


@dataclass(frozen=True)
class HostPages:
    """`pieces` of every sequence, kept alive here, and their `addresses` [b, most pieces] int64 on the device.

    `per_piece` is the number of pages in every piece but a sequence's last, which may have fewer. Where pages are
    quantised, by `format`, `held_keys` [b, Hk, p, d] takes the keys of the page that each sequence has written last, as
    they will be read; `sizes` [b, Hk, d] fp32 are those of the channels of keys that are rounded one by one.
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
        """Take one list of pieces for every sequence of the batch; `quantised`: their format, and the model's dtype.

        Raises ValueError where pages differ in shape, have gaps, or lie where kernels cannot read 16 bytes at once, and
        where there are no `sizes` of keys that are rounded one by one.
        """
        first = pieces[0][0]
        for piece in (piece for row in pieces for piece in row):
            if piece.shape[1:] != first.shape[1:] or piece.dtype != first.dtype or not piece.is_contiguous():
                raise ValueError(f"a piece {tuple(piece.shape)} of {piece.dtype} does not go with the first one")
        per_piece = max(len(row[0]) for row in pieces)  # not the first one's: a short sequence has one short piece
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
        """How many parts a page has: keys and values, or values alone."""
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
        """Elements from a page, head, half (keys, values) and token to the next."""
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
        """Raise ValueError where these are not pages of that size, dtype and number of sequences."""
        b, num_kv_heads, _, d = rows.k.shape
        if self.block_shape != (num_kv_heads, rows.layout.size, d) or len(self.pieces) != b:
            raise ValueError(f"host pages {self.block_shape} of {len(self.pieces)} sequences do not fit {rows.k.shape}")
        dtype = self.pieces[0][0].dtype if self.held_keys is None else self.held_keys.dtype
        if dtype != rows.k.dtype:
            raise ValueError(f"host pages are {dtype}, not {rows.k.dtype}")

    def written(self, rows: PagedKV) -> PagedKV:
        """See the quantised pages that newest tokens of `rows` have filled, once written: each in a slot of its own.

        Their keys, as they will be read, stand in the place of values too.
        """
        assert self.held_keys is not None
        return PagedKV(self.held_keys, self.held_keys, rows.lengths, SlotLayout(rows.layout.size, 0, 0, 1))
