"""Blocks of KV in a file, with a cache of them in host memory; `DiskPagePool` and `TokenMajorCache` use it."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from functools import partial
from itertools import pairwise
from time import perf_counter_ns
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcli.memory.disk_tier import ALIGNMENT, READ_BYTES, READERS, DamagedError, DiskShare, DiskTally, DiskTier, Wait
from kvcli.memory.pinned import host_memory
from kvcli.memory.tiers import Footprint
from kvcli.sizes import slices

Ints = NDArray[np.int64]

LINE_TABLES, SLOT_TABLES = 16, 16
"""Bytes of bookkeeping per line, its checksum included, and per slot."""

_NEVER = np.iinfo(np.int64).max  # time of last use of a line that stays


class LineCache:
    """A least-recently-used cache of `lines` of a file: `memory` [slots, line_bytes]; the first `kept` lines stay.

    The slot of a line that is being read is not reused, and the line is found once it is `placed`.
    """

    def __init__(self, slots: int, lines: int, line_bytes: int, kept: int = 0):
        self.memory: Tensor = host_memory((slots, line_bytes), torch.uint8)
        self.kept = kept
        self._slot_of = np.full(lines, -1, dtype=np.int64)
        self._line_in = np.full(slots, -1, dtype=np.int64)
        self._asked = np.zeros(slots, dtype=np.int64)  # time of last use, in calls; 0: empty
        self._calls = 0
        self._held = 0  # slots whose lines stay or are being read
        self._oldest: Ints = np.empty(0, dtype=np.int64)  # slots to evict next, in order, unless used since
        self._oldest_asked: Ints = self._oldest

    @property
    def empty(self) -> int:
        """Number of empty slots."""
        return int((self._asked == 0).sum())

    @property
    def room(self) -> int:
        """Number of slots whose lines may be evicted."""
        return len(self._asked) - self._held

    def find(self, lines: Ints) -> Ints:
        """Return the slots of lines [n], -1 for none, and mark the lines as used: [n]."""
        slots = self._slot_of[lines]
        here = slots[slots >= 0]
        self._calls += 1
        self._asked[here] = np.where(self._asked[here] == _NEVER, _NEVER, self._calls)
        return slots

    def take(self, count: int) -> Ints:
        """Free `count` slots, `room` at most; nothing is found in them until lines are placed."""
        assert count <= self.room
        found, wanted = [np.empty(0, dtype=np.int64)], count
        while wanted:
            if not len(self._oldest):
                self._look(wanted)
            fresh = self._asked[self._oldest] == self._oldest_asked
            at = np.flatnonzero(fresh)[:wanted]
            passed = int(at[-1]) + 1 if len(at) == wanted else len(self._oldest)
            taken = self._oldest[at]
            self._oldest, self._oldest_asked = self._oldest[passed:], self._oldest_asked[passed:]
            self._asked[taken] = _NEVER
            found.append(taken)
            wanted -= len(taken)
            self._held += len(taken)
        slots = np.concatenate(found)
        before = self._line_in[slots]
        self._slot_of[before[before >= 0]] = -1
        self._line_in[slots] = -1
        return slots

    def place(self, lines: Ints, slots: Ints) -> None:
        """Register lines [n] in slots [n] that were taken for them."""
        self._calls += 1
        self._slot_of[lines], self._line_in[slots] = slots, lines
        stays = lines < self.kept
        self._asked[slots] = np.where(stays, _NEVER, self._calls)
        self._held -= int((~stays).sum())

    def keep(self, first: int, lines: Tensor) -> None:
        """Store lines [n, line_bytes] from line `first` on, in place of others."""
        slots = self.take(len(lines))
        self.memory[torch.from_numpy(slots)] = lines
        self.place(np.arange(first, first + len(lines)), slots)

    def give_back(self, slots: Ints) -> None:
        """Empty slots that were taken for lines which did not come."""
        self._asked[slots] = 0
        self._held -= len(slots)
        self._oldest = self._oldest[:0]

    def _look(self, wanted: int) -> None:
        """Find the slots to evict next, some more than wanted."""
        most = min(max(wanted, len(self._asked) // 16), self.room)
        among = np.argpartition(self._asked, most - 1)[:most]
        self._oldest = among[np.lexsort((among, self._asked[among]))]
        self._oldest_asked = self._asked[self._oldest]


def blocks_per_line(block_bytes: int, unit: int, fill: int) -> int:
    """Return how many blocks are read together: as many as fit into `fill` bytes, a divisor or multiple of `unit`."""
    if block_bytes * unit <= fill:
        return unit * (fill // (block_bytes * unit))
    most = max(1, fill // block_bytes)
    return max(each for each in range(1, min(unit, most) + 1) if unit % each == 0)


class LineLayout:
    """The layout of blocks in the lines that are read from a disk: `per_line` blocks, at least one, in `fill` bytes.

    A line is a multiple of `sector` bytes, of which `used` hold KV.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, unit: int, sector: int, fill: int):
        self.shape, self.dtype, self.unit = tuple(shape), dtype, unit
        self.block_bytes = math.prod(shape) * dtype.itemsize
        self.per_line = blocks_per_line(self.block_bytes, unit, fill)
        self.used = self.per_line * self.block_bytes
        self.line_bytes = -(-self.used // sector) * sector

    def lines(self, blocks: int) -> int:
        """Return the number of lines for `blocks` blocks."""
        return -(-blocks // self.per_line)

    def blocks(self, lines: Tensor) -> Tensor:
        """View lines [n, line_bytes] as blocks [n, per_line, ..]."""
        return lines[:, : self.used].view(self.dtype).unflatten(1, (self.per_line, *self.shape))  # type: ignore[no-untyped-call, no-any-return]

    def take(self, memory: Tensor, slots: Ints, within: Ints, out: Tensor) -> None:
        """Copy blocks `within` lines in slots [m] of memory [n, line_bytes] to `out` [m, ..]."""
        lines = self.blocks(memory)
        if self.used == self.line_bytes or self.per_line == 1:
            flat = lines.flatten(0, 1) if self.used == self.line_bytes else lines[:, 0]
            torch.index_select(flat, 0, torch.from_numpy(slots * self.per_line + within), out=out)
        else:
            out.copy_(lines[torch.from_numpy(slots), torch.from_numpy(within)])

    def put(self, memory: Tensor, marked: Any, slots: Ints, within: Ints, out: Tensor) -> None:
        """Copy the blocks that are `marked`, bool [m], to their rows of `out`."""
        if (rows := marked.nonzero()[0]).size:
            some = out.new_empty(len(rows), *self.shape)
            self.take(memory, slots[rows], within[rows], some)
            out[torch.from_numpy(rows)] = some


AHEAD = 8
"""Pieces that are read ahead of a sequential reader."""

Rows = Sequence[NDArray[np.uint8]]


class DiskFile:
    """A file of the tier with `lines` lines, each written once and checked against its checksum when read.

    Raises:
        DiskError: there is no room, or writing or reading fails; then nothing that was read may be used.
    """

    def __init__(self, tier: DiskTier, lines: int, line_bytes: int):
        self.tier, self.line_bytes = tier, line_bytes
        self.file = tier.file(lines * line_bytes)
        self._sums = np.zeros(lines, dtype=np.uint64)
        weakref.finalize(self, self.file.close)

    def write(self, first: int, lines: Tensor) -> None:
        """Write lines [n, line_bytes] of host memory from line `first` on."""
        try:
            self.file.write(lines.view(-1), first * self.line_bytes)
        except OSError as error:
            raise self.tier.failed("writing", error, lines.numel()) from None
        self._sums[first : first + len(lines)] = [_checksum(row) for row in lines.numpy()]

    def read(self, lines: Ints, rows: Rows) -> list[Future[int]]:
        """Read lines [n], ascending, into rows of aligned memory; consecutive lines are read together."""
        most = min(256, max(1, READ_BYTES // self.line_bytes), max(1, len(lines) // READERS))
        edges = [0, *(np.flatnonzero(np.diff(lines) != 1) + 1).tolist(), len(lines)]
        jobs: list[Callable[[], int]] = []
        for start, stop in pairwise(edges):
            for at in range(start, stop, most):
                jobs.append(partial(self._read, int(lines[at]), rows[at : min(at + most, stop)]))
        return self.tier.submit(jobs)

    def result(self, reads: Sequence[Future[int]]) -> int:
        """Wait for all reads, even if one fails; return the bytes read."""
        wait(reads)
        try:
            return sum(each.result() for each in reads)
        except (OSError, DamagedError) as error:
            raise self.tier.failed("reading", error) from None

    def pieces(self, first: int, stop: int, tally: DiskTally) -> Iterator[tuple[int, Tensor]]:
        """Iterate over lines `first` to before `stop`, some [n, line_bytes] at a time, each with its first line.

        They are read ahead, and valid until the next ones.
        """
        at_once = max(1, READ_BYTES // self.line_bytes)
        starts, coming = iter(range(first, stop, at_once)), deque[tuple[int, Tensor, list[Future[int]]]]()
        number = min(AHEAD, -(-(stop - first) // at_once))
        free = [host_memory((at_once, self.line_bytes), torch.uint8) for _ in range(number)]
        try:
            while True:
                while free and (start := next(starts, None)) is not None:
                    memory = free.pop()[: stop - start]
                    coming.append((start, memory, self.tier.submit([partial(self._read, start, list(memory.numpy()))])))
                if not coming:
                    return
                start, memory, reads = coming.popleft()
                begun = perf_counter_ns()
                size = self.result(reads)
                tally.read += size
                tally.wait(begun, size)
                yield start, memory
                free.append(memory)
        finally:
            wait([each for _, _, reads in coming for each in reads])

    def _read(self, first: int, rows: Rows) -> int:
        """Read consecutive lines into rows of memory, and check their checksums."""
        self.file.read_scattered(rows, first * self.line_bytes)
        for line, row in enumerate(rows, first):
            if _checksum(row) != int(self._sums[line]):
                raise DamagedError("a checksum is wrong")
        return len(rows) * self.line_bytes


def _checksum(row: NDArray[np.uint8]) -> int:
    import xxhash  # imported late: only files need it

    return xxhash.xxh3_64_intdigest(row.data)


IN_ORDER = 16384
"""Bytes per line where all lines are read in order: longer lines mean fewer checksums."""

LEAST_LINES = 2
"""Lines that a cache needs room for, in addition to those that never leave it."""


class DiskBlocks:
    """`count` blocks in a file, written in order, at least `unit` at a time; the first `kept` stay in the cache.

    With `in_order`, blocks are read from first to last again and again. An LRU cache would always evict the next one,
    so the cache holds the first blocks for good. A copy, and an object that was told to `share`, refer to the blocks of
    another one. Nothing is allocated or created before the first block is written.

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
        self.written = self.shared = 0  # blocks; `shared` ones are another object's
        self._waiting, self._tail = 0, torch.empty(0)  # blocks of the incomplete line
        self._lender: DiskBlocks | None = None
        self._file: DiskFile | None = None
        self._coming: _Coming | None = None

    @property
    def lines(self) -> int:
        """Lines of its own file."""
        return self.layout.lines(self.count - self.shared)

    @property
    def slots(self) -> int:
        """Lines that the cache holds."""
        return min(self.lines, self.share_of.host_bytes // self.line_bytes)

    def check(self) -> None:
        """Refuse a cache without room for the lines that stay and those that come at once.

        Raises:
            KvcliError: the share of host memory is too small (will not fit).
        """
        least = min(self.lines, self.kept + LEAST_LINES) * self.line_bytes
        if not self.in_order and self.share_of.host_bytes < least:
            raise self.share_of.too_small(least)

    def share(self, other: DiskBlocks, blocks: int) -> bool:
        """Refer to the first `blocks` of another object, as many as it has when this one is first used."""
        alike = vars(other.layout) == vars(self.layout)
        if alike and (blocks := min(blocks, self.count, other.count) // self.per_line * self.per_line):
            self._lender, self.shared = other, blocks
        return alike and blocks > 0

    def footprint(self) -> Footprint:
        """Count its own bytes in host memory and on the disk."""
        tables = LINE_TABLES * self.lines + SLOT_TABLES * self.slots
        host = self.slots * self.line_bytes + self.layout.used + tables
        return Footprint(host=host, disk=self.lines * self.line_bytes)

    def write(self, first: int, blocks: Tensor) -> int:
        """Store the next blocks [n, ..], from block `first` on; return the bytes of those that are its own."""
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
        """Collect blocks [m] in `out` [m, ..], host memory; blocks `announced` to `begin` are not counted again."""
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
        """Read blocks [m] that will be requested next in the background, as far as the cache has room for them."""
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
        """Iterate over blocks `first` to before `stop` in parts, each with its first block, valid until the next."""
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
        """Refer to what is written, with a new file and cache for what comes."""
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
        """Decide what is shared, and create the file and the cache."""
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
        """Write whole lines; cache those that there is room for, and those of a decode step in any case."""
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
            self._flushed += count  # from now on they are read from there

    def _cache_written(self, first: int, lines: Tensor, appended: bool) -> None:
        """Cache lines [n, line_bytes] from line `first` on, as far as there is room."""
        if self.in_order:
            kept = lines[: max(0, self.slots - first)]
            self._cache.memory[first : first + len(kept)] = kept
        else:
            self._cache.keep(first, lines[: self._cache.room if appended else self._cache.empty])

    def _gather(self, blocks: Ints, out: Tensor, tally: DiskTally, announced: bool) -> None:
        """Collect its own blocks: first from the cache, then from lines as they come from the file."""
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
        """Start reading lines [n], ascending, into slots [n]."""
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
        """Wait for lines and register them in their slots."""
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
    """Lines [n] that are being read into slots [n] since `begun`; `tally` counts them."""

    lines: Ints
    slots: Ints
    reads: list[Future[int]]
    begun: int
    tally: DiskTally
