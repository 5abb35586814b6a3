"""Quantisation of KV in host memory to 8 or 4 bits per number, with channel sizes for keys of single tokens.

Some channels of keys are many times as large as others, in every token. Numbers that share a scale have an error
proportional to the largest of them, so where each token has a scale of its own, small channels are lost. Therefore keys
are first divided by the sizes of their channels, which all tokens of a head share (as SmoothAttention does, QServe,
arXiv 2405.04532, which folds them into the weights), and multiplied by them when they are read; or the query is.

RoPE turns channels c and c + d/2 into each other, slowly in some pairs, so that one that is small in the first tokens
is large later: both have the size of the pair. Sizes are powers of two, so that dividing by them is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import repeat
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvcli.kernels._numba import compiled, flat, inlined, prange, run, serves

TOKENS = 128
"""First tokens on whose keys channel sizes are measured."""

LEAST = 1 / 32
"""Lower bound of a channel's size, relative to the head's mean: a channel near zero now may grow."""


def channel_sizes(k: Tensor) -> Tensor:
    """Measure channel sizes on the first tokens of keys k [Hk, n, d]: [Hk, d] fp32."""
    low_half, high_half = k[:, :TOKENS].float().chunk(2, -1)
    pairs = torch.hypot(low_half, high_half).mean(1)  # [Hk, d / 2]
    least = (LEAST * pairs.mean(-1, keepdim=True)).clamp(min=torch.finfo(torch.float16).tiny)
    sizes = torch.exp2(torch.log2(torch.maximum(pairs, least)).round())
    return torch.cat((sizes, sizes), -1)


PIECE = 1 << 14  # numbers written per thread at once, about
TOKENS_AT_ONCE = 64  # tokens per thread at once
LINE = 64  # bytes of a cache line


class PartLayout(NamedTuple):
    """The layout of a part of a block: first byte of codes, first fp16 of scales, size of groups, bits of a code."""

    codes: int
    scales: int
    tokens: int
    channels: int
    bits: int

    def of_token(self, d: int) -> TokenLayout:
        """Return the layout in a block of one token with rows of d numbers."""
        columns, width = d // self.channels, d * self.bits // 8
        return TokenLayout(self.codes, self.scales, self.channels, columns, width, (1 << self.bits) - 1)


class TokenLayout(NamedTuple):
    """The layout of a part of a block of one token, with its numbers of groups and bytes, and the mask of a code."""

    codes: int
    scales: int
    channels: int
    columns: int
    width: int
    mask: int


@inlined
def _touch(blocks: Any, picked: Any) -> int:
    """Request all cache lines of the blocks from memory at once."""
    total = 0
    for i in range(len(picked)):
        for c in range(0, blocks.shape[1], LINE):
            total += blocks[picked[i], c]
    return total


@inlined
def _store(numbers: Any, as_bits: Any, target: Any) -> None:
    """Write numbers, also given `as_bits`, as fp32, or as bfloat16 into a target of 16 bits."""
    if target.itemsize == 2:  # the upper half of the bits, rounded to nearest even
        for c in range(len(target)):
            b = as_bits[c]
            b = (b + np.uint32(0x7FFF) + (b >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
            target[c] = b if numbers[c] == numbers[c] else np.uint32(0x7FC0)
    else:
        for c in range(len(target)):
            target[c] = numbers[c]


@inlined
def read_token(blocks: Any, halves: Any, row: int, floats: Any, part: Any, its: Any, out: Any, i: int) -> None:
    """Write the numbers of a part of a token to row i of `out`; `its` [2, columns] is scratch for scales and zeros.

    `part` is its `TokenLayout`: sizes known at compile time allow vectors of sixteen.
    """
    first, scales, channels, columns, width, mask = part
    for column in range(columns):
        its[0, column] = floats[halves[row, scales + column]]
        its[1, column] = floats[halves[row, scales + columns + column]]
    r, o = np.uint64(row), np.uint64(i)  # unsigned: checks for negative indices cost time
    for c in range(channels):
        for column in range(columns):  # the inner loop: as the outer one it would be too short
            begin = column * channels
            code = np.int32(blocks[r, np.uint64(first + begin % width + c)]) >> np.int32(4 * (begin // width))
            number = np.float32(code & np.int32(mask))
            out[o, np.uint64(begin + c)] = its[1, np.uint64(column)] + its[0, np.uint64(column)] * number


@compiled
def _dequantise_rows(
    blocks: Any,
    halves: Any,
    picked: Any,
    floats: Any,
    size: int,
    d: int,
    parts: Any,
    at_once: int,
    sizes: Any,
    heads: Any,
    out: Any,
    strides: Any,
    places: Any,
    touched: Any,
) -> None:
    for piece in prange(len(touched)):
        scale, zero, numbers = np.empty(d, np.float32), np.empty(d, np.float32), np.empty(d, np.float32)
        as_bits = numbers.view(np.uint32)
        last_block = min(len(picked), (piece + 1) * at_once)
        touched[piece] = _touch(blocks, picked[piece * at_once : last_block])
        for i in range(piece * at_once, last_block):
            block = picked[i]
            for part in range(len(parts)):
                first, scales, tokens, channels, bits = parts[part]
                width, mask, columns = d * bits // 8, (1 << bits) - 1, d // channels
                zeros = scales + size // tokens * columns
                for t in range(size):
                    codes = blocks[block, first + t * width :][:width]
                    if channels == 1:  # each channel has its own scale, one per `tokens` tokens
                        if t % tokens == 0:
                            for c in range(d):
                                group = t // tokens * d + c
                                scale[c] = floats[halves[block, scales + group]]
                                zero[c] = floats[halves[block, zeros + group]]
                        for half in range(d // width):
                            own, s, z = numbers[half * width :][:width], scale[half * width :], zero[half * width :]
                            for c in range(width):
                                own[c] = z[c] + s[c] * np.float32(
                                    np.int32(codes[c]) >> np.int32(4 * half) & np.int32(mask)
                                )
                    else:
                        for column in range(columns):
                            group, begin = t // tokens * columns + column, column * channels
                            s1, z1 = floats[halves[block, scales + group]], floats[halves[block, zeros + group]]
                            shift = 4 * (begin // width)
                            own, its = numbers[begin:][:channels], codes[begin % width :][:channels]
                            for c in range(channels):
                                code = np.int32(its[c]) >> np.int32(shift) & np.int32(mask)
                                own[c] = z1 + s1 * np.float32(code)
                    if part == 0 and len(sizes) > 0:
                        its_sizes = sizes[heads[i]]
                        for c in range(d):
                            numbers[c] *= its_sizes[c]
                    at = places[i] * strides[0] + part * strides[1] + t * strides[2]
                    _store(numbers, as_bits, out[at:][:d])


@cache
def _tokens(d: int, keys: PartLayout, values: PartLayout) -> Any:
    """Make the loop over blocks of single tokens, whose sizes are known at compile time."""
    of_key, of_value = keys.of_token(d), values.of_token(d)
    columns = max(of_key.columns, of_value.columns)

    @compiled
    def loop(
        blocks: Any,
        halves: Any,
        picked: Any,
        floats: Any,
        sizes: Any,
        heads: Any,
        out: Any,
        strides: Any,
        places: Any,
        touched: Any,
    ) -> None:
        for piece in prange(len(touched)):
            numbers, its = np.empty((2, d), np.float32), np.empty((2, columns), np.float32)
            as_bits = numbers.view(np.uint32)
            last = min(len(picked), (piece + 1) * TOKENS_AT_ONCE)
            touched[piece] = _touch(blocks, picked[piece * TOKENS_AT_ONCE : last])
            for i in range(piece * TOKENS_AT_ONCE, last):
                at = places[i] * strides[0]
                read_token(blocks, halves, picked[i], floats, of_key, its, numbers, 0)
                read_token(blocks, halves, picked[i], floats, of_value, its, numbers, 1)
                for c in range(d):
                    numbers[0, np.uint64(c)] *= sizes[heads[i], np.uint64(c)]
                _store(numbers[0], as_bits[0], out[at:][:d])
                _store(numbers[1], as_bits[1], out[at + strides[1] :][:d])

    return loop


def suits(blocks: Tensor, out: Tensor) -> bool:
    """Return whether `dequantise_cpu` can read these blocks into `out`."""
    narrow = out.dtype == torch.bfloat16
    return serves(out, dtype=torch.bfloat16 if narrow else torch.float32) and _are_bytes(blocks)


def dequantise_cpu(
    blocks: Tensor,
    parts: Sequence[PartLayout],
    out: Tensor,
    sizes: Tensor | None = None,
    heads: Tensor | None = None,
    moves: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Write the numbers of blocks to `out`; keys are multiplied by their `sizes`, if there are any.

    `moves` are rows of blocks and the rows of `out` that they go to, [m] each; `heads` [m] then belong to these.
    """
    picked, places = moves or (torch.arange(len(blocks)),) * 2
    target = flat(out.view(torch.uint16) if out.dtype == torch.bfloat16 else out)
    read = blocks, blocks.view(torch.uint16), picked.contiguous(), numbers_of_halves()
    written = target, np.array(out.stride()[:3]), places.contiguous()
    size, d = out.shape[2:]
    if sizes is not None and heads is not None and d % 16 == 0:
        loop = _tokens(d, *parts)
        touched = torch.empty(-(-len(picked) // TOKENS_AT_ONCE))
        run(loop, len(picked) * out[0].numel(), *read, sizes, heads.contiguous(), *written, touched)
        return
    if sizes is None or heads is None:
        sizes, heads = torch.empty(0, d), torch.empty(0, dtype=torch.int64)
    at_once = max(1, PIECE // out[0].numel())
    touched, sized = torch.empty(-(-len(picked) // at_once)), (sizes, heads.contiguous())
    shape = size, d, np.array(parts), at_once
    run(_dequantise_rows, len(picked) * out[0].numel(), *read, *shape, *sized, *written, touched)


def _are_bytes(blocks: Tensor) -> bool:
    return serves(blocks, dtype=torch.uint8) and blocks.data_ptr() % 2 == 0


@cache
def numbers_of_halves() -> Tensor:
    """Return the value of every fp16 number in fp32, by its bits: [65536]."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.float16).float()


KVDtype = Literal["auto", "int8", "k8v4", "int4"]
"""The format of KV in host memory, the largest first; auto keeps it as the model computes it."""

BITS = {"int8": (8, 8), "k8v4": (8, 4), "int4": (4, 4)}
"""The bits of a number of a key and of a value."""

KEY_TOKENS = 32
"""Most tokens of a page that share the scale of a channel of their keys."""

CHANNELS = 32
"""Most channels of a token that share a scale, but for values in 8 bits, where more lose nothing."""

LARGEST = 65504.0  # in fp16
AT_ONCE = 1 << 18  # numbers that the host handles at once: they fit into its cache, and calls pay off
ALIGNMENT = 16


class Groups(NamedTuple):
    """The numbers that share a scale: `tokens` times `channels`."""

    tokens: int
    channels: int


class BlockFormat(NamedTuple):
    """The format of quantised pages: `size` tokens, a power of two, of d channels, even.

    `bits` are those of a number of each part, keys and values or values alone.
    """

    bits: tuple[int, ...]
    size: int
    d: int

    @classmethod
    def of(cls, held: KVDtype, parts: int, size: int, d: int) -> BlockFormat | None:
        """Choose the format of 2 parts, or of 1 (values); None where KV is not quantised."""
        return None if held == "auto" else cls(BITS[held][-parts:], size, d)

    @property
    def parts(self) -> int:
        """Number of parts."""
        return len(self.bits)

    @property
    def key_groups(self) -> Groups:
        """The numbers of keys that share a scale."""
        if self.size > 1:
            return Groups(min(self.size, KEY_TOKENS), 1)
        return Groups(1, self._channels(0))

    @property
    def sized(self) -> bool:
        """Whether channels of keys share a scale, so that channel sizes are needed."""
        return self.parts == 2 and self.size == 1

    @property
    def groups(self) -> list[Groups]:
        """The groups of each part; none spans both halves of a byte."""
        values = Groups(1, self.d if self.bits[-1] == 8 else self._channels(-1))
        return [self.key_groups, values][-self.parts :]

    @property
    def widths(self) -> list[int]:
        """Bytes of codes per token in each part."""
        return [self.d * bits // 8 for bits in self.bits]

    @property
    def scales(self) -> list[int]:
        """Number of groups in each part."""
        return [(self.size // tokens) * (self.d // channels) for tokens, channels in self.groups]

    @property
    def at_once(self) -> int:
        """Blocks that the host handles at once."""
        return max(1, AT_ONCE // (self.parts * self.size * self.d))

    @property
    def bytes(self) -> int:
        """Bytes of a block, rounded up to a multiple of 16."""
        return -(-(self.scales_at + 4 * sum(self.scales)) // ALIGNMENT) * ALIGNMENT

    @property
    def scales_at(self) -> int:
        """First byte of scales, an even one: they follow the codes."""
        codes = self.size * sum(self.widths)
        return codes + codes % 2

    def codes_of(self, blocks: Tensor, part: int) -> Tensor:
        """View the codes of a part of blocks [.., bytes]: [.., p, width]."""
        start, width = self.size * sum(self.widths[:part]), self.widths[part]
        return blocks[..., start : start + self.size * width].unflatten(-1, (self.size, width))  # type: ignore[no-untyped-call, no-any-return]

    def scales_of(self, blocks: Tensor, part: int) -> tuple[Tensor, Tensor]:
        """View s and z of a part of blocks [.., bytes]: [.., p / tokens, 1, d / channels, 1] fp16 each."""
        (tokens, channels), count = self.groups[part], self.scales[part]
        start = self.scales_at + 4 * sum(self.scales[:part])
        both = blocks[..., start : start + 4 * count].view(torch.float16)
        shape = (self.size // tokens, 1, self.d // channels, 1)
        return both[..., :count].unflatten(-1, shape), both[..., count:].unflatten(-1, shape)  # type: ignore[no-untyped-call]

    def grouped(self, x: Tensor, part: int) -> Tensor:
        """View numbers of a part [.., p, d] by groups: [.., p / tokens, tokens, d / channels, channels]."""
        tokens, channels = self.groups[part]
        return x.unflatten(-2, (-1, tokens)).unflatten(-1, (-1, channels))  # type: ignore[no-untyped-call, no-any-return]

    def codes(self, x: Tensor, part: int) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the codes of pages x [.., p, d], by groups in fp32, and their s and z, fp16."""
        most, grouped = (1 << self.bits[part]) - 1, self.grouped(x.float(), part)
        low, high = (bound(grouped, (-3, -1), keepdim=True) for bound in (torch.amin, torch.amax))
        zero = low.clamp(-LARGEST, LARGEST).half()
        scale = ((high.clamp(-LARGEST, LARGEST) - zero.float()) / most).half()
        step = torch.where(scale == 0, 1.0, scale.float())
        return ((grouped - zero.float()) / step + 0.5).floor_().clamp_(0, most), scale, zero

    def rounded(self, x: Tensor, part: int = 0, sizes: Tensor | None = None) -> Tensor:
        """Return pages of a part, x [.., p, d], as they are after writing and reading; keys with `sizes`."""
        if sizes is not None and part == 0:
            return (self.rounded(x.float() / sizes) * sizes).to(x.dtype)
        codes, scale, zero = self.codes(x, part)
        return torch.addcmul(zero.float(), codes, scale.float()).flatten(-2).flatten(-3, -2).to(x.dtype)

    def quantise(self, parts: Sequence[Tensor], out: Tensor, sizes: Tensor | None = None) -> None:
        """Write pages, one tensor [.., p, d] per part, as blocks to out [.., bytes] uint8; keys have `sizes`."""
        for part, x in enumerate(parts):
            codes, *scales = self.codes(x if sizes is None or part else x.float() / sizes, part)
            for target, found in zip(self.scales_of(out, part), scales, strict=True):
                target.copy_(found)
            codes = codes.flatten(-2).flatten(-3, -2).to(torch.uint8)  # [.., p, d]
            if self.bits[part] == 4:
                low_half, high_half = codes.chunk(2, -1)
                codes = low_half | high_half << 4
            self.codes_of(out, part).copy_(codes)

    def dequantise(self, blocks: Tensor, out: Tensor, sizes: Tensor | None = None, heads: Tensor | None = None) -> None:
        """Write the numbers of blocks [n, bytes] to out [n, parts, p, d].

        Keys have `sizes` [Hk, d] per head, and blocks belong to `heads` [n], or to all heads in turn.
        """
        if sizes is not None and heads is None:
            heads = torch.arange(len(blocks), device=blocks.device) % len(sizes)
        if suits(blocks, out):
            dequantise_cpu(blocks, self.layouts, out, sizes, heads)
            return
        at_once = self.at_once if blocks.device.type == "cpu" else max(1, len(blocks))
        of_heads = repeat(None) if heads is None else torch.split(heads, at_once)
        parts = zip(torch.split(blocks, at_once), torch.split(out, at_once), of_heads, strict=False)
        for some, target, own in parts:
            numbers = target if out.dtype == torch.float32 else torch.empty_like(target, dtype=torch.float32)
            if suits(some, numbers):
                dequantise_cpu(some, self.layouts, numbers, sizes, own)
            else:
                self._dequantise_by_parts(some, numbers)
                if sizes is not None:
                    numbers[:, 0] *= sizes[own, None]
            if numbers is not target:
                target.copy_(numbers)

    def move(
        self, blocks: Tensor, picked: Tensor, out: Tensor, places: Tensor, sizes: Tensor | None, heads: Tensor
    ) -> bool:
        """Write the numbers of blocks `picked` [m] of [n, bytes] to rows `places` of out [.., parts, p, d] on a CPU.

        Keys have `sizes` as in `dequantise`, by `heads` [m]. Returns False if no loop serves.
        """
        if not suits(blocks, out):
            return False
        dequantise_cpu(blocks, self.layouts, out, sizes, heads, (picked, places))
        return True

    @property
    def layouts(self) -> list[PartLayout]:
        """The layouts of the parts of a block."""
        return [
            PartLayout(
                self.size * sum(self.widths[:part]),
                self.scales_at // 2 + 2 * sum(self.scales[:part]),
                *groups,
                self.bits[part],
            )
            for part, groups in enumerate(self.groups)
        ]

    def _channels(self, part: int) -> int:
        """Return how many channels of a token share a scale: as many as divide the codes of a token evenly."""
        width = self.widths[part]
        return next(n for n in range(min(width, CHANNELS), 0, -1) if width % n == 0)

    def _dequantise_by_parts(self, blocks: Tensor, out: Tensor) -> None:
        for part in range(self.parts):
            numbers, codes = out[:, part], self.codes_of(blocks, part)
            if self.bits[part] == 8:
                numbers.copy_(codes)
            else:
                low_half, high_half = numbers.chunk(2, -1)
                low_half.copy_(codes & 15)
                high_half.copy_(codes >> 4)
            scale, zero = (x.float() for x in self.scales_of(blocks, part))
            grouped = self.grouped(numbers, part)
            if self.groups[part].channels == 1:
                torch.addcmul(zero, grouped, scale, out=grouped)
            else:  # two passes, which vectorise over channels on the host
                grouped.mul_(scale).add_(zero)
