"""Directories that are complete or absent, whatever other processes do and whenever the machine goes down.

A directory is made under a temporary name that begins with `TEMPORARY`, locked by its process, and renamed once it is
complete. A directory is removed by renaming it first. The leftovers of a killed process are recognised by their names
and by a lock that no process holds, and the next process clears them away.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

from kvcli.memory.disk_tier import ALIGNMENT, DamagedError, UnbufferedFile, as_bytes, checksum
from kvcli.memory.pinned import host_memory
from kvcli.sizes import slices

TEMPORARY = ".kvcli-"


@contextmanager
def locked(folder: Path, shared: bool = False, wait: bool = True) -> Iterator[int | None]:
    """Hold the lock of a directory and yield its file descriptor; None if another holds it and `wait` is false.

    Raises:
        OSError: there is no such directory.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.flock(descriptor, kind if wait else kind | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        yield descriptor
    finally:
        os.close(descriptor)


class NewFolder:
    """A directory in the making next to others in `parent`; locked until it is committed or abandoned.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, parent: Path):
        with locked(parent):
            clear(parent)
            self.path = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=parent))
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def commit(self, target: Path) -> bool:
        """Give the directory its name, once its content is on disk; False if a full directory has that name.

        Raises:
            OSError: the name cannot be given.
        """
        os.fsync(self._descriptor)
        mask = os.umask(0)
        os.umask(mask)
        self.path.chmod(0o777 & ~mask)  # mkdtemp makes it accessible to its owner only
        with locked(target.parent) as parent:
            try:
                self.path.rename(target)
            except OSError:
                if target.is_dir() and any(target.iterdir()):
                    self.abandon()
                    return False
                raise
            assert parent is not None
            os.fsync(parent)
        os.close(self._descriptor)
        return True

    def abandon(self) -> None:
        """Remove the directory and its content."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):
            os.close(self._descriptor)


def clear(parent: Path) -> None:
    """Remove the leftovers of dead processes in `parent`, whose lock is held."""
    for path in parent.glob(f"{TEMPORARY}*"):
        with suppress(OSError):  # a file, or one that another process cleared
            if path.is_dir() and not path.is_symlink():
                with locked(path, wait=False) as free:
                    if free is not None:
                        shutil.rmtree(path, ignore_errors=True)


def remove(folder: Path) -> bool:
    """Remove a directory as a whole; False if another process is reading it, or it is gone."""
    with suppress(FileNotFoundError), locked(folder, wait=False) as free:
        if free is None:
            return False
        with locked(folder.parent):
            gone = Path(tempfile.mktemp(prefix=TEMPORARY, dir=folder.parent))
            folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
        return True
    return False


# The file of one layer's pages: safetensors with a padded header, read and written past the system's cache.

CHECKED_PAGES = 64
"""Pages per checksum: 2,048 tokens, 8 MiB of a layer with 8 KV heads of 128 in bf16."""

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def header(shape: Sequence[int], dtype: torch.dtype) -> bytes:
    """Return the first `ALIGNMENT` bytes of the file of a layer's pages."""
    size = math.prod(shape) * dtype.itemsize
    body = json.dumps({"kv": {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [0, size]}}).encode()
    return struct.pack("<Q", ALIGNMENT - 8) + body.ljust(ALIGNMENT - 8)


def write_layer(path: Path, pages: Tensor) -> list[str]:
    """Write pages [n, Hk, 2, p, d] of host memory through to the disk; return their checksums.

    Raises:
        OSError: the file cannot be written.
    """
    checksums = []
    with UnbufferedFile(path, os.O_RDWR | os.O_CREAT | os.O_EXCL) as file:
        begin = host_memory((ALIGNMENT,), torch.uint8)
        begin.copy_(torch.frombuffer(bytearray(header(pages.shape, pages.dtype)), dtype=torch.uint8))
        file.write(begin, 0)
        offset = ALIGNMENT
        for part in slices(len(pages), CHECKED_PAGES):
            block = as_bytes(pages[part])
            checksums.append(checksum(block))
            file.write(block, offset)
            offset += len(block)
        os.fsync(file.fd)
    return checksums


def check_layer(file: UnbufferedFile, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Check size and header of a layer's file.

    Raises:
        DamagedError: it does not hold pages of this shape.
    """
    size = ALIGNMENT + math.prod(shape) * dtype.itemsize
    if (found := os.fstat(file.fd).st_size) != size:
        raise DamagedError(f"{found:,} bytes long, not {size:,}")
    if os.pread(file.fd, ALIGNMENT, 0) != header(shape, dtype):
        raise DamagedError("its header is not that of its pages")


def read_pages(file: UnbufferedFile, pages: Tensor, first: int, checksums: Sequence[str]) -> int:
    """Read pages [n, Hk, 2, p, d] into aligned memory, from page `first` of the file on, a multiple of `CHECKED_PAGES`.

    `checksums` are those of the whole file. If the file has more pages under the last checksum, they are read as well.
    Returns the bytes read.

    Raises:
        DamagedError: a checksum differs, or the file ends too early.
        OSError: the file cannot be read.
    """
    page_bytes = math.prod(pages.shape[1:]) * pages.element_size()
    total = (os.fstat(file.fd).st_size - ALIGNMENT) // page_bytes
    stop = min(total, -(-(first + len(pages)) // CHECKED_PAGES) * CHECKED_PAGES)
    if (count := stop - first) < len(pages):
        raise DamagedError("it ends too early")
    block = pages if count == len(pages) else host_memory((count, *pages.shape[1:]), pages.dtype)
    file.read_into(as_bytes(block), ALIGNMENT + first * page_bytes)
    for number, part in enumerate(slices(count, CHECKED_PAGES), first // CHECKED_PAGES):
        if checksum(as_bytes(block[part])) != checksums[number]:
            raise DamagedError(f"a checksum of pages {first + part.start:,} to {first + part.stop - 1:,} is wrong")
    if block is not pages:
        pages.copy_(block[: len(pages)])
    return count * page_bytes
