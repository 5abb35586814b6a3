"""Clocks of a run that is taken apart: spans of the model's own layers, and timelines of a GPU.

Clocks inside a step cost time, so they are there in that run alone. `projections` are the parts of the attention
modules (linear layers, norms of queries and keys) and the head, `mlp` is what else a decoder layer is made of, its
norms included. Rotary arithmetic and residual additions are no modules and stay with the host's part.

On a GPU the host's clock only sees launches. There a span lies between two CUDA events on the stream that is current
where it begins and ends, so it is the time that the device took, including what it waited for; a lane is a stream. The
host does not wait until the spans are asked for. A captured graph has no spans inside: `graph_trace.py` reads its
kernels.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from typing_extensions import override

from kvcli.models.devices import Place, Placement
from kvcli.models.geometry import attention_modules
from kvcli.models.layers import decoder_of
from kvcli.telemetry.timeline import Span, Timeline


@contextmanager
def module_spans(model: PreTrainedModel, timeline: Timeline) -> Iterator[None]:
    """Time the modules of `model` on `timeline`, by phase; leaves the model as it was."""
    before: list[tuple[nn.Module, Callable[..., Any] | None]] = []
    try:
        for phase, name, layer, module in _modules(model):
            before.append((module, module.__dict__.get("forward")))
            module.forward = _timed(module.forward, timeline, phase, {"module": name, "layer": layer})
        yield
    finally:
        for module, forward in reversed(before):
            if forward is None:
                del module.forward  # back to the method of the class
            else:
                module.forward = forward


def _modules(model: PreTrainedModel) -> Iterator[tuple[str, str, int, nn.Module]]:
    """Phase, name, layer and module of everything that is timed; none of them lies within another."""
    attention = set(attention_modules(model))
    layers: list[nn.Module] = list(decoder_of(model).layers)  # type: ignore[arg-type]
    for index, layer in enumerate(layers):
        for phase, name, module in _parts(layer, attention):
            yield phase, name, index, module
    yield "projections", "head", len(layers), model.get_output_embeddings()  # type: ignore[no-untyped-call]


def _parts(module: nn.Module, attention: set[nn.Module]) -> Iterator[tuple[str, str, nn.Module]]:
    for name, child in module.named_children():
        if child in attention:
            yield from (("projections", part, each) for part, each in child.named_children())
        elif attention.isdisjoint(child.modules()):
            yield "mlp", name, child
        else:
            yield from _parts(child, attention)


def _timed(forward: Callable[..., Any], timeline: Timeline, phase: str, details: dict[str, Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with timeline.span(phase, **details):
            return forward(*args, **kwargs)

    return run


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


def recording(place: Place, nvtx: bool = False) -> Timeline:
    """Make a timeline that records: by events on a GPU, with NVTX ranges if `nvtx`, else by the host's clock."""
    if place.type != "cuda" or isinstance(place, Placement):
        return Timeline(enabled=True)
    return MarkedTimeline(place) if nvtx else DeviceTimeline(place)
