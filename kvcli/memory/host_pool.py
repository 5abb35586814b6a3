"""Pools of a layer's pages in host memory (FreeKV, section 4.2), in one of the two layouts of `HostPages`.

hnd   [pages, Hk, t, p, d]   one page of one KV head is a contiguous block of t*p*d elements, keys then values, so
                             that a recall moves it in one piece (16 KiB at p = 32, d = 128 in bf16)
nhd   [pages, t, p, Hk, d]   the paper's ablation: a page of one KV head lies in t*p pieces

t is 2 for keys and values; 1 where a method keeps its keys elsewhere, or keys are also the values. Quantised
(`Tiers.kv_dtype`), a block is a row of bytes, [pages, Hk, bytes], quantised when written and dequantised when read
(`kvcli.kernels.quant`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels._llvm import AHEAD, prefetch
from kvcli.kernels._numba import compiled, prange, run, serves
from kvcli.kernels.quant import TOKENS, BlockFormat, channel_sizes
from kvcli.kernels.recall import HostLayout
from kvcli.memory.disk_blocks import DiskBlocks
from kvcli.memory.pinned import host_memory, ready
from kvcli.memory.state import BRANCH, Settled, raw
from kvcli.memory.tiers import Footprint, Tiers, nbytes
from kvcli.sizes import slices

PIECE = 1 << 13  # numbers per thread at once, in whole rows
SHORT = 1 << 10  # numbers of a block that a processor does not prefetch by itself before its end


@compiled
def _bring(blocks: Any, flat: Any, kv: Any, pages: Any, heads: Any, slots: Any, at_once: int, ahead: int) -> None:
    half = kv.shape[3]
    for piece in prange((len(pages) + at_once - 1) // at_once):
        for i in range(piece * at_once, min(piece * at_once + at_once, len(pages))):
            if ahead and i + ahead < len(pages):
                prefetch(flat, (pages[i + ahead] * blocks.shape[1] + heads[i + ahead]) * 2 * half, 2 * half)
            h, slot = heads[i], slots[i]
            source, key, value = blocks[pages[i], h], kv[0, h, slot], kv[1, h, slot]
            for c in range(half):  # two at once: a single copy would become a library call, slow for short rows
                key[c] = source[c]
                value[c] = source[half + c]


@compiled
def _scatter(blocks: Any, rows: Any, into: Any, places: Any, at_once: int) -> None:
    half = len(into[0]) // 2
    for piece in prange((len(rows) + at_once - 1) // at_once):
        for i in range(piece * at_once, min(piece * at_once + at_once, len(rows))):
            source, target = blocks[rows[i]], into[places[i]]
            for c in range(half):
                target[c] = source[c]
                target[half + c] = source[half + c]
            if len(target) > 2 * half:
                target[2 * half] = source[2 * half]


def suits(blocks: Tensor, target: Tensor) -> bool:
    """Return whether loops can read these blocks and write to this target."""
    return serves(blocks, target) and blocks.is_contiguous() and target.is_contiguous()


def bring_cpu(blocks: Tensor, pages: Tensor, heads: Tensor, kv: Tensor, slots: Tensor) -> None:
    """Copy block (pages[i], heads[i]) of [n, Hk, 2, p, d] to slot slots[i] of its head: kv [2, Hk, slots, p, d]."""
    width = blocks[0, 0].numel()
    at = pages.contiguous(), heads.contiguous(), slots.contiguous()
    ahead = AHEAD if width <= SHORT else 0
    held = blocks.flatten(2), blocks.flatten(), kv.flatten(3)
    run(_bring, len(pages) * width, *held, *at, max(1, PIECE // width), ahead)


def scatter_cpu(blocks: Tensor, rows: Tensor, into: Tensor, places: Tensor) -> bool:
    """Copy rows of blocks [n, w] to rows of `into` [slots, w]; False if no loop serves."""
    if not suits(blocks, into):
        return False
    width = blocks.shape[1]
    at_once = max(1, PIECE // width)
    run(_scatter, len(rows) * width, blocks, rows.contiguous(), into, places.contiguous(), at_once)
    return True


PIECE_BYTES = 64 << 20
"""About as much is pinned at once, which urgent memory waits for; an extra piece costs kernels one table entry."""

OFFLOAD_BYTES = 32 << 20
"""Bytes of a prompt's KV in flight to the host, in another layout, at once: enough for the bus's full rate."""


class HostPagePool:
    """Full pages of one layer of one sequence, in host memory; each is written once and never changes.

    They lie in one or several tensors ("pieces"). Where memory is pinned, pieces have equally many pages and get ready
    in the background. A copy of a pool, and one that was told to `share`, refer to pages of another pool and hold only
    the remaining ones.

    `sizes` [Hk, d] are the channel sizes of keys that are quantised token by token, measured on the first ones written.
    Reading and writing wait for the memory of the pages concerned. `on_disk` are the blocks of a pool that uses files
    instead (`kvcli.memory.disk_blocks`).

    Raises:
        KvcliError: when reading or writing, if memory cannot be pinned (will not fit).
    """

    on_disk: DiskBlocks | None = None

    def __init__(
        self,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        num_pages: int,
        tiers: Tiers,
        layout: HostLayout = "hnd",
        tensors: int = 2,
    ):
        self.layout, self.tiers, self.num_pages = layout, tiers, num_pages
        tensors = min(tensors, tiers.parts)
        self.format = BlockFormat.of(tiers.kv_dtype, tensors, page_size, head_dim)
        self.dtype = tiers.dtype if self.format is None else torch.uint8
        self.block_shape = (tensors, page_size, head_dim)
        sized = self.format is not None and self.format.sized
        self.sizes = tiers.on_device(num_kv_heads, head_dim, dtype=torch.float32) if sized else None
        assert self.format is None or layout == "hnd"
        block = self.block_shape if self.format is None else (self.format.bytes,)
        by_token = tensors, page_size, num_kv_heads, head_dim
        self.page_shape: tuple[int, ...] = by_token if layout == "nhd" else (num_kv_heads, *block)
        self.page_bytes = math.prod(self.page_shape) * self.dtype.itemsize
        self.block_bytes = self.page_bytes // num_kv_heads
        self.per_piece = max(1, num_pages if tiers.pinned is None else PIECE_BYTES // self.page_bytes)
        self.written = 0  # pages in use, from the first on
        self.shared = 0  # pages of another pool, among them
        self._allocating = self._allocate(0)
        self._lender: tuple[HostPagePool, int] | None = None

    @classmethod
    def holding(cls, pages: Tensor, tiers: Tiers) -> HostPagePool:
        """Make a pool of existing pages: [n, Hk, t, p, d], in host memory."""
        count, num_kv_heads, tensors, size, head_dim = pages.shape
        pool = cls(num_kv_heads, head_dim, size, 0, tiers, tensors=tensors)
        pool.num_pages = pool.written = count
        pool._allocating = [(0, ready(pages))]
        return pool

    @property
    def pieces(self) -> list[Tensor]:
        """All pages, [n, Hk, t, p, d] or [n, t, p, Hk, d] each."""
        self._borrow()
        return [piece.result() for _, piece in self._allocating]

    @property
    def first_part(self) -> int:
        """The fewest first pages that must be written together, if more are to come, so that channel sizes agree."""
        return 0 if self.sizes is None else TOKENS

    def share(self, other: HostPagePool, pages: int) -> bool:
        """Refer to the first pages of another pool, `pages` at most, instead of holding the same ones again.

        How many are shared is decided when this pool is first read or written: those that the other one has by then.
        Writes to shared pages are assumed to be identical, and skipped. If the pools' pages differ in shape or kind, or
        are too few for equal channel sizes, nothing is shared and False is returned.
        """
        kinds = [(type(each), each.layout, each.page_shape, each.dtype, each.format) for each in (self, other)]
        return kinds[0] == kinds[1] and pages >= self.first_part and self._refer(other, pages)

    def write(self, first: int, *tensors: Tensor) -> int:
        """Store full pages from page `first` on: t tensors [Hk, n, p, d] or more; return the bytes moved.

        From a GPU to pinned memory, copies are only queued on the current stream.
        """
        stop = first + tensors[0].shape[1]
        self._borrow()
        if self.sizes is not None and first == self.shared == 0 < stop:
            self.sizes.copy_(channel_sizes(tensors[0][:, :, 0]))
        self.written = max(self.written, stop)
        own = max(first, self.shared)
        for start, piece in self._between(own, stop):
            target = piece.result()[max(own - start, 0) : stop - start]
            at = max(own, start) - first
            self._fill(target, [tensor[:, at : at + len(target)].transpose(0, 1) for tensor in tensors])
        return max(0, stop - own) * self.page_bytes

    def fetch(self, pages: Tensor, heads: Tensor) -> Tensor:
        """Bring block (pages[i], heads[i]) for every i to the device: [m, t, p, d].

        Indices on the device are waited for, and so is every earlier `write` of its stream.
        """
        out = self.tiers.scratch(len(pages), *self.block_shape)
        for part, blocks in self.fetch_parts(pages, heads):
            if len(blocks) == len(out):
                return blocks
            out[part] = blocks
        return out

    def fetch_parts(self, pages: Tensor, heads: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Fetch like `fetch`, in parts; on a CPU, dequantised parts fit into its cache."""
        gather, form = self._gatherer(pages, heads), self.format
        if form is None:
            yield slice(len(pages)), self.tiers.gathered((len(pages), *self.block_shape), gather)
            return
        at_once = form.at_once if self.tiers.device.type == "cpu" else max(1, len(pages))
        for part in slices(len(pages), at_once):
            shape = (part.stop - part.start, form.bytes)
            some = self.tiers.gathered(shape, partial(_within, gather, part.start), torch.uint8)
            numbers = self.tiers.scratch(len(some), *self.block_shape)
            form.dequantise(some, numbers, self.sizes, None if self.sizes is None else heads[part])
            yield part, numbers

    def bring(self, pages: Tensor, heads: Tensor, kv: Tensor, slots: Tensor) -> None:
        """Bring block (pages[i], heads[i]) for every i to slot slots[i] of its head: kv [t, Hk, slots, p, d]."""
        blocks = self.blocks(kv) if len(kv) == 2 else None
        if blocks is not None:
            bring_cpu(blocks, pages, heads, kv, slots)
            return
        rows, targets = slots.add(heads, alpha=kv.shape[2]), kv.flatten(1, 2).transpose(0, 1)  # [Hk * slots, t, p, d]
        if not self._move_here(pages, heads, targets, rows):
            for part, blocks in self.fetch_parts(pages, heads):
                targets.index_copy_(0, rows[part], blocks)

    def bring_pages(self, pages: Tensor, kv: Tensor, slots: Tensor) -> None:
        """Bring whole pages [m] to `slots` [m] of kv [slots, Hk, t, p, d]."""
        plain = self.format is None and kv.is_contiguous() and self._in_one_piece(kv)
        if plain and scatter_cpu(self.pieces[0].flatten(1), pages, kv.flatten(1), slots):  # all heads at once
            return
        all_heads = torch.arange(kv.shape[1], device=kv.device)
        heads, rows = all_heads.repeat(len(pages)), (slots[:, None] * len(all_heads) + all_heads).flatten()
        pages, targets = pages.repeat_interleave(len(all_heads)), kv.flatten(0, 1)  # [slots * Hk, t, p, d]
        if not self._move_here(pages, heads, targets, rows):
            targets[rows] = self.fetch(pages, heads)

    def blocks(self, slots: Tensor) -> Tensor | None:
        """View all pages [n, Hk, 2, p, d] where a loop can copy them into slots [.., p, d], as they are."""
        plain = self.format is None and self._in_one_piece(slots) and suits(self.pieces[0], slots)
        return self.pieces[0] if plain else None

    def held(self, first: int, stop: int) -> list[Tensor]:
        """View pages `first` to before `stop` in place, in the shape of `pieces`; none of them lies on a disk."""
        self._borrow()
        parts = [(start, piece.result()) for start, piece in self._between(first, stop)]
        return [pages[max(0, first - start) : stop - start] for start, pages in parts]

    def footprint(self) -> Footprint:
        """Count the bytes in host memory, those of another pool's pages separately."""
        shared, own = self.shared * self.page_bytes, (self.num_pages - self.shared) * self.page_bytes
        return Footprint(device=nbytes(self.sizes), host=own, shared=shared)

    def settled(self) -> list[Settled]:
        """Return the written pages, and all memory shared from other pools."""
        parts = []
        for start, piece in self._allocating:
            pages = piece.result()
            if start >= self.shared:
                parts.append(Settled(pages, 0, min(len(pages), max(0, self.written - start))))
            else:  # of another pool, which reports it itself unless it is gone
                memory = raw(pages.untyped_storage())
                parts.append(Settled(memory, 0, len(memory)))
        return parts

    def __deepcopy__(self, memo: dict[Any, Any]) -> HostPagePool:
        """Share what is written; allocate new memory, pinned like this pool's, for what comes.

        Of two of which one goes on (`kvcli.memory.state.branched`), the copy writes to this pool's memory.
        """
        self._borrow()
        other = copy.copy(self)
        other.sizes = copy.deepcopy(self.sizes, memo)
        if BRANCH in memo:
            return other
        if self.written:
            other._refer(self, self.written)
            other._borrow()
        else:
            other._allocating = other._allocate(0)
        return other

    def _refer(self, other: HostPagePool, pages: int) -> bool:
        if pages := min(pages, self.num_pages, other.num_pages):
            self._allocating, self._lender, self.shared = [], (other, pages), pages
        return pages > 0

    def _gatherer(self, pages: Tensor, heads: Tensor) -> Callable[[Tensor, slice], None]:
        """Make the function that fills rows of host memory with a part of these blocks."""
        pieces = self.pieces
        pages, heads = pages.to(pieces[0].device), heads.to(pieces[0].device)

        def gather(blocks: Tensor, part: slice) -> None:
            if len(pieces) == 1:
                self._take(pieces[0], pages[part], heads[part], blocks)
                return
            for (start, _), piece in zip(self._allocating, pieces, strict=True):
                here = ((pages[part] >= start) & (pages[part] < start + len(piece))).nonzero()[:, 0]
                blocks[here] = self._take(piece, pages[part][here] - start, heads[part][here])

        return gather

    def _move_here(self, pages: Tensor, heads: Tensor, targets: Tensor, rows: Tensor) -> bool:
        """Write blocks directly to `rows` of targets [n, t, p, d] if a CPU loop serves; return whether it did."""
        if not self._in_one_piece(targets):
            return False
        held, numbers = self.pieces[0].flatten(0, 1), heads.add(pages, alpha=self.page_shape[0])
        if self.format is not None:
            return self.format.move(held, numbers, targets, rows, self.sizes, heads)
        return targets.is_contiguous() and scatter_cpu(held.flatten(1), numbers, targets.flatten(1), rows)

    def _in_one_piece(self, targets: Tensor) -> bool:
        """Whether all pages lie head by head in one piece of memory, and the targets are on the CPU."""
        in_memory = targets.device.type == "cpu" and self.on_disk is None
        return in_memory and self.layout == "hnd" and len(self.pieces) == 1

    def _allocate(self, first: int) -> list[tuple[int, Future[Tensor]]]:
        """Request pieces from page `first` on, each with its first page."""
        starts = [*range(first, max(1, self.num_pages), self.per_piece), self.num_pages]
        with torch.inference_mode(False):  # like every cache, writable wherever decoding goes on
            shape, dtype = self.page_shape, self.dtype
            return [(at, self.tiers.on_host_async(stop - at, *shape, dtype=dtype)) for at, stop in pairwise(starts)]

    def _borrow(self) -> None:
        """Decide what is shared, on first use."""
        if self._lender is None:
            return
        (other, pages), self._lender = self._lender, None
        self.shared = self.written = min(pages, other.written)
        if self.shared and self.sizes is not None and other.sizes is not None:
            self.sizes.copy_(other.sizes)
        for start, piece in other._between(0, self.shared):
            self._allocating.append((start, ready(piece.result()[: self.shared - start])))
        self._allocating += self._allocate(self.shared)

    def _between(self, first: int, stop: int) -> list[tuple[int, Future[Tensor]]]:
        """Return the pieces that hold pages from `first` to before `stop`."""
        ends = [start for start, _ in self._allocating[1:]] + [self.num_pages]
        return [piece for piece, end in zip(self._allocating, ends, strict=True) if piece[0] < stop and end > first]

    def _fill(self, target: Tensor, tensors: list[Tensor]) -> None:
        """Write pages, t tensors [n, Hk, p, d], to `target`, n pages."""
        on_gpu, form = tensors[0].is_cuda, self.format
        # On a GPU the layout changes there, so that contiguous copies cross the bus; in parts, to save memory.
        at_once = max(1, OFFLOAD_BYTES // self.page_bytes) if on_gpu else max(1, len(target))
        if form is not None:  # quantising takes several steps in fp32
            at_once = max(1, at_once // 8 if on_gpu else form.at_once // target.shape[1])
        for part in slices(len(target), at_once):
            pages = torch.empty_like(target[part], device=tensors[0].device) if on_gpu else target[part]
            if form is not None:
                form.quantise([x[part] for x in tensors], pages, None if self.sizes is None else self.sizes[:, None])
            else:
                for blocks, tensor in zip(self._blocks(pages).unbind(2), tensors, strict=False):
                    blocks.copy_(tensor[part])
            if on_gpu:
                target[part].copy_(pages, non_blocking=True)

    def _take(self, piece: Tensor, pages: Tensor, heads: Tensor, out: Tensor | None = None) -> Tensor:
        """Collect blocks of a piece: [m, t, p, d], in `out` if given."""
        if self.layout == "hnd":
            return torch.index_select(piece.flatten(0, 1), 0, pages * piece.shape[1] + heads, out=out)
        taken = self._blocks(piece)[pages, heads]
        return taken if out is None else out.copy_(taken)

    def _blocks(self, piece: Tensor) -> Tensor:
        """View a piece by pages of one KV head, whatever the layout: [n, Hk, t, p, d]."""
        return piece if self.layout == "hnd" else piece.permute(0, 3, 1, 2, 4)


def _within(gather: Callable[[Tensor, slice], None], first: int, blocks: Tensor, part: slice) -> None:
    """Gather a part of what begins at `first`."""
    gather(blocks, slice(first + (part.start or 0), first + part.stop))


WRITE_BYTES = 8 << 20
"""Bytes of a prompt's KV that are laid out for the disk at once, about."""


def page_pool(
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    num_pages: int,
    tiers: Tiers,
    layout: HostLayout = "hnd",
    tensors: int = 2,
    kept: int = 0,
) -> HostPagePool:
    """Make a pool in host memory, or on a disk if there is one and host memory has no room for everything.

    The first `kept` pages of a pool on a disk stay in host memory as well.

    Raises:
        KvcliError: the share of host memory does not even hold what a step needs at once (will not fit).
    """
    shape = (num_kv_heads, head_dim, page_size, num_pages)
    if tiers.disk is not None:
        pool = DiskPagePool(*shape, tiers, tensors=tensors, kept=kept)
        if num_pages * pool.page_bytes > tiers.disk.host_bytes:
            pool.on_disk.check()
            return pool
    return HostPagePool(*shape, tiers, layout, tensors)


class DiskPagePool(HostPagePool):
    """Full pages of one layer of one sequence, in a file; one page of one KV head is a block of it.

    The interface is that of `HostPagePool`.

    Raises:
        DiskError: when reading or writing, if the disk is full (will not fit) or fails.
    """

    on_disk: DiskBlocks

    def __init__(
        self,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        num_pages: int,
        tiers: Tiers,
        tensors: int = 2,
        kept: int = 0,
    ):
        super().__init__(num_kv_heads, head_dim, page_size, num_pages, tiers, tensors=tensors)
        assert tiers.disk is not None
        self.heads = num_kv_heads
        count, shape = num_pages * num_kv_heads, self.page_shape[1:]
        self.on_disk = DiskBlocks(count, shape, self.dtype, tiers.disk, num_kv_heads, kept * num_kv_heads)

    @override
    def share(self, other: HostPagePool, pages: int) -> bool:
        if not isinstance(other, DiskPagePool) or other.format != self.format or pages < self.first_part:
            return False
        self._lent_sizes = other.sizes
        return self.on_disk.share(other.on_disk, pages * self.heads)

    @override
    def write(self, first: int, *tensors: Tensor) -> int:
        """Store the next full pages, from page `first` on; return the bytes moved."""
        moved, count = 0, tensors[0].shape[1]
        if self.sizes is not None and first == 0 < count:
            self.on_disk.open()
            lent = self._lent_sizes if self.on_disk.shared else None
            self.sizes.copy_(channel_sizes(tensors[0][:, :, 0]) if lent is None else lent)
        for part in slices(count, max(1, WRITE_BYTES // self.page_bytes)):
            pages = host_memory((part.stop - part.start, *self.page_shape), self.dtype)
            self._fill(pages, [tensor[:, part].transpose(0, 1) for tensor in tensors])
            if tensors[0].is_cuda:
                torch.cuda.current_stream(tensors[0].device).synchronize()
            moved += self.on_disk.write((first + part.start) * self.heads, pages.flatten(0, 1))
        self.written = max(self.written, first + count)
        return moved

    def announce(self, pages: Tensor, heads: Tensor) -> None:
        """Read blocks (pages[i], heads[i]) in the background; the next `fetch_parts` must be of the same blocks."""
        self.on_disk.begin(self._numbers(pages, heads))
        self._announced = True

    @property
    @override
    def pieces(self) -> list[Tensor]:
        raise RuntimeError("pages on a disk are in no memory that a device reads")

    @override
    def footprint(self) -> Footprint:
        return self.on_disk.footprint() + Footprint(device=nbytes(self.sizes))

    @override
    def settled(self) -> list[Settled]:
        return []

    def __deepcopy__(self, memo: dict[int, Any]) -> DiskPagePool:
        """Share what is written, with a new file and cache for what comes."""
        other = copy.copy(self)
        other.on_disk, other.sizes = copy.deepcopy(self.on_disk, memo), copy.deepcopy(self.sizes, memo)
        return other

    _announced = False
    _lent_sizes: Tensor | None = None  # channel sizes of the pool that lends pages

    @override
    def _allocate(self, first: int) -> list[tuple[int, Future[Tensor]]]:
        return []

    @override
    def _gatherer(self, pages: Tensor, heads: Tensor) -> Callable[[Tensor, slice], None]:
        numbers, announced, self._announced = self._numbers(pages, heads), self._announced, False

        def gather(blocks: Tensor, part: slice) -> None:
            self.on_disk.gather(numbers[part], blocks, announced=announced)

        return gather

    def _numbers(self, pages: Tensor, heads: Tensor) -> Any:
        """Number blocks as they lie in the file: numpy int64 [m]."""
        return (pages * self.heads + heads).cpu().numpy()
