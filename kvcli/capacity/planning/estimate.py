"""How long a prefill and a decode step will take.

The least time of a step follows from what it has to move and the machine's rates (`kvcli.capacity.floors`,
`kvcli.capacity.ceilings`). The time to expect is that of a few layers run here with made-up weights (`probe`), carried
over to all layers and to the whole context. Another machine cannot be tried: for it the least time is all that can be
said.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from transformers import PreTrainedConfig

from kvcli.capacity.ceilings import Ceilings
from kvcli.capacity.floors import PHASES, Work, layer_work, least_seconds, step_work
from kvcli.capacity.planning.probe import PROMPT, Probe, probe, shortened
from kvcli.inputs.profiles import Profile
from kvcli.methods.base import Method
from kvcli.models.geometry import LayerGeometry, ModelGeometry, geometry_of

# Weights and KV of the layers that are tried: more than any cache holds, and made up in a second or two.
_TRIED_BYTES = 512 << 20


@dataclass(frozen=True)
class Machine:
    """What is planned for: free bytes by pool of memory, rates measured or given, and whether it can be tried."""

    device: torch.device
    free: dict[str, int]
    ceilings: Ceilings | None
    here: bool


@dataclass(frozen=True)
class PlannedRun:
    """The model: its config, and what follows from it in `dtype`."""

    config: PreTrainedConfig
    dtype: torch.dtype
    geometry: ModelGeometry

    @classmethod
    def of(cls, config: PreTrainedConfig, dtype: torch.dtype) -> PlannedRun:
        """Work the geometry out; raises what `geometry_of` raises."""
        return cls(config, dtype, geometry_of(config, dtype))


@dataclass(frozen=True)
class Times:
    """Seconds of the prefill of all prompts and of a decode step, at least of a step, and the work of its phases, too.

    They stand on `tried` of `layers` layers at `tried_length` tokens; 0: they are least times. `missed` is the part of
    the selected pages that was recalled in these; None where nothing was selected: then all is taken to be recalled.
    """

    prefill: float
    step: float
    floor: float
    floors: dict[str, tuple[Work, float]]
    layers: int
    missed: float | None = None
    tried: int = 0
    tried_length: int = 0


def estimate(
    subject: PlannedRun, machine: Machine, profile: Profile, method: Method[Any, Any], context: int, batch: int
) -> Times | None:
    """Say what `batch` prompts of `context` tokens take; None without rates. `method` is one of them, on meta."""
    ceilings, itemsize = machine.ceilings, subject.dtype.itemsize
    if ceilings is None:
        return None
    tried = _try(subject, machine, profile, context, batch) if machine.here else None
    missed = None if tried is None else tried.missed
    work = step_work(subject.geometry, itemsize, [(method, context + 1)] * batch, 1.0 if missed is None else missed)
    floors = {phase: (work[phase], work[phase].seconds(ceilings)) for phase in PHASES}
    prompt = prefill_work(subject.geometry, method, context, itemsize)
    least = least_seconds(work, ceilings, machine.device.type == "cuda")
    if tried is None:
        return Times(batch * prompt.seconds(ceilings), least, least, floors, len(subject.geometry.layers))
    return Times(
        prefill=batch * _prefill(tried, ceilings, subject, method, context),
        step=_step(tried, ceilings, subject, method, context, batch),
        floor=least,
        floors=floors,
        layers=len(subject.geometry.layers),
        missed=missed,
        tried=len(tried.layers),
        tried_length=tried.length,
    )


def prefill_work(geometry: ModelGeometry, method: Method[Any, Any], length: int, itemsize: int) -> Work:
    """What reading a prompt needs: each weight read, each token through all layers, attention to what it sees."""
    parts = geometry.parts
    linear = parts.projections + parts.mlp + round(parts.experts * parts.active)
    attention = sum(_attention_operations(layer, method, length) for layer in geometry.layers)
    return Work(geometry.weight_bytes, operations=2 * (length * linear + parts.head) // itemsize + attention)


def _attention_operations(layer: LayerGeometry, method: Method[Any, Any], length: int) -> int:
    """Operations of a layer's attention over a prompt, read as the method wants it."""
    seen = length if layer.window is None else min(layer.window, length)
    if method.prefill_window is not None and layer.index in method.retrieval:
        seen = min(seen, method.prefill_window + getattr(method.config, "budget", length))
    pairs = seen * (seen + 1) // 2 + (length - seen) * seen  # of a query and a key that it sees
    return 4 * layer.num_heads * layer.head_dim * pairs


def _try(subject: PlannedRun, machine: Machine, profile: Profile, context: int, batch: int) -> Probe | None:
    """Run as many layers, at as long a context, as is quickly done; None where not even those few have room."""
    geometry, parts, dense = subject.geometry, subject.geometry.parts, profile.settings.leading_dense_layers
    layer_bytes = (parts.projections + parts.mlp + parts.experts) // len(geometry.layers)
    widest = max(layer.num_kv_heads * layer.head_dim for layer in geometry.layers)
    token_bytes = 2 * widest * subject.dtype.itemsize * batch
    kinds = [_kind(layer, dense) for layer in geometry.layers]
    fewest = 1 + max(kinds.index(kind) for kind in set(kinds))  # one of each kind, the others that come before it too
    ample = 2 * getattr(profile.settings, "budget", 0) + 1024  # tokens: something has to be left out
    length = min(context, max(ample, (_TRIED_BYTES // fewest - layer_bytes) // token_bytes))
    layers = min(len(kinds), max(fewest, _TRIED_BYTES // (layer_bytes + length * token_bytes)))
    if 2 * layers * (layer_bytes + length * token_bytes) > min(machine.free.values()):
        return None
    config = shortened(subject.config, layers, subject.dtype.itemsize)
    return probe(profile, config, subject.dtype, machine.device, length, batch)


def _kind(layer: LayerGeometry, dense: int) -> str:
    """What decides how a layer attends."""
    return "sliding" if layer.window is not None else "dense" if layer.index < dense else "retrieval"


def _step(
    tried: Probe, ceilings: Ceilings, subject: PlannedRun, method: Method[Any, Any], context: int, batch: int
) -> float:
    """Every layer takes what those of its kind took; what it moves beyond them comes at the rate of attention."""
    geometry, dense = subject.geometry, method.config.leading_dense_layers
    taken: defaultdict[str, list[float]] = defaultdict(list)
    for layer, seconds in zip(tried.geometry.layers, tried.layers, strict=True):
        taken[_kind(layer, dense)].append(seconds)

    def moving(layer: LayerGeometry, length: int) -> float:
        traffic, group = method.traffic(layer.index, length), layer.num_heads // layer.num_kv_heads
        work = layer_work(traffic, group, subject.dtype.itemsize, tried.missed or 0.0)
        return sum(part.read / tried.read + part.to_device / ceilings.to_device.median for part in work.values())

    beyond = sum(moving(layer, context + 1) - moving(layer, tried.length + 1) for layer in geometry.layers)
    head = (geometry.parts.head - tried.geometry.parts.head) / ceilings.read.median
    return tried.rest + head + sum(fmean(taken[_kind(layer, dense)]) for layer in geometry.layers) + batch * beyond


def _prefill(tried: Probe, ceilings: Ceilings, subject: PlannedRun, method: Method[Any, Any], context: int) -> float:
    """Every token takes what those of the prompt that was tried took; attention to more than it had, at full rate."""
    layers = subject.geometry.layers
    linear = tried.prompt_layer * len(layers) * context / PROMPT
    attention = sum(
        _attention_operations(layer, method, context) - _attention_operations(layer, method, PROMPT) * context / PROMPT
        for layer in layers
    )
    return linear + max(0.0, attention) / ceilings.matmul.median
