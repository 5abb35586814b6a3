"""The profiler: every method and profile, at every context and batch size.

Runs of several candidates are interleaved, round after round and every second one backwards, so that a change of the
machine's speed affects all of them alike; ratios are taken within a round. Runs that are split into phases are separate
ones, each right after a run without clocks inside, so that the two can be compared.
"""

import os
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch

from kvcli.bench.peers import Transformers, left_out, peer_profiles
from kvcli.bench.report import Case, ProfileReport
from kvcli.bench.rounds import Rounds
from kvcli.bench.runs import (
    Candidate,
    ContextSource,
    Decoding,
    Entry,
    Load,
    RandomContext,
    ReadContext,
    pipeline_on,
    seeded_tokens,
)
from kvcli.bench.timelines import recording
from kvcli.capacity import memory
from kvcli.capacity.disk import disk_for
from kvcli.capacity.planning.probe import RandomKV
from kvcli.capacity.roofline import MachineRates, RatesOverTime
from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.options import DiskOptions
from kvcli.inputs.profiles import Profile
from kvcli.memory.disk_tier import DiskTier
from kvcli.methods import get_method
from kvcli.models.devices import Place, all_of
from kvcli.models.loading import Checkpoint, Model, ModelSpec, open_checkpoint
from kvcli.runtime.sampling import Sampling
from kvcli.sizes import format_bytes
from kvcli.telemetry import report as telemetry_report
from kvcli.telemetry.observer import Observer
from kvcli.telemetry.timeline import Span

DEFAULT_CONTEXT = 8192
_WAY_OUT = "take a smaller --context, --batch-size or --dtype"


@dataclass(frozen=True)
class ProfileRequest:
    """What to profile, with `contexts` in tokens.

    The caches hold random KV; with `document` the model reads that text instead, cut to each context, and with `read`
    random tokens. Without `contexts` a document has its own length. KV of methods that keep some in host memory lies on
    a `disk`, where there is one.
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
    ids = None if request.document is None else checkpoint.tokenizer(request.document, verbose=False)["input_ids"]
    loads = _loads(request, ids)
    if request.nvtx and checkpoint.device.type != "cuda":
        raise KvcliError("--nvtx marks what a GPU does, and there is none", "leave --nvtx out", ExitCode.USAGE)
    for option, asked in {"--peers": request.peers, "--nvtx": request.nvtx}.items():
        if asked and checkpoint.placement is not None:
            what = f"{option} is for one device, and layers lie on {checkpoint.placement}"
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
            "leave --context out, or the document",
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
        prompts = {load.context: load.batch + (1 if reads else 0)}  # a prompt that was read stays beside its copies
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
    """The disk for one method after the other, and for the prompt that each has read and goes on from in copies."""
    profiles = [entry.profile for entry in request.entries]
    reads = request.read or request.document is not None
    kept = sum(profile.settings.on_host for profile in profiles) if reads else 0
    return disk_for(request.disk, profiles, checkpoint.device, load.batch + kept)


def _of(tier: DiskTier | None, profile: Profile) -> DiskTier | None:
    """The disk of a method that has use for one."""
    return tier if profile.settings.on_host else None


def _check_together(request: ProfileRequest, checkpoint: Checkpoint, load: Load, tier: DiskTier | None) -> None:
    """Refuse to prefill a prompt for more methods than fit into memory side by side."""
    lengths = [load.context], load.max_tokens, 1
    each = [
        memory.need(*(entry.profile, checkpoint.geometry, checkpoint.dtype, *lengths), disk=_of(tier, entry.profile)).kv
        for entry in request.entries
    ]
    kept = sum(footprint.device + footprint.host for footprint in each)
    free = memory.available(checkpoint.device)["host"]
    if checkpoint.device.type == "cpu" and kept + checkpoint.geometry.weight_bytes > free:
        raise KvcliError(
            f"the KV of {load.context:,} tokens for {len(each)} methods needs {format_bytes(kept)}, "
            f"{format_bytes(free)} are free",
            "name fewer methods at once, or leave --read out",
            ExitCode.WILL_NOT_FIT,
        )


def _warn(request: ProfileRequest, checkpoint: Checkpoint, loads: Sequence[Load], observer: Observer) -> None:
    for peer in left_out(checkpoint.device) if request.peers else []:
        observer.notice(f"left out, {peer}")
    beyond = checkpoint.geometry.beyond_positions(max(load.capacity for load in loads), checkpoint.name)
    if beyond is not None:
        observer.notice(beyond)
    for name in dict.fromkeys(entry.profile.method for entry in request.entries):
        if request.ablate and not get_method(name).ablation:
            observer.notice(f"--ablate: {name} declares no parts that can be taken out")
    if request.ablate and checkpoint.device.type == "cpu":
        observer.notice("--ablate: how pages are copied, and into how many buffers, makes no difference on a CPU")


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
