"""Linear layers with weights packed as in GGUF files: y_mi = sum_c x_mc W_ic, with W unpacked on the way.

A row of a weight is a sequence of blocks, each with some numbers in a few bits and their scales. A step reads every
weight once and is bound by memory, so time shrinks with the bytes: the loops and kernels here never write unpacked
numbers to memory. Many rows (a prompt) are multiplied by tiles of some rows of W, unpacked.

Shapes: x [.., in], W [out, in] as bytes [out, nbytes of a row]. Sums are in fp32, over exactly the reference's numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from kvcli.kernels._llvm import (
    LINE,
    NUMBERS,
    NUMBERS_OF_TWO,
    SHIFTED,
    FlatArrays,
    all_of,
    at_address,
    has_wide_registers,
    lanes,
    permutes,
)
from kvcli.kernels._numba import IN_ORDER, compiled, intrinsic, prange, run, serves
from kvcli.kernels._triton import jit, launch, power_of_two, takes, tl
from kvcli.kernels.chain import Chain, Gate, Matrix, Products, floats, loop_of_rows


class Packing(NamedTuple):
    """A block format: its name in GGUF files, and the numbers and bytes of a block.

    Files have one block of a row after the other. On a GPU a row has its blocks' bytes `by_field`, unless weights are
    streamed: then they are as in the file, which is slower to read.
    """

    name: str
    size: int
    nbytes: int
    by_field: bool = False

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a row; raise ValueError if it is not a whole number of blocks."""
        if columns % self.size:
            raise ValueError(f"a row of {columns} is no whole number of {self.name}'s blocks of {self.size}")
        return columns // self.size * self.nbytes


PACKINGS = {
    packing.name: packing
    for packing in (
        Packing("Q4_0", 32, 18),
        Packing("Q4_1", 32, 20),
        Packing("Q5_0", 32, 22),
        Packing("Q5_1", 32, 24),
        Packing("Q8_0", 32, 34),
        Packing("Q4_K", 256, 144),
        Packing("Q5_K", 256, 176),
        Packing("Q6_K", 256, 210),
        Packing("MXFP4", 32, 17),
        Packing("F16", 1, 2),
        Packing("BF16", 1, 2),
    )
}
"""The formats with products; F16 and BF16 have blocks of one number."""

MOST_ROWS = 8
"""Rows of x multiplied at once; for more than twice as many, unpacked tiles are faster."""

TILE = 1 << 20  # numbers unpacked at once on a CPU
DEVICE_TILE = 1 << 24  # the same on a GPU: 16-bit ones stay in its cache until they are multiplied
LANES = 16  # numbers per AVX-512 register
_LOT = 32  # numbers that loops handle at once in formats without blocks
_AHEAD = 4096  # bytes of prefetch distance
_ROWS = 32  # rows of a weight per thread at once


_HALVES = {"F16": torch.float16, "BF16": torch.bfloat16}


class PackedWeight(Tensor):
    """A weight [.., out, in] stored as `packed` bytes [.., out, nbytes of a row]; to torch, a floating-point tensor.

    Linear layers and embeddings use it packed, and so does who takes one matrix of several (those of experts). Any
    other function gets it unpacked.
    """

    packed: Tensor
    packing: Packing

    @staticmethod
    def __new__(cls, packed: Tensor, packing: Packing, dtype: torch.dtype) -> PackedWeight:
        """Wrap bytes without a copy."""
        shape = *packed.shape[:-1], packed.shape[-1] // packing.nbytes * packing.size
        made: Any = Tensor._make_wrapper_subclass
        weight: PackedWeight = made(cls, shape, dtype=dtype, device=packed.device, requires_grad=False)
        weight.packed, weight.packing = packed, packing
        return weight

    @classmethod
    def of(cls, weight: Tensor, packing: Packing, dtype: torch.dtype) -> PackedWeight:
        """Round a weight to 16-bit numbers and wrap it; a tensor of these is not copied."""
        return cls(weight.detach().to(_HALVES[packing.name]).contiguous().view(torch.uint8), packing, dtype)

    @override
    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"PackedWeight({list(self.shape)}, {self.packing.name}, {self.dtype}, {self.device})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Packing, torch.dtype]]:
        """Return its parts, for code that moves modules."""
        return ["packed"], (self.packing, self.dtype)

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], how: tuple[Packing, torch.dtype], *_: Any) -> PackedWeight:
        """Make a weight from its parts."""
        return PackedWeight(parts["packed"], *how)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of the packed weight."""
        return self.packed.nbytes

    def unpack(self) -> Tensor:
        """Return the plain weight in its dtype."""
        rows = self.packed.reshape(-1, self.packed.shape[-1])  # of all matrices, if there are several
        return _unpacked(rows, self.packing, self.dtype).view(self.shape)

    def laid_out(self, by_field: bool) -> PackedWeight:
        """Return the weight with the bytes of rows by field, as kernels read them best, or by block as in files."""
        packing = self.packing._replace(by_field=by_field and self.packing.name in _DEALT)
        if packing == self.packing:
            return self
        return PackedWeight(_rearranged(self.packed, self.packing), packing, self.dtype)

    @override
    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is functional.linear and isinstance(args[1], PackedWeight):
            return packed_linear(*args, **kwargs)
        if function is functional.embedding and isinstance(args[1], PackedWeight):
            return packed_embedding(args[0], args[1])
        if function is Tensor.__getitem__ and args[0].dim() == 3 and _is_place(args[1]):
            return PackedWeight(args[0].packed[int(args[1])], args[0].packing, args[0].dtype)
        with torch._C.DisableTorchFunctionSubclass():  # otherwise results would be of this class
            return function(*args, **kwargs)

    @override
    @classmethod
    def __torch_dispatch__(cls, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if function in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            packed = args[0].packed if function is torch.ops.aten.detach.default else args[0].packed.clone()
            return PackedWeight(packed, args[0].packing, args[0].dtype)
        if function is torch.ops.aten._to_copy.default:
            dtype, device = kwargs.get("dtype") or args[0].dtype, torch.device(kwargs.get("device") or args[0].device)
            on_device, weight = device.type == "cuda", args[0]
            if on_device and weight.is_cpu:  # laid out in the host's memory, since it takes several times as much
                weight = weight.laid_out(by_field=True)
            moved = PackedWeight(weight.packed.to(device), weight.packing, dtype)
            return moved if on_device else moved.laid_out(by_field=False)
        plain: Any = torch.utils._pytree.tree_map_only
        args, kwargs = plain(PackedWeight, PackedWeight.unpack, (args, kwargs))
        return function(*args, **kwargs)


def _is_place(index: Any) -> bool:
    """Tell whether an index names one matrix of several."""
    return isinstance(index, int) or (isinstance(index, Tensor) and index.dim() == 0 and index.dtype == torch.int64)


def packed_embedding(ids: Tensor, weight: PackedWeight) -> Tensor:
    """Unpack the rows of `ids` [..]; return [.., in]."""
    rows = weight.packed.index_select(0, ids.reshape(-1))
    return _unpacked(rows, weight.packing, weight.dtype).view(*ids.shape, -1)


def packed_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """Multiply x [.., in] by a packed weight [out, in]; return [.., out] in the dtype of x."""
    rows = x.reshape(-1, x.shape[-1])
    if x.requires_grad and torch.is_grad_enabled():  # nothing below supports gradients
        out = rows @ weight.unpack().to(x.dtype).T
    elif 0 < len(rows) <= 2 * MOST_ROWS and takes(x) and _takes(weight.packed, weight.packing):
        out = torch.cat([_multiply_on_device(part, weight) for part in torch.split(rows, MOST_ROWS)])
    elif 0 < len(rows) <= 2 * MOST_ROWS and suits_loops(weight):
        out = torch.cat([products_with([weight])(part.float()) for part in torch.split(rows, MOST_ROWS)])
    else:
        out = _by_tiles(rows, weight)
    if bias is not None:
        out = out + bias
    return out.to(x.dtype).view(*x.shape[:-1], -1)


def packed_linear_ref(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """Reference of `packed_linear`: unpack, then multiply."""
    wide = torch.promote_types(x.dtype, torch.float32)
    out = x.to(wide) @ unpack_ref(weight.packed, weight.packing).to(wide).T
    return (out if bias is None else out + bias).to(x.dtype)


def _by_tiles(x: Tensor, weight: PackedWeight) -> Tensor:
    """Multiply x [m, in] by tiles of the weight that are unpacked one after another; return [m, out]."""
    columns, at_once = x.shape[1], _takes(weight.packed, weight.packing)  # kernels round while they unpack
    step = max(_ROWS, (DEVICE_TILE if weight.is_cuda else TILE) // columns)
    if len(weight) <= step:
        return x @ _unpacked(weight.packed, weight.packing, x.dtype).T
    out = x.new_empty(len(x), len(weight))
    scratch = torch.empty(step, columns, device=x.device, dtype=x.dtype if at_once else torch.float32)
    for first in range(0, len(weight), step):
        rows = weight.packed[first : first + step]
        tile = unpack_rows(rows, weight.packing, scratch[: len(rows)])
        torch.mm(x, tile.to(x.dtype).T, out=out[:, first : first + step])
    return out


def _unpacked(packed: Tensor, packing: Packing, dtype: torch.dtype) -> Tensor:
    """Unpack rows and round them to `dtype`, which kernels do at once."""
    out = None
    if _takes(packed, packing):
        out = torch.empty(
            len(packed), packed.shape[1] // packing.nbytes * packing.size, device=packed.device, dtype=dtype
        )
    return unpack_rows(packed, packing, out).to(dtype)


def unpack_rows(packed: Tensor, packing: Packing, out: Tensor | None = None) -> Tensor:
    """Unpack rows [n, nbytes of a row] to [n, in], into `out` if given, otherwise to fp32.

    In fp32 they are exactly the reference's numbers. On a CPU `out` is fp32.
    """
    rows, columns = len(packed), packed.shape[1] // packing.nbytes * packing.size
    if out is None:
        out = torch.empty(rows, columns, device=packed.device)
    if rows and _takes(packed, packing):
        block, row_bytes = _constants(packing, columns), packed.shape[1]
        grid = -(-rows // _UNPACKED), -(-columns // (block["SIZE"] // block["LANES"] * block["THREADS"]))
        sizes = rows, columns, row_bytes, row_bytes // packing.nbytes
        launch(_unpack_kernel, grid, packed, out, *sizes, ROWS=_UNPACKED, **block)
        return out
    if not packing.by_field and _whole(packed, columns) and serves(packed, dtype=torch.uint8):
        lots = columns // max(packing.size, _LOT)
        run(_unpacking(list(PACKINGS).index(packing.name)), out.numel(), packed.view(-1), rows, lots, out.view(-1))
        return out
    return out.copy_(unpack_ref(packed, packing))


def _whole(packed: Tensor, columns: int) -> bool:
    """Return whether loops can take these rows: contiguous, and whole lots."""
    return columns % _LOT == 0 and packed.is_contiguous()


def unpack_ref(packed: Tensor, packing: Packing) -> Tensor:
    """Reference of unpacking in torch: rows [.., nbytes] to fp32 [.., in]."""
    if packing.by_field:
        packed = _rearranged(packed, packing)
    blocks = packed.reshape(-1, packing.nbytes)
    return _REFERENCES[packing.name](blocks).reshape(*packed.shape[:-1], -1)


def _half(blocks: Tensor, at: int) -> Tensor:
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Return the lower halves of bytes [.., n] before the upper ones: [.., 2 n]."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _fifth_bits(blocks: Tensor, at: int) -> Tensor:
    bits = blocks[:, at : at + 4, None] >> torch.arange(8, dtype=torch.uint8, device=blocks.device)
    return (bits & 1).flatten(1) << 4


def _scales_and_least(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales and least values of the eight parts of a block of Q4_K or Q5_K: [n, 8, 1] each."""
    a, b, c = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((a & 63, (c & 15) | ((a >> 2) & 48)), -1)
    least = torch.cat((b & 63, (c >> 4) | ((b >> 2) & 48)), -1)
    return (_half(blocks, 0) * scales)[..., None], (_half(blocks, 2) * least)[..., None]


def _plain_q4_k(blocks: Tensor) -> Tensor:
    scales, least = _scales_and_least(blocks)
    levels = _nibbles(blocks[:, 16:].view(-1, 4, 32)).view(-1, 8, 32)
    return scales * levels - least


def _plain_q5_k(blocks: Tensor) -> Tensor:
    scales, least = _scales_and_least(blocks)
    places = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    fifth = ((blocks[:, None, 16:48] >> places) & 1) << 4
    levels = _nibbles(blocks[:, 48:].view(-1, 4, 32)).view(-1, 8, 32) | fifth
    return scales * levels - least


def _plain_q6_k(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks[:, :128].view(-1, 2, 64)).view(-1, 2, 4, 32)
    places = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
    high = ((blocks[:, 128:192].view(-1, 2, 1, 32) >> places) & 3) << 4
    levels = (low | high).view(-1, 16, 16).to(torch.int8) - 32
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float() * _half(blocks, 208)
    return scales[..., None] * levels


_E2M1 = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)  # twice the numbers of four bits, without their sign


def _plain_mxfp4(blocks: Tensor) -> Tensor:
    levels = blocks.new_tensor(_E2M1, dtype=torch.float32)
    exponents = blocks[:, :1].int()
    bits = torch.where(exponents < 2, 0x00200000 << exponents.clamp(max=1), (exponents - 1).clamp(min=0) << 23)
    return bits.view(torch.float32) * torch.cat((levels, -levels))[_nibbles(blocks[:, 1:]).int()]


_REFERENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": lambda blocks: _half(blocks, 0) * (_nibbles(blocks[:, 2:]).to(torch.int8) - 8),
    "Q4_1": lambda blocks: _half(blocks, 0) * _nibbles(blocks[:, 4:]) + _half(blocks, 2),
    "Q5_0": lambda blocks: _half(blocks, 0) * ((_nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)).to(torch.int8) - 16),
    "Q5_1": lambda blocks: _half(blocks, 0) * (_nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)) + _half(blocks, 2),
    "Q8_0": lambda blocks: _half(blocks, 0) * blocks[:, 2:].contiguous().view(torch.int8),
    "Q4_K": _plain_q4_k,
    "Q5_K": _plain_q5_k,
    "Q6_K": _plain_q6_k,
    "MXFP4": _plain_mxfp4,
    "F16": lambda blocks: blocks.view(torch.float16).float(),
    "BF16": lambda blocks: blocks.view(torch.bfloat16).float(),
}


# GPU kernels. On a device a row has one field of its blocks after the other, for instance all levels before all scales,
# so that threads side by side read bytes side by side. A thread has a share of a block: a few words of levels, and the
# scales that go with them. Tensors are [threads, rows, rows of x]; what multiplies and what unpacks differ only in what
# they do with a number.

_THREADS = 128  # which have a row at once
_SKINNY = 4  # rows of a weight per program for one row of x, each thread having its share of all of them
_FEW = 2  # the same for several rows of x
_UNPACKED = 1  # the same while unpacking


class _Dealt(NamedTuple):
    """How kernels see a format.

    `fields` are ranges of a block's bytes, in the order in which a row on a device has them. `size` numbers are one
    unit, of which each of `lanes` threads has a share with `scales` scales.
    """

    fields: Sequence[tuple[int, int]]
    size: int = 32
    lanes: int = 1
    scales: int = 1


_DEALT = {
    "Q4_0": _Dealt([(2, 18), (0, 2)]),
    "Q4_1": _Dealt([(4, 20), (0, 4)]),
    "Q5_0": _Dealt([(6, 22), (2, 6), (0, 2)]),
    "Q5_1": _Dealt([(8, 24), (4, 8), (0, 4)]),
    "Q8_0": _Dealt([(2, 34), (0, 2)], lanes=2),
    "Q4_K": _Dealt([(16, 144), (0, 16)], 64, 2, 2),
    "Q5_K": _Dealt([(48, 176), (16, 48), (0, 16)], 64, 2, 2),
    "Q6_K": _Dealt([(0, 128), (128, 192), (192, 208), (208, 210)], 128, 2, 4),
    "MXFP4": _Dealt([(1, 17), (0, 1)]),
}
_WITH_OFFSET = "Q4_1", "Q5_1", "Q4_K", "Q5_K"


def _constants(packing: Packing, columns: int) -> dict[str, Any]:
    """Return the compile-time constants of kernels for rows of so many columns, and how many warps they take."""
    dealt, row_bytes = _DEALT[packing.name], packing.row_bytes(columns)
    sides = (row_bytes,) if packing.by_field else (row_bytes, packing.nbytes, dealt.fields[0][0])
    word = next(word for word in (4, 2, 1) if all(side % word == 0 for side in sides))
    threads = max(32, min(_THREADS, power_of_two(columns // dealt.size * dealt.lanes)))
    form = {"FORM": packing.name, "BY_FIELD": packing.by_field, "OFFSET": packing.name in _WITH_OFFSET, "WORD": word}
    form |= {"SIZE": dealt.size, "THREADS": threads, "LANES": dealt.lanes, "SCALES": dealt.scales}
    return form | {"EACH": dealt.size // dealt.lanes // dealt.scales, "warps": threads // 32}


def _rearranged(packed: Tensor, packing: Packing) -> Tensor:
    """Bring the fields of rows [.., nbytes of a row] into the order of the other layout."""
    fields = _DEALT[packing.name].fields
    if not packing.by_field:
        blocks = torch.unflatten(packed, -1, (-1, packing.nbytes))
        return torch.cat([blocks[..., start:stop].flatten(-2) for start, stop in fields], -1)
    count = packed.shape[-1] // packing.nbytes
    parts = torch.split(packed, [count * (stop - start) for start, stop in fields], -1)
    found = {start: torch.unflatten(part, -1, (count, -1)) for (start, _), part in zip(fields, parts, strict=True)}
    return torch.cat([found[start] for start in sorted(found)], -1).flatten(-2)


@jit
def _shares(first: tl.tensor, THREADS: tl.constexpr) -> tl.tensor:
    """Number the shares that the threads have [threads, 1, 1].

    Neighbours have shares that are none: otherwise Triton would let a thread load the scales of several, and exchange
    them.
    """
    thread = tl.arange(0, THREADS)[:, None, None]
    return first + thread % 2 * (THREADS // 2) + thread // 2


@jit
def _at(
    row: tl.tensor,
    block: tl.tensor,
    blocks: tl.tensor,
    START: tl.constexpr,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    NBYTES: tl.constexpr,
    UNIT: tl.constexpr,
    BY_FIELD: tl.constexpr,
) -> tl.tensor:
    """Return where a field of a block lies, in units of so many bytes.

    It begins START bytes within a block of NBYTES; by fields, those before it have FIRST bytes of each block.
    """
    if BY_FIELD:
        return row + blocks * (FIRST // UNIT) + block * (WIDTH // UNIT)
    return row + block * (NBYTES // UNIT) + START // UNIT


@jit
def _word(place: tl.tensor, mask: tl.tensor, WORD: tl.constexpr) -> tl.tensor:
    """Load 32 bits from words of so many bytes, without a sign."""
    if WORD == 4:
        return tl.load(place, mask=mask, other=0).to(tl.uint32, bitcast=True)
    if WORD == 2:
        return _bits(place, mask) | (_bits(place + 1, mask) << 16)
    a, b = tl.load(place, mask=mask, other=0).to(tl.uint32), tl.load(place + 1, mask=mask, other=0).to(tl.uint32)
    c, d = tl.load(place + 2, mask=mask, other=0).to(tl.uint32), tl.load(place + 3, mask=mask, other=0).to(tl.uint32)
    return a | (b << 8) | (c << 16) | (d << 24)


@jit
def _bits(place: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Load 16 bits without a sign."""
    return tl.load(place, mask=mask, other=0).to(tl.uint16, bitcast=True).to(tl.uint32)


@jit
def _as_half(bits: tl.tensor) -> tl.tensor:
    """Return the half-precision number that 16 bits are."""
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@jit
def _four_words(
    place: tl.tensor, mask: tl.tensor, WORD: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Load four neighbours, at once if possible."""
    if WORD == 4:
        four = tl.load(place[:, :, :, None] + tl.arange(0, 4), mask=mask[:, :, :, None], other=0)
        a, b, c, d = _in_four(four.to(tl.uint32, bitcast=True))
        return a, b, c, d
    step: tl.constexpr = 4 // WORD
    a, b = _word(place, mask, WORD), _word(place + step, mask, WORD)
    return a, b, _word(place + 2 * step, mask, WORD), _word(place + 3 * step, mask, WORD)


@jit
def _in_four(x: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Take x [a, b, c, 4] apart."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2], 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@jit
def _words(
    packed: tl.tensor,
    row: tl.tensor,
    row_bytes: tl.tensor,
    blocks: tl.tensor,
    share: tl.tensor,
    mask: tl.tensor,
    S: tl.constexpr,
    FORM: tl.constexpr,
    BY_FIELD: tl.constexpr,
    WORD: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return four words of 32 bits with the levels of a share that have scale S, and up to four with further bits."""
    if WORD == 4:
        begin = packed.to(tl.pointer_type(tl.int32), bitcast=True) + row * (row_bytes // 4)
    elif WORD == 2:
        begin = packed.to(tl.pointer_type(tl.int16), bitcast=True) + row * (row_bytes // 2)
    else:
        begin = packed + row * row_bytes
    step: tl.constexpr = 4 // WORD  # of the pointer, for a word of 32 bits
    lane, unit = share % 2, share // 2  # but for formats with one lane
    if FORM == "Q4_K" or FORM == "Q5_K":
        fifth: tl.constexpr = 32 if FORM == "Q5_K" else 0  # bytes of a block
        levels = _at(begin, unit // 4, blocks, 16 + fifth, 0, 128, 144 + fifth, WORD, BY_FIELD)
        a, b, c, d = _four_words(levels + (unit % 4 * 8 + lane * 4) * step, mask, WORD)
        if FORM == "Q4_K":
            return a, b, c, d, a, b, c, d
        upper = _at(begin, unit // 4, blocks, 16, 128, 32, 176, WORD, BY_FIELD) + lane * 4 * step
        e, f, g, h = _four_words(upper, mask, WORD)
        shift = unit % 4 * 2
        return a, b, c, d, e >> shift, f >> shift, g >> shift, h >> shift
    if FORM == "Q6_K":
        levels = _at(begin, unit // 2, blocks, 0, 0, 128, 210, WORD, BY_FIELD)
        a, b, c, d = _four_words(levels + (unit % 2 * 16 + S % 2 * 8 + lane * 4) * step, mask, WORD)
        upper = _at(begin, unit // 2, blocks, 128, 128, 64, 210, WORD, BY_FIELD)
        e, f, g, h = _four_words(upper + (unit % 2 * 8 + lane * 4) * step, mask, WORD)
        return a, b, c, d, e, f, g, h
    if FORM == "Q8_0":
        levels = _at(begin, unit, blocks, 2, 0, 32, 34, WORD, BY_FIELD) + lane * 4 * step
    elif FORM == "Q4_0":
        levels = _at(begin, share, blocks, 2, 0, 16, 18, WORD, BY_FIELD)
    elif FORM == "Q4_1":
        levels = _at(begin, share, blocks, 4, 0, 16, 20, WORD, BY_FIELD)
    elif FORM == "MXFP4":
        levels = _at(begin, share, blocks, 1, 0, 16, 17, WORD, BY_FIELD)
    elif FORM == "Q5_0":
        levels = _at(begin, share, blocks, 6, 0, 16, 22, WORD, BY_FIELD)
    else:  # Q5_1
        levels = _at(begin, share, blocks, 8, 0, 16, 24, WORD, BY_FIELD)
    a, b, c, d = _four_words(levels, mask, WORD)
    e = a
    if FORM == "Q5_0":
        e = _word(_at(begin, share, blocks, 2, 16, 4, 22, WORD, BY_FIELD), mask, WORD)
    if FORM == "Q5_1":
        e = _word(_at(begin, share, blocks, 4, 16, 4, 24, WORD, BY_FIELD), mask, WORD)
    return a, b, c, d, e, e, e, e


@jit
def _level(
    word: tl.tensor, upper: tl.tensor, by: tl.tensor, S: tl.constexpr, J: tl.constexpr, FORM: tl.constexpr
) -> tl.tensor:
    """Multiply number J of those of a share that have scale S, before it is scaled, by `by`.

    Its level is in byte J % 4 of a word; `upper` has its further bits.
    """
    nibble: tl.constexpr = S if FORM == "Q4_K" or FORM == "Q5_K" else (S // 2 if FORM == "Q6_K" else J // 16)
    if FORM == "MXFP4":
        level = (word >> (J % 4 * 8 + nibble * 4)) & 15
        bits = ((level & 7) << 22) | ((level & 8) << 28)  # of a number 2^127 times too small
        return bits.to(tl.float32, bitcast=True) * 1.7014118346046923e38 * by
    out: tl.constexpr = J % 4 // 2 * 16  # bits that are shifted out, so that none is too high for `_number`
    place: tl.constexpr = J % 2 * 8 + (0 if FORM == "Q8_0" else nibble * 4)
    if FORM == "Q8_0":
        return _number((word ^ 0x80808080) >> out, by, 8, place, 128)
    word = word >> out
    if FORM == "Q4_0" or FORM == "Q4_1" or FORM == "Q4_K":
        return _number(word, by, 4, place, 8 if FORM == "Q4_0" else 0)
    if FORM == "Q6_K":
        high = (upper >> out) << (4 - S % 2 * 2)
        return _number((word & (15 << place)) | (high & (48 << place)), by, 6, place, 32)
    high = ((upper >> out) << (4 + 3 * S)) if FORM == "Q5_K" else ((upper >> J) << (4 + place))
    return _number((word & (15 << place)) | (high & (16 << place)), by, 5, place, 16 if FORM == "Q5_0" else 0)


@jit
def _number(word: tl.tensor, by: tl.tensor, BITS: tl.constexpr, PLACE: tl.constexpr, ZERO: tl.constexpr) -> tl.tensor:
    """Return (level - ZERO) * by, for a level of some bits of a word from bit `PLACE` on.

    They stay at their place: as the last bits of a number they make it 2^23 + level * 2^PLACE. Conversions would take
    twice as long.
    """
    unit: tl.constexpr = 1 << PLACE
    bits = (word & (((1 << BITS) - 1) * unit)) | 0x4B000000
    return (bits.to(tl.float32, bitcast=True) - (8388608.0 + ZERO * unit)) * (by * (1.0 / unit))


@jit
def _words_of_four(
    a: tl.tensor,
    b: tl.tensor,
    c: tl.tensor,
    d: tl.tensor,
    e: tl.tensor,
    f: tl.tensor,
    g: tl.tensor,
    h: tl.tensor,
    FOUR: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Choose the words of four numbers of a share."""
    if FOUR % 4 == 0:
        return a, e
    if FOUR % 4 == 1:
        return b, f
    if FOUR % 4 == 2:
        return c, g
    return d, h


@jit
def _eight(
    a: tl.tensor,
    b: tl.tensor,
    c: tl.tensor,
    d: tl.tensor,
    e: tl.tensor,
    f: tl.tensor,
    g: tl.tensor,
    h: tl.tensor,
    scale: tl.tensor,
    S: tl.constexpr,
    FOUR: tl.constexpr,
    FORM: tl.constexpr,
) -> tl.tensor:
    """Return eight numbers of a share [threads, rows, 8], beginning with number 4 * FOUR; nothing is added to them."""
    word, upper = _words_of_four(a, b, c, d, e, f, g, h, FOUR)
    first = _joined(_level(word, upper, scale, S, 4 * FOUR, FORM), _level(word, upper, scale, S, 4 * FOUR + 1, FORM))
    second = _joined(
        _level(word, upper, scale, S, 4 * FOUR + 2, FORM), _level(word, upper, scale, S, 4 * FOUR + 3, FORM)
    )
    word, upper = _words_of_four(a, b, c, d, e, f, g, h, FOUR + 1)
    third = _joined(
        _level(word, upper, scale, S, 4 * FOUR + 4, FORM), _level(word, upper, scale, S, 4 * FOUR + 5, FORM)
    )
    last = _joined(_level(word, upper, scale, S, 4 * FOUR + 6, FORM), _level(word, upper, scale, S, 4 * FOUR + 7, FORM))
    return _joined(_joined(first, second), _joined(third, last))


@jit
def _joined(first: tl.tensor, second: tl.tensor) -> tl.tensor:
    """Put the numbers of a thread one after the other: [a, b, c] and [a, b, c] become [a, b, 2 c]."""
    both = tl.permute(tl.join(first, second), (0, 1, 3, 2))
    return tl.reshape(both, (first.shape[0], first.shape[1], 2 * first.shape[2]))


@jit
def _scale(
    packed: tl.tensor,
    row: tl.tensor,
    row_bytes: tl.tensor,
    blocks: tl.tensor,
    share: tl.tensor,
    mask: tl.tensor,
    S: tl.constexpr,
    FORM: tl.constexpr,
    BY_FIELD: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return scale S of a share, and what is added to its scaled numbers."""
    lane, unit = share % 2, share // 2  # but for formats with one lane
    if FORM == "MXFP4":
        place = _at(packed + row * row_bytes, share, blocks, 0, 16, 1, 17, 1, BY_FIELD)
        exponent = tl.load(place, mask=mask, other=0).to(tl.int32)
        bits = tl.where(exponent < 2, 0x00200000 << (exponent & 1), (exponent - 1) << 23)
        scale = bits.to(tl.float32, bitcast=True)
        return scale, scale
    if FORM == "Q4_K" or FORM == "Q5_K":
        words = packed.to(tl.pointer_type(tl.int32), bitcast=True) + row * (row_bytes // 4)
        before: tl.constexpr = 128 if FORM == "Q4_K" else 160
        place = _at(words, unit // 4, blocks, 0, before, 16, 16 + before, 4, BY_FIELD)
        both, a, b, c = _four_words(place, mask, 4)
        a, b, c = a >> (unit % 2 * 16), b >> (unit % 2 * 16), c >> (unit % 2 * 16)
        early = unit % 4 < 2
        bit: tl.constexpr = S * 8
        scale = tl.where(early, a & (63 << bit), (c & (15 << bit)) | ((a >> 2) & (48 << bit)))
        least = tl.where(early, b & (63 << bit), ((c >> 4) & (15 << bit)) | ((b >> 2) & (48 << bit)))
        return _number(scale, _as_half(both & 0xFFFF), 6, bit, 0), -_number(least, _as_half(both >> 16), 6, bit, 0)
    halves = packed.to(tl.pointer_type(tl.int16), bitcast=True) + row * (row_bytes // 2)
    if FORM == "Q6_K":
        levels = _at(halves, unit // 2, blocks, 192, 192, 16, 210, 2, BY_FIELD) + unit % 2 * 4 + S
        level = _bits(levels, mask) >> (lane * 8)
        whole = _bits(_at(halves, unit // 2, blocks, 208, 208, 2, 210, 2, BY_FIELD), mask)
        scale = _number(level ^ 128, _as_half(whole), 8, 0, 128)
        return scale, scale
    if FORM == "Q4_0":
        place = _at(halves, share, blocks, 0, 16, 2, 18, 2, BY_FIELD)
    elif FORM == "Q4_1":
        place = _at(halves, share, blocks, 0, 16, 4, 20, 2, BY_FIELD)
    elif FORM == "Q5_0":
        place = _at(halves, share, blocks, 0, 20, 2, 22, 2, BY_FIELD)
    elif FORM == "Q5_1":
        place = _at(halves, share, blocks, 0, 20, 4, 24, 2, BY_FIELD)
    else:  # Q8_0
        place = _at(halves, unit, blocks, 0, 32, 2, 34, 2, BY_FIELD)
    scale = _as_half(_bits(place, mask))
    if FORM == "Q4_1" or FORM == "Q5_1":
        return scale, _as_half(_bits(place + 1, mask))
    return scale, scale


@jit
def _unpack_kernel(
    packed: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    row_bytes: tl.tensor,
    blocks: tl.tensor,
    ROWS: tl.constexpr,
    FORM: tl.constexpr,
    BY_FIELD: tl.constexpr,
    OFFSET: tl.constexpr,
    WORD: tl.constexpr,
    SIZE: tl.constexpr,
    THREADS: tl.constexpr,
    LANES: tl.constexpr,
    SCALES: tl.constexpr,
    EACH: tl.constexpr,
) -> None:
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[None, :, None].to(tl.int64)
    share = _shares(tl.program_id(1) * THREADS, THREADS)
    begin = share // LANES * SIZE + share % LANES * EACH  # the column of the first number
    mask = (row < rows) & (begin < columns)
    for s in tl.static_range(SCALES):
        a, b, c, d, e, f, g, h = _words(packed, row, row_bytes, blocks, share, mask, s, FORM, BY_FIELD, WORD)
        scale, more = _scale(packed, row, row_bytes, blocks, share, mask, s, FORM, BY_FIELD)
        numbers = _eight(a, b, c, d, e, f, g, h, scale, s, 0, FORM)
        if EACH == 16:
            numbers = _joined(numbers, _eight(a, b, c, d, e, f, g, h, scale, s, 2, FORM))
        else:
            second = _eight(a, b, c, d, e, f, g, h, scale, s, 2, FORM)
            third = _eight(a, b, c, d, e, f, g, h, scale, s, 4, FORM)
            last = _eight(a, b, c, d, e, f, g, h, scale, s, 6, FORM)
            numbers = _joined(_joined(numbers, second), _joined(third, last))
        if OFFSET:
            numbers += more
        # Whole shares are stored at once, so that threads side by side write side by side.
        place = out + row * columns + begin + s * 32 + tl.arange(0, EACH)[None, None, :]
        tl.store(place, numbers.to(out.dtype.element_ty), mask=mask)


@jit
def _packed_gemv_kernel(
    x: tl.tensor,
    packed: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    columns: tl.tensor,
    row_bytes: tl.tensor,
    blocks: tl.tensor,
    M: tl.constexpr,
    M_BLOCK: tl.constexpr,
    DEALT: tl.constexpr,
    ROWS: tl.constexpr,
    FORM: tl.constexpr,
    BY_FIELD: tl.constexpr,
    OFFSET: tl.constexpr,
    WORD: tl.constexpr,
    SIZE: tl.constexpr,
    THREADS: tl.constexpr,
    LANES: tl.constexpr,
    SCALES: tl.constexpr,
    EACH: tl.constexpr,
) -> None:
    m = tl.arange(0, M_BLOCK)[None, None, :]
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[None, :, None].to(tl.int64)
    total = tl.zeros((THREADS, ROWS, M_BLOCK), tl.float32)
    at = 0
    while at * (SIZE // LANES) < columns:
        share = _shares(at, THREADS)
        begin = share // LANES * SIZE + share % LANES * EACH
        mask, given = (row < n) & (begin < columns), (m < M) & (begin < columns)
        for s in tl.static_range(SCALES):
            a, b, c, d, e, f, g, h = _words(packed, row, row_bytes, blocks, share, mask, s, FORM, BY_FIELD, WORD)
            scale, more = _scale(packed, row, row_bytes, blocks, share, mask, s, FORM, BY_FIELD)
            part = tl.zeros((THREADS, ROWS, M_BLOCK), tl.float32)
            whole = tl.zeros((THREADS, 1, M_BLOCK), tl.float32)
            for four in tl.static_range(EACH // 4):
                word, upper = _words_of_four(a, b, c, d, e, f, g, h, four)
                if DEALT:
                    place = x + (((s * (EACH // 4) + four) * M + m) * (columns // SIZE * LANES) + share) * 4
                else:
                    place = x + m * columns + begin + s * 32 + four * 4
                place = place[:, :, :, None] + tl.arange(0, 4)
                numbers = tl.load(place, mask=given[:, :, :, None], other=0.0).to(tl.float32)
                x0, x1, x2, x3 = _in_four(numbers)
                part += _level(word, upper, x0, s, 4 * four, FORM)
                part += _level(word, upper, x1, s, 4 * four + 1, FORM)
                part += _level(word, upper, x2, s, 4 * four + 2, FORM)
                part += _level(word, upper, x3, s, 4 * four + 3, FORM)
                if OFFSET:
                    whole += x0 + x1 + x2 + x3
            total += part * scale
            if OFFSET:
                total += whole * more
        at += THREADS
    sums = tl.sum(total, axis=0)
    m, row = tl.arange(0, M_BLOCK)[None, :], tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    tl.store(out + m.to(tl.int64) * n + row, sums.to(out.dtype.element_ty), mask=(m < M) & (row < n))


def _takes(packed: Tensor, packing: Packing) -> bool:
    """Return whether kernels can take these rows."""
    return packing.name in _DEALT and takes(packed) and packed.is_contiguous()


def _multiply_on_device(x: Tensor, weight: PackedWeight) -> Tensor:
    """Multiply at most `MOST_ROWS` rows x [m, in] by a packed weight; return [m, out]."""
    (m, columns), n, packed = x.shape, len(weight), weight.packed
    out, row_bytes, rows = x.new_empty(m, n), packed.shape[1], _SKINNY if m == 1 else _FEW
    x = _dealt_out(x, _DEALT[weight.packing.name]) if m > 1 else x.contiguous()
    block = _constants(weight.packing, columns)
    block |= {"M": m, "M_BLOCK": power_of_two(m), "DEALT": m > 1, "ROWS": rows}
    sizes = n, columns, row_bytes, row_bytes // weight.packing.nbytes
    launch(_packed_gemv_kernel, (-(-n // rows),), x, packed, out, *sizes, **block)
    return out


def _dealt_out(x: Tensor, dealt: _Dealt) -> Tensor:
    """Put x [m, in] in the order in which threads read it: four numbers of every share, then the next four.

    A share is up to 64 bytes of a row of x, so that threads side by side would read from lines far apart, once for each
    row of x. A single row is read as it is, which takes less than to arrange it.
    """
    parts = x.reshape(len(x), -1, dealt.scales, dealt.lanes, dealt.size // dealt.lanes // dealt.scales // 4, 4)
    return parts.permute(2, 4, 0, 1, 3, 5).contiguous()


# CPU loops. Blocks are unpacked into vectors of sixteen lanes, which stay in registers.


class _Block:
    """A block within a loop: loads bytes at fixed places as integers of 32 bits or floats, sixteen at once."""

    def __init__(self, builder: Any, held: FlatArrays, parts: Callable[[int], Any] | None = None):
        """Keep the loop's builder, the place of the block, and what loads one of the numbers of its parts, if any."""
        from llvmlite import ir

        self.builder, self.held, self.parts = builder, held, parts
        self.float, self.short, self.word = ir.FloatType(), ir.IntType(16), ir.IntType(32)
        self.floats, self.words = ir.VectorType(self.float, LANES), ir.VectorType(self.word, LANES)
        self.constant = ir.Constant

    def unsigned(self, at: int) -> Any:
        """Load sixteen bytes."""
        return self.builder.zext(self.held.load(0, LANES, at), self.words)

    def ask_for(self, count: int) -> None:
        """Prefetch so many bytes; a processor's own prefetching does not reach memory speed."""
        from llvmlite import ir
        from numba.core import cgutils

        anything, word = cgutils.voidptr_t, self.word
        hint = ir.FunctionType(ir.VoidType(), [anything, word, word, word])
        declare: Any = cgutils.get_or_insert_function
        function = declare(self.builder.module, hint, "llvm.prefetch.p0")
        for at in range(0, count, LINE):
            place = self.held.place(0, at)
            self.builder.call(function, [self.builder.bitcast(place, anything), word(0), word(3), word(1)])

    def signed(self, at: int) -> Any:
        """Load sixteen signed bytes."""
        return self.builder.sext(self.held.load(0, LANES, at), self.words)

    def half(self, at: int) -> Any:
        """Load one half-precision number into every lane.

        Converted alone, it would go into a register that still waits for the sums of the block before.
        """
        read = self.builder.bitcast(self.held.load(0, 2, at), self.short)
        return self._of_halves(read, [0] * LANES)

    def scale_and_offset(self, at: int) -> Any:
        """Load a half-precision number into eight lanes, and the next one, negated, into eight more."""
        read = self.builder.bitcast(self.held.load(0, 4, at), self.word)
        return self._of_halves(read, [0] * 8 + [1] * 8, [1.0, -1.0, 1.0, -1.0])

    def _of_halves(self, read: Any, which: Sequence[int], factors: Sequence[float] = ()) -> Any:
        """Repeat numbers `which` of the bytes read, times their factors."""
        from llvmlite import ir

        bits = self.builder.zext(read, ir.IntType(64))
        wide = self.builder.fpext(
            self.builder.bitcast(bits, ir.VectorType(ir.HalfType(), 4)), ir.VectorType(self.float, 4)
        )
        if factors:
            wide = self.builder.fmul(wide, self.constant(wide.type, factors))
        return lanes(self.builder, (wide, wide), which)

    def bits(self, at: int) -> Any:
        """Load sixteen bits, one for each lane, into a mask register."""
        from llvmlite import ir

        return self.builder.bitcast(self.held.load(0, 2, at), ir.VectorType(ir.IntType(1), LANES))

    def each(self, number: Any) -> Any:
        """Repeat one number in every lane."""
        return all_of(self.builder, number, LANES)

    def of(self, numbers: int | Iterable[int]) -> Any:
        """Return constant integers."""
        return self.constant(self.words, [numbers] * LANES if isinstance(numbers, int) else list(numbers))

    def low(self, words: Any) -> Any:
        """Return the lower halves of bytes."""
        return self.builder.and_(words, self.of(15))

    def high(self, words: Any) -> Any:
        """Return the upper halves of bytes."""
        return self.builder.lshr(words, self.of(4))

    def with_fifth(self, words: Any, bits: Any) -> Any:
        """Add a fifth bit, given in a mask register, above four bits."""
        return self.builder.select(bits, self.builder.or_(words, self.of(16)), words)

    def five_bits(self, at: int, fifth: Any, places: Iterable[tuple[int, int]]) -> tuple[Any, Any]:
        """Return words whose lowest five bits are levels, those of the lower halves of bytes and of the upper ones.

        The bytes are at `at`, one a lane. `places` are those of a lane's two fifth bits among 64 of `fifth`, which it
        shares with the lane beside it. A lane holds its byte twice, so that one instruction moves both bits to where
        a half ends; to add each by a mask takes more of them.
        """
        halves = self.held.load(0, LANES, at)
        halves = lanes(self.builder, (halves, halves), (lane for lane in range(LANES) for _ in range(4)))
        shifts = [shift % 64 for low, high in places for shift in (low - 4, 0, 0, high)]
        fifth = self._called(SHIFTED, self.constant(halves.type, shifts), self.builder.bitcast(fifth, halves.type))
        halves, fifth = (self.builder.bitcast(each, self.words) for each in (halves, fifth))
        of_halves, others = self.of(0x00F0000F), self.of(0xFF0FFFF0)
        words = self.builder.or_(self.builder.and_(halves, of_halves), self.builder.and_(fifth, others))
        return words, self.builder.lshr(words, self.of(20))

    def scaled(self, words: Any, scale: Any, beside: Any = None) -> Any:
        """Return scale * words + beside, rounded once."""
        product = self.builder.fmul(self.builder.sitofp(words, self.floats), scale, flags=("contract",))
        return product if beside is None else self.builder.fadd(product, beside, flags=("contract",))

    def halves(self, packed: Any, low: tuple[Any, Any], high: tuple[Any, Any]) -> tuple[Any, Any]:
        """Return scale * level + offset, rounded once, for the lower and the upper halves of bytes.

        `low` and `high` are their scales and offsets. A table of the sixteen levels takes two instructions less for a
        half than to mask, convert and scale it, and gives the same numbers.
        """
        if not permutes():
            return self.scaled(self.low(packed), *low), self.scaled(self.high(packed), *high)
        below, above = (self.scaled(self.of(range(LANES)), *each) for each in (low, high))
        return self.looked_up(packed, below), self.looked_up(self.high(packed), above)

    def looked_up(self, words: Any, table: Any, further: Any = None) -> Any:
        """Return the number of a table of sixteen for the four lowest bits of each word, see `permutes`.

        With a further table, it is that of both for the five lowest bits.
        """
        if further is None:
            return self._called(NUMBERS, table, words)
        return self._called(NUMBERS_OF_TWO, table, words, further)

    def of_five(self, words: Iterable[Any], scale: Any, beside: Any, least: int = 0) -> Iterator[Any]:
        """Look up scale * level + beside, rounded once, for levels of five bits from `least` on."""
        below, above = (self.scaled(self.of(range(at, at + LANES)), scale, beside) for at in (least, least + LANES))
        return (self.looked_up(each, below, above) for each in words)

    def _called(self, instruction: str, *given: Any) -> Any:
        """Call an instruction whose result is of the kind of what it is given first."""
        from llvmlite import ir
        from numba.core import cgutils

        declare: Any = cgutils.get_or_insert_function
        kind = ir.FunctionType(given[0].type, [each.type for each in given])
        return self.builder.call(declare(self.builder.module, kind, instruction), given)

    def times(self, a: Any, number: float) -> Any:
        """Return the product with a constant."""
        return self.builder.fmul(a, self.constant(a.type, [number] * a.type.count))


def _of_parts(block: _Block, decode: Callable[[_Block], Any]) -> Callable[[int], Any]:
    """Return what gives one of the sixteen numbers of a block's parts in every lane."""
    if (load := block.parts) is not None:
        return lambda at: block.each(load(at))
    numbers = decode(block)
    return lambda at: lanes(block.builder, (numbers, numbers), [at] * LANES)


def _parts_of_k(block: _Block) -> list[tuple[Any, Any]]:
    """Return scale and offset, in every lane, of the eight parts of a block of Q4_K or Q5_K."""
    number = _of_parts(block, _scales_of_k)
    return [(number(part), number(8 + part)) for part in range(8)]


def _scales_of_k(block: _Block) -> Any:
    """Decode the eight scales of a block of Q4_K or Q5_K, then its eight offsets.

    After two half-precision numbers, three words of four bytes hold them. The first four of each are six bits of a
    byte, the others four bits of one byte and two of another.
    """
    from llvmlite import ir

    builder, four = block.builder, ir.VectorType(block.word, 4)
    header = builder.bitcast(block.held.load(0, LANES), four)

    def bits(words: Sequence[int], shifts: Sequence[int], masks: Sequence[int]) -> Any:
        taken = lanes(builder, (header, header), words)
        shifted = builder.lshr(taken, block.constant(four, shifts))
        return builder.and_(shifted, block.constant(four, [0x01010101 * mask for mask in masks]))

    low, high = bits([1, 3, 2, 3], [0, 0, 0, 4], [63, 15, 63, 15]), bits([1, 1, 2, 2], [2] * 4, [0, 48, 0, 48])
    levels = builder.bitcast(builder.or_(low, high), ir.VectorType(ir.IntType(8), LANES))
    numbers = builder.sitofp(builder.zext(levels, block.words), block.floats)
    return builder.fmul(numbers, block.scale_and_offset(0))


def _q4_0(block: _Block) -> Iterator[Any]:
    scale = block.half(0)
    part = scale, block.times(scale, -8.0)
    yield from block.halves(block.unsigned(2), part, part)


def _q4_1(block: _Block) -> Iterator[Any]:
    part = block.half(0), block.half(2)
    yield from block.halves(block.unsigned(4), part, part)


def _q5(block: _Block, scale: Any, beside: Any, least: int, bits: int) -> Iterator[Any]:
    """Decode scale * (level + least) + beside; the fifth bits of levels begin at `bits`, before the other four."""
    if permutes():
        eight = block.held.load(0, 8, bits)
        fifth = lanes(block.builder, (eight, eight), [*range(8)] * 8)
        words = block.five_bits(bits + 4, fifth, ((lane, LANES + lane) for lane in range(LANES)))
        yield from block.of_five(words, scale, beside, least)
        return
    beside = block.times(scale, least) if beside is None else beside
    packed = block.unsigned(bits + 4)
    for words, at in ((block.low(packed), bits), (block.high(packed), bits + 2)):
        yield block.scaled(block.with_fifth(words, block.bits(at)), scale, beside)


def _q5_0(block: _Block) -> Iterator[Any]:
    return _q5(block, block.half(0), None, -16, 2)


def _q5_1(block: _Block) -> Iterator[Any]:
    return _q5(block, block.half(0), block.half(2), 0, 4)


def _q8_0(block: _Block) -> Iterator[Any]:
    scale = block.half(0)
    for at in (2, 2 + LANES):
        yield block.scaled(block.signed(at), scale)


def _q4_k(block: _Block) -> Iterator[Any]:
    parts = _parts_of_k(block)
    for pair in range(4):
        low, high = parts[2 * pair : 2 * pair + 2]
        packed = [block.unsigned(16 + 32 * pair + at) for at in (0, LANES)]
        first, second = (block.halves(words, low, high) for words in packed)
        yield from (first[0], second[0], first[1], second[1])


def _q5_k(block: _Block) -> Iterator[Any]:
    builder, parts, fifth = block.builder, _parts_of_k(block), [block.unsigned(16 + at) for at in (0, LANES)]
    for pair in range(4):
        if permutes():
            places = [(32 * odd + 2 * pair, 32 * odd + 2 * pair + 1) for odd in (0, 1)] * (LANES // 2)
            both = (block.five_bits(48 + 32 * pair + LANES * at, bits, places) for at, bits in enumerate(fifth))
            for place, words in enumerate(zip(*both, strict=True), 2 * pair):
                yield from block.of_five(words, *parts[place])
            continue
        packed = [block.unsigned(48 + 32 * pair + at) for at in (0, LANES)]
        for place, take in ((2 * pair, block.low), (2 * pair + 1, block.high)):
            for words, bits in zip(packed, fifth, strict=True):
                bit = builder.icmp_unsigned("!=", builder.and_(bits, block.of(1 << place)), block.of(0))
                yield block.scaled(block.with_fifth(take(words), bit), *parts[place])


def _q6_k(block: _Block) -> Iterator[Any]:
    builder, scale, number = block.builder, 0, _of_parts(block, _scales_of_q6_k)
    for half in range(2):
        low = [block.unsigned(64 * half + at) for at in range(0, 64, LANES)]
        high = [block.unsigned(128 + 32 * half + at) for at in (0, LANES)]
        for part in range(4):
            for at in range(2):
                words = low[2 * (part % 2) + at]
                words = block.low(words) if part < 2 else block.high(words)
                bits = builder.and_(builder.lshr(high[at], block.of(2 * part)), block.of(3))
                words = builder.or_(words, builder.shl(bits, block.of(4)))
                yield block.scaled(builder.sub(words, block.of(32)), number(scale))
                scale += 1


def _scales_of_q6_k(block: _Block) -> Any:
    """Decode the sixteen scales of a block of Q6_K."""
    builder = block.builder
    return builder.fmul(builder.sitofp(block.signed(192), block.floats), block.half(208))


def _mxfp4(block: _Block) -> Iterator[Any]:
    builder = block.builder
    exponent = builder.zext(builder.extract_element(block.held.load(0, 1, 0), block.word(0)), block.word)
    small = builder.shl(block.word(0x00200000), exponent)
    usual = builder.shl(builder.sub(exponent, block.word(1)), block.word(23))
    bits = builder.select(builder.icmp_unsigned("<", exponent, block.word(2)), small, usual)
    scale, packed = block.each(builder.bitcast(bits, block.float)), block.unsigned(1)
    if permutes():
        halves = block.constant(block.floats, [*_E2M1, *(-level for level in _E2M1)])
        table = builder.fmul(halves, scale)
        yield from (block.looked_up(words, table) for words in (packed, block.high(packed)))
        return
    for words in (block.low(packed), block.high(packed)):
        # One bit of mantissa below two of exponent: levels 0, 1, 2, 3, 4, 6, 8, 12.
        mantissa = builder.and_(words, block.of(1))
        power = builder.and_(builder.lshr(words, block.of(1)), block.of(3))
        shift = builder.and_(builder.sub(power, block.of(1)), block.of(3))
        normal = builder.shl(builder.or_(mantissa, block.of(2)), shift)
        level = builder.select(builder.icmp_signed("==", power, block.of(0)), mantissa, normal)
        negative = builder.icmp_signed(">", words, block.of(7))
        yield block.scaled(builder.select(negative, builder.sub(block.of(0), level), level), scale)


def _f16(block: _Block) -> Iterator[Any]:
    from llvmlite import ir

    for at in (0, 2 * LANES):
        halves = block.builder.bitcast(block.held.load(0, 2 * LANES, at), ir.VectorType(ir.HalfType(), LANES))
        yield block.builder.fpext(halves, block.floats)


def _bf16(block: _Block) -> Iterator[Any]:
    from llvmlite import ir

    for at in (0, 2 * LANES):
        halves = block.builder.bitcast(block.held.load(0, 2 * LANES, at), ir.VectorType(ir.IntType(16), LANES))
        words = block.builder.shl(block.builder.zext(halves, block.words), block.of(16))
        yield block.builder.bitcast(words, block.floats)


_IN_LANES: dict[str, Callable[[_Block], Iterator[Any]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
    "F16": _f16,
    "BF16": _bf16,
}
_SCALES = {"Q4_K": _scales_of_k, "Q5_K": _scales_of_k, "Q6_K": _scales_of_q6_k}
"""What decodes the sixteen numbers of a block with parts, by format."""


def _lot(packing: int) -> tuple[int, int]:
    """Return the numbers and bytes that a loop handles at once."""
    _, size, nbytes, _ = list(PACKINGS.values())[packing]
    return (size, nbytes) if size > 1 else (_LOT, _LOT * nbytes)


def _in_parts(packing: int) -> bool:
    """Tell whether a block has scales of parts, which a loop over the row decodes first."""
    return list(_IN_LANES)[packing] in _SCALES


_TWO_AT_ONCE = ("Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
"""Formats whose levels take too many registers for four rows."""


def _streams(packing: int, rows: int) -> int:
    """Return how many rows of a weight are multiplied at once: as many as registers are enough for.

    A processor prefetches in each of them, which formats of a byte a number and more need to come near memory's speed.
    """
    if rows > 1 or not has_wide_registers():
        return 1
    return 2 if list(PACKINGS)[packing] in _TWO_AT_ONCE else 4


@intrinsic
def _unpack_row(_: Any, packed: Any, place: Any, out: Any, at: Any, lots: Any, packing: Any) -> Any:
    """Unpack a row of `lots` lots, which starts at `place`, to `out` from `at` on."""
    from numba import types
    from numba.core import cgutils

    def unpack(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        size, nbytes = _lot(packing.literal_value)
        values = list(_IN_LANES.values())[packing.literal_value]
        with cgutils.for_range(builder, given[4]) as loop:
            here = list(given)
            for argument, step in ((1, nbytes), (3, size)):
                index = builder.mul(loop.index, loop.index.type(step))
                here[argument] = builder.add(given[argument], index)
            held = FlatArrays(context, builder, signature, here)
            for lane, vector in enumerate(values(_Block(builder, held))):
                held.store(2, vector, LANES * lane)
        return context.get_dummy_value()

    if not isinstance(packing, types.Literal):
        return None
    return types.none(packed, place, out, at, lots, packing), unpack


@intrinsic
def _decode_scales(_: Any, packed: Any, place: Any, parts: Any, first: Any, lots: Any, packing: Any) -> Any:
    """Decode the scales and offsets of the parts of a row that starts at `place` to `parts`, 16 numbers a lot."""
    from numba import types
    from numba.core import cgutils

    def decode(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        _, nbytes = _lot(packing.literal_value)
        with cgutils.for_range(builder, given[4]) as loop:
            here = list(given)
            for argument, step in ((1, nbytes), (3, LANES)):
                here[argument] = builder.add(given[argument], builder.mul(loop.index, loop.index.type(step)))
            held = FlatArrays(context, builder, signature, here)
            held.store(2, _SCALES[list(_IN_LANES)[packing.literal_value]](_Block(builder, held)))
        return context.get_dummy_value()

    if not isinstance(packing, types.Literal):
        return None
    return types.none(packed, place, parts, first, lots, packing), decode


@intrinsic
def _multiply_rows(
    _: Any,
    packed: Any,
    place: Any,
    x: Any,
    own: Any,
    out: Any,
    at: Any,
    parts: Any,
    first: Any,
    sizes: Any,
    packing: Any,
    rows: Any,
    streams: Any,
) -> Any:
    """Multiply `streams` rows of a weight, the first of which starts at `place`, with `rows` rows of x from `own` on.

    `sizes` are the lots of a row, the numbers of a row of x, those of a row of `out`, and how many rows of the weight
    a stream is from the next. The first product goes to `at`. `parts` are what `_decode_scales` gave for the streams,
    if the packing has such parts.
    """
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils

    def multiply(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        (size, nbytes), count = _lot(packing.literal_value), rows.literal_value
        values: Any = list(_IN_LANES.values())[packing.literal_value]
        in_parts, tools = _in_parts(packing.literal_value), cast(Any, cgutils)
        lots, width, stride, apart = tools.unpack_tuple(builder, given[8])
        vector = ir.VectorType(ir.FloatType(), LANES)
        zero, chains = ir.Constant(vector, [0.0] * LANES), min(4, 16 // count)
        every = range(streams.literal_value)
        sums = [[[tools.alloca_once_value(builder, zero) for _ in range(chains)] for _ in range(count)] for _ in every]
        row_bytes = builder.mul(lots, lots.type(nbytes))
        between = builder.mul(apart, row_bytes)  # the streams
        # `_decode_scales` reads all of a row before it is multiplied, so the next row is asked for.
        ahead = row_bytes if in_parts else row_bytes.type(_AHEAD)

        def moved(*by: tuple[int, Any]) -> FlatArrays:
            here = list(given)
            for argument, offset in by:
                here[argument] = builder.add(here[argument], offset)
            return FlatArrays(context, builder, signature, here)

        def times(number: Any, factor: int) -> Any:
            return builder.mul(number, number.type(factor))

        def of_stream(stream: int, index: Any) -> Any:
            """Return the numbers of a block, and ask for later ones."""
            begin = builder.add(times(between, stream), times(index, nbytes))
            lot = builder.add(times(lots, stream), index)
            arrays = moved((1, begin), (7, times(lot, LANES)))
            _Block(builder, moved((1, builder.add(begin, ahead)))).ask_for(nbytes)
            load = (lambda part: builder.load(arrays.place(6, part))) if in_parts else None
            return values(_Block(builder, arrays, load))

        with cgutils.for_range(builder, lots) as loop:
            column = times(loop.index, size)
            of_x = [moved((3, builder.add(column, times(width, row)))) for row in range(count)]
            held = [[[builder.load(each) for each in chain] for chain in own] for own in sums]
            blocks = [of_stream(stream, loop.index) for stream in every]
            for lane, weights in enumerate(zip(*blocks, strict=True)):
                for row in range(count):
                    numbers = of_x[row].load(2, LANES, LANES * lane)
                    for stream in every:
                        product = builder.fmul(weights[stream], numbers, flags=("contract",))
                        chain = held[stream][row]
                        chain[lane % chains] = builder.fadd(chain[lane % chains], product, flags=("contract",))
            for own, targets in zip(held, sums, strict=True):
                for chain, places in zip(own, targets, strict=True):
                    for index, where in enumerate(places):  # the next block adds to other sums
                        builder.store(chain[(index + size // LANES) % chains], where)
        for stream in every:
            for row in range(count):
                total = builder.load(sums[stream][row][0])
                for where in sums[stream][row][1:]:
                    total = builder.fadd(total, builder.load(where))
                while (half := total.type.count // 2) > 0:
                    parts_of = (lanes(builder, (total, total), range(at, at + half)) for at in (0, half))
                    total = builder.fadd(*parts_of)
                moved((5, builder.add(times(apart, stream), times(stride, row)))).store(4, total)
        return context.get_dummy_value()

    literals = packing, rows, streams
    if not all(isinstance(each, types.Literal) for each in literals):
        return None
    return types.none(packed, place, x, own, out, at, parts, first, sizes, *literals), multiply


@cache
def _unpacking(packing: int) -> Any:
    """Make the loop that unpacks rows of a packing, given by its index in `PACKINGS`."""
    size, nbytes = _lot(packing)

    @compiled
    def unpack(packed: Any, rows: int, lots: int, out: Any) -> None:
        for block in prange((rows + _ROWS - 1) // _ROWS):
            for row in range(block * _ROWS, min(block * _ROWS + _ROWS, rows)):
                _unpack_row(packed, np.uint64(row * lots * nbytes), out, np.uint64(row * lots * size), lots, packing)

    return unpack


@cache
def _multiplying(packing: int, rows: int) -> int:
    """Make the loop that multiplies `rows` rows of x by rows of a packing, see `kvcli.kernels.chain`."""
    size, nbytes = _lot(packing)
    in_parts, streams = _in_parts(packing), _streams(packing, rows)

    def multiply(
        weight: int, x: int, out: int, first: int, last: int, columns: int, stride: int, at: int, _: int
    ) -> None:
        lots = columns // size
        packed = at_address(weight, np.uint8(0), last * lots * nbytes)
        given, target, none = floats(x, rows * columns), floats(out, rows * stride), np.uint64(0)
        # A scale is loaded from memory into all lanes: to shuffle registers would take most of a row's time.
        parts = np.empty(streams * lots * LANES if in_parts else 0, np.float32)
        apart = (last - first) // streams
        sizes = lots, columns, stride, apart
        for i in range(first, first + apart):
            if in_parts:
                for stream in range(streams):
                    its, own = np.uint64((i + stream * apart) * lots * nbytes), np.uint64(stream * lots * LANES)
                    _decode_scales(packed, its, parts, own, lots, packing)
            place, column = np.uint64(i * lots * nbytes), np.uint64(at + i)
            _multiply_rows(packed, place, given, none, target, column, parts, none, sizes, packing, rows, streams)
        for i in range(first + streams * apart, last):
            place, column = np.uint64(i * lots * nbytes), np.uint64(at + i)
            if in_parts:
                _decode_scales(packed, place, parts, none, lots, packing)
            _multiply_rows(packed, place, given, none, target, column, parts, none, sizes, packing, rows, 1)

    return loop_of_rows(multiply, IN_ORDER)


def matrix_of(weight: PackedWeight, bias: Any = None) -> Matrix:
    """Describe a weight that suits loops, with an array as its bias, to `kvcli.kernels.chain`."""
    (rows, columns), packing = weight.shape, list(PACKINGS).index(weight.packing.name)
    return Matrix(partial(_multiplying, packing), weight.packed.numpy(), rows, columns, True, bias)


def suits_loops(weight: PackedWeight) -> bool:
    """Return whether there is a loop for a weight."""
    by_block = not weight.packing.by_field
    return by_block and _whole(weight.packed, weight.shape[1]) and serves(weight.packed, dtype=torch.uint8)


def products_with(weights: Sequence[PackedWeight]) -> Callable[[Tensor], Tensor]:
    """Make the function that multiplies x [m, in], fp32 and up to `MOST_ROWS` rows, by weights that suit.

    It returns the results concatenated, [m, all their out].
    """
    chain = Chain(["x"], [Products("x", "out", list(map(matrix_of, weights)))], ["out"])
    return lambda x: chain(x)[0]


def gated_with(gate: PackedWeight, up: PackedWeight) -> Callable[[Tensor], Tensor]:
    """Make the function silu(x . gate) * (x . up), for such x and weights: [m, out]."""
    chain = Chain(["x"], [Gate("x", "out", matrix_of(gate), matrix_of(up))], ["out"])
    return lambda x: chain(x)[0]
