"""Decode attention on a CPU over KV in narrow forms, which stay so in memory: they are widened in registers.

    k_jc = size_c (z_jr + s_jr code_jc)      v_jc = z_jr + s_jr code_jc      channel c of token j, in group r

Codes of 8 or 4 bits, groups and channel sizes are those of single tokens in `kvcli.kernels.quant`. As bfloat16, numbers
have no scales. Sizes are multiplied into the queries, scales into 16 products of keys or into the weights of values.
Values in 4 bits are multiplied by the Hadamard matrix before rounding, which spreads a large channel over all, and so
is their mixture: the matrix is its own inverse (QuaRot, arXiv 2404.00456).

Tokens lie in tiles of TILE. In a tile the keys lie channel by channel, so that a register holds a channel of 16 tokens
and no product is summed across a register; the values lie token by token, 16 channels to a register. After the codes
[d, TILE] of keys come their scales [groups, 2, TILE] fp16, then the codes [TILE, width] of values and their scales.

Shapes: q [H, d], k, v [Hk, n, d], tiles [Hk, m, bytes] uint8 without gaps, sizes [Hk, d] fp32 -> out [H, d].
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels import chain
from kvcli.kernels._llvm import FlatArrays, all_of, at_address, lanes
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


class TilePart(NamedTuple):
    """Keys or values in a tile: first byte of codes, bits of a code, and channels that share a scale; 0 for none."""

    begin: int
    bits: int
    channels: int

    def groups(self, d: int) -> int:
        """Count the scales of a token."""
        return d // self.channels if self.channels else 0

    def scales_at(self, d: int) -> int:
        """Return the first byte of scales."""
        return self.begin + TILE * d * self.bits // 8

    def end(self, d: int) -> int:
        """Return the byte after the last one."""
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
    def bytes(self) -> int:
        """Bytes of a tile in a KV head."""
        return self.parts[1].end(self.d)

    @property
    def turned(self) -> int:
        """The channels of values that are turned together, a power of two; 1 for none."""
        return self.d & -self.d if self.parts[1].bits == 4 else 1

    @property
    def fills_registers(self) -> bool:
        """Whether values fill registers, and each register is in one group."""
        _, bits, channels = self.parts[1]
        return self.d * min(bits, 8) // 8 % LANES == 0 and channels % LANES == 0

    def suits_loops(self, tiles: Tensor) -> bool:
        """Return whether loops take the tiles."""
        return self.fills_registers and serves(tiles, dtype=torch.uint8)

    def write(self, tiles: Tensor, first: int, k: Tensor, v: Tensor, sizes: Tensor) -> None:
        """Write tokens k, v [Hk, n, d] to tiles, from token `first` on."""
        if not self.suits_loops(tiles):
            self.write_ref(tiles, first, k, v, sizes)
            return
        for begin in range(0, k.shape[1], MOST_AT_ONCE):
            some = [x[:, begin : begin + MOST_AT_ONCE].float() for x in (k, v)]
            run(_writing(self), 2 * some[0].numel(), *some, sizes, tiles, tiles.view(torch.uint16), first + begin)

    def write_ref(self, tiles: Tensor, first: int, k: Tensor, v: Tensor, sizes: Tensor) -> None:
        """Reference of `write`, in plain torch."""
        for tokens, tile, begin in _pieces(first, k.shape[1]):
            for number, (part, x) in enumerate(zip(self.parts, (k, v), strict=True)):
                rows = x[:, tokens].float()
                rows = turned(rows, self.turned) if number else rows / sizes[:, None]
                count = min(rows.shape[1], TILE)
                rows = rows.unflatten(1, (-1, count))  # type: ignore[no-untyped-call]  # [Hk, t, count, d]
                some = tiles[:, tile : tile + rows.shape[1]]
                codes, scales = self._views(some, number)
                if self.block is None:
                    codes[:, :, begin : begin + count] = rows.bfloat16()
                    continue
                found, scale, zero = self.block.codes(rows[..., None, :], number)
                found = found.flatten(-4).to(torch.uint8)
                if part.bits == 4:
                    low_half, high_half = found.chunk(2, -1)
                    found = low_half | high_half << 4
                codes[:, :, begin : begin + count] = found
                for at, numbers in enumerate((scale, zero)):
                    scales[:, :, begin : begin + count, :, at] = numbers[..., 0, 0, :, 0]

    def read(self, tiles: Tensor, tokens: int, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first `tokens` keys and values in fp32, [Hk, tokens, d]."""
        tiles, found = tiles[:, : -(-tokens // TILE)], []
        for number, part in enumerate(self.parts):
            codes, scales = self._views(tiles, number)
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
        """View the codes [Hk, t, TILE, width or d] and the scales [Hk, t, TILE, groups, 2] of keys or values."""
        part = self.parts[number]
        middle = part.scales_at(self.d)
        codes, scales = tiles[..., part.begin : middle], tiles[..., middle : part.end(self.d)]
        codes = codes.view(torch.bfloat16) if part.bits == 16 else codes
        shape = (TILE, -1) if number else (-1, TILE)
        codes = codes.unflatten(-1, shape)  # type: ignore[no-untyped-call]
        scales = scales.view(torch.float16).unflatten(-1, (part.groups(self.d), 2, TILE))  # type: ignore[no-untyped-call]
        return codes if number else codes.transpose(-1, -2), scales.movedim(-1, -3)


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
    d, block = form.d, form.block
    groups = [0, 0] if block is None else [each.channels for each in block.groups]
    bits = (16, 16) if block is None else block.bits
    keys = TilePart(0, bits[0], groups[0])
    return keys, TilePart(keys.end(d), bits[1], groups[1])


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
    """Round a token's key and value [d] into place `t` of a tile, given as bytes and as halves; `row` and `codes` [d].

    `how`: d, the channels that are turned together, and of keys and of values the first byte, the bits of a code,
    channels and scales, and the first half of these. They are known at compile time.
    """
    d, size, keys, values = how
    bits, largest, half, none = row.view(np.uint32), np.float32(LARGEST), np.float32(0.5), np.uint16(0x7E00)
    for part in range(2):
        begin, code_bits, channels, groups, scales = values if part else keys
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
                its[begin // 2 + (t * d + c if part else c * TILE + t)] = b
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
            its[at], its[at + TILE] = scale, (zero if whole else none)
            for c in range(r * channels, (r + 1) * channels):
                code = np.floor((row[c] - shift) / step + half)
                code = code if code > 0 else np.float32(0)
                codes[c] = np.uint8(code if code < most else most)
        if part == 0:
            for c in range(d):
                own[begin + c * TILE + t] = codes[c]
        else:
            width = d * code_bits // 8
            for c in range(width):
                own[begin + t * width + c] = codes[c] | codes[c + width] << 4 if code_bits == 4 else codes[c]


def _how_to_write(form: TileFormat) -> Any:
    """Return what `_write_token` is told of tiles."""
    d = form.d
    parts = [(*part, part.groups(d), part.scales_at(d) // 2) for part in form.parts]
    return d, form.turned, *[(begin, bits, channels, *rest) for begin, bits, channels, *rest in parts]


@cache
def _writing(form: TileFormat) -> Any:
    """Make the loop that rounds tokens into tiles."""
    d, how = form.d, _how_to_write(form)

    @compiled
    def write(k: Any, v: Any, sizes: Any, tiles: Any, halves: Any, first: int) -> None:
        heads, n, _ = k.shape
        pieces = (n + TOKENS_AT_ONCE - 1) // TOKENS_AT_ONCE
        for piece in prange(heads * pieces):
            h, begin = piece // pieces, piece % pieces * TOKENS_AT_ONCE
            row, codes = np.empty(d, np.float32), np.empty(d, np.uint8)
            for i in range(begin, min(n, begin + TOKENS_AT_ONCE)):
                tile, t = (first + i) // TILE, (first + i) % TILE
                _write_token(k[h, i], v[h, i], sizes[h], tiles[h, tile], halves[h, tile], t, row, codes, how)

    return write


class _Tile(FlatArrays):
    """The arguments of a part of a loop; the first array is the tiles, from a place in one of them on."""

    def moved(self, argument: int, by: Any) -> _Tile:
        """Move the place of an array by a number that the loop knows."""
        other = copy(self)
        other.given = list(self.given)
        other.given[argument + 1] = self.builder.add(self.given[argument + 1], by)
        return other

    def words(self, offset: int, bits: int) -> Any:
        """Load 16 numbers of 8 or 16 bits from a byte on, as integers of 32 bits."""
        from llvmlite import ir

        held = self.load(0, LANES * bits // 8, offset)
        kind = ir.VectorType(ir.IntType(bits), LANES)
        return self.builder.zext(self.builder.bitcast(held, kind), ir.VectorType(ir.IntType(32), LANES))

    def numbers(self, offset: int, bits: int) -> list[Any]:
        """Widen a register of codes from a byte on: 16 numbers, or twice 16 of 4 bits."""
        from llvmlite import ir

        words, builder = self.words(offset, max(bits, 8)), self.builder
        floats = ir.VectorType(ir.FloatType(), LANES)

        def constant(x: int) -> Any:
            return ir.Constant(words.type, [x] * LANES)

        if bits == 16:
            return [builder.bitcast(builder.shl(words, constant(16)), floats)]
        halves = [builder.and_(words, constant(15)), builder.lshr(words, constant(4))] if bits == 4 else [words]
        return [builder.sitofp(each, floats) for each in halves]

    def halves(self, offset: int) -> Any:
        """Load 16 numbers in half precision from a byte on."""
        from llvmlite import ir

        held = self.builder.bitcast(self.load(0, 2 * LANES, offset), ir.VectorType(ir.HalfType(), LANES))
        return self.builder.fpext(held, ir.VectorType(ir.FloatType(), LANES))

    def everywhere(self, argument: int, offset: int) -> Any:
        """Load a number into all 16 lanes."""
        one = self.load(argument, 1, offset)
        return lanes(self.builder, (one, one), [0] * LANES)

    def add_product(self, total: Any, x: Any, y: Any) -> None:
        """Add x y to what lies at `total`."""
        product = self.builder.fmul(x, y, flags=("contract",))
        self.builder.store(self.builder.fadd(self.builder.load(total), product, flags=("contract",)), total)

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

    Flat arrays of fp32: q [group, d] from `query` on, its sums over groups of channels [group, groups] from `own` on,
    out [group, TILE] from `place` on, whose rows are `step` apart. `size` is the bytes of a tile; it and the numbers
    after it are known at compile time.
    """
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils

    if not all(isinstance(each, types.Literal) for each in (d, bits, channels, size, group)):
        return None

    def score(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        held, number = _Tile(context, builder, signature, given), given[1].type
        tools: Any = cgutils
        width, count = bits.literal_value // 8, group.literal_value
        shared = channels.literal_value or d.literal_value
        groups = d.literal_value // shared
        zero = ir.Constant(ir.VectorType(ir.FloatType(), LANES), [0.0] * LANES)
        registers = 4 if 4 * count <= MOST_SUMS else 2
        rows = [held.moved(6, builder.mul(given[8], number(g))) for g in range(count)]
        for first in range(0, TILE, LANES * registers):
            totals = [[zero] * registers for _ in range(count)]
            for r in range(groups):
                found = [[tools.alloca_once_value(builder, zero) for _ in range(registers)] for _ in range(count)]
                with cgutils.for_range(builder, number(shared)) as loop:
                    channel = builder.add(loop.index, number(r * shared))
                    here = held.moved(0, builder.mul(channel, number(TILE * width))).moved(2, channel)
                    if first == 0:
                        for line in range(width):
                            here.ask_for(size.literal_value + TILE * line)
                    places = [width * (first + LANES * register) for register in range(registers)]
                    codes = [here.numbers(place, bits.literal_value)[0] for place in places]
                    for g in range(count):
                        x = here.everywhere(2, g * d.literal_value)
                        for register in range(registers):
                            here.add_product(found[g][register], x, codes[register])
                for register in range(registers):
                    ends = [[builder.load(found[g][register])] for g in range(count)]
                    if bits.literal_value == 16:
                        for g in range(count):
                            totals[g][register] = ends[g][0]
                        continue
                    at = TILE * d.literal_value + 2 * (2 * r * TILE + first + LANES * register)
                    scale, lowest = held.halves(at), held.halves(at + 2 * TILE)
                    for g in range(count):
                        by = held.everywhere(4, g * groups + r)
                        scaled = builder.fmul(scale, ends[g][0], flags=("contract",))
                        shifted = builder.fmul(lowest, by, flags=("contract",))
                        both = builder.fadd(scaled, shifted, flags=("contract",))
                        totals[g][register] = builder.fadd(totals[g][register], both, flags=("contract",))
            for g in range(count):
                for register in range(registers):
                    rows[g].store(6, totals[g][register], first + LANES * register)
        return context.get_dummy_value()

    given = tiles, tile, q, query, sums, own, out, place, step, d, bits, channels, size, group
    return types.none(*given), score


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
    `steps` apart; scratch [groups, group, TILE] from `own` on. The last numbers are known at compile time.
    """
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils

    if not all(isinstance(each, types.Literal) for each in (d, bits, channels, size, group)):
        return None

    def mix(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        held, number = _Tile(context, builder, signature, given), given[1].type
        tools: Any = cgutils
        count, width = group.literal_value, d.literal_value * bits.literal_value // 8
        weight_step, out_step = tools.unpack_tuple(builder, given[8])
        of_weights = [held.moved(2, builder.mul(weight_step, number(g))) for g in range(count)]
        of_out = [held.moved(6, builder.mul(out_step, number(g))) for g in range(count)]
        zero = ir.Constant(ir.VectorType(ir.FloatType(), LANES), [0.0] * LANES)
        shared = channels.literal_value
        if shared:  # the weights times the scales; and the zeros, which all channels of a group have in common
            with cgutils.for_range(builder, number(d.literal_value // shared)) as loop:
                r = loop.index
                here = held.moved(0, builder.mul(r, number(4 * TILE)))
                target = held.moved(4, builder.mul(r, number(count * TILE)))
                lowest = [zero] * count
                for first in range(0, TILE, LANES):
                    at = TILE * width + 2 * first
                    scale, low = here.halves(at), here.halves(at + 2 * TILE)
                    words = ir.VectorType(number, LANES)
                    lane = ir.Constant(words, list(range(first, first + LANES)))
                    there = builder.icmp_signed("<", lane, all_of(builder, given[9], LANES))
                    for g in range(count):
                        w = of_weights[g].load(2, LANES, first)
                        target.store(4, builder.fmul(w, scale), g * TILE + first)
                        low_part = builder.select(there, builder.fmul(w, low), zero)
                        lowest[g] = builder.fadd(lowest[g], low_part)
                kind = ir.FunctionType(ir.FloatType(), [ir.FloatType(), zero.type])
                declare: Any = cgutils.get_or_insert_function
                add_up = declare(builder.module, kind, f"llvm.vector.reduce.fadd.v{LANES}f32")
                begin = builder.mul(r, number(shared))
                for g in range(count):
                    nothing = ir.Constant(ir.FloatType(), 0.0)
                    total = all_of(builder, builder.call(add_up, [nothing, lowest[g]], fastmath=("reassoc",)), LANES)
                    row = of_out[g].moved(6, begin)
                    for c in range(0, shared, LANES):
                        row.store(6, builder.fadd(row.load(6, LANES, c), total), c)
        each = 2 if bits.literal_value == 4 else 1  # registers of sums for one of codes
        code_bytes = LANES * max(8, bits.literal_value) // 8
        at_once = max(1, MOST_SUMS // (count * each))
        begins = range(0, width, code_bytes)
        for some in (begins[at : at + at_once] for at in range(0, len(begins), at_once)):
            columns = [
                [begin // code_bytes * LANES + half * d.literal_value // 2 for half in range(each)] for begin in some
            ]
            sums = [
                [
                    [tools.alloca_once_value(builder, of_out[g].load(6, LANES, column)) for column in both]
                    for both in columns
                ]
                for g in range(count)
            ]
            with cgutils.for_range(builder, given[9]) as loop:
                here = held.moved(0, builder.mul(loop.index, number(width)))
                for begin in some:
                    if begin % TILE == 0:
                        here.ask_for(begin + size.literal_value)
                codes = [here.numbers(begin, bits.literal_value) for begin in some]
                for g in range(count):
                    if shared:
                        its = {column // shared for both in columns for column in both}
                        there = held.moved(4, loop.index)
                        by = {r: there.everywhere(4, (r * count + g) * TILE) for r in sorted(its)}
                    else:
                        by = {0: of_weights[g].moved(2, loop.index).everywhere(2, 0)}
                    for i, both in enumerate(columns):
                        for half, column in enumerate(both):
                            here.add_product(sums[g][i][half], by[column // shared if shared else 0], codes[i][half])
            for g in range(count):
                for i, both in enumerate(columns):
                    for half, column in enumerate(both):
                        of_out[g].store(6, builder.load(sums[g][i][half]), column)
        return context.get_dummy_value()

    given = tiles, tile, weights, weight, scratch, own, out, place, steps, tokens, d, bits, channels, size, group
    return types.none(*given), mix


# What the loops are told besides, see `KV_HEADS` and so on: addresses of the tiles and of the channel sizes, tiles of a
# head, tokens in tiles that are read, and other tokens; the row of the newest one among these and its place in the
# tiles, or -1 where it is stored already.
_TILES, _SIZES, _HELD, _FAR, _NEAR, _NEWEST, _PLACE, TOLD = range(TOKEN + 1, TOKEN + 9)


@inlined
def _room(told: Any, d: int, group: int) -> Any:
    """View the room: scores of tokens in tiles and of others, the results of all pieces, and lse."""
    heads, begin, near = told[KV_HEADS], told[ROOM], told[_NEAR]
    far_row, row = row_in_loops((told[_FAR] + TILE - 1) // TILE * TILE), row_in_loops(near)
    pieces = told[PIECES] // heads
    scores = floats(begin, heads, group, far_row)
    others = floats(begin + 4 * heads * group * far_row, heads, group, row)
    begin += 4 * heads * group * (far_row + row)
    parts = floats(begin, heads, pieces, group, d + LINE)
    return scores, others, parts, floats(begin + 4 * heads * pieces * group * (d + LINE), heads, group)


@cache
def _loops(form: TileFormat, group: int) -> tuple[int, int]:
    """Make the loops for `group` queries that share a KV head: of a piece of a head, and over a head's pieces."""
    d, size, (keys, values) = form.d, form.bytes, form.parts
    (k_begin, k_bits, k_channels), (v_begin, v_bits, v_channels) = keys, values
    k_groups, v_groups, shared = max(1, keys.groups(d)), max(1, values.groups(d)), k_channels or d
    room, turning, scaling, how = d + LINE, form.turned, np.float32(form.turned**-0.5), _how_to_write(form)

    def attend_to_piece(place: int, x: int, _: int, unit: int) -> None:
        told = at_address(place, np.int64(0), TOLD)
        heads, far, held = told[KV_HEADS], told[_FAR], told[_HELD]
        scores, others, parts, _lse = _room(told, d, group)
        pieces, own_pieces = parts.shape[1], (far + PIECE - 1) // PIECE
        h, own = unit // pieces, unit % pieces
        q, sizes = floats(x, heads, group, d), floats(told[_SIZES], heads, d)
        tiles = at_address(told[_TILES], np.uint8(0), heads * held * size)
        if own >= own_pieces:
            n, head, token = told[_NEAR], told[HEAD], told[TOKEN]
            span = (heads - 1) * head + (n - 1) * token + d
            k, v = floats(told[KEYS], span), floats(told[VALUES], span)
            if told[_NEWEST] >= 0 and own == pieces - 1:
                newest, to = floats(x, (group + 2) * heads, d), h * head + told[_NEWEST] * token
                new_k, new_v = newest[group * heads + h], newest[(group + 1) * heads + h]
                for c in range(d):
                    k[to + c], v[to + c] = new_k[c], new_v[c]
                first = (h * held + told[_PLACE] // TILE) * size
                its, halves = tiles[first : first + size], at_address(told[_TILES] + first, np.uint16(0), size // 2)
                numbers, codes = np.empty(d, np.float32), np.empty(d, np.uint8)
                _write_token(new_k, new_v, sizes[h], its, halves, told[_PLACE] % TILE, numbers, codes, how)
            read = q, k, v, head, token, head, token, n * heads * d >= FAR
            attend_to_all(told, read, others, n, h, own - own_pieces, parts[h, own], (d, group))
            return
        first, last, step = own * PIECE, min(own * PIECE + PIECE, far), scores.shape[2]
        mine, sums = np.empty(group * d, np.float32), np.empty(group * k_groups, np.float32)
        scratch = np.empty(v_groups * group * TILE, np.float32)
        flat_scores, flat_parts = floats(told[ROOM], heads * group * step), parts.reshape(-1)
        for g in range(group):
            for r in range(k_groups):
                total = np.float32(0)
                for c in range(r * shared, (r + 1) * shared):
                    mine[g * d + c] = q[h, g, c] * sizes[h, c]
                    total += mine[g * d + c]
                sums[g * k_groups + r] = total
        begin, end, row = first // TILE, (last + TILE - 1) // TILE, h * group * step
        for tile in range(begin, end):
            at, there = (h * held + tile) * size + k_begin, row + tile * TILE
            _score(tiles, at, mine, 0, sums, 0, flat_scores, there, step, d, k_bits, k_channels, size, group)
        weigh_all(told, scores, h, first, last, parts[h, own], d)
        for tile in range(begin, end):
            at, there = (h * held + tile) * size + v_begin, row + tile * TILE
            to, some = (h * pieces + own) * group * room, min(TILE, last - tile * TILE)
            # fmt: off
            _mix(tiles, at, flat_scores, there, scratch, 0, flat_parts, to, (step, room), some,
                 d, v_bits, v_channels, size, group)
            # fmt: on
        if turning > 1:
            for g in range(group):
                _turn(parts[h, own, g, :d], turning, scaling)

    def merge(place: int, _: int, out: int, h: int) -> None:
        told = at_address(place, np.int64(0), TOLD)
        _, _, parts, lse = _room(told, d, group)
        merge_pieces(parts[h : h + 1], floats(out, told[KV_HEADS], group, d)[h : h + 1], lse[h : h + 1])

    return chain.called_loop(attend_to_piece), chain.called_loop(merge)


class NarrowTokens(NamedTuple):
    """The first `tokens` in tiles [Hk, m, bytes], with the channel sizes [Hk, d] of their keys."""

    tiles: Tensor
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
        return _loops(self.form, self.heads // self.kv_heads)

    @override
    def room(self, tokens: NarrowAndRecent) -> int:
        far, near = tokens.far.tokens, tokens.kv.shape[2]
        rows = row_of(-(-far // TILE) * TILE) + row_of(near)
        return self.heads * (rows + self._pieces(tokens) * (self.size + LINE) + 1)

    @override
    def tell(self, row: Any, tokens: NarrowAndRecent, room: int) -> int:
        (tiles, far, _, sizes), kv, newest = tokens
        about, near = self.about(kv, self._pieces(tokens), room), kv.shape[2]
        place = tokens.length - 1
        row[:TOLD] = *about, tiles.data_ptr(), sizes.data_ptr(), tiles.shape[1], far, near, newest, place
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
