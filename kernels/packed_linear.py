"""Linear layers with weights packed as in GGUF files: y_mi = sum_c x_mc W_ic, with W unpacked on the way.

A row of a weight is a sequence of blocks, each with some numbers in a few bits and their scales. A step reads every
weight once and is bound by memory, so time shrinks with the bytes: the loops and kernels here never write unpacked
numbers to memory. Many rows (a prompt) are multiplied by tiles of some rows of W, unpacked.

Shapes: x [.., in], W [out, in] as bytes [out, nbytes of a row]. Sums are in fp32, over exactly the reference's numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from kvcli.kernels._llvm import LINE, NUMBERS, FlatArrays, all_of, at_address, lanes, permutes
from kvcli.kernels._numba import compiled, intrinsic, prange, run, serves
from kvcli.kernels._triton import interpreted, jit, launch, power_of_two, takes, tl
from kvcli.kernels.chain import Chain, Gate, Matrix, Products, floats, loop_of_rows


class Packing(NamedTuple):
    """A block format: its name in GGUF files, and the numbers and bytes of a block."""

    name: str
    size: int
    nbytes: int

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

TILE = 1 << 20  # numbers unpacked at once
LANES = 16  # numbers per AVX-512 register
_LOT = 32  # numbers that loops handle at once in formats without blocks
_AHEAD = 4096  # bytes of prefetch distance
_ROWS = 32  # rows of a weight per thread at once


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
        half = torch.bfloat16 if packing.name == "BF16" else torch.float16
        return cls(weight.detach().to(half).contiguous().view(torch.uint8), packing, dtype)

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
        return unpack_rows(self.packed, self.packing).to(self.dtype)

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
            dtype, device = kwargs.get("dtype") or args[0].dtype, kwargs.get("device") or args[0].device
            return PackedWeight(args[0].packed.to(device), args[0].packing, dtype)
        plain: Any = torch.utils._pytree.tree_map_only
        args, kwargs = plain(PackedWeight, PackedWeight.unpack, (args, kwargs))
        return function(*args, **kwargs)


def _is_place(index: Any) -> bool:
    """Tell whether an index names one matrix of several."""
    return isinstance(index, int) or (isinstance(index, Tensor) and index.dim() == 0 and index.dtype == torch.int64)


def packed_embedding(ids: Tensor, weight: PackedWeight) -> Tensor:
    """Unpack the rows of `ids` [..]; return [.., in]."""
    rows = weight.packed.index_select(0, ids.reshape(-1))
    return unpack_rows(rows, weight.packing).to(weight.dtype).view(*ids.shape, -1)


def packed_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """Multiply x [.., in] by a packed weight [out, in]; return [.., out] in the dtype of x."""
    rows = x.reshape(-1, x.shape[-1])
    if x.requires_grad and torch.is_grad_enabled():  # nothing below supports gradients
        out = rows @ weight.unpack().to(x.dtype).T
    elif len(rows) and takes(weight.packed) and takes(x) and _whole(weight.packed, weight.shape[1]):
        out = _multiply_on_device(rows, weight)
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
    columns = x.shape[1]
    step = max(_ROWS, TILE // columns)
    if len(weight) <= step:
        return x @ unpack_rows(weight.packed, weight.packing).to(x.dtype).T
    out = x.new_empty(len(x), len(weight))
    scratch = torch.empty(step, columns, device=x.device)
    for first in range(0, len(weight), step):
        rows = weight.packed[first : first + step]
        tile = unpack_rows(rows, weight.packing, scratch[: len(rows)])
        torch.mm(x, tile.to(x.dtype).T, out=out[:, first : first + step])
    return out


def unpack_rows(packed: Tensor, packing: Packing, out: Tensor | None = None) -> Tensor:
    """Unpack rows [n, nbytes of a row] to fp32 [n, in], exactly the reference's numbers, into `out` if given."""
    rows, columns = len(packed), packed.shape[1] // packing.nbytes * packing.size
    if out is None:
        out = torch.empty(rows, columns, device=packed.device)
    if rows and takes(packed) and _whole(packed, columns):
        grid = -(-rows // _UNPACKED[0]), -(-columns // _UNPACKED[1])
        block = _blocks(packing, *_UNPACKED)
        launch(_unpack_kernel, grid, packed, out, rows, columns, packed.shape[1], **block)
        return out
    if _whole(packed, columns) and serves(packed, dtype=torch.uint8):
        lots = columns // max(packing.size, _LOT)
        run(_unpacking(list(PACKINGS).index(packing.name)), out.numel(), packed.view(-1), rows, lots, out.view(-1))
        return out
    return out.copy_(unpack_ref(packed, packing))


def _whole(packed: Tensor, columns: int) -> bool:
    """Return whether loops and kernels can take these rows: contiguous, and whole lots."""
    return columns % _LOT == 0 and packed.is_contiguous()


def unpack_ref(packed: Tensor, packing: Packing) -> Tensor:
    """Reference of unpacking in torch: rows [.., nbytes] to fp32 [.., in]."""
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


# GPU kernels. Groups of numbers share scale and offset, which are loaded once per group.

_UNPACKED = (8, 256)  # rows and columns unpacked per program
_SKINNY = (16, 256)  # rows of a weight per program, columns at a time
_WIDE = (64, 64, 64)  # rows of x and of a weight, columns at a time


def _blocks(packing: Packing, rows: int, columns: int) -> dict[str, Any]:
    """Return the compile-time constants of a packing, for rows and columns unpacked at once."""
    in_group = 16 if packing.name == "Q6_K" else 32  # share a scale
    form = {"FORM": packing.name, "SIZE": packing.size, "BYTES": packing.nbytes}
    return form | {"ROWS": rows, "LANES": in_group, "GROUPS": columns // in_group}


@jit
def _half_at(place: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Load a half-precision number, possibly at an odd address."""
    low = tl.load(place, mask=mask, other=0).to(tl.uint16)
    high = tl.load(place + 1, mask=mask, other=0).to(tl.uint16)
    return (low | (high << 8)).to(tl.float16, bitcast=True).to(tl.float32)


@jit
def _scale_of_k(block: tl.tensor, part: tl.tensor, mask: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Load the scale and the least value of a part of a block of Q4_K or Q5_K, six bits each."""
    early = part < 4
    a = tl.load(block + 4 + part % 4, mask=mask, other=0).to(tl.int32)
    b = tl.load(block + 8 + part % 4, mask=mask, other=0).to(tl.int32)
    c = tl.load(block + 12 + part % 4, mask=mask, other=0).to(tl.int32)
    scale = tl.where(early, a & 63, (c & 15) | ((a >> 2) & 48))
    least = tl.where(early, b & 63, (c >> 4) | ((b >> 2) & 48))
    return _half_at(block, mask) * scale.to(tl.float32), -(_half_at(block + 2, mask) * least.to(tl.float32))


@jit
def _unpacked(
    row: tl.tensor,
    group: tl.tensor,
    mask: tl.tensor,
    FORM: tl.constexpr,
    SIZE: tl.constexpr,
    BYTES: tl.constexpr,
    LANES: tl.constexpr,
) -> tl.tensor:
    """Unpack groups of numbers, numbered by `group` [1, g, 1], of rows that start at `row` [n, 1, 1]: [n, g, lanes]."""
    lane = tl.arange(0, LANES)[None, None, :]
    if FORM == "F16":
        return _half_at(row + (group * LANES + lane) * 2, mask & (lane >= 0))
    if FORM == "BF16":
        place, inside = row + (group * LANES + lane) * 2, mask & (lane >= 0)
        low = tl.load(place, mask=inside, other=0).to(tl.uint32)
        high = tl.load(place + 1, mask=inside, other=0).to(tl.uint32)
        return ((low << 16) | (high << 24)).to(tl.float32, bitcast=True)
    block = row + (group * LANES // SIZE) * BYTES
    part = group * LANES % SIZE // LANES
    inside = mask & (lane >= 0)
    half = lane % 16
    upper = (lane // 16) * 4
    if FORM == "Q8_0":
        level = tl.load(block + 2 + lane, mask=inside, other=0).to(tl.int8, bitcast=True).to(tl.float32)
        return _half_at(block, mask) * level
    if FORM == "Q4_0":
        level = (tl.load(block + 2 + half, mask=inside, other=0).to(tl.int32) >> upper) & 15
        return _half_at(block, mask) * (level - 8).to(tl.float32)
    if FORM == "Q4_1":
        level = (tl.load(block + 4 + half, mask=inside, other=0).to(tl.int32) >> upper) & 15
        return _half_at(block, mask) * level.to(tl.float32) + _half_at(block + 2, mask)
    if FORM == "Q5_0":
        level = (tl.load(block + 6 + half, mask=inside, other=0).to(tl.int32) >> upper) & 15
        fifth = tl.load(block + 2 + lane // 8, mask=inside, other=0).to(tl.int32) >> (lane % 8)
        return _half_at(block, mask) * ((level | ((fifth & 1) << 4)) - 16).to(tl.float32)
    if FORM == "Q5_1":
        level = (tl.load(block + 8 + half, mask=inside, other=0).to(tl.int32) >> upper) & 15
        fifth = tl.load(block + 4 + lane // 8, mask=inside, other=0).to(tl.int32) >> (lane % 8)
        scaled = _half_at(block, mask) * (level | ((fifth & 1) << 4)).to(tl.float32)
        return scaled + _half_at(block + 2, mask)
    if FORM == "Q4_K":
        scale, least = _scale_of_k(block, part, mask)
        level = tl.load(block + 16 + part // 2 * 32 + lane, mask=inside, other=0).to(tl.int32)
        return scale * ((level >> (part % 2 * 4)) & 15).to(tl.float32) + least
    if FORM == "Q5_K":
        scale, least = _scale_of_k(block, part, mask)
        level = tl.load(block + 48 + part // 2 * 32 + lane, mask=inside, other=0).to(tl.int32)
        fifth = tl.load(block + 16 + lane, mask=inside, other=0).to(tl.int32) >> part
        return scale * (((level >> (part % 2 * 4)) & 15) | ((fifth & 1) << 4)).to(tl.float32) + least
    if FORM == "Q6_K":  # groups of sixteen; eight of them share a half of the block
        of_half = part % 8 * 16 + lane  # numbered within the half
        low = tl.load(block + part // 8 * 64 + of_half % 64, mask=inside, other=0).to(tl.int32)
        high = tl.load(block + 128 + part // 8 * 32 + of_half % 32, mask=inside, other=0).to(tl.int32)
        level = ((low >> (of_half // 64 * 4)) & 15) | (((high >> (of_half // 32 * 2)) & 3) << 4)
        scale = tl.load(block + 192 + part, mask=mask, other=0).to(tl.int8, bitcast=True).to(tl.float32)
        return (_half_at(block + 208, mask) * scale) * (level - 32).to(tl.float32)
    # MXFP4
    exponent = tl.load(block, mask=mask, other=0).to(tl.int32)
    bits = tl.where(exponent < 2, 0x00200000 << (exponent & 1), (exponent - 1) << 23)
    code = (tl.load(block + 1 + half, mask=inside, other=0).to(tl.int32) >> upper) & 15
    power = (code >> 1) & 3
    level = tl.where(power == 0, code & 1, ((code & 1) | 2) << ((power - 1) & 3))
    return bits.to(tl.float32, bitcast=True) * tl.where(code > 7, -level, level).to(tl.float32)


@jit
def _unpack_kernel(
    packed: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    row_bytes: tl.tensor,
    FORM: tl.constexpr,
    SIZE: tl.constexpr,
    BYTES: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None, None].to(tl.int64)
    group = (tl.program_id(1) * GROUPS + tl.arange(0, GROUPS))[None, :, None]
    mask = (row < rows) & (group * LANES < columns)
    values = _unpacked(packed + row * row_bytes, group, mask, FORM, SIZE, BYTES, LANES)
    lane = tl.arange(0, LANES)[None, None, :]
    tl.store(out + row * columns + group * LANES + lane, values, mask=mask & (lane >= 0))


@jit
def _packed_gemv_kernel(
    x: tl.tensor,
    packed: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    columns: tl.tensor,
    row_bytes: tl.tensor,
    M: tl.constexpr,
    M_BLOCK: tl.constexpr,
    FORM: tl.constexpr,
    SIZE: tl.constexpr,
    BYTES: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m = tl.arange(0, M_BLOCK)
    begin = packed + row[:, None, None].to(tl.int64) * row_bytes
    total = tl.zeros((M_BLOCK, ROWS), tl.float32)
    column = tl.arange(0, GROUPS * LANES)
    first = 0
    while first < columns:
        group = (first // LANES + tl.arange(0, GROUPS))[None, :, None]
        mask = (row[:, None, None] < n) & (group * LANES < columns)
        weights = tl.reshape(_unpacked(begin, group, mask, FORM, SIZE, BYTES, LANES), (ROWS, GROUPS * LANES))
        inside = (m[:, None] < M) & (first + column[None, :] < columns)
        part = tl.load(x + m[:, None] * columns + first + column[None, :], mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(part[:, None, :] * weights[None, :, :], axis=2)
        first += GROUPS * LANES
    place = out + m[:, None].to(tl.int64) * n + row[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(m[:, None] < M) & (row[None, :] < n))


@jit
def _packed_gemm_kernel(
    x: tl.tensor,
    packed: tl.tensor,
    out: tl.tensor,
    m_rows: tl.tensor,
    n: tl.tensor,
    columns: tl.tensor,
    row_bytes: tl.tensor,
    EXACT: tl.constexpr,
    M_BLOCK: tl.constexpr,
    FORM: tl.constexpr,
    SIZE: tl.constexpr,
    BYTES: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m = tl.program_id(1) * M_BLOCK + tl.arange(0, M_BLOCK)
    begin = packed + row[:, None, None].to(tl.int64) * row_bytes
    total = tl.zeros((M_BLOCK, ROWS), tl.float32)
    column = tl.arange(0, GROUPS * LANES)
    first = 0
    while first < columns:
        group = (first // LANES + tl.arange(0, GROUPS))[None, :, None]
        mask = (row[:, None, None] < n) & (group * LANES < columns)
        weights = tl.reshape(_unpacked(begin, group, mask, FORM, SIZE, BYTES, LANES), (ROWS, GROUPS * LANES))
        inside = (m[:, None] < m_rows) & (first + column[None, :] < columns)
        part = tl.load(x + m[:, None].to(tl.int64) * columns + first + column[None, :], mask=inside, other=0.0)
        if EXACT:
            total += tl.dot(part.to(tl.float32), tl.trans(weights), input_precision="ieee")
        else:
            total += tl.dot(part, tl.trans(weights.to(part.dtype)))
        first += GROUPS * LANES
    place = out + m[:, None].to(tl.int64) * n + row[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(m[:, None] < m_rows) & (row[None, :] < n))


def _multiply_on_device(x: Tensor, weight: PackedWeight) -> Tensor:
    """Multiply x [m, in] by a packed weight; return [m, out]."""
    m, n, x = len(x), len(weight), x.contiguous()
    out, sizes = x.new_empty(m, n), (n, x.shape[1], weight.packed.shape[1])
    if m <= MOST_ROWS:
        block = _blocks(weight.packing, *_SKINNY) | {"M": m, "M_BLOCK": power_of_two(m)}
        launch(_packed_gemv_kernel, (-(-n // _SKINNY[0]),), x, weight.packed, out, *sizes, **block)
        return out
    tall, rows, columns = _WIDE
    block = _blocks(weight.packing, rows, columns)
    block |= {"EXACT": x.dtype == torch.float32 or interpreted(), "M_BLOCK": tall}
    launch(_packed_gemm_kernel, (-(-n // rows), -(-m // tall)), x, weight.packed, out, m, *sizes, **block)
    return out


# CPU loops. Blocks are unpacked into vectors of sixteen lanes, which stay in registers.


class _Block:
    """A block within a loop: loads bytes at fixed places as integers of 32 bits or floats, sixteen at once."""

    def __init__(self, builder: Any, held: FlatArrays, parts: Callable[[int], Any] | None = None):
        """Keep the loop's builder, the place of the block, and what loads one of the numbers of its parts, if any."""
        from llvmlite import ir

        self.builder, self.held, self.parts = builder, held, parts
        self.float, self.byte, self.word = ir.FloatType(), ir.IntType(8), ir.IntType(32)
        self.floats, self.words = ir.VectorType(self.float, LANES), ir.VectorType(self.word, LANES)
        self.constant = ir.Constant

    def unsigned(self, at: int) -> Any:
        """Load sixteen bytes."""
        return self.builder.zext(self.held.load(0, LANES, at), self.words)

    def ask_for(self, ahead: int, count: int) -> None:
        """Prefetch bytes this far ahead; a processor's own prefetching does not reach memory speed."""
        from llvmlite import ir
        from numba.core import cgutils

        anything, word = cgutils.voidptr_t, self.word
        hint = ir.FunctionType(ir.VoidType(), [anything, word, word, word])
        declare: Any = cgutils.get_or_insert_function
        function = declare(self.builder.module, hint, "llvm.prefetch.p0")
        for at in range(0, count, LINE):
            place = self.held.place(0, ahead + at)
            self.builder.call(function, [self.builder.bitcast(place, anything), word(0), word(3), word(1)])

    def signed(self, at: int) -> Any:
        """Load sixteen signed bytes."""
        return self.builder.sext(self.held.load(0, LANES, at), self.words)

    def half(self, at: int, count: int = LANES) -> Any:
        """Load one half-precision number into every lane, `count` of them.

        Converted alone, it would go into a register that still waits for the sums of the block before.
        """
        from llvmlite import ir

        bits = self.builder.zext(self.builder.bitcast(self.held.load(0, 2, at), ir.IntType(16)), ir.IntType(64))
        halves = self.builder.bitcast(bits, ir.VectorType(ir.HalfType(), 4))
        wide = self.builder.fpext(halves, ir.VectorType(self.float, 4))
        return lanes(self.builder, (wide, wide), [0] * count)

    def bits(self, at: int) -> Any:
        """Load 32 bits into every lane."""
        return self.each(self.builder.bitcast(self.held.load(0, 4, at), self.word))

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

    def with_fifth(self, words: Any, bits: Any, places: int | Iterable[int]) -> Any:
        """Add a fifth bit, at these places of `bits`, above four bits."""
        bit = self.builder.and_(self.builder.lshr(bits, self.of(places)), self.of(1))
        return self.builder.or_(words, self.builder.shl(bit, self.of(4)))

    def scaled(self, words: Any, scale: Any, beside: Any = None) -> Any:
        """Return scale * words + beside, rounded once."""
        product = self.builder.fmul(self.builder.sitofp(words, self.floats), scale, flags=("contract",))
        return product if beside is None else self.builder.fadd(product, beside, flags=("contract",))

    def looked_up(self, words: Any, table: Any) -> Any:
        """Return the number of a table of sixteen for the four lowest bits of each word, see `permutes`."""
        from llvmlite import ir
        from numba.core import cgutils

        declare: Any = cgutils.get_or_insert_function
        function = declare(self.builder.module, ir.FunctionType(self.floats, [self.floats, self.words]), NUMBERS)
        return self.builder.call(function, [table, words])

    def times(self, a: Any, number: float) -> Any:
        """Return the product with a constant."""
        return self.builder.fmul(a, self.constant(a.type, [number] * a.type.count))


def _of_parts(block: _Block, decode: Callable[[_Block], Sequence[Any]]) -> Callable[[int], Any]:
    """Return what gives one of the sixteen numbers of a block's parts in every lane."""
    if (load := block.parts) is not None:
        return lambda at: block.each(load(at))
    vectors = decode(block)
    each = LANES // len(vectors)
    return lambda at: lanes(block.builder, (vectors[at // each],) * 2, [at % each] * LANES)


def _parts_of_k(block: _Block) -> list[tuple[Any, Any]]:
    """Return scale and offset, in every lane, of the eight parts of a block of Q4_K or Q5_K."""
    number = _of_parts(block, _scales_of_k)
    return [(number(part), number(8 + part)) for part in range(8)]


def _scales_of_k(block: _Block) -> tuple[Any, Any]:
    """Decode the scales of a block of Q4_K or Q5_K, and its offsets, eight each."""
    from llvmlite import ir

    builder, word = block.builder, block.word
    a, b, c = (builder.bitcast(block.held.load(0, 4, at), word) for at in (4, 8, 12))

    def masked(bits: Any, mask: int, shift: int = 0) -> Any:
        return builder.and_(builder.lshr(bits, word(shift)) if shift else bits, word(mask))

    def eight(first: Any, second: Any, scale: Any) -> Any:
        pair = ir.Constant(ir.VectorType(word, 2), ir.Undefined)
        for at, bits in enumerate((first, second)):
            pair = builder.insert_element(pair, bits, word(at))
        levels = builder.zext(builder.bitcast(pair, ir.VectorType(block.byte, 8)), ir.VectorType(word, 8))
        wide = builder.sitofp(levels, ir.VectorType(block.float, 8))
        return builder.fmul(wide, scale)

    half, quarter = 0x3F3F3F3F, 0x0F0F0F0F
    scales = eight(masked(a, half), builder.or_(masked(c, quarter), masked(a, 0x30303030, 2)), block.half(0, 8))
    last = builder.or_(masked(c, quarter, 4), masked(b, 0x30303030, 2))
    least = eight(masked(b, half), last, block.times(block.half(2, 8), -1.0))
    return scales, least


def _q4_0(block: _Block) -> Iterator[Any]:
    scale, packed = block.half(0), block.unsigned(2)
    beside = block.times(scale, -8.0)
    yield block.scaled(block.low(packed), scale, beside)
    yield block.scaled(block.high(packed), scale, beside)


def _q4_1(block: _Block) -> Iterator[Any]:
    scale, beside, packed = block.half(0), block.half(2), block.unsigned(4)
    yield block.scaled(block.low(packed), scale, beside)
    yield block.scaled(block.high(packed), scale, beside)


def _q5(block: _Block, scale: Any, beside: Any, bits: Any, packed: Any) -> Iterator[Any]:
    yield block.scaled(block.with_fifth(block.low(packed), bits, range(LANES)), scale, beside)
    yield block.scaled(block.with_fifth(block.high(packed), bits, range(LANES, 2 * LANES)), scale, beside)


def _q5_0(block: _Block) -> Iterator[Any]:
    scale = block.half(0)
    return _q5(block, scale, block.times(scale, -16.0), block.bits(2), block.unsigned(6))


def _q5_1(block: _Block) -> Iterator[Any]:
    return _q5(block, block.half(0), block.half(2), block.bits(4), block.unsigned(8))


def _q8_0(block: _Block) -> Iterator[Any]:
    scale = block.half(0)
    for at in (2, 2 + LANES):
        yield block.scaled(block.signed(at), scale)


def _q4_k(block: _Block) -> Iterator[Any]:
    parts = _parts_of_k(block)
    for pair in range(4):
        packed = [block.unsigned(16 + 32 * pair + at) for at in (0, LANES)]
        for take, part in ((block.low, parts[2 * pair]), (block.high, parts[2 * pair + 1])):
            yield from (block.scaled(take(words), *part) for words in packed)


def _q5_k(block: _Block) -> Iterator[Any]:
    parts, fifth = _parts_of_k(block), [block.unsigned(16 + at) for at in (0, LANES)]
    for pair in range(4):
        packed = [block.unsigned(48 + 32 * pair + at) for at in (0, LANES)]
        for place, take in ((2 * pair, block.low), (2 * pair + 1, block.high)):
            for words, bits in zip(packed, fifth, strict=True):
                yield block.scaled(block.with_fifth(take(words), bits, place), *parts[place])


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


def _scales_of_q6_k(block: _Block) -> tuple[Any]:
    """Decode the sixteen scales of a block of Q6_K."""
    builder = block.builder
    return (builder.fmul(builder.sitofp(block.signed(192), block.floats), block.half(208)),)


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
    _, size, nbytes = list(PACKINGS.values())[packing]
    return (size, nbytes) if size > 1 else (_LOT, _LOT * nbytes)


def _in_parts(packing: int) -> bool:
    """Tell whether a block has scales of parts, which a loop over the row decodes first."""
    return list(_IN_LANES)[packing] in _SCALES


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
            vectors = _SCALES[list(_IN_LANES)[packing.literal_value]](_Block(builder, held))
            for at, numbers in enumerate(vectors):
                held.store(2, numbers, LANES // len(vectors) * at)
        return context.get_dummy_value()

    if not isinstance(packing, types.Literal):
        return None
    return types.none(packed, place, parts, first, lots, packing), decode


@intrinsic
def _multiply_row(
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
) -> Any:
    """Multiply a row of a weight, which starts at `place`, with `rows` rows of x, the first starting at `own`.

    `sizes` are the lots of a row, the numbers of a row of x, and those of a row of `out`. The first product goes to
    `at`. `parts` are what `_decode_scales` gave, if the packing has such parts.
    """
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils

    def multiply(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        (size, nbytes), count = _lot(packing.literal_value), rows.literal_value
        values = list(_IN_LANES.values())[packing.literal_value]
        tools: Any = cgutils
        lots, width, stride = tools.unpack_tuple(builder, given[8])
        vector = ir.VectorType(ir.FloatType(), LANES)
        zero, chains = ir.Constant(vector, [0.0] * LANES), min(4, 16 // count)
        in_parts = _in_parts(packing.literal_value)
        sums = [[tools.alloca_once_value(builder, zero) for _ in range(chains)] for _ in range(count)]
        with cgutils.for_range(builder, lots) as loop:
            index = loop.index
            here = list(given)
            here[1] = builder.add(given[1], builder.mul(index, index.type(nbytes)))
            column = builder.add(given[3], builder.mul(index, index.type(size)))
            begins = [builder.add(column, builder.mul(width, width.type(row))) for row in range(count)]
            of_x = [FlatArrays(context, builder, signature, [*given[:3], begin, *given[4:]]) for begin in begins]
            held = [[builder.load(each) for each in chain] for chain in sums]
            here[7] = builder.add(given[7], builder.mul(index, index.type(LANES)))
            arrays = FlatArrays(context, builder, signature, here)
            block = _Block(builder, arrays, (lambda part: builder.load(arrays.place(6, part))) if in_parts else None)
            if in_parts:  # the next row is asked for: `_decode_scales` reads all of it before it is multiplied
                here = [*here[:1], builder.add(here[1], builder.mul(lots, lots.type(nbytes))), *here[2:]]
            _Block(builder, FlatArrays(context, builder, signature, here)).ask_for(_AHEAD, nbytes)
            for lane, weights in enumerate(values(block)):
                for row in range(count):
                    product = builder.fmul(weights, of_x[row].load(2, LANES, LANES * lane), flags=("contract",))
                    chain = held[row]
                    chain[lane % chains] = builder.fadd(chain[lane % chains], product, flags=("contract",))
            for chain, places in zip(held, sums, strict=True):
                for index, where in enumerate(places):  # the next block adds to other sums
                    builder.store(chain[(index + size // LANES) % chains], where)
        kind = ir.FunctionType(ir.FloatType(), [ir.FloatType(), vector])
        declare: Any = cgutils.get_or_insert_function
        add_up = declare(builder.module, kind, f"llvm.vector.reduce.fadd.v{LANES}f32")
        for row in range(count):
            total = builder.load(sums[row][0])
            for where in sums[row][1:]:
                total = builder.fadd(total, builder.load(where))
            number = builder.call(add_up, [ir.Constant(ir.FloatType(), 0.0), total], fastmath=("reassoc",))
            here = list(given)
            here[5] = builder.add(given[5], builder.mul(stride, stride.type(row)))
            one = builder.bitcast(number, ir.VectorType(number.type, 1))
            FlatArrays(context, builder, signature, here).store(4, one)
        return context.get_dummy_value()

    if not isinstance(packing, types.Literal) or not isinstance(rows, types.Literal):
        return None
    return types.none(packed, place, x, own, out, at, parts, first, sizes, packing, rows), multiply


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
    in_parts = _in_parts(packing)

    def multiply(
        weight: int, x: int, out: int, first: int, last: int, columns: int, stride: int, at: int, _: int
    ) -> None:
        lots = columns // size
        packed = at_address(weight, np.uint8(0), last * lots * nbytes)
        given, target, none = floats(x, rows * columns), floats(out, rows * stride), np.uint64(0)
        # A scale is loaded from memory into all lanes: to shuffle registers would take most of a row's time.
        parts = np.empty(lots * LANES if in_parts else 0, np.float32)
        for i in range(first, last):
            place, column = np.uint64(i * lots * nbytes), np.uint64(at + i)
            if in_parts:
                _decode_scales(packed, place, parts, none, lots, packing)
            sizes = lots, columns, stride
            _multiply_row(packed, place, given, none, target, column, parts, none, sizes, packing, rows)

    return loop_of_rows(multiply)


def matrix_of(weight: PackedWeight, bias: Any = None) -> Matrix:
    """Describe a weight that suits loops, with an array as its bias, to `kvcli.kernels.chain`."""
    (rows, columns), packing = weight.shape, list(PACKINGS).index(weight.packing.name)
    return Matrix(partial(_multiplying, packing), weight.packed.numpy(), rows, columns, True, bias)


def suits_loops(weight: PackedWeight) -> bool:
    """Return whether there is a loop for a weight."""
    return _whole(weight.packed, weight.shape[1]) and serves(weight.packed, dtype=torch.uint8)


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
