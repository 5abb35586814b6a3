"""The candidates of a profile: a method in kvcli's own loop, or transformers' caches, on the same weights.

The time of a step depends on how many tokens are held, not on their values, with one exception: selection, correction
and recall follow the queries. Random KV saves a prefill that takes minutes on a CPU; tokens that are read (a document,
or seeded ones) lead to the model's own selections.

Peers run under transformers' `generate`. Their KV is always random, because the time of full attention does not depend
on its values. kvpress is not among them: its releases (0.5.5) need transformers below 5.3, which cannot be installed
together with the version that kvcli needs.
"""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Any, Protocol

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Cache, DynamicCache
from transformers.generation.streamers import BaseStreamer
from typing_extensions import override

from kvcli.bench.phases import Kernel, StepParts, module_spans, parts_of, products_of, spans_of, traced
from kvcli.capacity.memory import planned_method
from kvcli.capacity.planning.probe import RandomKV
from kvcli.capacity.roofline import Work, step_work
from kvcli.inputs.profiles import Profile, resolve_profile
from kvcli.inputs.variants import Variant, ablated
from kvcli.memory.disk_tier import DiskTier
from kvcli.memory.tiers import Footprint
from kvcli.methods import get_method
from kvcli.methods.card import BLOCKING, GRAPH, gpu_step_of
from kvcli.methods.contract import AnyMethod
from kvcli.models.devices import Place, Placement
from kvcli.models.layers import cache_argument
from kvcli.models.loading import Model
from kvcli.runtime.decode import decode
from kvcli.runtime.engine import Engine, engine
from kvcli.runtime.pipeline import Pipeline, stepper_for
from kvcli.runtime.sampling import Sampling
from kvcli.telemetry.counters import Count, Counters
from kvcli.telemetry.timeline import Timeline

# The token that a context ends with: any will do, as long as it is the same in all runs.
_FIRST_TOKEN = 1


@dataclass(frozen=True)
class Entry:
    """One method under one profile; `kind` is "method", or "ablation" if a part of it is switched off."""

    label: str
    kind: str
    profile: Profile


def entries(compared: Sequence[Variant], ablate: bool) -> tuple[Entry, ...]:
    """List the methods to compare; with `ablate` each method comes after the ablations that it declares."""
    found = []
    for variant in compared:
        parts = ablated(variant) if ablate else []
        found += [Entry(each.name, "ablation", each.profile) for each in parts]
        found.append(Entry(variant.name, "method", variant.profile))
    return tuple(found)


@dataclass(frozen=True)
class Load:
    """The load of a run: `batch` sequences after `context` tokens each, `steps` timed ones after `warmup` others."""

    context: int
    batch: int
    warmup: int
    steps: int

    @property
    def max_tokens(self) -> int:
        """Tokens of each sequence after its context, including the first one."""
        return 1 + self.warmup + self.steps

    @property
    def capacity(self) -> int:
        """Tokens of each sequence at the end."""
        return self.context + self.max_tokens


class ContextSource(Protocol):
    """Provides the methods of a run with their context."""

    def methods(self, engine: Engine, profile: Profile, load: Load, timeline: Timeline) -> list[AnyMethod]:
        """Make one method object per sequence, its context read; their spans go to `timeline`."""

    def prefill_ms(self, profile: Profile) -> float | None:  # noqa: ARG002
        """Return the milliseconds of reading the context for a profile; None if it was not read."""
        return None


class RandomContext(ContextSource):
    """Gives noise to the methods instead of reading."""

    def __init__(self, noise: RandomKV):
        self.noise = noise

    @override
    def methods(self, engine: Engine, profile: Profile, load: Load, timeline: Timeline) -> list[AnyMethod]:
        made = []
        for row in range(load.batch):
            context = engine.context(load.context, load.max_tokens, timeline=timeline, track=f"sequence {row}")
            made.append(engine.method(profile, context))
        self.noise.fill(made, engine.layers, load.context)
        return made


class ReadContext(ContextSource):
    """Reads a prompt once for all profiles and keeps the result; every run continues copies of it.

    Methods that read exactly do it together, and each has the time of all of them; windows are read for each method.
    """

    def __init__(self, ids: Sequence[int], profiles: Sequence[Profile]):
        self.ids, self.profiles = ids, profiles
        self._kept: dict[str, AnyMethod] = {}
        self._taken: dict[str, float] = {}

    @override
    def methods(self, engine: Engine, profile: Profile, load: Load, timeline: Timeline) -> list[AnyMethod]:
        if not self._kept:
            contexts = [engine.context(len(self.ids), load.max_tokens) for _ in self.profiles]
            made = [engine.method(each, context) for each, context in zip(self.profiles, contexts, strict=True)]
            self._kept = {each.hash: method for each, method in zip(self.profiles, made, strict=True)}
            exact = [key for key, method in self._kept.items() if method.prefill_window is None]
            for keys in ([exact] if exact else []) + [[key] for key in self._kept if key not in exact]:
                self._taken |= dict.fromkeys(keys, self._read(engine, [self._kept[key] for key in keys]))
        master = self._kept[profile.hash]
        copies = [master.fork(Counters(len(engine.layers)), f"sequence {row}") for row in range(load.batch)]
        for copy in copies:
            copy.context.timeline = timeline
        return copies

    @override
    def prefill_ms(self, profile: Profile) -> float | None:
        return self._taken.get(profile.hash)

    def _read(self, engine: Engine, methods: Sequence[AnyMethod]) -> float:
        """Read the prompt into methods, and wait for the result; return the milliseconds."""
        begun = time.perf_counter()
        engine.prefill(self.ids, methods)[0].cpu()
        return 1000 * (time.perf_counter() - begun)


def seeded_tokens(count: int, vocab_size: int, seed: int) -> list[int]:
    """Draw token ids in place of a text."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (count,), generator=generator).tolist()


@dataclass(frozen=True)
class TimedRun:
    """One run: the wall time of each timed step, and further results of a method's loop.

    `parts` are those of every step, including warm-up, if they do not come from the timeline; empty if the step could
    not be taken apart. `kv_bytes` is what full attention reads at the last step. `prefill_ms` is the time of the
    prompt, if it was read. `pipeline` is how the steps ran, `notices` why: see `report.Case`.
    """

    steps_ms: list[float]
    counters: Sequence[Counters] = ()
    footprint: Footprint | None = None
    work: dict[str, Work] = field(default_factory=dict)
    kv_bytes: int = 0
    parts: list[StepParts] | None = None
    prefill_ms: float | None = None
    pipeline: str | None = None
    notices: Sequence[str] = ()


class Candidate(Protocol):
    """Something that decodes, and can be run again and again from the same start."""

    @property
    def label(self) -> str:
        """A name that no other candidate has."""

    @property
    def kind(self) -> str:
        """The kind, as in `report.Case.kind`."""

    @property
    def profile(self) -> Profile | None:
        """Method and settings, for those of kvcli."""

    def pipeline(self, load: Load) -> str | None:
        """Return how its steps run, as in `report.Case.pipeline`."""

    def run(self, load: Load, timeline: Timeline) -> TimedRun:
        """Decode once. If `timeline` is on, take the step apart on it, if that is possible at all."""


def pipeline_on(place: Place, profile: Profile, disk: DiskTier | None = None, method: AnyMethod | None = None) -> str:
    """Return how the steps of a profile run, as in `report.Case.pipeline`: blocking on several devices or with a disk.

    `method` is that of a sequence, if known.
    """
    captured = place.type == "cuda" and not isinstance(place, Placement) and disk is None
    return gpu_step_of(get_method(profile.method), method or profile.settings) if captured else BLOCKING


@dataclass(frozen=True)
class Decoding:
    """A method of kvcli, with the context from `source`."""

    label: str
    kind: str
    profile: Profile
    model: Model
    source: ContextSource
    disk: DiskTier | None = None

    def pipeline(self, load: Load) -> str:
        """Return how steps are to run on the model's device; a run tells how they did."""
        model = self.model
        method = planned_method(self.profile, model.geometry, load.capacity, model.dtype, load.context)
        return pipeline_on(model.place, self.profile, self.disk, method)

    def run(self, load: Load, timeline: Timeline) -> TimedRun:
        """Decode by the loop of `kvcli generate`, which is what is timed."""
        replays: list[list[Kernel]] = []
        promised, notices = self.pipeline(load), list[str]()
        with ExitStack() as stack:
            stack.enter_context(self.disk or nullcontext())
            ready = stack.enter_context(engine(self.model, [load.capacity], notices.append, self.disk))
            methods = self.source.methods(ready, self.profile, load, timeline)
            for method in methods:
                method.context.counters.warmup = load.warmup
            sampling = Sampling(max_tokens=load.max_tokens, ignore_eos=True)
            sequences = [
                ready.sequence(method, sampling, index=row, sample=row, source=self.label, first_token=_FIRST_TOKEN)
                for row, method in enumerate(methods)
            ]
            notices.clear()  # of what the method needed to know
            wanted: Pipeline = "blocking" if promised == BLOCKING else "overlapped"
            stepper = stepper_for(ready.hook, ready.rope, sequences, wanted, ready.notice)
            ran_by, phased = stepper.ran_by, promised != GRAPH  # phases of slots overlap, and are not timed
            if timeline.enabled and ran_by == GRAPH:
                replays = stack.enter_context(traced())
            elif timeline.enabled and ran_by == BLOCKING:  # there are no modules between pieces
                stack.enter_context(module_spans(self.model.module, timeline))
            for _ in decode(stepper, sequences, timeline if phased else Timeline()):
                pass
        counters = [sequence.counters for sequence in sequences]
        asked, missed = (_total(counters, count) for count in (Count.PAGES_REQUESTED, Count.MISSES))
        held = [(method, sequence.length) for method, sequence in zip(methods, sequences, strict=True)]
        work = step_work(self.model.geometry, self.model.dtype.itemsize, held, missed / asked if asked else 1.0)
        kv_bytes = self.model.dtype.itemsize * sum(
            layer.grows * sequence.length or layer.token_size * min(sequence.length, layer.window or 0)
            for layer in self.model.geometry.layers
            for sequence in sequences
        )
        footprint = sum((method.footprint() for method in methods), Footprint())
        products = products_of(self.model.module, predicted_by(methods[0])) if replays else []
        parts = None if phased else parts_of(replays, products)
        timeline.spans.extend(spans_of(replays, products))
        prefill_ms = self.source.prefill_ms(self.profile)
        known = counters, footprint, work, kv_bytes, parts, prefill_ms, ran_by, notices
        return TimedRun(sequences[0].decode_ms[load.warmup :], *known)


def predicted_by(method: AnyMethod) -> list[int]:
    """List the layers of a method whose queries are predicted a layer ahead."""
    plan = method.step_plan
    return [layer for layer in method.retrieval if layer] if plan is not None and plan.when == "ahead" else []


def _total(counters: Sequence[Counters], count: Count) -> int:
    return sum(layer[count] for each in counters for step in each.counts for layer in step)


_RESIDENT, _OFFLOADED = "transformers", "transformers offloaded"


class TokenClock(BaseStreamer):
    """Records when the tokens of each step arrive on the host: `times` in seconds, the first one that of the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    @override
    def put(self, value: torch.Tensor) -> None:
        self.times.append(perf_counter())

    @override
    def end(self) -> None: ...


@dataclass(frozen=True)
class Transformers:
    """`generate` with a `DynamicCache`: resident, or offloaded to host memory layer by layer."""

    model: Model
    noise: RandomKV
    offloading: bool = False
    kind: str = "peer"
    profile: None = None

    @property
    def label(self) -> str:
        """The name of the cache."""
        return _OFFLOADED if self.offloading else _RESIDENT

    def pipeline(self, load: Load) -> None:
        """Return None: its steps are transformers' own."""

    @torch.inference_mode()
    def run(self, load: Load, timeline: Timeline) -> TimedRun:  # noqa: ARG002
        """Decode once; the phases of the step are not timed."""
        clock, cache = TokenClock(), self.cache(load)
        for layer in self.model.geometry.layers:
            k, v = self.noise.kv(layer, load.context)
            cache.update(*(x[None].expand(load.batch, -1, -1, -1) for x in (k, v)), layer.index)
        ids = torch.ones(load.batch, load.context + 1, dtype=torch.long, device=self.model.device)
        generate: Any = self.model.module.generate
        with self.attention():
            generate(
                ids,
                attention_mask=torch.ones_like(ids),
                **{cache_argument(self.model.module): cache},
                max_new_tokens=load.max_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                streamer=clock,
            )
        steps = [1000 * (later - earlier) for earlier, later in pairwise(clock.times)]
        return TimedRun(steps[len(steps) - load.steps :])

    def cache(self, load: Load) -> Cache:  # noqa: ARG002
        """Make an empty cache."""
        return DynamicCache(config=self.model.module.config, offloading=self.offloading)

    def attention(self) -> AbstractContextManager[None]:
        """Choose the kernels of attention: all but cuDNN, which torch prefers on some GPUs.

        cuDNN plans every length anew, which takes tens of milliseconds per step.
        """
        return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def peer_profiles(device: torch.device) -> dict[str, Profile]:
    """List the caches that run on a device: by label, a profile that needs as much memory.

    The offloaded cache needs CUDA.
    """
    resident = {_RESIDENT: resolve_profile("full")}
    return resident | {_OFFLOADED: resolve_profile("offload")} if device.type == "cuda" else resident


def left_out(device: torch.device) -> list[str]:
    """List the peers that cannot run here, each with the reason."""
    offloaded = [] if device.type == "cuda" else [f"{_OFFLOADED}: it needs CUDA"]
    return [*offloaded, "kvpress: its releases need transformers below 5.3"]
