"""Take a step apart: by clocks inside it, or by the kernels of a captured one, into the phase of every moment.

Clocks inside a step cost time, so only the run that is taken apart has them. Inner spans count for themselves and not
for the spans around them, so that the parts of a step are disjoint and add up to it exactly. Time that no span claims
is the host's: Python, launches, rotary and residual arithmetic.

The step waits for only one lane, its own. Work on other lanes (threads, streams) is overlapped: it is reported
separately, except where the step was waiting for the very same phase.

On a GPU the host's clock only sees launches. There a span lies between two CUDA events on the stream that is current
when it begins and ends, so it is the time that the device took, including its waits; a lane is a stream. The host does
not wait until the spans are requested.

Inside a CUDA graph there are no clocks; the profiler's trace says when each kernel of a replay ran. The name of one of
our kernels gives its phase. A matrix product's place in the step gives its phase: products come layer by layer, those
of attention first, as many as are left when layers are fused. Anything else goes with the kernel before it. A moment at
which a kernel of the step's own lane runs is that kernel's; simultaneous retrieval is hidden. A moment at which only
retrieval runs is exposed, and one at which nothing runs is the host's.
"""

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from typing_extensions import override

from kvcli.capacity.roofline import PHASES
from kvcli.models.auto import layers_of
from kvcli.models.devices import Place, Placement
from kvcli.models.geometry import attention_modules, reader_modules
from kvcli.runtime.fused import gated_of, projections_of
from kvcli.telemetry.timeline import Span, Timeline

STEP = "step"
# A token is appended to a method's KV, which is part of attending; with KV in host memory it is the offload.
_APPEND, _OFFLOAD = "append", "offload"
_PHASE_OF = {STEP: "host", _APPEND: "attention", "prune": "select", **{phase: phase for phase in PHASES}}


@dataclass(frozen=True)
class StepParts:
    """One step in microseconds: the disjoint parts that it waits for, by phase, and the work hidden behind them."""

    exposed: dict[str, float]
    hidden: dict[str, float]


def known_spans() -> frozenset[str]:
    """Return the names of spans that belong to a phase."""
    return frozenset(_PHASE_OF)


def phase_of(name: str, offloaded: bool) -> str:
    """Return the phase of a span called `name`, of a method that keeps KV in host memory or not."""
    return _OFFLOAD if offloaded and name == _APPEND else _PHASE_OF.get(name, "host")


def step_parts(spans: Sequence[Span], offloaded: bool) -> list[StepParts]:
    """Take the steps among `spans` apart, in order; `offloaded` as in `phase_of`."""
    steps = sorted((span for span in spans if span.name == STEP), key=lambda span: span.start)
    return [_parts(step, spans, offloaded) for step in steps]


def _parts(step: Span, spans: Sequence[Span], offloaded: bool) -> StepParts:
    inside = [span for span in spans if span is not step and step.start <= span.start and span.end <= step.end]
    own = [span for span in inside if span.lane == step.lane]
    exposed: dict[str, float] = defaultdict(float)
    for name, time in exclusive(step, own).items():
        exposed[phase_of(name, offloaded)] += time
    waits: dict[str, list[Span]] = defaultdict(list)
    for span in own:
        waits[phase_of(span.name, offloaded)].append(span)
    hidden: dict[str, float] = defaultdict(float)
    for span in inside:
        if span.lane != step.lane:
            phase = phase_of(span.name, offloaded)
            hidden[phase] += span.end - span.start - sum(_overlap(span, wait) for wait in waits[phase])
    return StepParts(dict(exposed), dict(hidden))


def exclusive(outer: Span, inner: Sequence[Span]) -> dict[str, float]:
    """Return each name's time within `outer`, without deeper spans; `inner` is nested, in the order of its ends."""
    time: dict[str, float] = defaultdict(float)
    at, around = outer.start, [outer]

    def close(until: float) -> None:
        nonlocal at
        while len(around) > 1 and around[-1].end <= until:
            span = around.pop()
            time[span.name] += span.end - at
            at = span.end

    nested = list(reversed(inner))  # of two with the same extent the outer one ended last
    nested.sort(key=lambda span: (span.start, -span.end))
    for span in nested:
        close(span.start)
        time[around[-1].name] += span.start - at
        at = span.start
        around.append(span)
    close(outer.end)
    time[outer.name] += outer.end - at
    return dict(time)


def _overlap(one: Span, other: Span) -> float:
    return max(0.0, min(one.end, other.end) - max(one.start, other.start))


def middle(steps: Sequence[tuple[float, StepParts]]) -> list[tuple[float, StepParts]]:
    """Return the half of the steps, each with its time, around the median, without those that others disturbed."""
    ordered = sorted(steps, key=lambda step: step[0])
    drop = len(ordered) // 4
    return ordered[drop : len(ordered) - drop]


@contextmanager
def module_spans(model: PreTrainedModel, timeline: Timeline) -> Iterator[None]:
    """Time the modules of `model` on `timeline`, by phase; restore the model at the end.

    `projections` are the parts of the attention modules (linear layers, norms of queries and keys) and the head; `mlp`
    is the rest of a decoder layer, including its norms.
    """
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
    """Yield phase, name, layer and module of everything that is timed; none of them lies within another."""
    attention = {*attention_modules(model), *reader_modules(model)}
    layers: list[nn.Module] = list(layers_of(model))
    for index, layer in enumerate(layers):
        for phase, name, module in _parts_of_module(layer, attention):
            yield phase, name, index, module
    yield "projections", "head", len(layers), model.get_output_embeddings()  # type: ignore[no-untyped-call]


def _parts_of_module(module: nn.Module, attention: set[nn.Module]) -> Iterator[tuple[str, str, nn.Module]]:
    for name, child in module.named_children():
        if child in attention:
            yield from (("projections", part, each) for part, each in child.named_children())
        elif attention.isdisjoint(child.modules()):
            yield "mlp", name, child
        else:
            yield from _parts_of_module(child, attention)


def _timed(forward: Callable[..., Any], timeline: Timeline, phase: str, details: dict[str, Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with timeline.span(phase, **details):
            return forward(*args, **kwargs)

    return run


class DeviceTimeline(Timeline):
    """Records spans by CUDA events."""

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
    """Records spans by CUDA events, and shows them as NVTX ranges of the same names."""

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


# The Triton kernels (`kvcli.kernels`), by the beginnings of their names in a trace. The kernel that indexes the newest
# token, or the page that it has completed, counts as offload: it does that and writes out. Attention that recalls its
# pages itself counts as attention.
_KERNEL_PHASES = {
    "_correct_kernel": "correction",
    **dict.fromkeys(("_score_kernel", "_pool_kernel", "_token_kernel", "_one_bit_kernel"), "score"),
    **dict.fromkeys(("_project_kernel", "_kept_kernel", "_rotate_newest_kernel"), "score"),
    **dict.fromkeys(("_topk_kernel", "_near_kernel", "_nucleus_kernel", "_room_kernel", "_replace_kernel"), "select"),
    **dict.fromkeys(("_resolve_kernel", "_gather_kernel", "_gather_quantised_kernel"), "recall"),
    **dict.fromkeys(("_rebuild_kernel", "_bring_kernel"), "recall"),
    **dict.fromkeys(("_filled_kernel", "_write_quantised_kernel", "_store_kernel", "_leaving_kernel"), "offload"),
    **dict.fromkeys(("_newest_kernel", "_quantise_filled_kernel", "_quantise_kernel", "_prompt_kernel"), "offload"),
    **dict.fromkeys(("_attend_kernel", "_append_kernel", "_move_kernel", "_tile_kernel"), "attention"),
    "_silu_kernel": "mlp",
}
BY_PLACE = ("_norm_kernel", "_add_norm_kernel", "_rotate_kernel", "_unpack_kernel", "_packed_gemv_kernel")
"""Triton kernels of several phases: products have their order, others go with what ran before them."""
_RETRIEVAL = ("correction", "score", "select", "recall", "offload")
_PRODUCT = re.compile(r"gemm|gemv|cutlass|cublas|nvjet|xmma", re.IGNORECASE)
_REDUCTION = re.compile(r"splitk_?reduce", re.IGNORECASE)  # the second half of a split product, "..._splitK"
_CHOICE = re.compile(r"maxops", re.IGNORECASE)  # of argmax, and of a maximum with its place

# A replay has at least this many kernels: smaller groups were launched individually.
_FEWEST = 16


class Kernel(NamedTuple):
    """A kernel or copy that ran from `start` to `end`, in microseconds."""

    name: str
    stream: int
    start: float
    end: float


@contextmanager
def traced() -> Iterator[list[list[Kernel]]]:
    """Record the device's work inside; the yielded list then holds the kernels of every replay, in order."""
    replays: list[list[Kernel]] = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        yield replays
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        replays.extend(replays_of(json.loads(path.read_text())["traceEvents"]))


def replays_of(events: Iterable[dict[str, Any]]) -> list[list[Kernel]]:
    """Group the device's events of a Chrome trace by the graph launch that they come from, in order."""
    groups: dict[int, list[Kernel]] = defaultdict(list)
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            known, start = event["args"], float(event["ts"])
            kernel = Kernel(event["name"], int(known["stream"]), start, start + float(event["dur"]))
            groups[int(known["correlation"])].append(kernel)
    replays = [sorted(group, key=lambda kernel: kernel.start) for group in groups.values() if len(group) >= _FEWEST]
    return sorted(replays, key=lambda group: group[0].start)


def products_of(model: PreTrainedModel, predicted: Collection[int] = ()) -> list[str]:
    """List the phase of every matrix product of a fused step, in order: of each layer's attention and MLP, the head's.

    The layer before one in `predicted` makes that layer's query first. Call this while the modules are unchanged.
    """
    attention, phases = attention_modules(model), list[str]()
    telling = {attention[layer - 1] for layer in predicted}
    for layer in layers_of(model):
        modules = list(layer.modules())
        inner = {part for module in modules if module in attention for part in module.modules()}
        joined = {each for module in modules for each in projections_of(module)[1:]}
        joined |= {parts[1] for parts in map(gated_of, modules) if parts is not None}  # "up", which "gate" makes
        linears = [module for module in modules if isinstance(module, nn.Linear) and module not in joined]
        own, ahead = (
            sum(module in those for module in among) for those, among in ((inner, linears), (telling, modules))
        )
        phases += ["projections"] * (ahead + own) + ["mlp"] * (len(linears) - own)
    return [*phases, "projections"]


def phases_of(step: Sequence[Kernel], products: Sequence[str]) -> list[str]:
    """Find the phase of each kernel of a step; `products` as `products_of` returns them.

    If the step has another number of products (experts, say), all of them count as the MLP's.
    """
    found = [bool(_PRODUCT.search(kernel.name)) and not _REDUCTION.search(kernel.name) for kernel in step]
    coming = iter(products if sum(found) == len(products) else ["mlp"] * sum(found))
    phases, before = [], "mlp"
    for kernel, is_product in zip(step, found, strict=True):
        own = next((phase for name, phase in _KERNEL_PHASES.items() if kernel.name.startswith(name)), None)
        if own is None:
            before = next(coming) if is_product else "sampling" if _CHOICE.search(kernel.name) else before
            own = before
        phases.append(own)
    return phases


def parts_of(replays: Sequence[Sequence[Kernel]], products: Sequence[str]) -> list[StepParts]:
    """Take every step apart; a step lasts until the next one begins, the last one until its end."""
    ends = [after[0].start for _, after in pairwise(replays)] + [max(k.end for k in step) for step in replays[-1:]]
    return [_swept(step, phases_of(step, products), end) for step, end in zip(replays, ends, strict=True)]


def spans_of(replays: Sequence[Sequence[Kernel]], products: Sequence[str]) -> list[Span]:
    """Return the steps, and their kernels as spans named by phase; a lane is a stream."""
    spans = []
    for step in replays:
        for kernel, phase in zip(step, phases_of(step, products), strict=True):
            details = {"kernel": kernel.name}
            spans.append(Span(phase, f"stream {kernel.stream}", kernel.start, kernel.end, kernel.stream, details))
        spans.append(Span(STEP, "run", step[0].start, max(kernel.end for kernel in step)))
    return spans


def _swept(step: Sequence[Kernel], phases: Sequence[str], end: float) -> StepParts:
    """Assign every moment of a step to a phase, and simultaneous work to its own phase's hidden time."""
    exposed: dict[str, float] = defaultdict(float)
    hidden: dict[str, float] = defaultdict(float)
    changes = sorted(
        (time, begins, index)
        for index, kernel in enumerate(step)
        for time, begins in ((kernel.start, True), (min(kernel.end, end), False))
    )
    running: dict[int, str] = {}  # in the order in which they began
    at = step[0].start
    for time, begins, index in [*changes, (end, False, -1)]:
        beside = set(running.values())
        own = [phase for phase in running.values() if phase not in _RETRIEVAL] or list(running.values())
        waited = own[-1] if own else "host"
        if time > at:
            exposed[waited] += time - at
            for phase in beside - {waited}:
                hidden[phase] += time - at
        at = time
        if begins:
            running[index] = phases[index]
        else:
            running.pop(index, None)
    return StepParts(dict(exposed), dict(hidden))
