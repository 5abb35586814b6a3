"""Capture work in CUDA graphs, in one piece or in several, and replay it."""

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.compat import end_broken_capture
from kvcli.memory.pinned import pinned_allocator
from kvcli.runtime.device_transfer import Carrier

# The streams of a step: a main stream, others in parallel, and points that they wait for.

Point = Any
"""A place in a stream that others can wait for."""

Work = Callable[[], None]

PRIORITIES = {"main": -1, "correction": -2}
"""Streams that a step waits for go before the recall streams; a lower number is more urgent."""


class Streams(ABC):
    """The streams of one step after another."""

    @abstractmethod
    def mark(self) -> Point:
        """Return the point that the main stream has reached."""

    @abstractmethod
    def submit(self, name: str, work: Work, after: Sequence[Point]) -> Point:
        """Do work in a stream, once all points of `after` are reached; return the point at which it is done."""

    @abstractmethod
    def wait(self, point: Point) -> None:
        """Let the main stream wait for a point."""

    @abstractmethod
    def join(self) -> None:
        """Let the main stream wait for everything: called at the end of a step, and before it goes to another device.

        All earlier points are reached then: to wait for one is to wait for nothing.
        """

    @abstractmethod
    def forget(self) -> None:
        """Drop all earlier points: the capture that they belonged to was aborted."""


class SerialStreams(Streams):
    """Does all work at once, in the order in which it is given: for a CPU, which has nothing to overlap with."""

    @override
    def mark(self) -> Point: ...

    def submit(self, name: str, work: Work, after: Sequence[Point]) -> Point:  # noqa: ARG002
        """See `Streams.submit`."""
        work()

    @override
    def wait(self, point: Point) -> None: ...

    @override
    def join(self) -> None: ...

    @override
    def forget(self) -> None: ...


class CudaStreams(Streams):
    """A CUDA stream for each stream, forked from the current one; may be captured in graphs, one after another.

    A graph must not wait for an event of another one, so a point is an event and the number of joins before it. `delay`
    is called in a stream before its work, for tests that make streams late at random.
    """

    def __init__(self, device: torch.device, delay: Work = lambda: None):
        self.device, self.delay = device, delay
        self.streams: dict[str, torch.cuda.Stream] = {}
        self.forked: set[str] = set()  # since the last join; a graph must not wait for a stream that is not in it
        self.joins = 0

    @override
    def mark(self) -> Point:
        return torch.cuda.current_stream(self.device).record_event(), self.joins

    @override
    def submit(self, name: str, work: Work, after: Sequence[Point]) -> Point:
        # Work that names no point begins with the main stream's.
        if name not in self.streams:
            self.streams[name] = torch.cuda.Stream(self.device, priority=PRIORITIES.get(name, 0))  # type: ignore[no-untyped-call]
        stream = self.streams[name]
        for event, _ in [point for point in after if self._counts(point)] or [self.mark()]:
            stream.wait_event(event)
        self.forked.add(name)
        with torch.cuda.stream(stream):
            self.delay()
            work()
            return stream.record_event(), self.joins

    @override
    def wait(self, point: Point) -> None:
        if self._counts(point):
            torch.cuda.current_stream(self.device).wait_event(point[0])

    @override
    def join(self) -> None:
        for name in sorted(self.forked):
            torch.cuda.current_stream(self.device).wait_stream(self.streams[name])
        self.forget()

    @override
    def forget(self) -> None:
        self.forked.clear()
        self.joins += 1

    def _counts(self, point: Point) -> bool:
        return bool(point[1] == self.joins)


def streams_for(device: torch.device) -> Streams:
    """Choose the streams for a device."""
    return CudaStreams(device) if device.type == "cuda" else SerialStreams()


WARM_UP = 3
"""Rehearsals before a capture, in which libraries choose their kernels and Triton compiles."""


class CaptureError(Exception):
    """Work cannot be captured; the text says why. Everything is as it was before, so that it can be launched."""


class Recorder(Carrier, Protocol):
    """Captures work, piece after piece, and replays it."""

    def record(
        self,
        rehearse: Callable[[], None],
        work: Callable[[], None],
        leave: Callable[[torch.device], None] = lambda _: None,
    ) -> None:
        """Capture work, which calls `cut` at the end of each piece; `rehearse` does the same without pieces.

        Work may go from device to device (`Carrier`); before it leaves one, `leave` joins the streams there.

        Raises:
            CaptureError: it cannot be captured.
        """

    def cut(self) -> None:
        """End a piece and begin the next one."""

    def replay(self, piece: int) -> None:
        """Do the work of a piece, counted from 0."""


@dataclass
class GraphSegment:
    """Work between two transfers: a graph of one device, and the tensors copied to the device before it (from, to)."""

    device: torch.device
    graph: torch.cuda.CUDAGraph
    arriving: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class CudaRecorder(Recorder):
    """Records a piece as a CUDA graph, or several if it goes from device to device: no graph spans two.

    All graphs of a device share one memory pool: what one leaves, the next ones find. Tensors that cross are copied
    between graphs, each time to the same place. Work begins on the first device.
    """

    def __init__(self, *devices: torch.device):
        self.devices = devices
        self.streams = {
            device: torch.cuda.Stream(device, priority=PRIORITIES["main"])  # type: ignore[no-untyped-call]
            for device in devices
        }
        self.pools = {device: torch.cuda.graph_pool_handle() for device in devices}
        self.pieces: list[list[GraphSegment]] = []
        self.leave: Callable[[torch.device], None] = lambda _: None

    @override
    def record(
        self,
        rehearse: Callable[[], None],
        work: Callable[[], None],
        leave: Callable[[torch.device], None] = lambda _: None,
    ) -> None:
        self.leave = leave
        for device, stream in self.streams.items():
            stream.wait_stream(torch.cuda.current_stream(device))
        with ExitStack() as within:
            for device in reversed(self.devices):  # the first one is then the current one
                within.enter_context(torch.cuda.stream(self.streams[device]))
            for _ in range(WARM_UP):
                rehearse()
            for device in self.streams:  # other threads unpin what is freed; they would wait for the device meanwhile
                within.enter_context(pinned_allocator(device).unpinning_held())
            gc.collect()  # memory that is freed during a capture may abort it
            for device in self.devices:
                torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
            try:
                self.pieces.append([])
                self._begin(self.devices[0])
                work()
                self._last.graph.capture_end()
            except BaseException as error:
                self._break_off()
                if isinstance(error, RuntimeError):
                    raise CaptureError(f"{error}".strip().partition("\n")[0]) from error
                raise
        for device, stream in self.streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)

    @override
    def cut(self) -> None:
        device = self._last.device
        self._last.graph.capture_end()
        self.pieces.append([])
        self._begin(device)

    @override
    def go_to(self, device: torch.device) -> torch.device:
        before = self._last.device
        if device != before:
            self.leave(before)
            torch.cuda.set_device(before)  # a capture ends on the stream on which it began
            self._last.graph.capture_end()
            torch.cuda.set_device(device)
            self._begin(device)
        return before

    @override
    def bring(self, given: Tensor, device: torch.device) -> Tensor:
        self.go_to(device)
        if given.device == device:
            return given
        there = torch.empty_like(given, device=device)
        self._last.arriving.append((given, there))
        return there

    @override
    def replay(self, piece: int) -> None:
        for stretch in self.pieces[piece]:
            for given, there in stretch.arriving:
                there.copy_(given, non_blocking=True)  # in the order of both devices' streams
            stretch.graph.replay()

    @property
    def _last(self) -> GraphSegment:
        return self.pieces[-1][-1]

    def _begin(self, device: torch.device) -> None:
        self.pieces[-1].append(GraphSegment(device, torch.cuda.CUDAGraph()))
        # Another thread may be pinning memory meanwhile, which would abort a capture that minds all threads.
        self._last.graph.capture_begin(pool=self.pools[device], capture_error_mode="thread_local")

    def _break_off(self) -> None:
        device = self._last.device
        if len(self.devices) > 1:
            torch.cuda.set_device(device)
        end_broken_capture(self._last.graph, device, self.pools[device])
        self.pieces.clear()
