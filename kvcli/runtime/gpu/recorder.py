"""Work that is captured in CUDA graphs, in one piece or in several, and done again."""

import gc
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.compat import end_broken_capture
from kvcli.runtime.crossing import Carrier
from kvcli.runtime.gpu.streams import PRIORITIES

WARM_UP = 3
"""Times that work is tried out before it is captured: libraries choose their kernels then, and Triton compiles."""


class CaptureError(Exception):
    """Work cannot be captured; the text says why. All is as it was before, so that it can be launched."""


class Recorder(Carrier, Protocol):
    """Captures work, piece after piece, and does it again."""

    def record(
        self,
        rehearse: Callable[[], None],
        work: Callable[[], None],
        leave: Callable[[torch.device], None] = lambda _: None,
    ) -> None:
        """Capture work, which calls `cut` where a piece ends; `rehearse` does the same without pieces.

        Work may go from device to device (`Carrier`); before it leaves one, `leave` joins the streams there.

        Raises:
            CaptureError: it cannot be captured.
        """

    def cut(self) -> None:
        """End a piece and begin the next one."""

    def replay(self, piece: int) -> None:
        """Do the work of a piece, the first one being 0."""


@dataclass
class Stretch:
    """Work between two crossings: a graph of one device, and what comes to the device before (from, to)."""

    device: torch.device
    graph: torch.cuda.CUDAGraph
    arriving: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class CudaRecorder(Recorder):
    """A piece is a CUDA graph, or several where it goes from device to device: no graph spans two.

    All graphs of a device have one memory pool: what one leaves, the next ones find. What crosses is copied between
    graphs, each time to the same place. The first device is the one where work begins.
    """

    def __init__(self, *devices: torch.device):
        self.devices = devices
        self.streams = {
            device: torch.cuda.Stream(device, priority=PRIORITIES["main"])  # type: ignore[no-untyped-call]
            for device in devices
        }
        self.pools = {device: torch.cuda.graph_pool_handle() for device in devices}
        self.pieces: list[list[Stretch]] = []
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
            gc.collect()  # memory that is freed while a graph is captured may break it off
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
    def _last(self) -> Stretch:
        return self.pieces[-1][-1]

    def _begin(self, device: torch.device) -> None:
        self.pieces[-1].append(Stretch(device, torch.cuda.CUDAGraph()))
        # Another thread may be pinning memory meanwhile, which would break off a capture that minds all threads.
        self._last.graph.capture_begin(pool=self.pools[device], capture_error_mode="thread_local")

    def _break_off(self) -> None:
        device = self._last.device
        if len(self.devices) > 1:
            torch.cuda.set_device(device)
        end_broken_capture(self._last.graph, device, self.pools[device])
        self.pieces.clear()
