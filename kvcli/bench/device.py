"""The clock of a GPU: CUDA events where the host's clock only sees launches, and NVTX ranges for other tools.

An event is recorded on the stream that is current where a span begins and ends, so that a span is what the device did
there, its waits included; a stream is a lane. Nothing waits until the spans are asked for. A captured graph has no
spans inside: its kernels are for `kernels.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvcli.telemetry.timeline import Span, Timeline


class DeviceTimeline(Timeline):
    """Spans from CUDA events."""

    def __init__(self, device: torch.device):
        super().__init__(enabled=True)
        self._device = device
        self._start = self._event()
        self._pending: list[tuple[str, str, Any, Any, int, dict[str, Any]]] = []

    @property
    def spans(self) -> list[Span]:
        """See `Timeline.spans`; waits for the device."""
        torch.cuda.synchronize(self._device)
        for name, track, start, end, lane, details in self._pending:
            begun, ended = (1000 * self._start.elapsed_time(event) for event in (start, end))
            self._spans.append(Span(name, track, begun, ended, lane, details))
        self._pending.clear()
        return self._spans

    @contextmanager
    def _timed(self, name: str, track: str, details: dict[str, Any]) -> Iterator[None]:
        lane = torch.cuda.current_stream(self._device).stream_id
        start = self._event()
        try:
            yield
        finally:
            self._pending.append((name, track, start, self._event(), lane, details))

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


class MarkedTimeline(DeviceTimeline):
    """Shows every span as an NVTX range, too, under the same name."""

    @contextmanager
    def _timed(self, name: str, track: str, details: dict[str, Any]) -> Iterator[None]:
        with torch.cuda.nvtx.range(name), super()._timed(name, track, details):
            yield
