"""Work that is captured in CUDA graphs, in one piece or in several, and done again."""

import gc
from collections.abc import Callable
from typing import Protocol

import torch
from typing_extensions import override

from kvcli.compat import end_broken_capture
from kvcli.runtime.gpu.streams import PRIORITIES

WARM_UP = 3
"""Times that work is tried out before it is captured: libraries choose their kernels then, and Triton compiles."""


class CaptureError(Exception):
    """Work cannot be captured; the text says why. All is as it was before, so that it can be launched."""


class Recorder(Protocol):
    """Captures work, piece after piece, and does it again."""

    def record(self, rehearse: Callable[[], None], work: Callable[[], None]) -> None:
        """Capture work, which calls `cut` where a piece ends; `rehearse` does the same without pieces.

        Raises:
            CaptureError: it cannot be captured.
        """

    def cut(self) -> None:
        """End a piece and begin the next one."""

    def replay(self, piece: int) -> None:
        """Do the work of a piece, the first one being 0."""


class CudaRecorder(Recorder):
    """Pieces are CUDA graphs of one memory pool: what one leaves, the next ones find."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device, priority=PRIORITIES["main"])  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.graph_pool_handle()
        self.graphs: list[torch.cuda.CUDAGraph] = []

    @override
    def record(self, rehearse: Callable[[], None], work: Callable[[], None]) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for _ in range(WARM_UP):
                rehearse()
            gc.collect()  # memory that is freed while a graph is captured may break it off
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
            try:
                self._begin()
                work()
                self.graphs[-1].capture_end()
            except BaseException as error:
                end_broken_capture(self.graphs[-1], self.device, self.pool)
                self.graphs.clear()
                if isinstance(error, RuntimeError):
                    raise CaptureError(f"{error}".strip().partition("\n")[0]) from error
                raise
        torch.cuda.current_stream(self.device).wait_stream(self.stream)

    @override
    def cut(self) -> None:
        self.graphs[-1].capture_end()
        self._begin()

    @override
    def replay(self, piece: int) -> None:
        self.graphs[piece].replay()

    def _begin(self) -> None:
        self.graphs.append(torch.cuda.CUDAGraph())
        # Another thread may be pinning memory meanwhile, which would break off a capture that minds all threads.
        self.graphs[-1].capture_begin(pool=self.pool, capture_error_mode="thread_local")
