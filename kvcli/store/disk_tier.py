"""The tier below host memory: a directory whose files hold pages that host memory has no room for, and its readers.

Files have no name, so that nothing is left of them however a run ends, and take their room on the disk when they are
made: a disk that is full says so before anything lies on it. What is read goes past the system's cache, by many threads
at once, since a disk that is asked for one block at a time is idle most of it.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from time import perf_counter_ns
from typing import Any, ClassVar, NamedTuple, Self

from kvcli.errors import ExitCode, KvcliError, usage_error
from kvcli.sizes import format_bytes
from kvcli.store.host_memory import mapping
from kvcli.store.unbuffered import ALIGNMENT, UnbufferedFile

READERS = 16
"""Threads that read: as many reads are in flight."""

READ_BYTES = 1 << 20
"""No more is read in one piece: enough for the disk's full rate, and small enough for several threads to share."""

SMALLEST_SECTOR = 512
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskError(KvcliError):
    """The disk did not take or give back KV that a run needs."""


class Wait(NamedTuple):
    """Something that waited for the disk or was read beside the run: nanoseconds of the clock, and bytes read."""

    begun: int
    ended: int
    size: int


@dataclass
class DiskTally:
    """What was asked of the host's cache since the last look: blocks it had or had not, bytes moved, waits."""

    hits: int = 0
    misses: int = 0
    read: int = 0
    written: int = 0
    waited: int = 0  # nanoseconds in which the run had nothing else to do
    waits: list[Wait] = field(default_factory=list)

    def taken(self) -> DiskTally:
        """What was counted, and begin anew."""
        counted = replace(self)
        vars(self).update(vars(DiskTally()))
        return counted

    def wait(self, begun: int, size: int) -> None:
        """Note a wait that ends now."""
        now = perf_counter_ns()
        self.waited += now - begun
        self.waits.append(Wait(begun, now, size))


class DiskTier:
    """A directory for KV and the `host_bytes` of host memory that cache it, for `sequences` at a time.

    Files end with whoever holds them; `close` ends the threads. Only `file` and reads touch the disk, so that memory
    can be planned with it.
    """

    stateless: ClassVar[bool] = True

    def __init__(self, folder: Path, host_bytes: int, sequences: int = 1):
        self.folder, self.host_bytes, self.sequences = folder, host_bytes, max(1, sequences)

    @classmethod
    def elsewhere(cls, folder: Path, host_bytes: int, sequences: int) -> Self:
        """Make one of another machine, to plan memory with: nothing is asked of its disk."""
        tier = cls(folder, host_bytes, sequences)
        tier.sector = ALIGNMENT
        return tier

    @cached_property
    def sector(self) -> int:
        """Bytes to which reads past the system's cache have to be aligned: 512 where the disk takes that."""
        try:
            with UnbufferedFile.nameless(self.folder) as file:
                os.ftruncate(file.fd, ALIGNMENT)
                if file.direct is None:
                    return SMALLEST_SECTOR
                memory = memoryview(mapping(ALIGNMENT))[:SMALLEST_SECTOR]
                try:
                    os.preadv(file.direct, [memory], SMALLEST_SECTOR)
                except OSError:
                    return ALIGNMENT
                return SMALLEST_SECTOR
        except OSError as error:
            raise self.unusable(error) from None

    @cached_property
    def threads(self) -> ThreadPoolExecutor:
        """The readers."""
        return ThreadPoolExecutor(READERS, "disk")

    @cached_property
    def ahead(self) -> ThreadPoolExecutor:
        """One that has a layer come while another one is computed."""
        return ThreadPoolExecutor(1, "layer-ahead")

    def check(self, size: int) -> None:
        """Refuse a directory that takes no files, or a disk without room for `size` bytes.

        Raises:
            KvcliError: it is no directory that can be written to (usage); there is no room (will not fit).
        """
        if not self.folder.is_dir():
            what = "is no directory" if self.folder.exists() else "is not there"
            raise usage_error(f"--kv-disk {self.folder}: it {what}", "name a directory on a local disk")
        assert self.sector
        if (free := shutil.disk_usage(self.folder).free) < size:
            raise self.full(size, free)

    def share(self) -> DiskShare:
        """What one sequence has of it."""
        return DiskShare(self, self.host_bytes // self.sequences, self.sequences)

    def file(self, size: int) -> UnbufferedFile:
        """Make a file of `size` bytes, all of which the disk has set apart.

        Raises:
            DiskError: there is no room for it (will not fit), or the directory takes no files.
        """
        try:
            file = UnbufferedFile.nameless(self.folder)
        except OSError as error:
            raise self.unusable(error) from None
        try:
            os.posix_fallocate(file.fd, 0, max(1, size))
        except OSError as error:
            file.close()
            raise self.failed("writing", error, size) from None
        return file

    def submit(self, jobs: Sequence[Callable[[], int]]) -> list[Future[int]]:
        """Have reads done, each of which gives the bytes that it read."""
        each = -(-len(jobs) // READERS)
        return [self.threads.submit(_all, jobs[at : at + each]) for at in range(0, len(jobs), max(1, each))]

    def full(self, size: int, free: int) -> DiskError:
        """Make the error of a disk without room."""
        return DiskError(
            f"--kv-disk {self.folder}: KV takes {format_bytes(size)} there, {format_bytes(free)} are free",
            "free some, name another disk, or take a shorter context or fewer sequences",
            ExitCode.WILL_NOT_FIT,
        )

    def failed(self, doing: str, error: Exception, size: int = 0) -> DiskError:
        """Make the error of a read or a write that failed."""
        if doing == "writing" and isinstance(error, OSError) and error.errno in _NO_ROOM:
            return self.full(size, shutil.disk_usage(self.folder).free)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        hint = "the disk or the file has failed: run again, on another disk or without --kv-disk"
        return DiskError(f"--kv-disk {self.folder}: {doing} KV failed: {reason}", hint)

    def unusable(self, error: OSError) -> DiskError:
        """Make the error of a directory that takes no files."""
        what = f"--kv-disk {self.folder}: {error.strerror}"
        return DiskError(what, "name a directory on a local disk that can be written to", ExitCode.USAGE)

    def close(self) -> None:
        """End the threads, if there are any; the next reads begin new ones."""
        for name in ("ahead", "threads"):
            if name in vars(self):
                vars(self).pop(name).shutdown(cancel_futures=True)

    def __enter__(self) -> DiskTier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> DiskTier:
        """A copy of a cache uses the same disk."""
        return self


@dataclass(frozen=True)
class DiskShare:
    """A part of the tier, one of `parts`: the `host_bytes` of a sequence, or of one of its layers."""

    tier: DiskTier
    host_bytes: int
    parts: int

    def divided(self, layers: int) -> DiskShare:
        """What each of so many layers has."""
        layers = max(1, layers)
        return DiskShare(self.tier, self.host_bytes // layers, self.parts * layers)

    def too_small(self, least: int) -> KvcliError:
        """Make the error of a share that does not hold the `least` bytes that a layer needs."""
        return KvcliError(
            f"--host-memory {format_bytes(self.tier.host_bytes)} is {format_bytes(self.host_bytes)} for each of "
            f"{self.parts:,} caches of a layer and sequence, which need {format_bytes(least)}",
            f"give {format_bytes(-(-least * self.parts * 1001 // 1000))} at least, or run fewer sequences together",
            ExitCode.WILL_NOT_FIT,
        )


def _all(jobs: Sequence[Callable[[], int]]) -> int:
    return sum(job() for job in jobs)
