"""The profiler: every method and profile, at every context and batch size.

Runs of several candidates are interleaved, round after round and every second one backwards, so that a change of the
machine's speed affects all of them alike; ratios are taken within a round. Runs that are split into phases are separate
ones, each right after a run without clocks inside, so that the two can be compared.
"""

import os
import statistics
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import product
from typing import Any

import torch

from kvcli.bench.phases import StepParts, middle, recording, step_parts
from kvcli.bench.report import Breakdown, Case, Counts, PhaseTime, ProfileReport, Spread
from kvcli.bench.runs import (
    Candidate,
    ContextSource,
    Decoding,
    Entry,
    Load,
    RandomContext,
    ReadContext,
    TimedRun,
    Transformers,
    left_out,
    peer_profiles,
    pipeline_on,
    seeded_tokens,
)
from kvcli.capacity import memory, unnamed
from kvcli.capacity.disk import disk_for
from kvcli.capacity.planning.probe import RandomKV
from kvcli.capacity.roofline import PHASES, MachineRates, RatesOverTime, equivalent_bandwidth, least_seconds
from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.options import DiskOptions
from kvcli.inputs.profiles import Profile
from kvcli.inputs.variants import scaled
from kvcli.memory.disk_tier import DiskTier
from kvcli.methods import get_method
from kvcli.models.devices import Place, all_of
from kvcli.models.loading import Checkpoint, Model, ModelSpec, open_checkpoint
from kvcli.runtime.sampling import Sampling
from kvcli.sizes import format_bytes
from kvcli.telemetry import report as telemetry_report
from kvcli.telemetry.counters import Count, Counters
from kvcli.telemetry.observer import Observer
from kvcli.telemetry.report import HeadCounts
from kvcli.telemetry.timeline import Span, Timeline

DEFAULT_CONTEXT = 8192
_WAY_OUT = "use a smaller --context, --batch-size or --dtype"


@dataclass(frozen=True)
class ProfileRequest:
    """What to profile, with `contexts` in tokens.

    The caches hold random KV; with `document` the model reads that text instead, cut to each context, and with `read`
    random tokens. Without `contexts` a document has its own length. A `disk`, if given, takes the KV of methods that
    keep some in host memory.
    """

    model: ModelSpec
    entries: tuple[Entry, ...]
    contexts: tuple[int, ...] = ()
    batches: tuple[int, ...] = (1,)
    steps: int = 32
    repeat: int = 5
    warmup: int = 2
    seed: int = 0
    document: str | None = None
    read: bool = False
    peers: bool = False
    ablate: bool = False
    nvtx: bool = False
    disk: DiskOptions | None = None


@dataclass(frozen=True)
class Outcome:
    """The report, and by the name of each case the spans of its last run that was split into phases."""

    report: ProfileReport
    spans: dict[str, list[Span]] = field(default_factory=dict)


def profile(request: ProfileRequest, observer: Observer) -> Outcome:
    """Run all cases; Ctrl-C ends the profile early with the cases so far (`finished` is False).

    A case that fails or does not fit among others is reported with its error.

    Raises:
        KvcliError: the model cannot be loaded, the document is too short for a context (usage), or no case fits into
            memory (will not fit).
    """
    observer.stage("load")
    checkpoint = open_checkpoint(request.model)
    own = [unnamed.native(each.profile, checkpoint.geometry) for each in request.entries]
    both = zip(request.entries, own, strict=True)
    entries = (was if now is was.profile else Entry(now.method, was.kind, now) for was, now in both)
    request = replace(request, entries=tuple(entries))
    ids = None if request.document is None else checkpoint.tokenizer(request.document, verbose=False)["input_ids"]
    loads = _loads(request, ids)
    if request.nvtx and checkpoint.device.type != "cuda":
        raise KvcliError("--nvtx needs a GPU, and there is none", "leave --nvtx out", ExitCode.USAGE)
    for option, asked in {"--peers": request.peers, "--nvtx": request.nvtx}.items():
        if asked and checkpoint.placement is not None:
            what = f"{option} works on one device, but layers are on {checkpoint.placement}"
            raise KvcliError(what, f"name one device, or leave {option} out", ExitCode.USAGE)
    tiers = {load: _tier(request, checkpoint, load) for load in loads}
    refused = _refused(request, checkpoint, loads, tiers)
    _warn(request, checkpoint, loads, observer)
    model = checkpoint.load()
    observer.stage("measure the machine")
    rates = RatesOverTime(model.device, model.dtype)
    noise = RandomKV(request.seed, model.device, model.dtype)
    cases: list[Case] = []
    spans: dict[str, list[Span]] = {}
    finished = True
    for load in loads:
        candidates = _candidates(request, load, model, noise, refused, ids, tiers[load])
        rounds = Rounds(candidates, load, rates, model.device.type == "cuda")
        observer.stage(f"{load.context:,} tokens, batch {load.batch}", len(candidates) * request.repeat)
        try:
            rounds.run_all(request.repeat, lambda: recording(model.place, request.nvtx), observer)
        except KeyboardInterrupt:
            finished = False
        cases += [case for (at, _), case in refused.items() if at == load]
        cases += rounds.cases()
        spans |= {case_name(label, load.context, load.batch): found for label, found in rounds.spans.items()}
        if not finished:
            break
    observer.stage_done()
    ceilings = MachineRates.over(rates.all).as_dict()
    report = ProfileReport(
        _environment(model.place), model.as_dict(), _options(request, loads), ceilings, cases, finished
    )
    return Outcome(report, spans)


def case_name(label: str, context: int, batch: int) -> str:
    """Name a case among all others."""
    return f"{label} · {context:,} tokens" + (f" · batch {batch}" if batch > 1 else "")


def _loads(request: ProfileRequest, ids: Sequence[int] | None) -> list[Load]:
    contexts = request.contexts or ((DEFAULT_CONTEXT,) if ids is None else (len(ids),))
    if ids is not None and len(ids) < max(contexts):
        raise KvcliError(
            f"the document has {len(ids):,} tokens, fewer than a context of {max(contexts):,}",
            "leave out --context or the document",
            ExitCode.USAGE,
        )
    return [Load(context, batch, request.warmup, request.steps) for context in contexts for batch in request.batches]


def _refused(
    request: ProfileRequest, checkpoint: Checkpoint, loads: Sequence[Load], tiers: Mapping[Load, DiskTier | None]
) -> dict[tuple[Load, str], Case]:
    """Find the cases that do not fit before the weights are read: by load and label, as they are reported."""
    refused: dict[tuple[Load, str], Case] = {}
    reads = request.read or request.document is not None
    peers = peer_profiles(checkpoint.device) if request.peers else {}
    wanted = [(entry.label, entry.kind, entry.profile) for entry in request.entries]
    wanted += [(label, "peer", profile) for label, profile in peers.items()]
    errors = []
    for load, (label, kind, profile) in product(loads, wanted):
        prompts = {load.context: load.batch + (1 if reads else 0)}  # a prompt stays with its copies
        try:
            sampling, tier = Sampling(max_tokens=load.max_tokens), _of(tiers[load], profile) if kind != "peer" else None
            memory.check(profile, checkpoint, prompts, sampling, way_out=_WAY_OUT, disk=tier)
        except KvcliError as error:
            errors += [] if kind == "peer" else [error]
            settings = pipeline = None
            if kind != "peer":
                settings, pipeline = profile.as_dict(), pipeline_on(checkpoint.place, profile, tier)
            refused[load, label] = Case(label, kind, load.context, load.batch, settings, pipeline, error=error.what)
    if len(errors) == len(loads) * len(request.entries):
        raise errors[0]
    for load in loads if reads else []:
        _check_together(request, checkpoint, load, tiers[load])
    return refused


def _tier(request: ProfileRequest, checkpoint: Checkpoint, load: Load) -> DiskTier | None:
    """Make the disk tier for one method after another, and for the prompts that they continue copies of."""
    profiles = [entry.profile for entry in request.entries]
    reads = request.read or request.document is not None
    kept = sum(profile.settings.on_host for profile in profiles) if reads else 0
    return disk_for(request.disk, profiles, checkpoint.device, load.batch + kept)


def _of(tier: DiskTier | None, profile: Profile) -> DiskTier | None:
    """Return the disk tier of a method that uses one."""
    return tier if profile.settings.on_host else None


def _check_together(request: ProfileRequest, checkpoint: Checkpoint, load: Load, tier: DiskTier | None) -> None:
    """Refuse to prefill a prompt for more methods than fit into memory together."""
    lengths = [load.context], load.max_tokens, 1
    each = [
        memory.need(*(entry.profile, checkpoint.geometry, checkpoint.dtype, *lengths), disk=_of(tier, entry.profile)).kv
        for entry in request.entries
    ]
    kept = sum(footprint.device + footprint.host for footprint in each)
    free = memory.available(checkpoint.device)["host"]
    if checkpoint.device.type == "cpu" and kept + checkpoint.geometry.held_bytes > free:
        raise KvcliError(
            f"the KV of {load.context:,} tokens for {len(each)} methods needs {format_bytes(kept)}, "
            f"but {format_bytes(free)} are free",
            "name fewer methods, or leave --read out",
            ExitCode.WILL_NOT_FIT,
        )


def _warn(request: ProfileRequest, checkpoint: Checkpoint, loads: Sequence[Load], observer: Observer) -> None:
    for peer in left_out(checkpoint.device) if request.peers else []:
        observer.notice(f"left out, {peer}")
    beyond = checkpoint.geometry.beyond_positions(max(load.capacity for load in loads), checkpoint.name)
    if beyond is not None:
        observer.notice(beyond)
    labelled = [(entry.label, entry.profile) for entry in request.entries]
    for line in scaled(labelled, min(load.context for load in loads)):
        observer.notice(line)
    for name in dict.fromkeys(entry.profile.method for entry in request.entries):
        if request.ablate and not get_method(name).ablation:
            observer.notice(f"--ablate: {name} has no parts to switch off")
    if request.ablate and checkpoint.device.type == "cpu":
        observer.notice("--ablate: on a CPU, the ablations of page copies and buffers make no difference")


def _candidates(
    request: ProfileRequest,
    load: Load,
    model: Model,
    noise: RandomKV,
    refused: Container[tuple[Load, str]],
    ids: Sequence[int] | None,
    tier: DiskTier | None,
) -> list[Candidate]:
    entries = [entry for entry in request.entries if (load, entry.label) not in refused]
    source: ContextSource = RandomContext(noise)
    if ids is not None or request.read:
        if ids is None:
            ids = seeded_tokens(load.context, model.geometry.vocab_size, request.seed)
        source = ReadContext(ids[: load.context], [entry.profile for entry in entries])
    methods = [
        Decoding(entry.label, entry.kind, entry.profile, model, source, _of(tier, entry.profile)) for entry in entries
    ]
    peers = [Transformers(model, noise, offloading) for offloading in (False, True)]
    offered = peer_profiles(model.device) if request.peers else ()
    return [*methods, *(peer for peer in peers if peer.label in offered and (load, peer.label) not in refused)]


def _environment(place: Place) -> dict[str, Any]:
    gpus = ", ".join(map(torch.cuda.get_device_name, all_of(place))) if place.type == "cuda" else None
    return telemetry_report.environment() | {
        "device": gpus or telemetry_report.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
    }


def _options(request: ProfileRequest, loads: Sequence[Load]) -> dict[str, object]:
    return {
        "kv": "read" if request.read or request.document is not None else "made up",
        "contexts": list(dict.fromkeys(load.context for load in loads)),
        "batch_sizes": list(request.batches),
        "steps": request.steps,
        "warmup": request.warmup,
        "repeat": request.repeat,
        "seed": request.seed,
        "kv_disk": None if request.disk is None else str(request.disk.folder),
    }


class Rounds:
    """Runs the candidates under `load`, round after round; `cases` can be called at any time, even after Ctrl-C.

    Rooflines come from the `rates` before and after a candidate's runs; `overlapped` as in `least_seconds`.
    """

    def __init__(self, candidates: Sequence[Candidate], load: Load, rates: RatesOverTime, overlapped: bool):
        self.candidates, self.load = candidates, load
        self.rates, self.overlapped = rates, overlapped
        self.measured: dict[str, list[MachineRates]] = {candidate.label: [] for candidate in candidates}
        self.medians: dict[str, list[float]] = {candidate.label: [] for candidate in candidates}
        self.last: dict[str, TimedRun] = {}
        self.spans: dict[str, list[Span]] = {}  # of the last run that was split into phases
        self.steps: dict[str, list[tuple[float, StepParts]]] = {}  # of all such runs
        self.disturbances: dict[str, list[float]] = {}
        self.errors: dict[str, str] = {}

    def run_all(self, repeat: int, recording: Callable[[], Timeline], observer: Observer) -> None:
        """Run every candidate in each round, once without clocks inside the step and once with them.

        Every second round goes backwards, so that the state of caches, memory and clock rates after a run does not
        always meet the same candidate.
        """
        for turn in range(repeat):
            for candidate in self.candidates[:: -1 if turn % 2 else 1]:
                if candidate.label not in self.errors:
                    measured = self.measured[candidate.label]
                    measured.append(self.rates.now())
                    self._try(candidate, recording)
                    measured.append(self.rates.now())
                observer.advance()

    def cases(self) -> list[Case]:
        """Sum up each candidate that was run at least once."""
        return [self._case(candidate) for candidate in self.candidates if self._known(candidate)]

    def _known(self, candidate: Candidate) -> bool:
        return bool(self.medians[candidate.label]) or candidate.label in self.errors

    def _try(self, candidate: Candidate, recording: Callable[[], Timeline]) -> None:
        try:
            self._round(candidate, recording)
        except KvcliError as error:
            self.errors[candidate.label] = error.what
        except (MemoryError, torch.OutOfMemoryError):
            self.errors[candidate.label] = "out of memory"

    def _round(self, candidate: Candidate, recording: Callable[[], Timeline]) -> None:
        label = candidate.label
        run = self.last[label] = candidate.run(self.load, Timeline())
        self.medians[label].append(statistics.median(run.steps_ms))
        if candidate.profile is None:  # the step of a peer has no spans
            return
        timeline = recording()
        split = candidate.run(self.load, timeline)
        if split.parts == []:
            return
        offloaded = split.footprint is not None and split.footprint.host > 0
        parts = step_parts(timeline.spans, offloaded) if split.parts is None else split.parts
        times = zip(split.steps_ms, parts[self.load.warmup :], strict=True)
        self.steps.setdefault(label, []).extend(times)
        self.disturbances.setdefault(label, []).append(statistics.median(split.steps_ms) / self.medians[label][-1])
        self.spans[label] = timeline.spans

    def _case(self, candidate: Candidate) -> Case:
        label, load = candidate.label, self.load
        profile = None if candidate.profile is None else candidate.profile.as_dict()
        known = label, candidate.kind, load.context, load.batch, profile, candidate.pipeline(load)
        if label in self.errors:
            return Case(*known, error=self.errors[label])
        own, last = self.medians[label], self.last[label]
        # The baseline is the first that did not fail; Ctrl-C can leave some one round more than others.
        first = next(each.label for each in self.candidates if each.label not in self.errors)
        pairs = zip(self.medians[first], own, strict=False)
        ratios = [theirs / mine for theirs, mine in pairs]
        rates = MachineRates.over(self.measured[label])
        if last.pipeline is not None:  # may differ from the promised one
            known = *known[:-1], last.pipeline
        return Case(
            *known,
            runs_ms=own,
            step_ms=Spread.of(own),
            tokens_per_s=1000 * load.batch / statistics.median(own),
            ratio=Spread.of(ratios) if ratios else None,
            floor_ms=1000 * least_seconds(last.work, rates, self.overlapped) if last.work else None,
            equivalent_bandwidth=equivalent_bandwidth(last.work, last.kv_bytes, rates) if last.work else None,
            breakdown=self._breakdown(label, rates),
            counts=counts(last.counters, load.warmup) if last.counters else None,
            device_kv_bytes=None if last.footprint is None else last.footprint.device,
            host_kv_bytes=None if last.footprint is None else last.footprint.host,
            prefill_ms=last.prefill_ms,
            disk_kv_bytes=None if last.footprint is None else last.footprint.disk,
            notices=list(last.notices),
        )

    def _breakdown(self, label: str, rates: MachineRates) -> Breakdown | None:
        if label not in self.steps:
            return None
        steps, work = middle(self.steps[label]), self.last[label].work
        parts = []
        for phase in PHASES:
            exposed = sum(step.exposed.get(phase, 0.0) for _, step in steps) / len(steps) / 1000
            hidden = sum(step.hidden.get(phase, 0.0) for _, step in steps) / len(steps) / 1000
            floor = 1000 * work[phase].seconds(rates) if phase in work else None
            parts.append(PhaseTime(phase, exposed, hidden, floor, work.get(phase)))
        step_ms = sum(ms for ms, _ in steps) / len(steps)
        outside = step_ms - sum(part.ms for part in parts)  # the time of the loop around the step's own span
        return Breakdown(
            step_ms=step_ms,
            steps=len(steps),
            parts=[replace(part, ms=part.ms + outside) if part.phase == "host" else part for part in parts],
            disturbance=Spread.of(self.disturbances[label]),
        )


def counts(counters: Sequence[Counters], warmup: int) -> Counts:
    """Add up the counts of all sequences without the first `warmup` steps."""
    total = torch.tensor([each.counts[warmup:] for each in counters]).sum(0)  # [steps, layers, Count]
    names = [each.name for each in fields(Counts) if each.name not in ("by_head", "disk_wait_ms")]
    by_head = [_add_heads([each.by_head(layer) for each in counters]) for layer in range(counters[0].num_layers)]
    waited = (total[..., Count.DISK_WAIT_US] / 1000).tolist()
    moved = {name: total[..., Count[name.upper()]].tolist() for name in names}
    return Counts(**moved, by_head=by_head, disk_wait_ms=waited)


def _add_heads(sequences: Sequence[HeadCounts | None]) -> HeadCounts | None:
    """Add up the counts of one layer by KV head; None if no sequence has any."""
    found = [asdict(each) for each in sequences if each is not None]
    if not found:
        return None
    return HeadCounts(**{name: torch.tensor([each[name] for each in found]).sum(0).tolist() for name in found[0]})
