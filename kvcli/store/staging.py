"""The way of scattered host memory to the device: gathered into pinned buffers, from which copies are asynchronous."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvcli.store.pages import slices
from kvcli.store.pinned import PinnedAllocator, pinned_allocator

BUFFER_BYTES = 8 << 20
"""Size of a buffer: a step's recall of one layer mostly fits, and longer ones are gathered and copied side by side."""


class PinnedStaging:
    """Two pinned buffers that the host gathers into and the device copies from, in turn.

    The host fills one while the device copies the other. Before it fills a buffer again it waits for the event that
    `record` gave after that buffer's last copy.
    """

    def __init__(self, allocator: PinnedAllocator, record: Callable[[], torch.cuda.Event]):
        self.allocator, self.record = allocator, record
        self._copied: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    def upload(self, target: Tensor, gather: Callable[[Tensor, slice], None]) -> None:
        """Fill `target` [m, ..] on the device, in the order of the current stream.

        `gather(rows, part)` has to write what belongs into `target[part]` to `rows`, on the host.
        """
        row_bytes = target[:1].nbytes
        for part in slices(len(target), max(1, BUFFER_BYTES // max(1, row_bytes))):
            here = target[part]
            buffer = self._next(len(here) * row_bytes)
            rows = buffer[: len(here) * row_bytes].view(here.dtype).view(here.shape)
            gather(rows, part)
            here.copy_(rows, non_blocking=True)
            self._copied.append((buffer, self.record()))

    def __deepcopy__(self, memo: dict[int, Any]) -> PinnedStaging:
        """A copy of a cache uses the same buffers."""
        return self

    def _next(self, size: int) -> Tensor:
        if len(self._copied) == 2:
            buffer, copied = self._copied.popleft()
            copied.synchronize()
            if len(buffer) >= size:
                return buffer
        return self.allocator.allocate((max(size, BUFFER_BYTES),), torch.uint8).result()


@functools.cache
def pinned_staging(device: torch.device) -> PinnedStaging:
    """The buffers of this process for a CUDA device."""
    return PinnedStaging(pinned_allocator(device), lambda: torch.cuda.current_stream(device).record_event())
