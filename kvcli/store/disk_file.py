"""A file of lines of equal size, each written once and held against its checksum when it is read."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from functools import partial
from itertools import pairwise
from time import perf_counter_ns

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcli.store.disk_tier import READ_BYTES, READERS, DiskTally, DiskTier
from kvcli.store.host_memory import host_memory
from kvcli.store.line_cache import Ints
from kvcli.store.unbuffered import DamagedError

AHEAD = 8
"""Pieces that are read ahead of who goes through the file in order."""

Rows = Sequence[NDArray[np.uint8]]


class DiskFile:
    """Room for `lines` of so many bytes in a file of the tier, which ends with this object.

    Raises:
        DiskError: there is no room for it, or writing and reading fail; then nothing of what was read is to be used.
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
        """Have lines [n], ascending, read into rows of aligned memory, those that follow each other together."""
        most = min(256, max(1, READ_BYTES // self.line_bytes), max(1, len(lines) // READERS))
        edges = [0, *(np.flatnonzero(np.diff(lines) != 1) + 1).tolist(), len(lines)]
        jobs: list[Callable[[], int]] = []
        for start, stop in pairwise(edges):
            for at in range(start, stop, most):
                jobs.append(partial(self._read, int(lines[at]), rows[at : min(at + most, stop)]))
        return self.tier.submit(jobs)

    def result(self, reads: Sequence[Future[int]]) -> int:
        """Wait for reads, all of them also where one fails; gives the bytes that they read."""
        wait(reads)
        try:
            return sum(each.result() for each in reads)
        except (OSError, DamagedError) as error:
            raise self.tier.failed("reading", error) from None

    def pieces(self, first: int, stop: int, tally: DiskTally) -> Iterator[tuple[int, Tensor]]:
        """Give lines `first` to before `stop` in order, some [n, line_bytes] at a time, each with its first line.

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
        """Read lines that follow each other into rows of memory, and hold them against their checksums."""
        self.file.read_scattered(rows, first * self.line_bytes)
        for line, row in enumerate(rows, first):
            if _checksum(row) != int(self._sums[line]):
                raise DamagedError("a checksum is wrong")
        return len(rows) * self.line_bytes


def _checksum(row: NDArray[np.uint8]) -> int:
    import xxhash  # here, as in `unbuffered`: what has no file does without

    return xxhash.xxh3_64_intdigest(row.data)
