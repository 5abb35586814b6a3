"""Numbers of quantised blocks on a CPU: `kvcli.kernels.quantised_blocks` read in one loop, each number written once.

torch goes over all numbers once for each of its operations, which takes several times as long as moving them.

Shapes: blocks [n, bytes] uint8 -> out [n, parts, p, d] fp32 or bfloat16, with any strides but the last; sizes [Hk, d]
of keys, block i of KV head heads[i].
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvcli.kernels._numba import compiled, flat, inlined, prange, run, serves

PIECE = 1 << 14  # numbers that a thread writes at once, about
TOKENS = 64  # that a thread takes at once
LINE = 64  # bytes that come from memory together


class PartLayout(NamedTuple):
    """Where a part of a block lies: its first byte of codes, its first fp16 of scales, and the size of its groups."""

    codes: int
    scales: int
    tokens: int
    channels: int

    def of_token(self, d: int, bits: int) -> tuple[int, int, int, int, int]:
        """Say the same of a block of one token with rows of d numbers, and how many groups and bytes it has."""
        return self.codes, self.scales, self.channels, d // self.channels, d * bits // 8


@inlined
def _touch(blocks: Any, picked: Any) -> int:
    """Have all lines of the blocks on their way from memory at once."""
    total = 0
    for i in range(len(picked)):
        for c in range(0, blocks.shape[1], LINE):
            total += blocks[picked[i], c]
    return total


@inlined
def _store(numbers: Any, as_bits: Any, target: Any) -> None:
    """Write numbers, also given `as_bits`, into fp32, or as bfloat16 into a target of 16 bits."""
    if target.itemsize == 2:  # the upper half of the bits, to the nearest, of two the even one
        for c in range(len(target)):
            b = as_bits[c]
            b = (b + np.uint32(0x7FFF) + (b >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
            target[c] = b if numbers[c] == numbers[c] else np.uint32(0x7FC0)
    else:
        for c in range(len(target)):
            target[c] = numbers[c]


@inlined
def read_token(
    blocks: Any, halves: Any, row: int, floats: Any, part: Any, mask: Any, its: Any, out: Any, i: int
) -> None:
    """Write the numbers of a part of a token into row i of `out`, through `its` [2, columns], scales and zeros.

    `part` is what `PartLayout.of_token` gives: with sizes that are known a processor takes sixteen numbers at a time.
    """
    first, scales, channels, columns, width = part
    for column in range(columns):
        its[0, column] = floats[halves[row, scales + column]]
        its[1, column] = floats[halves[row, scales + columns + column]]
    r, o = np.uint64(row), np.uint64(i)  # what is below 0 would count from the end, and asking costs a loop its pace
    for c in range(channels):
        for column in range(columns):  # inside: alone it would be too short
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
    bits: int,
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
    width, mask = d * bits // 8, (1 << bits) - 1
    for piece in prange(len(touched)):
        scale, zero, numbers = np.empty(d, np.float32), np.empty(d, np.float32), np.empty(d, np.float32)
        as_bits = numbers.view(np.uint32)
        last_block = min(len(picked), (piece + 1) * at_once)
        touched[piece] = _touch(blocks, picked[piece * at_once : last_block])
        for i in range(piece * at_once, last_block):
            block = picked[i]
            for part in range(len(parts)):
                first, scales, tokens, channels = parts[part]
                columns = d // channels
                zeros = scales + size // tokens * columns
                for t in range(size):
                    codes = blocks[block, first + t * width :][:width]
                    if channels == 1:  # every channel has its own scale, for so many tokens
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
def _tokens(d: int, bits: int, keys: PartLayout, values: PartLayout) -> Any:
    """Make the loop over blocks of single tokens, whose sizes are known."""
    mask, of_key, of_value = (1 << bits) - 1, keys.of_token(d, bits), values.of_token(d, bits)
    columns = max(of_key[3], of_value[3])

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
            last = min(len(picked), (piece + 1) * TOKENS)
            touched[piece] = _touch(blocks, picked[piece * TOKENS : last])
            for i in range(piece * TOKENS, last):
                at = places[i] * strides[0]
                read_token(blocks, halves, picked[i], floats, of_key, mask, its, numbers, 0)
                read_token(blocks, halves, picked[i], floats, of_value, mask, its, numbers, 1)
                for c in range(d):
                    numbers[0, np.uint64(c)] *= sizes[heads[i], np.uint64(c)]
                _store(numbers[0], as_bits[0], out[at:][:d])
                _store(numbers[1], as_bits[1], out[at + strides[1] :][:d])

    return loop


def suits(blocks: Tensor, out: Tensor) -> bool:
    """Tell whether this can read these blocks into that."""
    narrow = out.dtype == torch.bfloat16
    return serves(out, dtype=torch.bfloat16 if narrow else torch.float32) and _are_bytes(blocks)


def dequantise_rows(
    blocks: Tensor,
    bits: int,
    parts: Sequence[PartLayout],
    out: Tensor,
    sizes: Tensor | None = None,
    heads: Tensor | None = None,
    moves: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Write the numbers of blocks, of `bits` each, into out; keys times their `sizes` where there are any.

    `moves`, rows of blocks and of out [m] each, says which go where; `heads` [m] are then of these.
    """
    picked, places = moves or (torch.arange(len(blocks)),) * 2
    target = flat(out.view(torch.uint16) if out.dtype == torch.bfloat16 else out)
    read = blocks, blocks.view(torch.uint16), picked.contiguous(), numbers_of_halves()
    written = target, np.array(out.stride()[:3]), places.contiguous()
    size, d = out.shape[2:]
    if sizes is not None and heads is not None and d % 16 == 0:
        loop = _tokens(d, bits, *parts)
        touched = torch.empty(-(-len(picked) // TOKENS))
        run(loop, len(picked) * out[0].numel(), *read, sizes, heads.contiguous(), *written, touched)
        return
    if sizes is None or heads is None:
        sizes, heads = torch.empty(0, d), torch.empty(0, dtype=torch.int64)
    at_once = max(1, PIECE // out[0].numel())
    touched, sized = torch.empty(-(-len(picked) // at_once)), (sizes, heads.contiguous())
    shape = bits, size, d, np.array(parts), at_once
    run(_dequantise_rows, len(picked) * out[0].numel(), *read, *shape, *sized, *written, touched)


def _are_bytes(blocks: Tensor) -> bool:
    return serves(blocks, dtype=torch.uint8) and blocks.data_ptr() % 2 == 0


@cache
def numbers_of_halves() -> Tensor:
    """What each number of fp16, by its bits, is in fp32: [65536]."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.float16).float()
