"""Pinned host memory of exactly the size asked for, got ready in the background.

torch's own pinned allocator rounds every size up to a power of two, and pinning tens of GiB takes seconds. Here memory
is mapped page by page of the system and registered with CUDA by one thread, in the order in which it was asked for, so
that it goes on beside the prefill: the first layer's is ready while the last one's is still to come.
"""

from __future__ import annotations

import atexit
import functools
import math
import mmap
import threading
import weakref
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kvcli.errors import ExitCode, KvcliError
from kvcli.sizes import format_bytes


class HostRegistrar(Protocol):
    """Whoever tells a device of memory that it may read and write itself."""

    def register(self, address: int, size: int) -> None:
        """Pin `size` bytes; raises RuntimeError with the reason where that cannot be."""

    def unregister(self, address: int) -> None:
        """Let go of what was registered there, once nobody uses it any more."""


class CudaHostRegistrar:
    """Pins for a CUDA device. Memory then has the same address there (Linux, unified addressing)."""

    def __init__(self, device: torch.device):
        self.device = device

    def register(self, address: int, size: int) -> None:
        """See `HostRegistrar.register`; other threads run meanwhile."""
        with torch.cuda.device(self.device):  # a thread begins with device 0, whichever the others use
            # 0 is cudaHostRegisterDefault: pinned and mapped for every device, where addresses are unified.
            code = int(torch.cuda.cudart().cudaHostRegister(address, size, 0))  # type: ignore[no-untyped-call]
        if code:
            raise torch.cuda.CudaError(code)

    def unregister(self, address: int) -> None:
        """See `HostRegistrar.unregister`; waits for copies on their way, which nobody else keeps track of.

        Says nothing of a device that has failed: whoever computes on it gets to know.
        """
        with torch.cuda.device(self.device), suppress(RuntimeError):
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


class PinnedAllocator:
    """Gives pinned tensors, one after another; what is asked for and let go before its turn is never pinned."""

    def __init__(self, registrar: HostRegistrar):
        self.registrar = registrar
        self.registered: dict[int, mmap.mmap] = {}  # by address
        self._requests: SimpleQueue[_Request | None] = SimpleQueue()
        self._closing = False
        # No executor: it would work off its queue before the process may end, which takes seconds after Ctrl-C.
        self._worker = threading.Thread(target=self._work, name="pinning", daemon=True)
        self._worker.start()

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Future[Tensor]:
        """Ask for an uninitialised tensor, aligned to a page of the system.

        Its result is waited for, and may raise KvcliError (will not fit): the system pins no more.
        """
        future: Future[Tensor] = Future()
        if math.prod(shape):
            self._requests.put(_Request(weakref.ref(future), shape, dtype))
        else:
            future.set_result(torch.empty(shape, dtype=dtype))
        return future

    def close(self) -> None:
        """Pin nothing any more, and wait for what is being pinned right now; what was pinned stays."""
        self._closing = True
        self._requests.put(None)
        self._worker.join()

    def __deepcopy__(self, memo: dict[int, Any]) -> PinnedAllocator:
        """Copies of what allocates here allocate here, too."""
        return self

    def _work(self) -> None:
        while (request := self._requests.get()) is not None and not self._closing:
            self._serve(request)

    def _serve(self, request: _Request) -> None:
        future = request.future()
        if future is None:
            return
        try:
            future.set_result(self._pin(request.shape, request.dtype))
        except Exception as error:  # whoever waits has to know, whatever it is
            future.set_exception(error)

    def _pin(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        try:
            # Mappings share no page of the system: two registrations must not meet in one.
            mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(AttributeError, OSError):  # not every system has huge pages, which are pinned faster
                mapping.madvise(mmap.MADV_HUGEPAGE)
            memory = memoryview(mapping)  # held by the tensor and all views of it, and by nobody else
            tensor = torch.frombuffer(memory, dtype=dtype).view(shape)
            # Pages that exist are pinned faster, and a device's launches wait while memory is being registered.
            tensor.view(-1).view(torch.uint8)[:: mmap.PAGESIZE].zero_()
            address = tensor.data_ptr()
            self.registrar.register(address, size)
        except (OSError, RuntimeError) as error:
            held = sum(map(len, list(self.registered.values())))
            raise KvcliError(
                f"the system does not pin {format_bytes(size)} of host memory beside the {format_bytes(held)} pinned "
                f"already: {error}",
                "raise ulimit -l and the container's memory limit, or take a shorter context or fewer sequences",
                ExitCode.WILL_NOT_FIT,
            ) from error
        self.registered[address] = mapping
        weakref.finalize(memory, self._free, address).atexit = False  # the system takes back what is left then
        return tensor

    def _free(self, address: int) -> None:
        self.registrar.unregister(address)
        del self.registered[address]  # this ends the mapping


class _Request(NamedTuple):
    future: weakref.ref[Future[Tensor]]  # weak: who lets go of it does not want it any more
    shape: tuple[int, ...]
    dtype: torch.dtype


@functools.cache
def pinned_allocator(device: torch.device) -> PinnedAllocator:
    """Get the one that serves this process for a CUDA device."""
    memory = PinnedAllocator(CudaHostRegistrar(device))
    atexit.register(memory.close)
    return memory
