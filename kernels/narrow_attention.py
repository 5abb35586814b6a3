"""Decode attention on a CPU over KV in narrow forms, which stay so in memory: they are widened in registers.

    k_jc = size_c (z_jr + s_jr code_jc)      v_jc = z_jr + s_jr code_jc      channel c of token j, in group r

Codes of 8 or 4 bits, groups and channel sizes are those of single tokens in `kvcli.kernels.quant`. As bfloat16, numbers
have no scales. Sizes are multiplied into the queries, scales into 16 products of keys or into the weights of values.
Values in 4 bits are multiplied by the Hadamard matrix before rounding, which spreads a large channel over all, and so
is their mixture: the matrix is its own inverse (QuaRot, arXiv 2404.00456).

Tokens lie in tiles of TILE. In a tile the keys lie channel by channel, so that a register holds a channel of 16 tokens
and no product is summed across a register; the values lie token by token, 16 channels to a register. Four codes are
together, of channels of a key or of tokens of a channel of values: a register holds 16 times four. After the codes
[d / 4, TILE, 4] of keys, or [TILE / 4, width, 4] of values, come their scales [groups, 2, TILE] fp16. Numbers in
bfloat16 are [d, TILE] and [TILE, d]. Keys and values have tiles of their own, because memory gives what lies together
faster.

Where a processor multiplies four bytes at once, codes are not widened. Queries are given as three bytes, which loses
nothing, and the weights of a tile as two, which changes a result by some 1e-5 of the range of the values. Codes of
eight bits are off by up to 2e-3 of it.

Shapes: q [H, d], k, v [Hk, n, d], tiles two [Hk, m, bytes] uint8 without gaps, sizes [Hk, d] fp32 -> out [H, d].
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import copy
from functools import cache
from itertools import product
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels import chain
from kvcli.kernels._llvm import BYTE_PRODUCTS, FlatArrays, all_of, at_address, lanes, multiplies_bytes
from kvcli.kernels._numba import compiled, inlined, intrinsic, prange, run, serves
from kvcli.kernels.chain import floats
from kvcli.kernels.decode_attention import (
    HEAD,
    KEYS,
    KV_HEADS,
    LINE,
    PIECES,
    ROOM,
    TOKEN,
    VALUES,
    AttentionInChain,
    Tokens,
    attend_to_all,
    decode_attention_ref,
    finish,
    merge_pieces,
    row_in_loops,
    row_of,
    weigh_all,
)
from kvcli.kernels.gemv import FAR, LANES, MOST_ROWS, PIECE
from kvcli.kernels.quant import BITS, LARGEST, BlockFormat
from kvcli.kernels.softmax import Softmax

NarrowDtype = Literal["bfloat16", "int8", "k8v4"]
"""The form of KV that attention reads in place, the largest first."""

TILE = 64
"""Tokens of a tile; a channel of their keys in 8 bits is a cache line."""

TOKENS_AT_ONCE = 64  # written by a thread at once
MOST_AT_ONCE = 1 << 12  # tokens that are made wide at once before they are rounded


Tiles = tuple[Tensor, Tensor]
"""Tiles of keys and tiles of values."""


class TilePart(NamedTuple):
    """Tiles of keys or of values: bits of a code, and channels that share a scale; 0 for none."""

    bits: int
    channels: int

    def groups(self, d: int) -> int:
        """Count the scales of a token."""
        return d // self.channels if self.channels else 0

    @property
    def together(self) -> int:
        """The codes that lie together; fewer if channels are not divided by four."""
        return 1 if self.bits == 16 else 4

    def scales_at(self, d: int) -> int:
        """Return the first byte of scales."""
        return TILE * d * self.bits // 8

    def bytes(self, d: int) -> int:
        """Return the bytes of a tile in a KV head."""
        return self.scales_at(d) + 4 * TILE * self.groups(d)


class TileFormat(NamedTuple):
    """The format of tiles of tokens of d channels, even."""

    held: NarrowDtype
    d: int

    @property
    def block(self) -> BlockFormat | None:
        """The codes and groups of a token; None without scales."""
        return None if self.held == "bfloat16" else BlockFormat(BITS[self.held], 1, self.d)

    @property
    def parts(self) -> tuple[TilePart, TilePart]:
        """Keys and values."""
        return _parts(self)

    @property
    def bytes(self) -> tuple[int, int]:
        """Bytes of a tile of keys, and of one of values, in a KV head."""
        keys, values = self.parts
        return keys.bytes(self.d), values.bytes(self.d)

    @property
    def turned(self) -> int:
        """The channels of values that are turned together, a power of two; 1 for none."""
        return self.d & -self.d if self.parts[1].bits == 4 else 1

    @property
    def fills_registers(self) -> bool:
        """Whether values fill registers, and each register is in one group, as are keys that lie together."""
        keys, values = self.parts
        whole = self.d * min(values.bits, 8) // 8 % LANES == 0 and values.channels % LANES == 0
        return whole and keys.channels % keys.together == 0

    @property
    def multiplies_bytes(self) -> bool:
        """Whether loops multiply codes as they are."""
        return self.block is not None and self.parts[0].channels % LANES == 0 and multiplies_bytes()

    def suits_loops(self, tiles: Tiles) -> bool:
        """Return whether loops take the tiles."""
        return self.fills_registers and serves(*tiles, dtype=torch.uint8)

    def write(self, tiles: Tiles, first: int, k: Tensor, v: Tensor, sizes: Tensor) -> None:
        """Write tokens k, v [Hk, n, d] to tiles, from token `first` on."""
        if not self.suits_loops(tiles):
            self.write_ref(tiles, first, k, v, sizes)
            return
        for begin in range(0, k.shape[1], MOST_AT_ONCE):
            some = [x[:, begin : begin + MOST_AT_ONCE].float() for x in (k, v)]
            halves = [part.view(torch.uint16) for part in tiles]
            run(_writing(self), 2 * some[0].numel(), *some, sizes, *tiles, *halves, first + begin)

    def write_ref(self, tiles: Tiles, first: int, k: Tensor, v: Tensor, sizes: Tensor) -> None:
        """Reference of `write`, in plain torch."""
        for tokens, tile, begin in _pieces(first, k.shape[1]):
            for number, (part, x) in enumerate(zip(self.parts, (k, v), strict=True)):
                rows = x[:, tokens].float()
                rows = turned(rows, self.turned) if number else rows / sizes[:, None]
                count = min(rows.shape[1], TILE)
                rows = rows.unflatten(1, (-1, count))  # type: ignore[no-untyped-call]  # [Hk, t, count, d]
                codes, scales = self._views(tiles[number][:, tile : tile + rows.shape[1]], number)
                if self.block is None:
                    found = rows.bfloat16()
                else:
                    levels, scale, zero = self.block.codes(rows[..., None, :], number)
                    found = levels.flatten(-4).to(torch.uint8)
                    for at, numbers in enumerate((scale, zero)):
                        scales[:, :, begin : begin + count, :, at] = numbers[..., 0, 0, :, 0]
                if part.bits == 4:
                    low_half, high_half = found.chunk(2, -1)
                    found = low_half | high_half << 4
                its = codes.flatten(4).flatten(2, 3).clone()
                its[:, :, begin : begin + count] = found
                codes.copy_(its.view_as(codes))

    def read(self, tiles: Tiles, tokens: int, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first `tokens` keys and values in fp32, [Hk, tokens, d]."""
        found = []
        for number, (part, its) in enumerate(zip(self.parts, tiles, strict=True)):
            codes, scales = self._views(its[:, : -(-tokens // TILE)], number)
            codes = codes.flatten(4).flatten(2, 3)
            if part.bits == 4:
                codes = torch.cat((codes & 15, codes >> 4), -1)
            numbers = codes.float()
            if part.channels:
                grouped = numbers.unflatten(-1, (-1, part.channels))  # type: ignore[no-untyped-call]
                scale, zero = scales.float().unbind(-1)
                numbers = torch.addcmul(zero[..., None], grouped, scale[..., None]).flatten(-2)
            found.append(numbers.flatten(1, 2)[:, :tokens])
        return found[0] * sizes[:, None], turned(found[1], self.turned)

    def _views(self, tiles: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """View the codes and the scales [Hk, t, TILE, groups, 2] of keys or values.

        Codes are [Hk, t, TILE, 1, d / 4, 4] of keys and [Hk, t, TILE / 4, 4, width, 1] of values.
        """
        part = self.parts[number]
        middle, together = part.scales_at(self.d), part.together if number else math.gcd(self.d, part.together)
        codes, scales = tiles[..., :middle], tiles[..., middle:]
        codes = codes.view(torch.bfloat16) if part.bits == 16 else codes
        shape = (TILE // together, 1, -1, together) if number else (-1, 1, TILE, together)
        codes = codes.unflatten(-1, shape)  # type: ignore[no-untyped-call]
        codes = codes.transpose(3, 5) if number else codes.transpose(2, 4)
        scales = scales.view(torch.float16).unflatten(-1, (part.groups(self.d), 2, TILE))  # type: ignore[no-untyped-call]
        return codes, scales.movedim(-1, -3)


def turned(x: Tensor, size: int) -> Tensor:
    """Multiply each `size` channels of x [.., d], a power of two, by the orthogonal Hadamard matrix."""
    step = 1
    while step < size:
        one, other = x.unflatten(-1, (-1, 2, step)).unbind(-2)  # type: ignore[no-untyped-call]
        x, step = torch.stack((one + other, one - other), -2).flatten(-3), 2 * step
    return x * size**-0.5 if size > 1 else x


@inlined
def _turn(row: Any, size: int, scale: Any) -> None:
    step = 1
    while step < size:
        for begin in range(0, len(row), 2 * step):
            for c in range(begin, begin + step):
                one, other = row[c], row[c + step]
                row[c], row[c + step] = one + other, one - other
        step *= 2
    for c in range(len(row)):
        row[c] *= scale


@cache
def _parts(form: TileFormat) -> tuple[TilePart, TilePart]:
    block = form.block
    groups = [0, 0] if block is None else [each.channels for each in block.groups]
    bits = (16, 16) if block is None else block.bits
    return TilePart(bits[0], groups[0]), TilePart(bits[1], groups[1])


def _pieces(first: int, count: int) -> Iterator[tuple[slice, int, int]]:
    """Divide `count` tokens from `first` on: slices of a part of a tile or of whole ones, tile and place in it."""
    done = 0
    while done < count:
        tile, begin = divmod(first + done, TILE)
        left = count - done
        whole = min(left, MOST_AT_ONCE) // TILE * TILE
        some = whole if begin == 0 and whole else min(left, TILE - begin)
        yield slice(done, done + some), tile, begin
        done += some


@intrinsic
def _half(_: Any, __: Any) -> Any:
    """Round a number to half precision; return its bits."""
    from llvmlite import ir
    from numba import types

    def make(_: Any, builder: Any, ___: Any, given: Any) -> Any:
        return builder.bitcast(builder.fptrunc(given[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), make


@intrinsic
def _of_half(_: Any, __: Any) -> Any:
    """Return the number in half precision of these bits."""
    from llvmlite import ir
    from numba import types

    def make(_: Any, builder: Any, ___: Any, given: Any) -> Any:
        return builder.fpext(builder.bitcast(given[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), make


@inlined
def _write_token(k: Any, v: Any, sizes: Any, own: Any, its: Any, t: int, row: Any, codes: Any, how: Any) -> None:
    """Round a token's key and value [d] into place `t` of their tiles; `row` and `codes` [d].

    `own` and `its` are the tiles as bytes and as halves. `how`: d, the channels that are turned together, and of keys
    and of values the bits of a code, channels and scales, and the first half of these. They are known at compile time.
    """
    d, size, keys, values = how
    bits, largest, half, none = row.view(np.uint32), np.float32(LARGEST), np.float32(0.5), np.uint16(0x7E00)
    for part in range(2):
        code_bits, channels, groups, scales = values if part else keys
        most = np.float32((1 << code_bits) - 1)
        for c in range(d):
            row[c] = v[c] if part else k[c] / sizes[c]
        if part and size > 1:
            _turn(row, size, np.float32(1) / np.sqrt(np.float32(size)))
        if code_bits == 16:
            for c in range(d):  # to the nearest, the even one of two
                b = bits[c]
                b = (b + np.uint32(0x7FFF) + (b >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
                b = b if row[c] == row[c] else np.uint32(0x7FC0)
                its[part][t * d + c if part else c * TILE + t] = b
            continue
        for r in range(groups):
            low, high, whole = largest, -largest, True
            for c in range(r * channels, (r + 1) * channels):
                x = row[c]
                low, high = (x if x < low else low), (x if x > high else high)
                whole = whole and x == x
            low, high = (low if low > -largest else -largest), (high if high < largest else largest)
            zero = _half(low)
            shift = _of_half(zero)
            scale = _half((high - shift) / most)
            step = _of_half(scale)
            step = step if step != 0 else np.float32(1)
            at = scales + r * 2 * TILE + t
            its[part][at], its[part][at + TILE] = scale, (zero if whole else none)
            for c in range(r * channels, (r + 1) * channels):
                code = np.floor((row[c] - shift) / step + half)
                code = code if code > 0 else np.float32(0)
                codes[c] = np.uint8(code if code < most else most)
        if part == 0:
            for c in range(d):
                own[0][(c // 4 * TILE + t) * 4 + c % 4] = codes[c]
        else:
            width = d * code_bits // 8
            for c in range(width):
                code = codes[c] | codes[c + width] << 4 if code_bits == 4 else codes[c]
                own[1][(t // 4 * width + c) * 4 + t % 4] = code


def _how_to_write(form: TileFormat) -> Any:
    """Return what `_write_token` is told of tiles."""
    d = form.d
    return d, form.turned, *[(*part, part.groups(d), part.scales_at(d) // 2) for part in form.parts]


@cache
def _writing(form: TileFormat) -> Any:
    """Make the loop that rounds tokens into tiles."""
    d, how = form.d, _how_to_write(form)

    @compiled
    def write(
        k: Any, v: Any, sizes: Any, keys: Any, values: Any, key_halves: Any, value_halves: Any, first: int
    ) -> None:
        heads, n, _ = k.shape
        pieces = (n + TOKENS_AT_ONCE - 1) // TOKENS_AT_ONCE
        for piece in prange(heads * pieces):
            h, begin = piece // pieces, piece % pieces * TOKENS_AT_ONCE
            row, codes = np.empty(d, np.float32), np.empty(d, np.uint8)
            for i in range(begin, min(n, begin + TOKENS_AT_ONCE)):
                tile, t = (first + i) // TILE, (first + i) % TILE
                own, its = (keys[h, tile], values[h, tile]), (key_halves[h, tile], value_halves[h, tile])
                _write_token(k[h, i], v[h, i], sizes[h], own, its, t, row, codes, how)

    return write


_QUERY_BYTES, _WEIGHT_BYTES = 3, 2
_LEAST = float(np.float32(1e-30))  # below it, numbers are taken as 0: they have no inverse


def _floats() -> Any:
    """Return the type of 16 numbers."""
    from llvmlite import ir

    return ir.VectorType(ir.FloatType(), LANES)


class _Tile(FlatArrays):
    """The arguments of a part of a loop; the first array is the tiles, from a place in one of them on."""

    def moved(self, argument: int, by: Any) -> _Tile:
        """Move the place of an array by a number that the loop knows."""
        other = copy(self)
        other.given = list(self.given)
        other.given[argument + 1] = self.builder.add(self.given[argument + 1], by)
        return other

    def words(self, offset: int, bits: int) -> Any:
        """Load 16 numbers of 16 or 32 bits from a byte on, as integers of 32 bits."""
        from llvmlite import ir

        held = self.builder.bitcast(self.load(0, LANES * bits // 8, offset), ir.VectorType(ir.IntType(bits), LANES))
        return held if bits == 32 else self.builder.zext(held, ir.VectorType(ir.IntType(32), LANES))

    def numbers(self, words: Any, bits: int) -> list[Any]:
        """Widen words to fp32: that of a bfloat16, or the four codes in a word."""
        if bits == 16:
            return [self.builder.bitcast(self._by("shl", words, 16), _floats())]
        codes = [self._by("and_", self._by("lshr", words, 8 * i) if i else words, 255) for i in range(4)]
        return [self.builder.sitofp(each, _floats()) for each in codes]

    def both_halves(self, words: Any) -> list[Any]:
        """Take the codes of 4 bits in words apart: lower ones, and upper ones."""
        return [self._by("and_", each, 0x0F0F0F0F) for each in (words, self._by("lshr", words, 4))]

    def _by(self, what: str, words: Any, number: int) -> Any:
        from llvmlite import ir

        return getattr(self.builder, what)(words, ir.Constant(words.type, [number] * LANES))

    def halves(self, offset: int) -> Any:
        """Load 16 numbers in half precision from a byte on."""
        from llvmlite import ir

        held = self.builder.bitcast(self.load(0, 2 * LANES, offset), ir.VectorType(ir.HalfType(), LANES))
        return self.builder.fpext(held, _floats())

    def everywhere(self, argument: int, offset: int) -> Any:
        """Load a number into all 16 lanes."""
        one = self.load(argument, 1, offset)
        return lanes(self.builder, (one, one), [0] * LANES)

    def everywhere_as(self, kind: Any, argument: int, offset: int) -> Any:
        """Load a number of four bytes into all 16 lanes."""
        return all_of(self.builder, self.builder.bitcast(self.load(argument, 4, offset), kind), LANES)

    def add_product(self, total: Any, x: Any, y: Any) -> None:
        """Add x y to what lies at `total`."""
        product = self.builder.fmul(x, y, flags=("contract",))
        self.builder.store(self.builder.fadd(self.builder.load(total), product, flags=("contract",)), total)

    def add_products(self, total: Any, words: Any, signed: Any) -> None:
        """Add the products of the four bytes in each word to the integers at `total`; those of `signed` have a sign."""
        from llvmlite import ir
        from numba.core import cgutils

        declare: Any = cgutils.get_or_insert_function
        products = declare(self.builder.module, ir.FunctionType(words.type, [words.type] * 3), BYTE_PRODUCTS)
        self.builder.store(self.builder.call(products, [self.builder.load(total), words, signed]), total)

    def of_bytes(self, totals: list[Any]) -> Any:
        """Add up in fp32 what the lowest, the next and further bytes of numbers gave, at `totals`."""
        from llvmlite import ir

        lowest, second, *others = (self.builder.load(each) for each in totals)
        total = self.builder.sitofp(self.builder.add(self._by("shl", second, 8), lowest), _floats())
        for i, each in enumerate(others, 2):
            worth = ir.Constant(_floats(), [float(1 << 8 * i)] * LANES)
            product = self.builder.fmul(self.builder.sitofp(each, _floats()), worth, flags=("contract",))
            total = self.builder.fadd(total, product, flags=("contract",))
        return total

    def in_bytes(self, registers: list[Any], count: int) -> tuple[list[list[Any]], Any, list[Any]]:
        """Round numbers to `count` bytes: these [count][registers], the lowest first, the step, and the rests."""
        from llvmlite import ir
        from numba.core import cgutils

        builder, declare = self.builder, cast(Any, cgutils.get_or_insert_function)
        number, real, most = ir.IntType(32), ir.FloatType(), float(127 << 8 * (count - 1))  # all bytes have signs
        words = ir.VectorType(number, LANES)
        magnitudes = [self._by("and_", builder.bitcast(each, words), 0x7FFFFFFF) for each in registers]
        largest = magnitudes[0]
        for each in magnitudes[1:]:
            largest = builder.select(builder.icmp_signed(">", each, largest), each, largest)
        highest = declare(builder.module, ir.FunctionType(number, [words]), f"llvm.vector.reduce.smax.v{LANES}i32")
        top = builder.bitcast(builder.call(highest, [largest]), real)
        some = builder.fcmp_ordered(">", top, ir.Constant(real, _LEAST))
        per = builder.select(some, builder.fdiv(ir.Constant(real, most), top), ir.Constant(real, 0.0))
        whole = declare(builder.module, ir.FunctionType(_floats(), [_floats()]), f"llvm.rint.v{LANES}f32")
        found, step = [], builder.fmul(top, ir.Constant(real, float(np.float32(1 / most))))
        scaled = [builder.fmul(each, all_of(builder, per, LANES)) for each in registers]
        rounded = [builder.call(whole, [each]) for each in scaled]
        left = [builder.fptosi(each, words) for each in rounded]
        for _ in range(count):
            found.append([builder.trunc(each, ir.VectorType(ir.IntType(8), LANES)) for each in left])
            left = [self._by("ashr", self._by("add", each, 128), 8) for each in left]
        held = [builder.fmul(each, all_of(builder, step, LANES), flags=("contract",)) for each in rounded]
        return found, step, [builder.fsub(*both, flags=("contract",)) for both in zip(registers, held, strict=True)]

    def ask_for(self, offset: int) -> None:
        """Prefetch the cache line of a byte."""
        from llvmlite import ir
        from numba.core import cgutils

        anything, number = cgutils.voidptr_t, ir.IntType(32)
        hint = ir.FunctionType(ir.VoidType(), [anything, number, number, number])
        declare: Any = cgutils.get_or_insert_function
        function = declare(self.builder.module, hint, "llvm.prefetch.p0")
        place = self.builder.bitcast(self.place(0, offset), anything)
        self.builder.call(function, [place, number(0), number(3), number(1)])


MOST_SUMS = 16  # registers of sums; others hold what is added


@intrinsic
def _in_bytes(_: Any, numbers: Any, number: Any, out: Any, place: Any, apart: Any, count: Any) -> Any:
    """Round `count` times 16 numbers to _QUERY_BYTES; return the step.

    Flat arrays: numbers of fp32 from `number` on, out of bytes from `place` on, the lowest ones first; others are
    `apart`. `apart` and `count` are known at compile time.
    """
    from numba import types

    if not all(isinstance(each, types.Literal) for each in (apart, count)):
        return None

    def split(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        held = _Tile(context, builder, signature, given)
        registers = [held.load(0, LANES, LANES * i) for i in range(count.literal_value)]
        found, step, _ = held.in_bytes(registers, _QUERY_BYTES)
        for part, its in enumerate(found):
            for i, register in enumerate(its):
                held.store(2, register, part * apart.literal_value + LANES * i)
        return step

    return types.float32(numbers, number, out, place, apart, count), split


@intrinsic
def _score(
    _: Any,
    tiles: Any,
    tile: Any,
    q: Any,
    query: Any,
    sums: Any,
    own: Any,
    out: Any,
    place: Any,
    step: Any,
    d: Any,
    bits: Any,
    channels: Any,
    size: Any,
    group: Any,
) -> Any:
    """Multiply the keys of a tile, which starts at byte `tile`, with `group` queries.

    Flat arrays: q [group, d] fp32 from `query` on, or their bytes [_QUERY_BYTES, group, d]; fp32 from `own` on, their
    sums over groups of channels [group, groups], and the steps of bytes [group, groups]; out [group, TILE] fp32 from
    `place` on, whose rows are `step` apart. `size` is the bytes of a tile; it and the numbers after it are
    known at compile time.
    """
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils

    if not all(isinstance(each, types.Literal) for each in (d, bits, channels, size, group)):
        return None

    def score(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        held, number, word = _Tile(context, builder, signature, given), given[1].type, ir.IntType(32)
        tools: Any = cgutils
        count, row, in_bytes = group.literal_value, d.literal_value, q.dtype == types.int8
        together, width = (1, 2) if bits.literal_value == 16 else (4, 4)  # codes that are together, and their bytes
        shared, parts = channels.literal_value or row, _QUERY_BYTES if in_bytes else 1
        groups = row // shared
        nothing = ir.Constant(ir.VectorType(word, LANES) if in_bytes else _floats(), [0] * LANES)
        registers = next(n for n in (4, 2, 1) if n * count * parts <= MOST_SUMS or n == 1)
        registers = registers if in_bytes else max(2, registers)
        rows = [held.moved(6, builder.mul(given[8], number(g))) for g in range(count)]
        for first in range(0, TILE, LANES * registers):
            totals = [[ir.Constant(_floats(), [0.0] * LANES)] * registers for _ in range(count)]
            for r in range(groups):
                found = [
                    [[tools.alloca_once_value(builder, nothing) for _ in range(parts)] for _ in range(registers)]
                    for _ in range(count)
                ]
                with cgutils.for_range(builder, number(shared // together)) as loop:
                    channel = builder.add(loop.index, number(r * shared // together))
                    here = held.moved(0, builder.mul(channel, number(TILE * width)))
                    here = here.moved(2, builder.mul(channel, number(together)))
                    for line in range(width * first // TILE, width * (first + LANES * registers) // TILE):
                        here.ask_for(size.literal_value + TILE * line)
                    words = [here.words(width * (first + LANES * i), 8 * width) for i in range(registers)]
                    if in_bytes:
                        for part, g in product(range(parts), range(count)):
                            x = here.everywhere_as(word, 2, (part * count + g) * row)
                            for i in range(registers):
                                here.add_products(found[g][i][part], words[i], x)
                    else:
                        numbers = [here.numbers(each, bits.literal_value) for each in words]
                        for c, g in product(range(together), range(count)):
                            x = here.everywhere(2, g * row + c)
                            for i in range(registers):
                                here.add_product(found[g][i][0], x, numbers[i][c])
                for i in range(registers):
                    if in_bytes:
                        ends = [held.of_bytes(found[g][i]) for g in range(count)]
                        steps = [held.everywhere(4, (count + g) * groups + r) for g in range(count)]
                        ends = [builder.fmul(*both) for both in zip(ends, steps, strict=True)]
                    else:
                        ends = [builder.load(found[g][i][0]) for g in range(count)]
                    if bits.literal_value == 16:
                        for g in range(count):
                            totals[g][i] = ends[g]
                        continue
                    at = TILE * row + 2 * (2 * r * TILE + first + LANES * i)
                    scale, lowest = held.halves(at), held.halves(at + 2 * TILE)
                    for g in range(count):
                        by = held.everywhere(4, g * groups + r)
                        scaled = builder.fmul(scale, ends[g], flags=("contract",))
                        shifted = builder.fmul(lowest, by, flags=("contract",))
                        both = builder.fadd(scaled, shifted, flags=("contract",))
                        totals[g][i] = builder.fadd(totals[g][i], both, flags=("contract",))
            for g in range(count):
                for i in range(registers):
                    rows[g].store(6, totals[g][i], first + LANES * i)
        return context.get_dummy_value()

    given = tiles, tile, q, query, sums, own, out, place, step, d, bits, channels, size, group
    return types.none(*given), score


_STEP_AT = _WEIGHT_BYTES * TILE  # after a tile's weights in bytes
_SCRATCH = _STEP_AT + LINE  # the row of a query's weights in bytes, and their step


def _scale_weights(tile: _Tile, of_weights: list[_Tile], scratch: _Tile, of_out: list[_Tile], how: Any) -> None:
    """Emit what `_mix` does first for a group of channels: weights times scales go to `scratch`.

    Weights times zeros, which all channels of the group have in common, go to the results. `how`: bytes of a token in a
    tile, bits of a code, channels of the group, and whether scratch takes bytes.
    """
    from llvmlite import ir
    from numba.core import cgutils

    (width, bits, channels, in_bytes), builder, tokens = how, tile.builder, tile.given[9]
    zero = ir.Constant(_floats(), [0.0] * LANES)
    middle = ir.Constant(_floats(), [((1 << bits) - 1) / 2] * LANES)
    lowest, scaled = [zero] * len(of_out), [list[Any]() for _ in of_out]
    for first in range(0, TILE, LANES):
        at = TILE * width + 2 * first
        scale, low = tile.halves(at), tile.halves(at + 2 * TILE)
        lane = ir.Constant(ir.VectorType(tokens.type, LANES), list(range(first, first + LANES)))
        there = builder.icmp_signed("<", lane, all_of(builder, tokens, LANES))
        for g, its in enumerate(of_weights):
            w = its.load(2, LANES, first)
            scaled[g].append(builder.select(there, builder.fmul(w, scale), zero))
            lowest[g] = builder.fadd(lowest[g], builder.select(there, builder.fmul(w, low), zero))
    kind = ir.FunctionType(ir.FloatType(), [ir.FloatType(), zero.type])
    declare: Any = cgutils.get_or_insert_function
    add_up = declare(builder.module, kind, f"llvm.vector.reduce.fadd.v{LANES}f32")
    for g, out in enumerate(of_out):
        if in_bytes:
            found, step, rests = tile.in_bytes(scaled[g], _WEIGHT_BYTES)
            for rest in rests:  # of codes in the middle: otherwise all channels would be off alike
                missing = builder.fmul(rest, middle, flags=("contract",))
                lowest[g] = builder.fadd(lowest[g], missing, flags=("contract",))
            for part, i in product(range(_WEIGHT_BYTES), range(TILE // LANES)):
                scratch.store(4, found[part][i], g * _SCRATCH + part * TILE + LANES * i)
            scratch.store(4, builder.bitcast(step, ir.VectorType(ir.IntType(8), 4)), g * _SCRATCH + _STEP_AT)
        else:
            for i in range(TILE // LANES):
                scratch.store(4, scaled[g][i], g * TILE + LANES * i)
        sum_of = builder.call(add_up, [ir.Constant(ir.FloatType(), 0.0), lowest[g]], fastmath=("reassoc",))
        for c in range(0, channels, LANES):
            out.store(6, builder.fadd(out.load(6, LANES, c), all_of(builder, sum_of, LANES)), c)


@intrinsic
def _mix(
    _: Any,
    tiles: Any,
    tile: Any,
    weights: Any,
    weight: Any,
    scratch: Any,
    own: Any,
    out: Any,
    place: Any,
    steps: Any,
    tokens: Any,
    d: Any,
    bits: Any,
    channels: Any,
    size: Any,
    group: Any,
) -> Any:
    """Add the first `tokens` values of a tile, which start at byte `tile`, by the weights of `group` queries.

    Flat arrays of fp32: weights [group, TILE] from `weight` on and out [group, d] from `place` on, whose rows are
    `steps` apart; scratch [groups, group, TILE] from `own` on, or bytes [groups, group, _SCRATCH]. The last numbers are
    known at compile time.
    """
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils

    if not all(isinstance(each, types.Literal) for each in (d, bits, channels, size, group)):
        return None

    def mix(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        held, number, word = _Tile(context, builder, signature, given), given[1].type, ir.IntType(32)
        tools: Any = cgutils
        count, shared, in_bytes = group.literal_value, channels.literal_value, scratch.dtype == types.int8
        width, row = d.literal_value * bits.literal_value // 8, _SCRATCH if in_bytes else TILE
        weight_step, out_step = tools.unpack_tuple(builder, given[8])
        of_weights = [held.moved(2, builder.mul(weight_step, number(g))) for g in range(count)]
        of_out = [held.moved(6, builder.mul(out_step, number(g))) for g in range(count)]
        if shared:
            with cgutils.for_range(builder, number(d.literal_value // shared)) as loop:
                here = held.moved(0, builder.mul(loop.index, number(4 * TILE)))
                target = held.moved(4, builder.mul(loop.index, number(count * row)))
                own_out = [each.moved(6, builder.mul(loop.index, number(shared))) for each in of_out]
                _scale_weights(here, of_weights, target, own_out, (width, bits.literal_value, shared, in_bytes))
        together, code_bytes = (4, LANES) if shared else (1, 2 * LANES)  # tokens, and bytes of a token in a register
        each, parts = 2 if bits.literal_value == 4 else 1, _WEIGHT_BYTES if in_bytes else 1  # sums for codes in one
        at_once = max(1, MOST_SUMS // (count * each * parts))
        begins = range(0, width, code_bytes)
        turns = builder.sdiv(builder.add(given[9], number(together - 1)), number(together))
        for some in (begins[at : at + at_once] for at in range(0, len(begins), at_once)):
            columns = [
                begin // code_bytes * LANES + half * d.literal_value // 2 for begin in some for half in range(each)
            ]
            group_of = [column // shared if shared else 0 for column in columns]
            whole = ir.Constant(ir.VectorType(word, LANES), [0] * LANES)
            begun = [[whole if in_bytes else its.load(6, LANES, column) for column in columns] for its in of_out]
            sums = [[[tools.alloca_once_value(builder, x) for _ in range(parts)] for x in its] for its in begun]
            with cgutils.for_range(builder, turns) as loop:
                here = held.moved(0, builder.mul(loop.index, number(width * together)))
                there = held.moved(4, builder.mul(loop.index, number(together)))
                for begin in some:
                    if begin * together % TILE == 0:
                        here.ask_for(begin * together + size.literal_value)
                words = [here.words(begin * together, 8 * together if shared else 16) for begin in some]
                if bits.literal_value == 4:
                    words = [half for both in words for half in here.both_halves(both)]
                if in_bytes:
                    for part, g in product(range(parts), range(count)):
                        by = {r: there.everywhere_as(word, 4, (r * count + g) * row + part * TILE) for r in {*group_of}}
                        for i, r in enumerate(group_of):
                            here.add_products(sums[g][i][part], words[i], by[r])
                else:
                    numbers = [here.numbers(its, bits.literal_value) for its in words]
                    for t, g in product(range(together), range(count)):
                        if shared:
                            by = {r: there.everywhere(4, (r * count + g) * row + t) for r in {*group_of}}
                        else:
                            by = {0: of_weights[g].moved(2, loop.index).everywhere(2, 0)}
                        for i, r in enumerate(group_of):
                            here.add_product(sums[g][i][0], by[r], numbers[i][t])
            for g, its in enumerate(of_out):
                for i, (column, r) in enumerate(zip(columns, group_of, strict=True)):
                    if in_bytes:
                        step = held.everywhere_as(ir.FloatType(), 4, (r * count + g) * row + _STEP_AT)
                        added = builder.fmul(held.of_bytes(sums[g][i]), step, flags=("contract",))
                        total = builder.fadd(its.load(6, LANES, column), added, flags=("contract",))
                    else:
                        total = builder.load(sums[g][i][0])
                    its.store(6, total, column)
        return context.get_dummy_value()

    given = tiles, tile, weights, weight, scratch, own, out, place, steps, tokens, d, bits, channels, size, group
    return types.none(*given), mix


# What the loops are told besides, see `KV_HEADS` and so on: addresses of both tiles and of the channel sizes, tiles of
# a head, tokens in tiles that are read, and other tokens; the row of the newest one among these and its place in the
# tiles, or -1 where it is stored already.
_KEY_TILES, _VALUE_TILES, _SIZES, _HELD, _FAR, _NEAR, _NEWEST, _PLACE, TOLD = range(TOKEN + 1, TOKEN + 10)


@inlined
def _room(told: Any, d: int, group: int) -> Any:
    """View the room: scores of tokens that are not in tiles, the results of all pieces, and lse."""
    heads, begin, row = told[KV_HEADS], told[ROOM], row_in_loops(told[_NEAR])
    pieces, others = told[PIECES] // heads, floats(begin, heads, group, row)
    begin += 4 * heads * group * row
    parts = floats(begin, heads, pieces, group, d + LINE)
    return others, parts, floats(begin + 4 * heads * pieces * group * (d + LINE), heads, group)


@inlined
def _queries(numbers: Any, _: Any, __: Any) -> Any:
    """Return what keys are multiplied with: the queries [group, d] themselves."""
    return numbers


@inlined
def _queries_in_bytes(numbers: Any, sums: Any, sizes: Any) -> Any:
    """Return what keys are multiplied with: bytes of the queries [_QUERY_BYTES, group, d]. Steps go after the sums."""
    groups, registers, apart = sizes
    found, of_group = np.empty(_QUERY_BYTES * apart, np.int8), LANES * registers
    for i in range(groups):
        sums[groups + i] = _in_bytes(numbers, i * of_group, found, i * of_group, apart, registers)
    return found


@inlined
def _scratch(groups: int, group: int) -> Any:
    return np.empty(groups * group * TILE, np.float32)


@inlined
def _scratch_in_bytes(groups: int, group: int) -> Any:
    return np.empty(groups * group * _SCRATCH, np.int8)


@cache
def _loops(form: TileFormat, group: int, in_bytes: bool) -> tuple[int, int]:
    """Make the loops for `group` queries that share a KV head: of a piece of a head, and over a head's pieces.

    `in_bytes` says whether codes are multiplied as they are.
    """
    d, (k_size, v_size), (keys, values) = form.d, form.bytes, form.parts
    (k_bits, k_channels), (v_bits, v_channels) = keys, values
    k_groups, v_groups, shared = max(1, keys.groups(d)), max(1, values.groups(d)), k_channels or d
    queries, scratch_of = (_queries_in_bytes, _scratch_in_bytes) if in_bytes else (_queries, _scratch)
    sizes_of_queries = group * k_groups, shared // LANES, group * d
    room, turning, scaling, how = d + LINE, form.turned, np.float32(form.turned**-0.5), _how_to_write(form)

    def attend_to_piece(place: int, x: int, _: int, unit: int) -> None:
        told = at_address(place, np.int64(0), TOLD)
        heads, far, held = told[KV_HEADS], told[_FAR], told[_HELD]
        others, parts, _lse = _room(told, d, group)
        pieces, own_pieces = parts.shape[1], (far + PIECE - 1) // PIECE
        h, own = unit // pieces, unit % pieces
        q, sizes = floats(x, heads, group, d), floats(told[_SIZES], heads, d)
        k_tiles = at_address(told[_KEY_TILES], np.uint8(0), heads * held * k_size)
        v_tiles = at_address(told[_VALUE_TILES], np.uint8(0), heads * held * v_size)
        if own >= own_pieces:
            n, head, token = told[_NEAR], told[HEAD], told[TOKEN]
            span = (heads - 1) * head + (n - 1) * token + d
            k, v = floats(told[KEYS], span), floats(told[VALUES], span)
            if told[_NEWEST] >= 0 and own == pieces - 1:
                newest, to = floats(x, (group + 2) * heads, d), h * head + told[_NEWEST] * token
                new_k, new_v = newest[group * heads + h], newest[(group + 1) * heads + h]
                for c in range(d):
                    k[to + c], v[to + c] = new_k[c], new_v[c]
                tile = h * held + told[_PLACE] // TILE
                k_place, v_place = told[_KEY_TILES] + tile * k_size, told[_VALUE_TILES] + tile * v_size
                its = at_address(k_place, np.uint8(0), k_size), at_address(v_place, np.uint8(0), v_size)
                halves = at_address(k_place, np.uint16(0), k_size // 2), at_address(v_place, np.uint16(0), v_size // 2)
                numbers, codes = np.empty(d, np.float32), np.empty(d, np.uint8)
                _write_token(new_k, new_v, sizes[h], its, halves, told[_PLACE] % TILE, numbers, codes, how)
            read = q, k, v, head, token, head, token, n * heads * d >= FAR
            attend_to_all(told, read, others, n, h, own - own_pieces, parts[h, own], (d, group))
            return
        first, last, step = own * PIECE, min(own * PIECE + PIECE, far), row_in_loops(PIECE)
        scores = np.empty((1, group, step), np.float32)  # of a piece, so that they stay in a cache
        mine, sums = np.empty(group * d, np.float32), np.empty(2 * group * k_groups, np.float32)
        scratch = scratch_of(v_groups, group)
        flat_scores, flat_parts = scores.reshape(-1), parts.reshape(-1)
        for g in range(group):
            for r in range(k_groups):
                total = np.float32(0)
                for c in range(r * shared, (r + 1) * shared):
                    mine[g * d + c] = q[h, g, c] * sizes[h, c]
                    total += mine[g * d + c]
                sums[g * k_groups + r] = total
        given = queries(mine, sums, sizes_of_queries)
        begin, count = h * held + first // TILE, (last - first + TILE - 1) // TILE
        for tile in range(count):
            at, there = (begin + tile) * k_size, tile * TILE
            _score(k_tiles, at, given, 0, sums, 0, flat_scores, there, step, d, k_bits, k_channels, k_size, group)
        weigh_all(told, scores, 0, 0, last - first, parts[h, own], d)
        for tile in range(count):
            at, there = (begin + tile) * v_size, tile * TILE
            to, some = (h * pieces + own) * group * room, min(TILE, last - first - tile * TILE)
            # fmt: off
            _mix(v_tiles, at, flat_scores, there, scratch, 0, flat_parts, to, (step, room), some,
                 d, v_bits, v_channels, v_size, group)
            # fmt: on
        if turning > 1:
            for g in range(group):
                _turn(parts[h, own, g, :d], turning, scaling)

    def merge(place: int, _: int, out: int, h: int) -> None:
        told = at_address(place, np.int64(0), TOLD)
        _, parts, lse = _room(told, d, group)
        merge_pieces(parts[h : h + 1], floats(out, told[KV_HEADS], group, d)[h : h + 1], lse[h : h + 1])

    return chain.called_loop(attend_to_piece), chain.called_loop(merge)


class NarrowTokens(NamedTuple):
    """The first `tokens` in tiles, with the channel sizes [Hk, d] of their keys."""

    tiles: Tiles
    tokens: int
    form: TileFormat
    sizes: Tensor

    def read(self) -> tuple[Tensor, Tensor]:
        """Return keys and values in fp32, [Hk, tokens, d]."""
        return self.form.read(self.tiles, self.tokens, self.sizes)


class NarrowAndRecent(NamedTuple):
    """Tokens in tiles, and further ones as computed: keys and values kv [2, Hk, n, d] in any order.

    The newest token, number `length` - 1, is written to its place in the tiles and to row `newest` of kv, unless that
    is -1: it lies there already.
    """

    far: NarrowTokens
    kv: Tensor
    newest: int = -1

    @property
    def length(self) -> int:
        """All tokens."""
        return self.far.tokens + self.kv.shape[2]

    @property
    def form(self) -> TileFormat:
        """The form of the tiles."""
        return self.far.form


ChainTokens = Tokens | NarrowAndRecent
"""What a layer attends to in a `Chain`."""


class NarrowAttentionInChain(AttentionInChain):
    """Attention to `NarrowAndRecent`, in a `Chain` or by itself."""

    def __init__(self, heads: int, kv_heads: int, form: TileFormat, softmax: Softmax):
        super().__init__(heads, kv_heads, form.d, softmax)
        self.form = form

    @override
    def loops(self) -> tuple[int, int]:
        return _loops(self.form, self.heads // self.kv_heads, self.form.multiplies_bytes)

    @override
    def room(self, tokens: NarrowAndRecent) -> int:
        pieces = self._pieces(tokens) * (self.size + LINE)
        return self.heads * (row_of(tokens.kv.shape[2]) + pieces + 1)

    @override
    def tell(self, row: Any, tokens: NarrowAndRecent, room: int) -> int:
        (tiles, far, _, sizes), kv, newest = tokens
        about, near = self.about(kv, self._pieces(tokens), room), kv.shape[2]
        place = tokens.length - 1
        addresses = (each.data_ptr() for each in (*tiles, sizes))
        row[:TOLD] = *about, *addresses, tiles[0].shape[1], far, near, newest, place
        return 2 * self.kv_heads * tokens.length * self.size

    def _pieces(self, tokens: NarrowAndRecent) -> int:
        return -(-tokens.far.tokens // PIECE) - (-tokens.kv.shape[2] // PIECE)


def narrow_attention_ref(q: Tensor, far: NarrowTokens, kv: Tensor, softmax: Softmax) -> Tensor:
    """Reference of `narrow_attention` in plain torch: all numbers are made wide first."""
    keys, values = (torch.cat(both, 1) for both in zip(far.read(), kv.float(), strict=True))
    return decode_attention_ref(q.float(), keys, values, softmax).to(q.dtype)


def narrow_attention(q: Tensor, far: NarrowTokens, kv: Tensor, softmax: Softmax) -> Tensor:
    """Attend with q [H, d] to tokens in tiles, and to kv [2, Hk, n, d], n >= 1, as they are; return [H, d]."""
    heads, d = kv.shape[1], kv.shape[3]
    if len(q) // heads > MOST_ROWS or not far.form.suits_loops(far.tiles):
        return narrow_attention_ref(q, far, kv, softmax)
    tokens, rows = NarrowAndRecent(far, kv.float()), q.float().contiguous()
    attention = NarrowAttentionInChain(len(q), heads, far.form, softmax)
    room, told, out = rows.new_empty(attention.room(tokens)), np.empty(TOLD, np.int64), torch.empty_like(rows)
    numbers = attention.tell(told, tokens, room.data_ptr())
    for loop, blocks in zip(attention.loops(), (PIECES, KV_HEADS), strict=True):
        chain.call(loop, told, rows, told[blocks], numbers, out)
    lse = room[-len(q) :].view(heads, -1)
    return finish(q, out.view(heads, -1, d), lse, softmax).to(q.dtype)
