"""Files that are read and written past the system's cache, by aligned parts, and checksums of what they hold."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 4096
"""Bytes to which the data of a file, and the memory it is read into, are aligned."""


class DamagedError(Exception):
    """A file is not as it was written; says what is wrong with it."""


def checksum(block: Tensor) -> str:
    """Sixteen hexadecimal digits over bytes [n]."""
    import xxhash  # here, as in `disk_file`: what has no file does without

    return xxhash.xxh3_64_hexdigest(_view(block))


class UnbufferedFile:
    """A file whose aligned parts go past the system's cache, where its file system can do that; use it in a `with`."""

    def __init__(self, path: Path | str, flags: int = os.O_RDONLY, folder: int | None = None):
        self.fd = os.open(path, flags, 0o666, dir_fd=folder)
        try:
            access = flags & (os.O_RDONLY | os.O_RDWR)
            self.direct: int | None = os.open(path, access | os.O_DIRECT, dir_fd=folder)
        except OSError:  # tmpfs, say
            self.direct = None

    @classmethod
    def nameless(cls, folder: Path) -> UnbufferedFile:
        """Make a file of no name in a directory, which ends with the process at the latest, however that ends."""
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
        """Give the file back to the system."""
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
        """Fill aligned memories [n] one after another from `offset` on, in one call of the system where it can.

        Raises:
            DamagedError: the file ends before.
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
        """Choose how to move bytes [n], and how many of them at once."""
        whole = len(memory) // ALIGNMENT * ALIGNMENT
        if self.direct is None or not whole or memory.data_ptr() % ALIGNMENT or offset % ALIGNMENT:
            return self.fd, memory
        return self.direct, memory[:whole]


def as_bytes(pages: Tensor) -> Tensor:
    """View memory of the host as bytes [n]."""
    return pages.reshape(-1).view(torch.uint8)


def _view(block: Tensor) -> memoryview:
    return block.numpy().data
