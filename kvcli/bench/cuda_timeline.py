"""Timelines of a GPU: CUDA events, because the host's clock only sees launches, and NVTX ranges for other tools.

An event is recorded on the stream that is current where a span begins and ends, so a span is the time that the device
took there, including what it waited for; a lane is a stream. The host does not wait until the spans are asked for. A
captured graph has no spans inside: `graph_trace.py` reads its kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from typing_extensions import override

from kvcli.telemetry.timeline import Span, Timeline


class DeviceTimeline(Timeline):
    """Spans from CUDA events."""

    def __init__(self, device: torch.device):
        super().__init__(enabled=True)
        self._device = device
        self._start = self._event()
        self._pending: list[tuple[str, str, Any, Any, int, dict[str, Any]]] = []

    @property
    @override
    def spans(self) -> list[Span]:
        torch.cuda.synchronize(self._device)
        for name, track, start, end, lane, details in self._pending:
            begun, ended = (1000 * self._start.elapsed_time(event) for event in (start, end))
            self._spans.append(Span(name, track, begun, ended, lane, details))
        self._pending.clear()
        return self._spans

    @contextmanager
    @override
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
    """Spans from CUDA events that are shown as NVTX ranges of the same names, too."""

    @contextmanager
    @override
    def _timed(self, name: str, track: str, details: dict[str, Any]) -> Iterator[None]:
        with torch.cuda.nvtx.range(name), super()._timed(name, track, details):
            yield


def recording(device: torch.device, nvtx: bool = False) -> Timeline:
    """Make a timeline that records: by the host's clock on a CPU, by events on a GPU, with NVTX ranges if `nvtx`."""
    if device.type != "cuda":
        return Timeline(enabled=True)
    return MarkedTimeline(device) if nvtx else DeviceTimeline(device)
