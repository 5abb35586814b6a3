"""A captured step taken apart: the kernels of its replays, by phase.

Inside a CUDA graph there are no clocks; the profiler's trace says when each kernel ran. What kernel belongs to which
phase follows from its name where it is one of ours, and from its place in the step where it is a matrix product: they
come layer by layer, those of attention first, as many as are left when layers are fused. Anything else goes with what
ran before it.

Phases overlap. A moment at which a kernel of the step's own lane runs is that kernel's; what retrieval does at the same
time is hidden. A moment that retrieval has for itself is exposed, and one at which nothing runs is the host's.
"""

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from kvcli.bench.phases import STEP, StepParts
from kvcli.models.geometry import attention_modules
from kvcli.models.layers import decoder_of
from kvcli.runtime.fused import gated_of, projections_of
from kvcli.telemetry.timeline import Span

# Names of the Triton kernels (`kvcli.kernels`), and how they begin in a trace. What indexes the newest token, or what
# it has completed, is offload: one kernel does that and writes out.
_PHASE_OF = {
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
BY_PLACE: tuple[str, ...] = ("_norm_kernel", "_add_norm_kernel", "_rotate_kernel", "_unpack_kernel")
BY_PLACE += ("_packed_gemv_kernel", "_packed_gemm_kernel")
"""Triton kernels of several phases: products have their order, others go with what ran before them."""
_RETRIEVAL = ("correction", "score", "select", "recall", "offload")
_PRODUCT = re.compile(r"gemm|gemv|cutlass|cublas|nvjet|xmma", re.IGNORECASE)
_REDUCTION = re.compile(r"splitk_?reduce", re.IGNORECASE)  # the second half of a product that is split, "..._splitK"
_CHOICE = re.compile(r"maxops", re.IGNORECASE)  # of argmax, and of a maximum with its place

# A replay has at least so many kernels: what has fewer was launched by itself.
_FEWEST = 16


class Kernel(NamedTuple):
    """A kernel or copy that ran from `start` to `end`, in microseconds."""

    name: str
    stream: int
    start: float
    end: float


@contextmanager
def traced() -> Iterator[list[list[Kernel]]]:
    """Record what the device does inside; the list that is given then holds the kernels of every replay, in order."""
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


def products_of(model: PreTrainedModel, foretold: Collection[int] = ()) -> list[str]:
    """Say the phase of every matrix product of a fused step, in order: of each layer's attention and MLP, the head's.

    The layer before one that is `foretold` its query makes that first. To be asked while the modules are as they came.
    """
    attention, phases = attention_modules(model), list[str]()
    telling = {attention[layer - 1] for layer in foretold}
    for layer in decoder_of(model).layers:  # type: ignore[union-attr]
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
    """Find the phase of each kernel of a step; `products` as `products_of` has them.

    Where the step has another number of products (experts, say), all of them count as the MLP's.
    """
    found = [bool(_PRODUCT.search(kernel.name)) and not _REDUCTION.search(kernel.name) for kernel in step]
    coming = iter(products if sum(found) == len(products) else ["mlp"] * sum(found))
    phases, before = [], "mlp"
    for kernel, is_product in zip(step, found, strict=True):
        own = next((phase for name, phase in _PHASE_OF.items() if kernel.name.startswith(name)), None)
        if own is None:
            before = next(coming) if is_product else "sampling" if _CHOICE.search(kernel.name) else before
            own = before
        phases.append(own)
    return phases


def parts_of(replays: Sequence[Sequence[Kernel]], products: Sequence[str]) -> list[StepParts]:
    """Take every step apart; it lasts until the next one begins, the last one until its end."""
    ends = [after[0].start for _, after in pairwise(replays)] + [max(k.end for k in step) for step in replays[-1:]]
    return [_swept(step, phases_of(step, products), end) for step, end in zip(replays, ends, strict=True)]


def spans_of(replays: Sequence[Sequence[Kernel]], products: Sequence[str]) -> list[Span]:
    """The steps, and their kernels as spans named by phase; a lane is a stream."""
    spans = []
    for step in replays:
        for kernel, phase in zip(step, phases_of(step, products), strict=True):
            details = {"kernel": kernel.name}
            spans.append(Span(phase, f"stream {kernel.stream}", kernel.start, kernel.end, kernel.stream, details))
        spans.append(Span(STEP, "run", step[0].start, max(kernel.end for kernel in step)))
    return spans


def _swept(step: Sequence[Kernel], phases: Sequence[str], end: float) -> StepParts:
    """Give every moment of a step to a phase, and what ran beside it to that phase's hidden time."""
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
