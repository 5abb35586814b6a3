"""Pinned host memory of exactly the size asked for, mapped and registered with CUDA by a thread in the background.

`torch.empty(pin_memory=True)` does not serve here, for three reasons. Its caching allocator rounds each size up to a
power of two and keeps what is freed: two layers of 1.1 GiB each take 4 GiB. The options that change this
(`pinned_max_round_threshold_mb`, `pinned_max_cached_size_mb`) hold for the whole process and belong to its user. It
pins on the calling thread, and tens of GiB take seconds: here memory gets ready while the weights are read (`prepare`),
or the first layer's while the last one's is still to come, beside the prefill. And it asks for no huge pages, of which
a registration has 512 times fewer to pin.
"""

from __future__ import annotations

import atexit
import errno
import functools
import math
import mmap
import os
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kvcli.errors import ExitCode, KvcliError
from kvcli.sizes import format_bytes, slices


def nearby_cpus(device: torch.device, devices: Path = Path("/sys/bus/pci/devices")) -> set[int]:
    """The processors of the memory node that a CUDA device is attached to; none where the system does not tell.

    Pages lie where the thread that touches them first runs. From another node's memory a device reads at a part of the
    rate of its bus.
    """
    known: Any = torch.cuda.get_device_properties(device)
    address = f"{known.pci_domain_id:04x}:{known.pci_bus_id:02x}:{known.pci_device_id:02x}.0"
    try:
        text = (devices / address / "local_cpulist").read_text()
    except OSError:
        return set()
    spans = [span.partition("-") for span in text.strip().split(",") if span]
    return {cpu for first, _, last in spans for cpu in range(int(first), int(last or first) + 1)}


class CudaHostRegistrar:
    """Makes memory of the host known to a CUDA device, which then reads and writes it by itself.

    The device sees it at the same address (Linux, unified addressing).

    Raises:
        RuntimeError: the system or the device refuses. Memory that could not be unregistered stays registered.
    """

    def __init__(self, device: torch.device):
        self.device = device

    def settle(self) -> None:
        """Let this thread run near the device from now on, as far as the process may."""
        # Not every system places threads or tells where a device is, and memory is pinned from anywhere.
        with suppress(AttributeError, OSError, RuntimeError, ValueError):
            cpus = nearby_cpus(self.device) & os.sched_getaffinity(0)
            if cpus:
                os.sched_setaffinity(0, cpus)  # 0: of this thread alone

    def register(self, address: int, size: int) -> None:
        """Pin `size` bytes from `address` on."""
        with torch.cuda.device(self.device):  # a new thread begins with device 0
            # 0 is cudaHostRegisterDefault: pinned and mapped for every device, where addresses are unified.
            _check(torch.cuda.cudart().cudaHostRegister(address, size, 0))  # type: ignore[no-untyped-call]

    def unregister(self, address: int) -> None:
        """Unpin what was registered at `address`, once the device has done all its work."""
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()  # kernels read this memory, too, of which no event tells
            _check(torch.cuda.cudart().cudaHostUnregister(address))  # type: ignore[no-untyped-call]


Wanted = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor."""


class HostAllocator(Protocol):
    """Allocates tensors in host memory that a device reads and writes itself."""

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, urgent: bool = False) -> Future[Tensor]:
        """Ask for an uninitialised tensor."""


class PinnedAllocator:
    """Allocates pinned tensors and frees them with their last view, on a thread of its own and in order.

    What is urgent comes before all that waits: a prompt's beginning must not wait for the room of its KV.
    `registered` are the mappings that a device knows, by address. None of them is unmapped before the device has
    forgotten it: one that cannot be unregistered, say while a CUDA graph is being captured, is tried again when the
    next one is freed. A request that its caller has let go of before its turn is never served.
    """

    def __init__(self, registrar: CudaHostRegistrar):
        self.registrar = registrar
        self.registered: dict[int, mmap.mmap] = {}
        self._freed: set[int] = set()  # addresses to unregister
        self._queue: SimpleQueue[_Request | int | None] = SimpleQueue()  # an address: to free; None: the end, or ..
        self._urgent: SimpleQueue[_Request] = SimpleQueue()  # .. that there is something here
        self._ahead: defaultdict[Wanted, deque[Future[Tensor]]] = defaultdict(deque)
        self._closing = False
        # An executor would work off its queue before the process may end, which takes seconds after Ctrl-C.
        self._worker = threading.Thread(target=self._work, name="pinning", daemon=True)
        self._worker.start()

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, urgent: bool = False) -> Future[Tensor]:
        """Ask for an uninitialised tensor, aligned to a page of the system; waiting for it may raise KvcliError.

        Raises:
            KvcliError: the system pins no more (will not fit); raised by the future.
        """
        prepared = self._ahead[shape, dtype]
        return prepared.popleft() if prepared else self._ask(shape, dtype, urgent)

    def prepare(self, wanted: Iterable[Wanted]) -> None:
        """Begin to allocate what will be asked for, in this order; it waits for that, or for `forget`."""
        for shape, dtype in wanted:
            self._ahead[shape, dtype].append(self._ask(shape, dtype))

    def forget(self) -> None:
        """Let go of what was prepared and not asked for."""
        self._ahead.clear()

    def _ask(self, shape: tuple[int, ...], dtype: torch.dtype, urgent: bool = False) -> Future[Tensor]:
        future: Future[Tensor] = Future()
        if math.prod(shape):
            request = _Request(weakref.ref(future), shape, dtype)
            if urgent:
                self._urgent.put(request)
                self._queue.put(None)  # wakes the thread
            else:
                self._queue.put(request)
        else:
            future.set_result(torch.empty(shape, dtype=dtype))
        return future

    def close(self) -> None:
        """End the thread once it has done what it is at, and unregister all memory, which stays usable on the host.

        A process that ends without this call leaves both to the system, which loses nothing.
        """
        self._closing = True
        self._queue.put(None)
        self._worker.join()
        self._unregister(*self.registered)

    def __deepcopy__(self, memo: dict[int, Any]) -> PinnedAllocator:
        """A copy of a cache allocates where the cache does."""
        return self

    def _work(self) -> None:
        self.registrar.settle()
        while not self._closing:
            task = self._queue.get()
            while not self._closing and not self._urgent.empty():  # this thread alone takes from it
                self._serve(self._urgent.get())
            if isinstance(task, int) and not self._closing:
                self._unregister(task)
            elif isinstance(task, _Request) and not self._closing:
                self._serve(task)

    def _serve(self, request: _Request) -> None:
        future = request.future()
        if future is None:
            return
        try:
            future.set_result(self._pin(request.shape, request.dtype))
        except Exception as error:  # raised where the future is waited for, whatever it is
            future.set_exception(error)

    def _pin(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        try:
            # A fork must not turn pages that a device writes to into copies on write.
            mapped = mapping(size, "MADV_DONTFORK")
            memory = memoryview(mapped)  # held by the tensor and its views alone
            tensor = torch.frombuffer(memory, dtype=dtype).view(shape)
            # Pages that exist are pinned faster, and a device's launches wait while memory is being registered.
            tensor.view(-1).view(torch.uint8)[:: mmap.PAGESIZE].zero_()
            address = tensor.data_ptr()
            self.registrar.register(address, size)
        except (OSError, RuntimeError) as error:
            held = sum(map(len, self.registered.values()))
            raise KvcliError(
                f"the system does not pin {format_bytes(size)} of host memory beside the {format_bytes(held)} pinned "
                f"already: {error}",
                "raise ulimit -l and the container's memory limit, or take a shorter context or fewer sequences",
                ExitCode.WILL_NOT_FIT,
            ) from error
        self.registered[address] = mapped
        # A view may die on any thread and at any time, where the device cannot be waited for: the worker sees to it.
        weakref.finalize(memory, self._queue.put, address).atexit = False
        return tensor

    def _unregister(self, *addresses: int) -> None:
        self._freed.update(addresses)
        for address in tuple(self._freed):
            with suppress(RuntimeError):  # the device still knows it: not to be unmapped
                self.registrar.unregister(address)
                self._freed.remove(address)
                del self.registered[address]  # ends the mapping, where no tensor holds it


class _Request(NamedTuple):
    future: weakref.ref[Future[Tensor]]  # weak: a caller that lets go of it does not want the memory any more
    shape: tuple[int, ...]
    dtype: torch.dtype


def _check(code: Any) -> None:
    """Raise RuntimeError for what the CUDA runtime returns where a call fails."""
    if int(code):
        raise torch.cuda.CudaError(int(code))


@functools.cache
def pinned_allocator(device: torch.device) -> PinnedAllocator:
    """The allocator of this process for a CUDA device, whose thread ends before the interpreter does."""
    allocator = PinnedAllocator(CudaHostRegistrar(device))
    atexit.register(allocator.close)
    return allocator


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
