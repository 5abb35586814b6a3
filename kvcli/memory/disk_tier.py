"""The tier below host memory: a directory whose files hold pages that host memory has no room for, and its readers.

Files have no name, so that nothing is left of them however a run ends, and allocate their space when they are made: a
full disk shows before anything is written. Reads bypass the system's cache and come from many threads at once, because
a disk that gets one request at a time is mostly idle.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from time import perf_counter_ns
from types import TracebackType
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcli.errors import ExitCode, KvcliError, usage_error
from kvcli.memory.pinned import mapping
from kvcli.sizes import format_bytes

ALIGNMENT = 4096
"""Bytes to which file contents, and the memory they are read into, are aligned."""


class DamagedError(Exception):
    """A file does not hold what was written to it; the message says what is wrong."""


def checksum(block: Tensor) -> str:
    """Return sixteen hexadecimal digits over bytes [n]."""
    import xxhash  # imported late: only files need it

    return xxhash.xxh3_64_hexdigest(_view(block))


class UnbufferedFile:
    """A file whose aligned parts bypass the system's cache, if its file system supports that; use it in a `with`."""

    def __init__(self, path: Path | str, flags: int = os.O_RDONLY, folder: int | None = None):
        self.fd = os.open(path, flags, 0o666, dir_fd=folder)
        try:
            access = flags & (os.O_RDONLY | os.O_RDWR)
            self.direct: int | None = os.open(path, access | os.O_DIRECT, dir_fd=folder)
        except OSError:  # tmpfs, say
            self.direct = None

    @classmethod
    def nameless(cls, folder: Path) -> UnbufferedFile:
        """Make a file without a name in a directory; it ends with the process at the latest, however that ends."""
        made = cls.__new__(cls)
        try:
            made.fd = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
                raise
            path = folder / f".kvcli-{os.getpid()}-{secrets.token_hex(4)}"
            made.fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            path.unlink()
        made.direct = None
        with suppress(OSError):  # tmpfs, say
            made.direct = os.open(f"/proc/self/fd/{made.fd}", os.O_RDWR | os.O_DIRECT)
        return made

    def close(self) -> None:
        """Close the file."""
        self.__exit__(None, None, None)

    def __enter__(self) -> UnbufferedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self.fd)
        if self.direct is not None:
            os.close(self.direct)

    def read_into(self, memory: Tensor, offset: int) -> None:
        """Fill bytes `memory` [n] from `offset` on.

        Raises:
            DamagedError: the file ends before.
        """
        at = 0
        while at < len(memory):
            fd, part = self._way(memory[at:], offset + at)
            if not (moved := os.preadv(fd, [_view(part)], offset + at)):
                raise DamagedError("it ends too early")
            at += moved

    def read_scattered(self, parts: Sequence[NDArray[np.uint8]], offset: int) -> None:
        """Fill aligned memories [n] one after another from `offset` on, in one system call if possible.

        Raises:
            DamagedError: the file ends early.
        """
        buffers: Any = parts
        if os.preadv(self.fd if self.direct is None else self.direct, buffers, offset) == sum(map(len, parts)):
            return
        for part in parts:
            self.read_into(torch.from_numpy(part), offset)
            offset += len(part)

    def write(self, memory: Tensor, offset: int) -> None:
        """Write bytes `memory` [n] from `offset` on."""
        at = 0
        while at < len(memory):
            fd, part = self._way(memory[at:], offset + at)
            at += os.pwritev(fd, [_view(part)], offset + at)

    def _way(self, memory: Tensor, offset: int) -> tuple[int, Tensor]:
        """Choose the file descriptor to move bytes [n] with, and how many of them at once."""
        whole = len(memory) // ALIGNMENT * ALIGNMENT
        if self.direct is None or not whole or memory.data_ptr() % ALIGNMENT or offset % ALIGNMENT:
            return self.fd, memory
        return self.direct, memory[:whole]


def as_bytes(pages: Tensor) -> Tensor:
    """View host memory as bytes [n]."""
    return pages.reshape(-1).view(torch.uint8)


def _view(block: Tensor) -> memoryview:
    return block.numpy().data


READERS = 16
"""Number of reading threads, which is the number of reads in flight."""

READ_BYTES = 1 << 20
"""Most bytes per read: enough for the disk's full rate, and small enough to share among threads."""

SMALLEST_SECTOR = 512
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskError(KvcliError):
    """The disk did not take or give back KV that a run needs."""


class Wait(NamedTuple):
    """A wait for the disk, or a read in the background: clock times in nanoseconds, and bytes read."""

    begun: int
    ended: int
    size: int


@dataclass
class DiskTally:
    """Counts since the last look: blocks that the host's cache had or missed, bytes moved, waits."""

    hits: int = 0
    misses: int = 0
    read: int = 0
    written: int = 0
    waited: int = 0  # nanoseconds in which the run was blocked
    waits: list[Wait] = field(default_factory=list)

    def taken(self) -> DiskTally:
        """Return the counts and reset them."""
        counted = replace(self)
        vars(self).update(vars(DiskTally()))
        return counted

    def wait(self, begun: int, size: int) -> None:
        """Record a wait that ends now."""
        now = perf_counter_ns()
        self.waited += now - begun
        self.waits.append(Wait(begun, now, size))


class DiskTier:
    """A directory for KV and the `host_bytes` of host memory that cache it, for `sequences` at a time.

    Files end with their owners; `close` ends the threads. Only `file` and reads touch the disk, so that memory can be
    planned with a tier.
    """

    stateless: ClassVar[bool] = True

    def __init__(self, folder: Path, host_bytes: int, sequences: int = 1):
        self.folder, self.host_bytes, self.sequences = folder, host_bytes, max(1, sequences)

    @classmethod
    def elsewhere(cls, folder: Path, host_bytes: int, sequences: int) -> Self:
        """Make the tier of another machine, to plan memory with; its disk is not accessed."""
        tier = cls(folder, host_bytes, sequences)
        tier.sector = ALIGNMENT
        return tier

    @cached_property
    def sector(self) -> int:
        """Bytes to which reads that bypass the system's cache are aligned: 512 if the disk accepts that."""
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
        """The reading threads."""
        return ThreadPoolExecutor(READERS, "disk")

    @cached_property
    def ahead(self) -> ThreadPoolExecutor:
        """One thread that brings a layer while another one is computed."""
        return ThreadPoolExecutor(1, "layer-ahead")

    def check(self, size: int) -> None:
        """Make the directory where it is not there; refuse one that takes no files, or a disk without `size` bytes.

        Raises:
            KvcliError: it is not a writable directory (usage); there is no room (will not fit).
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise usage_error(f"--kv-disk {self.folder}: not a directory", "name one on a local disk") from None
        except OSError as error:
            raise self.unusable(error) from None
        assert self.sector
        if (free := shutil.disk_usage(self.folder).free) < size:
            raise self.full(size, free)

    def share(self) -> DiskShare:
        """Return one sequence's share of the tier."""
        return DiskShare(self, self.host_bytes // self.sequences, self.sequences)

    def file(self, size: int) -> UnbufferedFile:
        """Make a file of `size` bytes, all of them allocated on the disk.

        Raises:
            DiskError: there is no room (will not fit), or the directory takes no files.
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
        """Submit reads, each of which returns the bytes that it read."""
        each = -(-len(jobs) // READERS)
        return [self.threads.submit(_all, jobs[at : at + each]) for at in range(0, len(jobs), max(1, each))]

    def full(self, size: int, free: int) -> DiskError:
        """Make the error of a disk without room."""
        return DiskError(
            f"--kv-disk {self.folder}: KV needs {format_bytes(size)} there, but {format_bytes(free)} are free",
            "free some space, name another disk, or use a shorter context or fewer sequences",
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
        return DiskError(what, "name a writable directory on a local disk", ExitCode.USAGE)

    def close(self) -> None:
        """End the threads, if there are any; later reads start new ones."""
        for name in ("ahead", "threads"):
            if name in vars(self):
                vars(self).pop(name).shutdown(cancel_futures=True)

    def __enter__(self) -> DiskTier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> DiskTier:
        """Return itself: a copy of a cache uses the same disk."""
        return self


@dataclass(frozen=True)
class DiskShare:
    """A part of the tier, one of `parts`: the `host_bytes` of a sequence, or of one of its layers."""

    tier: DiskTier
    host_bytes: int
    parts: int

    def divided(self, layers: int) -> DiskShare:
        """Return the share of each of `layers` layers."""
        layers = max(1, layers)
        return DiskShare(self.tier, self.host_bytes // layers, self.parts * layers)

    def too_small(self, least: int) -> KvcliError:
        """Make the error of a share that does not hold the `least` bytes that a layer needs."""
        return KvcliError(
            f"--host-memory {format_bytes(self.tier.host_bytes)} gives {format_bytes(self.host_bytes)} to each of "
            f"{self.parts:,} caches of a layer and sequence, but each needs {format_bytes(least)}",
            f"give {format_bytes(-(-least * self.parts * 1001 // 1000))} at least, or run fewer sequences together",
            ExitCode.WILL_NOT_FIT,
        )


def _all(jobs: Sequence[Callable[[], int]]) -> int:
    return sum(job() for job in jobs)
