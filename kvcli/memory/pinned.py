"""Pinned host memory of exactly the requested size, mapped and registered with CUDA by a background thread.

`torch.empty(pin_memory=True)` does not serve here, for three reasons. First, its caching allocator rounds each size up
to a power of two and keeps what is freed: two layers of 1.1 GiB each take 4 GiB. The options that change this
(`pinned_max_round_threshold_mb`, `pinned_max_cached_size_mb`) hold for the whole process and belong to its user.
Second, it pins on the calling thread, and tens of GiB take seconds. Here memory gets ready while the weights are read
(`prepare`), or during the prefill, the first layer's before the last one's. Third, it asks for no huge pages, of which
a registration has 512 times fewer to pin.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import functools
import math
import mmap
import os
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kvcli.errors import ExitCode, KvcliError
from kvcli.sizes import format_bytes, slices


def nearby_cpus(device: torch.device, devices: Path = Path("/sys/bus/pci/devices")) -> set[int]:
    """Return the processors of the memory node that a CUDA device is attached to; empty where the system does not tell.

    Pages are placed on the node of the thread that touches them first. From another node's memory a device reads at
    only a part of its bus's rate.
    """
    known: Any = torch.cuda.get_device_properties(device)
    address = f"{known.pci_domain_id:04x}:{known.pci_bus_id:02x}:{known.pci_device_id:02x}.0"
    try:
        text = (devices / address / "local_cpulist").read_text()
    except OSError:
        return set()
    spans = [span.partition("-") for span in text.strip().split(",") if span]
    return {cpu for first, _, last in spans for cpu in range(int(first), int(last or first) + 1)}


SAME_ADDRESS = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM of the driver


@functools.cache
def reads_host_addresses(device: torch.device) -> bool:
    """Return whether a CUDA device sees registered memory at the host's address, as kernels read it.

    A driver that cannot be asked is not doubted.
    """
    found, handle = ctypes.c_int(1), ctypes.c_int()
    with suppress(OSError, AttributeError):
        driver = ctypes.CDLL("libcuda.so.1")  # torch's interface to the runtime has no attributes of devices
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(handle), device.index or 0) == 0:
            driver.cuDeviceGetAttribute(ctypes.byref(found), SAME_ADDRESS, handle)
    return bool(found.value)


def not_at_host_address(device: torch.device) -> KvcliError:
    """Make the error of a device that sees registered memory elsewhere."""
    return KvcliError(
        f"{device} does not see pinned host memory at the host's address, where kernels read KV",
        "use --device cpu, or a GPU and driver with cudaDevAttrCanUseHostPointerForRegisteredMem",
    )


class CudaHostRegistrar:
    """Registers host memory with a CUDA device, which then reads and writes it directly, at the same address.

    Raises:
        KvcliError: the device would see it at another address.
        RuntimeError: the system or the device refuses. Memory that could not be unregistered stays registered.
    """

    def __init__(self, device: torch.device):
        self.device = device

    def settle(self) -> None:
        """Move this thread near the device from now on, as far as the process may."""
        # Not every system places threads or tells where a device is; memory can be pinned from anywhere.
        with suppress(AttributeError, OSError, RuntimeError, ValueError):
            cpus = nearby_cpus(self.device) & os.sched_getaffinity(0)
            if cpus:
                os.sched_setaffinity(0, cpus)  # 0: of this thread alone

    def register(self, address: int, size: int) -> None:
        """Pin `size` bytes from `address` on."""
        if not reads_host_addresses(self.device):
            raise not_at_host_address(self.device)
        with torch.cuda.device(self.device):  # a new thread starts with device 0
            # 0 is cudaHostRegisterDefault: pinned and mapped for every device, where addresses are unified.
            _check(torch.cuda.cudart().cudaHostRegister(address, size, 0))  # type: ignore[no-untyped-call]

    def unregister(self, address: int) -> None:
        """Unpin the memory registered at `address`, once the device has done all its work."""
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()  # kernels may still read this memory, and no event tells
            _check(torch.cuda.cudart().cudaHostUnregister(address))  # type: ignore[no-untyped-call]


Wanted = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor."""


class HostAllocator(Protocol):
    """Allocates tensors in host memory that a device reads and writes directly."""

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, urgent: bool = False) -> Future[Tensor]:
        """Request an uninitialised tensor."""


class PinnedAllocator:
    """Allocates pinned tensors and frees them with their last view, in order, on a thread of its own.

    Urgent requests come before all others: the beginning of a prompt must not wait for the room of its KV. `registered`
    are the mappings that a device knows, by address. A mapping is unmapped only after the device has forgotten it: one
    that cannot be unregistered is tried again when the next one is freed, or after `unpinning_held`. A request whose
    future is dropped before its turn is never served.
    """

    def __init__(self, registrar: CudaHostRegistrar):
        self.registrar = registrar
        self.registered: dict[int, mmap.mmap] = {}
        self._freed: set[int] = set()  # addresses to unregister
        self._unpinning = threading.Lock()
        self._queue: SimpleQueue[_Request | int | None] = SimpleQueue()  # an address: to free; None: wakes the thread
        self._urgent: SimpleQueue[_Request] = SimpleQueue()  # served first
        self._ahead: defaultdict[Wanted, deque[Future[Tensor]]] = defaultdict(deque)
        self._closing = False
        # An executor would finish its queue before the process may end, which takes seconds after Ctrl-C.
        self._worker = threading.Thread(target=self._work, name="pinning", daemon=True)
        self._worker.start()

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, urgent: bool = False) -> Future[Tensor]:
        """Request an uninitialised tensor, aligned to a system page; waiting for it may raise KvcliError.

        Raises:
            KvcliError: no more memory can be pinned (will not fit); raised by the future.
        """
        prepared = self._ahead[shape, dtype]
        return prepared.popleft() if prepared else self._ask(shape, dtype, urgent)

    def prepare(self, wanted: Iterable[Wanted]) -> None:
        """Start allocating what will be requested, in this order; it is kept for those requests, or until `forget`."""
        for shape, dtype in wanted:
            self._ahead[shape, dtype].append(self._ask(shape, dtype))

    def forget(self) -> None:
        """Drop what was prepared but not requested."""
        self._ahead.clear()

    @contextmanager
    def unpinning_held(self) -> Iterator[None]:
        """Unpin nothing within this context; what is being unpinned is waited for, what is freed meanwhile waits.

        While a CUDA graph is captured nobody may wait for the device, as unpinning does: it would break the capture.
        Pinning goes on, for which the device is not waited for.
        """
        try:
            with self._unpinning:
                yield
        finally:
            self._queue.put(None)  # wakes the thread, for what waits

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
        """Stop the thread after its current task, and unregister all memory, which stays usable on the host.

        A process that ends without this call leaves both to the system; nothing is lost.
        """
        self._closing = True
        self._queue.put(None)
        self._worker.join()
        self._unregister(*self.registered)

    def __deepcopy__(self, memo: dict[int, Any]) -> PinnedAllocator:
        """Return itself: a copy of a cache allocates where the cache does."""
        return self

    def _work(self) -> None:
        self.registrar.settle()
        while not self._closing:
            task = self._queue.get()
            while not self._closing and not self._urgent.empty():  # no other thread takes from it
                self._serve(self._urgent.get())
            if self._closing:
                break
            if isinstance(task, _Request):
                self._serve(task)
            else:
                self._unregister(*() if task is None else (task,))

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
            memory = memoryview(mapped)  # held only by the tensor and its views
            tensor = torch.frombuffer(memory, dtype=dtype).view(shape)
            # Touched pages are pinned faster, and a device's launches wait while memory is being registered.
            tensor.view(-1).view(torch.uint8)[:: mmap.PAGESIZE].zero_()
            address = tensor.data_ptr()
            self.registrar.register(address, size)
        except (OSError, RuntimeError) as error:
            held = sum(map(len, self.registered.values()))
            raise KvcliError(
                f"the system does not pin {format_bytes(size)} of host memory on top of the {format_bytes(held)} "
                f"pinned already: {error}",
                "raise ulimit -l and the container's memory limit, or use a shorter context or fewer sequences",
                ExitCode.WILL_NOT_FIT,
            ) from error
        self.registered[address] = mapped
        # A view may die on any thread at any time, where waiting for the device is impossible: the worker frees it.
        weakref.finalize(memory, self._queue.put, address).atexit = False
        return tensor

    def _unregister(self, *addresses: int) -> None:
        """Unregister these and what could not be before; where unpinning is held, its end wakes the thread again."""
        self._freed.update(addresses)
        if not self._unpinning.acquire(blocking=False):
            return
        try:
            for address in tuple(self._freed):
                with suppress(RuntimeError):  # the device still knows it: keep it mapped
                    self.registrar.unregister(address)
                    self._freed.remove(address)
                    del self.registered[address]  # unmaps it, unless a tensor holds it
        finally:
            self._unpinning.release()


class _Request(NamedTuple):
    future: weakref.ref[Future[Tensor]]  # weak: a caller that drops it no longer wants the memory
    shape: tuple[int, ...]
    dtype: torch.dtype


def _check(code: Any) -> None:
    """Raise RuntimeError if a call of the CUDA runtime returned an error code."""
    if int(code):
        raise torch.cuda.CudaError(int(code))


@functools.cache
def pinned_allocator(device: torch.device) -> PinnedAllocator:
    """Return this process's allocator for a CUDA device, whose thread ends before the interpreter does."""
    allocator = PinnedAllocator(CudaHostRegistrar(device))
    atexit.register(allocator.close)
    return allocator


BUFFER_BYTES = 8 << 20
"""Size of a buffer: one layer's recall in a step mostly fits; longer ones overlap gathering and copying."""


class PinnedStaging:
    """Two pinned buffers that the host gathers into and the device copies from, in turn.

    The host fills one while the device copies the other. Before it fills a buffer again it waits for the event recorded
    (`record`) after that buffer's last copy.
    """

    def __init__(self, allocator: PinnedAllocator, record: Callable[[], torch.cuda.Event]):
        self.allocator, self.record = allocator, record
        self._copied: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    def upload(self, target: Tensor, gather: Callable[[Tensor, slice], None]) -> None:
        """Fill `target` [m, ..] on the device, in the order of the current stream.

        `gather(rows, part)` must write the contents of `target[part]` to `rows`, on the host.
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
        """Return itself: a copy of a cache uses the same buffers."""
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
    """Return this process's buffers for a CUDA device."""
    return PinnedStaging(pinned_allocator(device), lambda: torch.cuda.current_stream(device).record_event())


HUGE_PAGE = 2 << 20  # bytes, on most systems


def mapping(size: int, *advice: str) -> mmap.mmap:
    """Map `size` >= 1 zero bytes, with further `advice` to the system by the names of its constants.

    Raises MemoryError if the system has no room for them.
    """
    try:
        # Mappings share no system page: two registrations with a device must not meet in one.
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise MemoryError(f"the system gives no {size:,} bytes") from error
    for name in ("MADV_HUGEPAGE", *advice):
        with suppress(AttributeError, OSError):  # not every system knows all of it
            memory.madvise(getattr(mmap, name))
    return memory


def host_memory(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Allocate a tensor in a mapping of its own, which ends with its last view."""
    size = math.prod(shape) * dtype.itemsize
    with torch.inference_mode(False):
        return torch.frombuffer(mapping(size), dtype=dtype).view(*shape) if size else torch.empty(*shape, dtype=dtype)


def ready(tensor: Tensor) -> Future[Tensor]:
    """Wrap memory that is there in a future."""
    future: Future[Tensor] = Future()
    future.set_result(tensor)
    return future
