"""Blocks of KV in a file, with a cache of them in host memory: the least recently asked for make room for others.

A block is what a fetch asks for, a page of one KV head say. Blocks that follow each other make a line, which is what is
read and cached: as many as fill a sector of the disk, mostly one. The file holds lines in order, as saved KV lies, and
each is written through, once. The blocks of a line that is not full yet wait in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from time import perf_counter_ns
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvcli.store.disk_file import DiskFile
from kvcli.store.disk_tier import READ_BYTES, DiskShare, DiskTally, Wait
from kvcli.store.footprint import Footprint
from kvcli.store.host_memory import host_memory
from kvcli.store.line_cache import LINE_TABLES, SLOT_TABLES, Ints, LineCache
from kvcli.store.line_layout import LineLayout
from kvcli.store.pages import slices
from kvcli.store.unbuffered import ALIGNMENT

IN_ORDER = 16384
"""Bytes that a line is to have where all of them are read one after another: the fewer lines, the fewer checksums."""

LEAST_LINES = 2
"""Lines that a cache has room for beside those that never leave it."""


class DiskBlocks:
    """`count` blocks of this shape, written in order, `unit` of them together at least; `kept` first ones never leave.

    With `in_order` blocks are read from the first to the last, again and again, where the least recently asked for
    would be the next one: then the cache holds the first ones for good. A copy, and one that is told to `share`, refer
    to the blocks of another one. Nothing is allocated or made before the first block is written.

    Raises:
        DiskError: the disk is full (will not fit) or fails.
    """

    stateless: ClassVar[bool] = True

    def __init__(
        self,
        count: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        share: DiskShare,
        unit: int = 1,
        kept: int = 0,
        in_order: bool = False,
    ):
        self.count, self.share_of = count, share
        sector = share.tier.sector
        self.layout = LineLayout(shape, dtype, unit, sector, IN_ORDER if in_order else sector)
        self.per_line, self.line_bytes = self.layout.per_line, self.layout.line_bytes
        self.kept, self.in_order = -(-kept // self.per_line), in_order  # lines
        self.tally = DiskTally()
        self.written = self.shared = 0  # blocks; `shared` of another one
        self._waiting, self._tail = 0, torch.empty(0)  # blocks of the line that is not full
        self._lender: DiskBlocks | None = None
        self._file: DiskFile | None = None
        self._coming: _Coming | None = None

    @property
    def lines(self) -> int:
        """Lines of its own."""
        return self.layout.lines(self.count - self.shared)

    @property
    def slots(self) -> int:
        """Lines that the cache holds."""
        return min(self.lines, self.share_of.host_bytes // self.line_bytes)

    def check(self) -> None:
        """Refuse a cache that has no room for what is to stay and what comes at once.

        Raises:
            KvcliError: the share of host memory is too small (will not fit).
        """
        least = min(self.lines, self.kept + LEAST_LINES) * self.line_bytes
        if not self.in_order and self.share_of.host_bytes < least:
            raise self.share_of.too_small(least)

    def share(self, other: DiskBlocks, blocks: int) -> bool:
        """Refer to the first `blocks` of another one, as many as it has by the time that this one is used."""
        alike = vars(other.layout) == vars(self.layout)
        if alike and (blocks := min(blocks, self.count, other.count) // self.per_line * self.per_line):
            self._lender, self.shared = other, blocks
        return alike and blocks > 0

    def footprint(self) -> Footprint:
        """Count the bytes in host memory and on the disk that are its own."""
        tables = LINE_TABLES * self.lines + SLOT_TABLES * self.slots
        host = self.slots * self.line_bytes + self.layout.used + tables
        return Footprint(host=host, disk=self.lines * self.line_bytes)

    def write(self, first: int, blocks: Tensor) -> int:
        """Store the next blocks [n, ..] from block `first` on; returns the bytes of those that are its own."""
        self.open()
        known = max(0, self.shared - first)
        blocks, own = blocks[known:], max(0, len(blocks) - known)
        if own:
            assert first + known == self.written, "blocks are written in order"
            self.written += own
            if self._waiting:
                blocks = torch.cat((self._tail[: self._waiting], blocks))
            whole = len(blocks) // self.per_line * self.per_line
            if whole:
                self._flush(blocks[:whole])
            self._waiting = len(blocks) - whole
            self._tail[: self._waiting] = blocks[whole:]
        return own * self.layout.block_bytes

    def gather(self, blocks: Ints, out: Tensor, tally: DiskTally | None = None, announced: bool = False) -> None:
        """Collect blocks [m] in `out` [m, ..], host memory; those that were `announced` to `begin` count no more."""
        self.open()
        tally = tally or self.tally
        lent = blocks < self.shared
        if self._lender is None or not lent.any():
            return self._gather(blocks, out, tally, announced)
        for marked, gather in ((lent, self._lender.gather), (~lent, self._gather)):
            if (rows := marked.nonzero()[0]).size:
                some = out.new_empty(len(rows), *self.layout.shape)
                gather(blocks[rows], some, tally, announced)
                out[torch.from_numpy(rows)] = some
        return None

    def begin(self, blocks: Ints, tally: DiskTally | None = None) -> None:
        """Have blocks [m] that will be asked for next read beside the run, as far as the cache has room for them."""
        self.open()
        tally = tally or self.tally
        if self._lender is not None and (lent := blocks < self.shared).any():
            self._lender.begin(blocks[lent], tally)
            blocks = blocks[~lent]
        self._arrive()
        lines = (blocks - self.shared) // self.per_line
        lines = lines[lines < self._flushed]
        absent = self._cache.find(lines) < 0
        tally.misses += (missed := int(absent.sum()))
        tally.hits += len(blocks) - missed
        if len(missing := np.unique(lines[absent])[: self._cache.room // 2]):
            self._coming = self._read(missing, self._cache.take(len(missing)), tally)

    def stream(self, first: int, stop: int, tally: DiskTally | None = None) -> Iterator[tuple[int, Tensor]]:
        """Give blocks `first` to before `stop`, part after part, each with its first; valid until the next one."""
        self.open()
        assert self._file is not None
        tally = tally or self.tally
        if self._lender is not None and first < self.shared:
            yield from self._lender.stream(first, min(stop, self.shared), tally)
            first = min(stop, self.shared)
        while first < stop:
            own, end = first - self.shared, stop - self.shared
            line, within = divmod(own, self.per_line)
            if line >= self._flushed:
                yield first, self._tail[within : within + end - own]
                return
            last = min(-(-end // self.per_line), self._flushed)
            cached = min(last, self.slots)
            if line < cached:
                rows = self.layout.blocks(self._cache.memory[line:cached]).flatten(0, 1)
                rows = rows[within : min(len(rows), end - line * self.per_line)]
                tally.hits += len(rows)
                yield first, rows
                first += len(rows)
            else:
                for at, piece in self._file.pieces(line, last, tally):
                    rows = self.layout.blocks(piece).flatten(0, 1)
                    skip = max(0, own - at * self.per_line)
                    rows = rows[skip : min(len(rows), end - at * self.per_line)]
                    tally.misses += len(rows)
                    yield first, rows
                    first += len(rows)

    def __deepcopy__(self, memo: dict[int, Any]) -> DiskBlocks:
        """A copy refers to what is written, and has a file and a cache of its own for what comes."""
        other = DiskBlocks(
            *(self.count, self.layout.shape, self.layout.dtype, self.share_of, self.layout.unit),
            kept=self.kept * self.per_line,
            in_order=self.in_order,
        )
        if self.written:
            self.open()
            if not other.share(self, self.written):
                other.shared = 0
            other.open()
            if self._waiting:
                other.write(other.shared, self._tail[: self._waiting])
        return other

    def open(self) -> None:
        """Settle what is shared, and make the file and the cache."""
        if self._file is not None:
            return
        if self._lender is not None:
            self.shared = min(self.shared, self._lender.written) // self.per_line * self.per_line
        self.written = self.shared
        self._file = DiskFile(self.share_of.tier, self.lines, self.line_bytes)
        self._cache = LineCache(self.slots, self.lines, self.line_bytes, 0 if self.shared else self.kept)
        self._flushed = 0  # lines in the file
        with torch.inference_mode(False):  # like every cache, writable wherever decoding goes on
            self._tail = torch.empty(self.per_line, *self.layout.shape, dtype=self.layout.dtype)

    def _flush(self, blocks: Tensor) -> None:
        """Write whole lines; those that the cache has room for stay there, and those of a decode step in any case."""
        assert self._file is not None
        used = self.layout.used
        at_once = max(1, 8 * READ_BYTES // self.line_bytes)
        for part in slices(len(blocks) // self.per_line, at_once):
            raw = blocks[part.start * self.per_line : part.stop * self.per_line].reshape(-1).view(torch.uint8)
            lines, first, count = raw.view(-1, used), self._flushed, part.stop - part.start
            if used < self.line_bytes or raw.data_ptr() % ALIGNMENT:
                lines = host_memory((count, self.line_bytes), torch.uint8)
                lines[:, :used] = raw.view(count, used)
            begun = perf_counter_ns()
            self._file.write(first, lines)
            self.tally.written += lines.numel()
            self.tally.wait(begun, 0)
            self._cache_written(first, lines, appended=len(blocks) <= max(self.layout.unit, self.per_line))
            self._flushed += count  # from now on it is looked for there

    def _cache_written(self, first: int, lines: Tensor, appended: bool) -> None:
        """Keep lines [n, line_bytes] from line `first` on that the cache has room for."""
        if self.in_order:
            kept = lines[: max(0, self.slots - first)]
            self._cache.memory[first : first + len(kept)] = kept
        else:
            self._cache.keep(first, lines[: self._cache.room if appended else self._cache.empty])

    def _gather(self, blocks: Ints, out: Tensor, tally: DiskTally, announced: bool) -> None:
        """Collect blocks of its own: from the cache first, then from lines as they come from the file."""
        self._arrive()
        memory, (lines, within) = self._cache.memory, np.divmod(blocks - self.shared, self.per_line)
        waiting = lines >= self._flushed
        if waiting.any():
            rows = torch.from_numpy(waiting.nonzero()[0])
            out[rows] = self._tail[torch.from_numpy(within[waiting])]
            lines = np.where(waiting, 0, lines)
        slots = np.where(waiting, -1, self._cache.find(lines))
        missed = (slots < 0) & ~waiting
        if not announced:
            tally.misses += (missing := int(missed.sum()))
            tally.hits += len(blocks) - missing
        if not (missed.any() or waiting.any()):
            self.layout.take(memory, slots, within, out)
            return
        self.layout.put(memory, slots >= 0, slots, within, out)
        wanted = np.unique(lines[missed])
        for part in slices(len(wanted), max(1, self._cache.room)):
            some = wanted[part]
            taken = self._cache.take(len(some))
            self._finish(self._read(some, taken, tally))
            found = np.searchsorted(some, lines)
            here = missed & (found < len(some))
            here[here] = some[found[here]] == lines[here]
            slots[here] = taken[found[here]]
            self.layout.put(memory, here, slots, within, out)

    def _read(self, lines: Ints, slots: Ints, tally: DiskTally) -> _Coming:
        """Have lines [n], ascending, read into slots [n]."""
        assert self._file is not None
        memory = self._cache.memory.numpy()
        begun, reads = perf_counter_ns(), self._file.read(lines, [memory[slot] for slot in slots])
        return _Coming(lines, slots, reads, begun, tally)

    def _arrive(self) -> None:
        """Wait for what was announced."""
        coming, self._coming = self._coming, None
        if coming is not None:
            self._finish(coming)

    def _finish(self, coming: _Coming) -> None:
        """Wait for lines, which are in their slots from then on."""
        assert self._file is not None
        begun = perf_counter_ns()
        try:
            size = self._file.result(coming.reads)
        except BaseException:
            self._cache.give_back(coming.slots)
            raise
        coming.tally.read += size
        coming.tally.waited += perf_counter_ns() - begun
        coming.tally.waits.append(Wait(coming.begun, perf_counter_ns(), size))
        self._cache.place(coming.lines, coming.slots)


class _Coming(NamedTuple):
    """Lines [n] that are being read into slots [n], since `begun`, for whom `tally` counts."""

    lines: Ints
    slots: Ints
    reads: list[Future[int]]
    begun: int
    tally: DiskTally
