"""A page of one KV head in 8 or 4 bits a number: how KV is held in host memory where it is to take less of it.

    z = fp16(min x)    s = fp16((max x - z) / (2^bits - 1))
    code = clamp(floor((x - z) / s + 1/2))    x~ = z + s * code

with one s and z for every group of numbers. Groups are those that the literature has settled on (KIVI, arXiv
2402.02750, section 3; KVQuant, arXiv 2401.18079, section 3.1). A few channels of keys are large in every token, so keys
are grouped by channel, up to `KEY_TOKENS` tokens of a page together, and one channel's size harms no other. Values have
no such channels, and attention mixes whole tokens, so values are grouped by token, a head's together (in 4 bits each
half of them), and an error stays with its token's weight. A page of a single token has no channel to group: there keys
are grouped by token too, `KEY_CHANNELS` of them together, for scales of a group of tokens would have to be fetched with
each of them. So that no channel's size harms the others all the same, keys are divided by sizes that all tokens of a
head share (`kvcli.kernels.channel_sizes`); reading, writing and rounding take them where there are any.

x~ is computed in fp32, where s * code is exact, so that every back end makes the same numbers of the same bytes. What
lies beyond fp16 is cut to its largest number.

A block is, in bytes, so that it crosses the bus in one piece:

    codes of keys [p, d], of values [p, d]  |  s, z of keys [2, groups], of values [2, groups] fp16  |  up to 16 bytes

In 4 bits a byte holds channel c in its lower half and channel c + d/2 in its upper half. Where keys are kept elsewhere
a block has values alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvcli.kernels import dequantise_rows
from kvcli.kernels.dequantise_rows import PartLayout

KVDtype = Literal["auto", "int8", "int4"]
"""How KV in host memory is held: auto is as the model computes it."""

KEY_TOKENS = 32
"""Tokens of a page that share the scale of a channel of their keys, at most."""

KEY_CHANNELS = 32
"""Channels of a single token's key that share a scale, at most."""

LARGEST = 65504.0  # in fp16
AT_ONCE = 1 << 18  # numbers that the host works on at once: few enough for its cache, enough for a call to pay
ALIGNMENT = 16


class Groups(NamedTuple):
    """Numbers that share a scale: those of `tokens` times `channels`."""

    tokens: int
    channels: int


class BlockFormat(NamedTuple):
    """Blocks of pages of `size` tokens, a power of two, of d channels, an even number; `parts` 2, or 1 of values."""

    bits: int
    parts: int
    size: int
    d: int

    @classmethod
    def of(cls, held: KVDtype, parts: int, size: int, d: int) -> BlockFormat | None:
        """Choose the format, None where KV is held as it is computed."""
        return None if held == "auto" else cls({"int8": 8, "int4": 4}[held], parts, size, d)

    @property
    def key_groups(self) -> Groups:
        """Numbers of a key that share a scale."""
        if self.size > 1:
            return Groups(min(self.size, KEY_TOKENS), 1)
        return Groups(1, next(n for n in range(min(self.width, KEY_CHANNELS), 0, -1) if self.width % n == 0))

    @property
    def sized(self) -> bool:
        """Whether there are keys whose channels share a scale."""
        return self.parts == 2 and self.size == 1

    @property
    def groups(self) -> list[Groups]:
        """The groups of each part; none has channels of both halves of a byte."""
        return [self.key_groups, Groups(1, self.width)][-self.parts :]

    @property
    def width(self) -> int:
        """Bytes of the codes of a token."""
        return self.d * self.bits // 8

    @property
    def scales(self) -> list[int]:
        """How many groups each part has."""
        return [(self.size // tokens) * (self.d // channels) for tokens, channels in self.groups]

    @property
    def at_once(self) -> int:
        """Blocks that the host works on at once."""
        return max(1, AT_ONCE // (self.parts * self.size * self.d))

    @property
    def bytes(self) -> int:
        """Bytes of a block, up to a multiple of 16."""
        used = self.parts * self.size * self.width + 4 * sum(self.scales)
        return -(-used // ALIGNMENT) * ALIGNMENT

    def codes_of(self, blocks: Tensor, part: int) -> Tensor:
        """View the codes of a part of blocks [.., bytes]: [.., p, width]."""
        start = part * self.size * self.width
        return blocks[..., start : start + self.size * self.width].unflatten(-1, (self.size, self.width))  # type: ignore[no-untyped-call, no-any-return]

    def scales_of(self, blocks: Tensor, part: int) -> tuple[Tensor, Tensor]:
        """View s and z of a part of blocks [.., bytes]: [.., p / tokens, 1, d / channels, 1] fp16 each."""
        (tokens, channels), count = self.groups[part], self.scales[part]
        start = self.parts * self.size * self.width + 4 * sum(self.scales[:part])
        both = blocks[..., start : start + 4 * count].view(torch.float16)
        shape = (self.size // tokens, 1, self.d // channels, 1)
        return both[..., :count].unflatten(-1, shape), both[..., count:].unflatten(-1, shape)  # type: ignore[no-untyped-call]

    def grouped(self, x: Tensor, part: int) -> Tensor:
        """View numbers of a part [.., p, d] by groups: [.., p / tokens, tokens, d / channels, channels]."""
        tokens, channels = self.groups[part]
        return x.unflatten(-2, (-1, tokens)).unflatten(-1, (-1, channels))  # type: ignore[no-untyped-call, no-any-return]

    def codes(self, x: Tensor, part: int) -> tuple[Tensor, Tensor, Tensor]:
        """Work out codes of pages x [.., p, d], by groups in fp32, and their s and z, fp16."""
        most, grouped = (1 << self.bits) - 1, self.grouped(x.float(), part)
        low, high = (bound(grouped, (-3, -1), keepdim=True) for bound in (torch.amin, torch.amax))
        zero = low.clamp(-LARGEST, LARGEST).half()
        scale = ((high.clamp(-LARGEST, LARGEST) - zero.float()) / most).half()
        step = torch.where(scale == 0, 1.0, scale.float())
        return ((grouped - zero.float()) / step + 0.5).floor_().clamp_(0, most), scale, zero

    def rounded(self, x: Tensor, part: int = 0, sizes: Tensor | None = None) -> Tensor:
        """Give what pages of a part, x [.., p, d], are once they have been written and read; keys with `sizes`."""
        if sizes is not None and part == 0:
            return (self.rounded(x.float() / sizes) * sizes).to(x.dtype)
        codes, scale, zero = self.codes(x, part)
        return torch.addcmul(zero.float(), codes, scale.float()).flatten(-2).flatten(-3, -2).to(x.dtype)

    def quantise(self, parts: Sequence[Tensor], out: Tensor, sizes: Tensor | None = None) -> None:
        """Write pages, one tensor [.., p, d] a part, as blocks into out [.., bytes] uint8; keys have `sizes`."""
        for part, x in enumerate(parts):
            codes, *scales = self.codes(x if sizes is None or part else x.float() / sizes, part)
            for target, found in zip(self.scales_of(out, part), scales, strict=True):
                target.copy_(found)
            codes = codes.flatten(-2).flatten(-3, -2).to(torch.uint8)  # [.., p, d]
            if self.bits == 4:
                low_half, high_half = codes.chunk(2, -1)
                codes = low_half | high_half << 4
            self.codes_of(out, part).copy_(codes)

    def dequantise(self, blocks: Tensor, out: Tensor, sizes: Tensor | None = None, heads: Tensor | None = None) -> None:
        """Write the numbers of blocks [n, bytes] into out [n, parts, p, d].

        Keys have `sizes` [Hk, d] of each head, and blocks are of `heads` [n], or of all of them in turn.
        """
        if sizes is not None and heads is None:
            heads = torch.arange(len(blocks), device=blocks.device) % len(sizes)
        if dequantise_rows.suits(blocks, out):
            dequantise_rows.dequantise_rows(blocks, self.bits, self.layouts, out, sizes, heads)
            return
        at_once = self.at_once if blocks.device.type == "cpu" else max(1, len(blocks))
        of_heads = repeat(None) if heads is None else torch.split(heads, at_once)
        parts = zip(torch.split(blocks, at_once), torch.split(out, at_once), of_heads, strict=False)
        for some, target, own in parts:
            numbers = target if out.dtype == torch.float32 else torch.empty_like(target, dtype=torch.float32)
            if dequantise_rows.suits(some, numbers):
                dequantise_rows.dequantise_rows(some, self.bits, self.layouts, numbers, sizes, own)
            else:
                self._dequantise_by_parts(some, numbers)
                if sizes is not None:
                    numbers[:, 0] *= sizes[own, None]
            if numbers is not target:
                target.copy_(numbers)

    def move(
        self, blocks: Tensor, picked: Tensor, out: Tensor, places: Tensor, sizes: Tensor | None, heads: Tensor
    ) -> bool:
        """Write the numbers of blocks `picked` [m] of [n, bytes] into rows `places` of out [.., parts, p, d] on a CPU.

        Keys have `sizes` as of `dequantise`, by `heads` [m]. Returns False where no loop serves.
        """
        if not dequantise_rows.suits(blocks, out):
            return False
        dequantise_rows.dequantise_rows(blocks, self.bits, self.layouts, out, sizes, heads, (picked, places))
        return True

    @property
    def layouts(self) -> list[PartLayout]:
        """Where the parts of a block lie."""
        codes = self.parts * self.size * self.width
        return [
            PartLayout(part * self.size * self.width, codes // 2 + 2 * sum(self.scales[:part]), *groups)
            for part, groups in enumerate(self.groups)
        ]

    def _dequantise_by_parts(self, blocks: Tensor, out: Tensor) -> None:
        for part in range(self.parts):
            numbers, codes = out[:, part], self.codes_of(blocks, part)
            if self.bits == 8:
                numbers.copy_(codes)
            else:
                low_half, high_half = numbers.chunk(2, -1)
                low_half.copy_(codes & 15)
                high_half.copy_(codes >> 4)
            scale, zero = (x.float() for x in self.scales_of(blocks, part))
            grouped = self.grouped(numbers, part)
            if self.groups[part].channels == 1:
                torch.addcmul(zero, grouped, scale, out=grouped)
            else:  # the same in two passes, of which the host does many channels at once
                grouped.mul_(scale).add_(zero)
