"""Memory of the host in mappings of its own: it begins where a page of the system does, so that a disk can read into it
by itself, and asks for huge pages, of which 512 times fewer have to be made before it holds anything."""

from __future__ import annotations

import errno
import math
import mmap
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20  # bytes, of most systems


def mapping(size: int, *advice: str) -> mmap.mmap:
    """Map `size` >= 1 bytes of zeros, with further `advice` to the system by the names of its constants.

    Raises MemoryError where the system has no room for them.
    """
    try:
        # Mappings share no page of the system: two registrations with a device must not meet in one.
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise MemoryError(f"the system gives no {size:,} bytes") from error
    for name in ("MADV_HUGEPAGE", *advice):
        with suppress(AttributeError, OSError):  # not every system has all of it
            memory.madvise(getattr(mmap, name))
    return memory


def host_memory(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Allocate a tensor in a mapping, which ends with its last view."""
    size = math.prod(shape) * dtype.itemsize
    with torch.inference_mode(False):
        return torch.frombuffer(mapping(size), dtype=dtype).view(*shape) if size else torch.empty(*shape, dtype=dtype)


def ready(tensor: Tensor) -> Future[Tensor]:
    """Stand for memory that is there as for memory that is on its way."""
    future: Future[Tensor] = Future()
    future.set_result(tensor)
    return future
