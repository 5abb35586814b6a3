"""A file of one layer's pages: safetensors with a padded header, read and written past the system's cache.

One tensor, `kv` [pages, Hk, 2, p, d], as `kvcli.store.host_pool` lays pages out. Its data begins at byte `ALIGNMENT`,
so that pages go between the disk and memory that is aligned as well without a copy. Every `CHECKED_PAGES` pages have a
checksum, which stands in the manifest.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from kvcli.store.host_memory import host_memory
from kvcli.store.pages import slices
from kvcli.store.unbuffered import ALIGNMENT, DamagedError, UnbufferedFile, as_bytes, checksum

CHECKED_PAGES = 64
"""Pages that have a checksum together: 2,048 tokens, 8 MiB of a layer with 8 KV heads of 128 in bf16."""

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def header(shape: Sequence[int], dtype: torch.dtype) -> bytes:
    """The first `ALIGNMENT` bytes of the file of a layer's pages."""
    size = math.prod(shape) * dtype.itemsize
    body = json.dumps({"kv": {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [0, size]}}).encode()
    return struct.pack("<Q", ALIGNMENT - 8) + body.ljust(ALIGNMENT - 8)


def write_layer(path: Path, pages: Tensor) -> list[str]:
    """Write pages [n, Hk, 2, p, d] of host memory, and to the disk; returns their checksums.

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
        DamagedError: it is not that of pages of this shape.
    """
    size = ALIGNMENT + math.prod(shape) * dtype.itemsize
    if (found := os.fstat(file.fd).st_size) != size:
        raise DamagedError(f"{found:,} bytes long, not {size:,}")
    if os.pread(file.fd, ALIGNMENT, 0) != header(shape, dtype):
        raise DamagedError("its header is not that of its pages")


def read_pages(file: UnbufferedFile, pages: Tensor, first: int, checksums: Sequence[str]) -> int:
    """Read pages [n, Hk, 2, p, d] into aligned memory, from page `first` of the file on, a multiple of `CHECKED_PAGES`.

    `checksums` are those of the whole file. Where it has more pages under the last checksum, they are read as well.
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
