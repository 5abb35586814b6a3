"""A layer's prompt KV on its way from the computation to the method's cache."""

import math
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from kvcli.store.host_memory import host_memory

ALONE_BYTES = 1 << 30
"""A layer's KV of more bytes has no second buffer beside it: what is offloaded by chunks has all but left by then."""


def prefill_buffers(device: torch.device, nbytes: int) -> int:
    """Buffers of so many bytes that hold a layer's KV during the prefill: one being computed and, on CUDA, another.

    That one is being offloaded meanwhile.
    """
    return 2 if device.type == "cuda" and nbytes <= ALONE_BYTES else 1


class PrefillOffloader:
    """Lends a buffer for each layer's KV, and does the work of offloading it while the next layer is computed.

    On CUDA the work has a stream of its own, and the layers take turns with two buffers, or one that is large: it is
    lent again once the work on it is done. On the CPU there is nothing to overlap with: the work is done at once, in
    one buffer.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # The work stays with its buffer, so that whatever else it reads outlives it too.
        self._lent: deque[tuple[Tensor, Callable[[], None], torch.cuda.Event | None]] = deque()
        self._without: tuple[Callable[[], None], torch.cuda.Event | None] | None = None  # the last that had no buffer

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Lend an uninitialised buffer on the device."""
        found = None
        while len(self._lent) >= prefill_buffers(self.device, math.prod(shape) * dtype.itemsize):
            buffer, _, done = self._lent.popleft()
            if done is not None:
                torch.cuda.current_stream(self.device).wait_event(done)
            found = buffer if buffer.shape == shape and buffer.dtype == dtype else found
            del buffer  # before there is another one
        if found is not None:
            return found
        if self.device.type == "cpu":
            return host_memory(shape, dtype)
        return torch.empty(shape, dtype=dtype, device=self.device)

    def beside(self, work: Callable[[], None]) -> None:
        """Do `work` after all that was computed so far; it reads a buffer that `start` is called with later."""
        if self.stream is None:
            work()
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            work()

    def start(self, buffer: Tensor | None, work: Callable[[], None]) -> None:
        """Do `work`, the last that reads `buffer`, after all that was computed so far; None: it was not lent here."""
        self.beside(work)
        done = None if self.stream is None else self.stream.record_event()
        if buffer is not None:
            self._lent.append((buffer, work, done))
            return
        if self._without is not None and (before := self._without[1]) is not None:
            torch.cuda.current_stream(self.device).wait_event(before)
        self._without = work, done

    def finish(self) -> None:
        """Wait until all work is done, and let go of the buffers."""
        if self.stream is not None:
            self.stream.synchronize()
        self._lent.clear()
        self._without = None


class PrefillOffloaders:
    """An offloader for each device on which layers lie."""

    def __init__(self) -> None:
        self._of: dict[torch.device, PrefillOffloader] = {}

    def on(self, device: torch.device) -> PrefillOffloader:
        """Give that of a device."""
        if device not in self._of:
            self._of[device] = PrefillOffloader(device)
        return self._of[device]

    def finish(self) -> None:
        """Wait until all work is done, and let go of the buffers."""
        for offloader in self._of.values():
            offloader.finish()
