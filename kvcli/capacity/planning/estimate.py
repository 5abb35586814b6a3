"""Estimate the time of a prefill and of a decode step.

The least time of a step is its roofline (`kvcli.capacity.roofline`). The expected time comes from running a few layers
here with random weights (`probe`) and extrapolating to all layers and to the whole context. For another machine nothing
can be run, so the roofline is all there is.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import torch
from transformers import PreTrainedConfig

from kvcli.capacity.planning.probe import PROMPT, Probe, few_layers, kinds_of, probe
from kvcli.capacity.roofline import PHASES, MachineRates, Work, layer_work, least_seconds, step_work
from kvcli.inputs.profiles import Profile
from kvcli.memory.tiers import Footprint
from kvcli.methods.contract import AnyMethod
from kvcli.models.devices import Place, Placement
from kvcli.models.geometry import LayerGeometry, ModelGeometry, build_on_meta
from kvcli.models.loading import describe
from kvcli.models.streamed import WeightsOn, WeightStreaming
from kvcli.models.weights import ON_LOADING, WeightForm


@dataclass(frozen=True)
class Machine:
    """The machine of a plan: free bytes by pool of memory and its rates, None if unknown.

    `here` is True for this machine, on which layers can be run. If the model's layers lie on several devices,
    `placement` maps them; rates are those of the first.
    """

    device: torch.device
    free: dict[str, int]
    rates: MachineRates | None
    here: bool
    placement: Placement | None = None

    @property
    def place(self) -> Place:
        """The device, or the placement on several."""
        return self.placement or self.device


@dataclass(frozen=True)
class PlannedRun:
    """The model of a plan: its config, and its shapes and sizes in `dtype`, or in a form of weights.

    `path` has its files, if there are any.
    """

    config: PreTrainedConfig
    dtype: torch.dtype
    geometry: ModelGeometry
    path: Path | None = None

    @property
    def weights(self) -> str:
        """The form that weights are brought into on loading, auto if they stay as they are."""
        form = self.geometry.form
        return "auto" if form is None or form.stored else form.name

    def with_weights(self, weights: str) -> PlannedRun:
        """Return the same model with its weights in another form."""
        return PlannedRun.of(self.config, self.dtype, ON_LOADING[weights])

    def with_weights_on(self, where: WeightsOn, limit: int | None = None) -> PlannedRun:
        """Return the same model with streamed weights; raises what `WeightStreaming.of` raises."""
        shapes, geometry = build_on_meta(self.config, self.dtype), self.geometry
        streaming = WeightStreaming.of(shapes, geometry.form, geometry.weight_bytes, where, limit)
        return replace(self, geometry=replace(geometry, streaming=streaming))

    @classmethod
    def of(
        cls, config: PreTrainedConfig, dtype: torch.dtype, form: WeightForm | None = None, path: Path | None = None
    ) -> PlannedRun:
        """Derive the geometry from the config, and from files at `path` whose weights are quantised, if any.

        Raises:
            KvcliError: the architecture is not supported.
        """
        return cls(config, dtype, describe(config, dtype, form, path), path)


@dataclass(frozen=True)
class DiskReads:
    """A disk of `rate` bytes a second, which holds the part `missing` of what is fetched.

    That is the part of the KV that the host's cache does not hold, which steps miss if they request all KV evenly.
    """

    rate: float
    missing: float

    @classmethod
    def of(cls, rate: float | None, held: Footprint) -> DiskReads | None:
        """Derive the reads of a sequence that holds this much in files; None if it holds nothing there."""
        if rate is None or not held.disk:
            return None
        return cls(rate, max(0.0, 1 - held.host / held.disk))


@dataclass(frozen=True)
class Times:
    """Seconds of the prefill of all prompts and of a decode step, with the roofline of the step and of its phases.

    `tried` of `layers` layers were run, on `tried_length` tokens; if it is 0, `prefill` and `step` are rooflines, too.
    `missed` is the part of the selected pages that those layers recalled. It is None if nothing was selected; all
    selected pages are then assumed to be recalled. A step reads the bytes `from_disk` and waits for them, except in a
    roofline, where reads overlap with the step.
    """

    prefill: float
    step: float
    roofline: float
    phases: dict[str, tuple[Work, float]]
    layers: int
    missed: float | None = None
    tried: int = 0
    tried_length: int = 0
    from_disk: int = 0


def estimate(
    subject: PlannedRun,
    machine: Machine,
    profile: Profile,
    method: AnyMethod,
    context: int,
    batch: int,
    disk: DiskReads | None = None,
    disk_rate: float | None = None,
) -> Times | None:
    """Estimate the times of `batch` prompts of `context` tokens; None if the rates are unknown.

    `method` is the method object of one of them, on the meta device. A `disk` holds part of what it fetches. Streamed
    weights are read once a prompt (or each of its windows) and once a step, while others are computed;
    from a disk of `disk_rate`, or at once if that is unknown.
    """
    rates, itemsize = machine.rates, subject.dtype.itemsize
    if rates is None:
        return None
    form = subject.geometry.form
    possible = machine.here and (form is None or form.widened or form.made is not None)
    tried = _try(subject, machine, profile, context, batch) if possible else None
    missed = None if tried is None else tried.missed
    work = step_work(subject.geometry, itemsize, [(method, context + 1)] * batch, 1.0 if missed is None else missed)
    phases = {phase: work[phase].seconds(rates) for phase in PHASES}
    least = least_seconds(work, rates, machine.device.type == "cuda")
    if tried is None:
        prefill, step = prefill_work(subject.geometry, method, context).seconds(rates), least
    else:
        prefill = _prefill(tried, rates, subject, method, context)
        step = _step(tried, rates, subject, method, context, batch)
    # Layers that ran faster than the rates allow show that the rates are too low: they were measured while other
    # programs used the machine, or the layers fit into the processor's caches.
    scale = min(1.0, step / least)
    from_disk = 0 if disk is None else round(disk.missing * sum(part.to_device for part in work.values()))
    reading = 0.0 if disk is None else from_disk / disk.rate
    read_prompt, read_step, passes = 0.0, 0.0, 1
    if (streaming := subject.geometry.streaming) is not None:
        rate = rates.to_device.median if streaming.where == "host" else disk_rate
        per_step = streaming.per_step(subject.geometry.parts.active, batch)
        if rate is not None:
            read_prompt, read_step = (streaming.per_pass + streaming.of_experts) / rate, per_step / rate
        passes = -(-context // (method.prefill_window or context))
        from_disk += per_step if streaming.where == "disk" else 0
    return Times(
        prefill=batch * max(prefill, passes * read_prompt),
        step=max(step, read_step, reading) if tried is None else max(step, read_step) + reading,
        roofline=max(scale * least, read_step, reading),
        phases={phase: (work[phase], scale * seconds) for phase, seconds in phases.items()},
        layers=subject.geometry.depth,
        missed=missed,
        tried=0 if tried is None else len(tried.layers),
        tried_length=0 if tried is None else tried.length,
        from_disk=from_disk,
    )


def prefill_work(geometry: ModelGeometry, method: AnyMethod, length: int) -> Work:
    """Return the work of a prefill: every weight is read once, every token passes all layers and attends causally.

    The head sees the last token, or all tokens if the method wants their logits.
    """
    parts = geometry.parts
    linear = parts.counts.projections + parts.passed
    attention = sum(_attention_operations(layer, method, length) for layer in geometry.layers)
    judged = length if method.wants_logits else 1
    return Work(geometry.weight_bytes, operations=2 * (length * linear + judged * parts.counts.head) + attention)


def _attention_operations(layer: LayerGeometry, method: AnyMethod, length: int) -> int:
    """Count the operations of a layer's attention over a prompt, by windows if the method prefills so."""
    seen = length if layer.window is None else min(layer.window, length)
    if method.prefill_window is not None and layer.index in method.retrieval:
        seen = min(seen, method.prefill_window + getattr(method.config, "budget", length))
    pairs = seen * (seen + 1) // 2 + (length - seen) * (seen // 2 if layer.chunked else seen)  # query and key before it
    return 4 * layer.num_heads * layer.head_dim * pairs


def _try(subject: PlannedRun, machine: Machine, profile: Profile, context: int, batch: int) -> Probe | None:
    """Run a few layers; None if memory does not hold them."""
    model = subject.config, subject.geometry, subject.dtype
    found = few_layers(*model, profile, context, batch, machine.free)
    if found is None:
        return None
    config, length = found
    return probe(profile, config, subject.dtype, machine.device, length, batch, subject.geometry.form)


def _step(tried: Probe, rates: MachineRates, subject: PlannedRun, method: AnyMethod, context: int, batch: int) -> float:
    """Extrapolate a step: layers take the time of their kind, and additional KV the time of reading it."""
    geometry, dense = subject.geometry, method.config.leading_dense_layers
    taken: defaultdict[str, list[float]] = defaultdict(list)
    for kind, seconds in zip(kinds_of(tried.geometry, dense), tried.layers, strict=True):
        taken[kind].append(seconds)

    def moving(layer: LayerGeometry, length: int) -> float:
        traffic, group = method.traffic(layer.index, length), layer.num_heads // layer.num_kv_heads
        work = layer_work(traffic, group, subject.dtype.itemsize, tried.missed or 0.0)
        moved = sum(part.read / tried.read + part.to_device / rates.to_device.median for part in work.values())
        return (1 + layer.readers) * moved

    beyond = sum(moving(layer, context + 1) - moving(layer, tried.length + 1) for layer in geometry.layers)
    head = (geometry.parts.head - tried.geometry.parts.head) / rates.read.median
    return tried.rest + head + sum(fmean(taken[kind]) for kind in kinds_of(geometry, dense)) + batch * beyond


def _prefill(tried: Probe, rates: MachineRates, subject: PlannedRun, method: AnyMethod, context: int) -> float:
    """Extrapolate the prefill of one prompt: linear layers by the token, attention by its operations."""
    layers = subject.geometry.layers
    linear = tried.prompt_layer * subject.geometry.depth * context / PROMPT
    attention = sum(
        _attention_operations(layer, method, context) - _attention_operations(layer, method, PROMPT) * context / PROMPT
        for layer in layers
    )
    heads = 2 * (context - 1) * subject.geometry.parts.counts.head if method.wants_logits else 0
    return linear + (max(0.0, attention) + heads) / rates.matmul.median
