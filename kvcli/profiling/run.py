"""The profile: every entry under every load.

Runs of several candidates are interleaved, repeat after repeat, so that what changes on the machine meanwhile falls on
all alike; ratios are taken within a repeat. What is taken apart are runs of their own, each right after one that is
not, so that the two can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvcli import memory
from kvcli.ceilings import measure_ceilings
from kvcli.errors import ExitCode, KvcliError
from kvcli.model import Checkpoint, Model, ModelSpec, open_checkpoint
from kvcli.observer import Observer
from kvcli.profile import resolve_profile
from kvcli.profiling.candidates import Candidate, Decoding
from kvcli.profiling.entries import Entry
from kvcli.profiling.hardware import describe, recording
from kvcli.profiling.peers import Transformers, left_out, transformers_peers
from kvcli.profiling.report import Case, ProfileReport
from kvcli.profiling.runs import Runs
from kvcli.profiling.sources import Load, MadeUp, Noise, Read, Source, seeded_tokens
from kvcli.sampling import Sampling
from kvcli.sizes import format_bytes
from kvcli.timeline import Span

DEFAULT_CONTEXT = 8192


@dataclass(frozen=True)
class Request:
    """What to profile. `document` is read instead of made-up KV, cut to each context; so are seeded tokens if `read`.

    Without `contexts` a document is taken at its own length.
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
    nvtx: bool = False


@dataclass(frozen=True)
class Outcome:
    """The report, and of each case that was taken apart the spans of its run."""

    report: ProfileReport
    spans: dict[str, list[Span]] = field(default_factory=dict)


def profile(request: Request, observer: Observer) -> Outcome:
    """Run everything; Ctrl-C ends it early with what there is (`finished` is False).

    Raises:
        KvcliError: the model cannot be loaded, the document is too short for a context (usage), or no case fits into
            memory (exit code 3). A case that fails among others is reported with its error.
    """
    observer.stage("load")
    checkpoint = open_checkpoint(request.model)
    ids = None if request.document is None else checkpoint.tokenizer(request.document)["input_ids"]
    loads = _loads(request, ids)
    if request.nvtx and checkpoint.device.type != "cuda":
        raise KvcliError("--nvtx marks what a GPU does, and there is none", "leave --nvtx out", ExitCode.USAGE)
    refused = _refused(request, checkpoint, loads)
    _warn(request, checkpoint, loads, observer)
    model = checkpoint.load()
    observer.stage("measure the machine")
    ceilings = measure_ceilings(model.device, model.dtype)
    noise = Noise(request.seed, model.device, model.dtype)
    cases: list[Case] = []
    spans: dict[str, list[Span]] = {}
    finished = True
    for load in loads:
        entries = [entry for entry in request.entries if (load, entry.label) not in refused]
        candidates = _candidates(request, load, model, noise, entries, ids)
        runs = Runs(candidates, load)
        observer.stage(f"{load.context:,} tokens, batch {load.batch}", len(candidates) * request.repeat)
        try:
            runs.run_all(request.repeat, lambda: recording(model.device, request.nvtx), observer)
        except KeyboardInterrupt:
            finished = False
        cases += [
            Case(entry.label, entry.kind, load.context, load.batch, entry.profile.as_dict(), error=error.what)
            for entry in request.entries
            if (error := refused.get((load, entry.label))) is not None
        ]
        cases += runs.cases(ceilings)
        spans |= {case_name(label, load.context, load.batch): found for label, found in runs.spans.items()}
        if not finished:
            break
    observer.stage_done()
    environment, described = describe(model)
    report = ProfileReport(environment, described, _options(request, loads), ceilings.as_dict(), cases, finished)
    return Outcome(report, spans)


def case_name(label: str, context: int, batch: int) -> str:
    """What to call a case where all of them stand together."""
    return f"{label} · {context:,} tokens" + (f" · batch {batch}" if batch > 1 else "")


def _loads(request: Request, ids: Sequence[int] | None) -> list[Load]:
    contexts = request.contexts or ((DEFAULT_CONTEXT,) if ids is None else (len(ids),))
    if ids is not None and len(ids) < max(contexts):
        raise KvcliError(
            f"the document has {len(ids):,} tokens, fewer than a context of {max(contexts):,}",
            "leave --context out, or the document",
            ExitCode.USAGE,
        )
    return [Load(context, batch, request.warmup, request.steps) for context in contexts for batch in request.batches]


def _refused(request: Request, checkpoint: Checkpoint, loads: Sequence[Load]) -> dict[tuple[Load, str], KvcliError]:
    """Find what memory does not hold, before the weights are read."""
    refused: dict[tuple[Load, str], KvcliError] = {}
    reads = request.read or request.document is not None
    for load in loads:
        sampling = Sampling(max_tokens=load.max_tokens)
        lengths = [load.context] * (load.batch + (1 if reads else 0))  # what was read stays beside its copies
        for entry in request.entries:
            try:
                memory.check(entry.profile, checkpoint, lengths, sampling)
            except KvcliError as error:
                refused[load, entry.label] = error
        if request.peers:
            memory.check(resolve_profile("full"), checkpoint, lengths, sampling)
        if reads:
            _check_together(request, checkpoint, load)
    if len(refused) == len(loads) * len(request.entries):
        raise next(iter(refused.values()))
    return refused


def _check_together(request: Request, checkpoint: Checkpoint, load: Load) -> None:
    """Refuse to read a prompt for more methods than memory holds side by side."""
    each = [
        memory.need(entry.profile, checkpoint.geometry, checkpoint.dtype, [load.context], load.max_tokens, 1).kv
        for entry in request.entries
    ]
    kept = sum(footprint.device + footprint.host for footprint in each)
    free = memory.available(checkpoint.device)["host"]
    if checkpoint.device.type == "cpu" and kept + checkpoint.geometry.weight_bytes > free:
        raise KvcliError(
            f"the prompt of {load.context:,} tokens as {len(each)} methods keep it needs {format_bytes(kept)}, "
            f"{format_bytes(free)} are free",
            "name fewer methods at once, or leave --read out",
            ExitCode.WILL_NOT_FIT,
        )


def _warn(request: Request, checkpoint: Checkpoint, loads: Sequence[Load], observer: Observer) -> None:
    for peer in left_out(checkpoint.device) if request.peers else []:
        observer.notice(f"left out, {peer}")
    limit, capacity = checkpoint.geometry.max_positions, max(load.capacity for load in loads)
    if limit is not None and capacity > limit:
        observer.notice(f"{capacity:,} tokens are more than the {limit:,} positions {checkpoint.name} was made for")


def _candidates(
    request: Request,
    load: Load,
    model: Model,
    noise: Noise,
    entries: Sequence[Entry],
    ids: Sequence[int] | None,
) -> list[Candidate]:
    source: Source = MadeUp(noise)
    if ids is not None or request.read:
        if ids is None:
            ids = seeded_tokens(load.context, model.geometry.vocab_size, request.seed)
        source = Read(ids[: load.context], [entry.profile for entry in entries])
    methods = [Decoding(entry.label, entry.kind, entry.profile, model, source) for entry in entries]
    peers: list[Transformers] = transformers_peers(model, noise) if request.peers else []
    return [*methods, *peers]


def _options(request: Request, loads: Sequence[Load]) -> dict[str, object]:
    return {
        "kv": "read" if request.read or request.document is not None else "made up",
        "contexts": list(dict.fromkeys(load.context for load in loads)),
        "batch_sizes": list(request.batches),
        "steps": request.steps,
        "warmup": request.warmup,
        "repeat": request.repeat,
        "seed": request.seed,
    }
