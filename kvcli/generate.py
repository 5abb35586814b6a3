"""The main path: load a model, read the prompts into a method's caches, decode, report.

Read this first; every other module serves one of its lines.
"""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from kvcli.capacity import memory
from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.profiles import Profile
from kvcli.inputs.prompts import Prompt, Template
from kvcli.inputs.provenance import profile_mismatch
from kvcli.models.loading import Checkpoint, Model, ModelSpec, open_checkpoint
from kvcli.quality.audit import Audit, conclude, prepare
from kvcli.runtime.compiled import cpp_compiler
from kvcli.runtime.engine import Pipeline, engine
from kvcli.runtime.prefill_runner import EncodedPrompt, Reader, announce, encode_all
from kvcli.runtime.sampling import Sampling
from kvcli.runtime.sequence import RunningSequence
from kvcli.store.cache import Footprint
from kvcli.telemetry import report
from kvcli.telemetry.observer import Observer
from kvcli.telemetry.timeline import Timeline


@dataclass(frozen=True)
class GenerationRequest:
    """What to generate: a model, a profile, prompts, how to sample; `trace` asks for a Chrome trace file."""

    model: ModelSpec
    profile: Profile
    prompts: tuple[Prompt, ...]
    sampling: Sampling = field(default_factory=Sampling)
    template: Template = field(default_factory=Template)
    trace: Path | None = None
    audit: int | None = None
    """Compare every so many steps with full attention, see `kvcli.quality.audit`."""
    pipeline: Literal["auto", "blocking", "overlapped", "compiled"] = "auto"
    """How a step runs, see `kvcli.runtime.engine.Pipeline`."""


def generate(request: GenerationRequest, observer: Observer) -> report.Report:
    """Continue every prompt `sampling.num_samples` times; the report lists them in order, samples side by side.

    Ctrl-C is no error once the model is loaded: the report holds what there is, `finish_reason` "interrupted". A
    prompt that alone among several cannot be encoded is reported with `finish_reason` "error"; the others go on.

    Raises:
        KvcliError: the model cannot be loaded or the only prompt not encoded (usage or runtime); the run will not
            fit (exit code 3), which is found out before the weights are read.
    """
    timeline = Timeline(enabled=request.trace is not None)
    observer.stage("load")
    with timeline.span("load"):
        checkpoint = open_checkpoint(request.model)
        prompts = encode_all(request.prompts, request.template, checkpoint.tokenizer)
        _check_fit(request, checkpoint, prompts, observer)
        pipeline = _pipeline(request, checkpoint)
        model = checkpoint.load()
    sequences: list[RunningSequence] = []
    audits: list[Audit] = []
    try:
        with engine(model, _capacities(request, prompts), observer.notice) as ready:
            reader = Reader(ready, request.profile, request.sampling, observer, timeline, request.audit)
            audits = reader.audits
            for index, prompt in enumerate(prompts):  # one at a time, each of its own length
                sequences += reader.read(index, prompt)
            prepare(audits)
            for step in ready.decode(sequences, timeline, pipeline):  # all together, one token each
                announce(step, request.sampling.max_tokens, observer)
                conclude(audits)
                prepare(audits)
    except KeyboardInterrupt:
        _flush(sequences, observer)
    observer.stage_done()
    if request.trace is not None:
        timeline.save(request.trace)
    return _report(request, model, prompts, sequences, audits)


def _capacities(request: GenerationRequest, prompts: Sequence[EncodedPrompt]) -> list[int]:
    """Tokens of each sequence if it runs to its end."""
    return [len(prompt.ids) + request.sampling.max_tokens for prompt in prompts]


def _check_fit(
    request: GenerationRequest, checkpoint: Checkpoint, prompts: Sequence[EncodedPrompt], observer: Observer
) -> None:
    """Refuse what memory does not hold; warn of what the model was not made for."""
    lengths = [len(prompt.ids) for prompt in prompts if prompt.error is None]
    memory.check(request.profile, checkpoint, lengths, request.sampling, request.audit is not None)
    if (elsewhere := profile_mismatch(request.profile, checkpoint)) is not None:
        observer.notice(elsewhere)
    beyond = checkpoint.geometry.beyond_positions(max(_capacities(request, prompts)), checkpoint.name)
    if beyond is not None:
        observer.notice(f"{beyond}: the text may be poor")


def _pipeline(request: GenerationRequest, checkpoint: Checkpoint) -> Pipeline:
    """Choose how steps run.

    Raises:
        KvcliError: what was asked for cannot do what else was asked for (usage).
    """
    obstacle = _obstacle(request, checkpoint)
    if request.pipeline == "auto":
        return "overlapped" if obstacle is None and checkpoint.device.type == "cuda" else "blocking"
    if request.pipeline != "blocking" and obstacle is not None:
        hint = "leave --pipeline out, or take --pipeline blocking"
        raise KvcliError(f"--pipeline {request.pipeline}: {obstacle}", hint, ExitCode.USAGE)
    return request.pipeline


def _obstacle(request: GenerationRequest, checkpoint: Checkpoint) -> str | None:
    """Why steps can be nothing but blocking, if so."""
    if request.audit is not None or request.trace is not None:
        return f"{'--trace' if request.audit is None else '--audit'} looks into the phases of a step"
    method = memory.planned_method(request.profile, checkpoint.geometry, 1, checkpoint.dtype)
    if request.pipeline == "compiled" and checkpoint.device.type == "cpu":
        if method.wants_next_query:
            return f"method {request.profile.method!r} listens between the layers"
        return None if cpp_compiler() else "there is no C++ compiler here: neither $CXX nor g++ is one"
    if method.slot_rule is None:
        return f"method {request.profile.method!r} with these settings is served by the blocking pipeline alone"
    return None


def _flush(sequences: Sequence[RunningSequence], observer: Observer) -> None:
    """End what Ctrl-C cut off, and show the text that was held back."""
    for sequence in sequences:
        if sequence.running:
            piece = sequence.end("interrupted")
            if piece:
                observer.text(sequence.index, piece)
            observer.finished(sequence.index)


def _report(
    request: GenerationRequest,
    model: Model,
    prompts: Sequence[EncodedPrompt],
    sequences: Sequence[RunningSequence],
    audits: Sequence[Audit],
) -> report.Report:
    by_index = {sequence.index: sequence.report() for sequence in sequences}
    for audit in audits:
        by_index[audit.sequence.index] = replace(by_index[audit.sequence.index], fidelity=audit.summary())
    samples = request.sampling.num_samples
    outcomes = [
        by_index.get(index * samples + sample) or _unread(prompt, sample)
        for index, prompt in enumerate(prompts)
        for sample in range(samples)
    ]
    kv = sum((sequence.method.footprint() for sequence in sequences), Footprint())
    cuda = model.device.type == "cuda"
    return report.Report(
        environment=report.environment() | {"device": _device_name(model.device), "threads": torch.get_num_threads()},
        model={
            "name": model.name,
            "source": model.source,
            "type": model.module.config.model_type,
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": str(model.device),
            "weight_bytes": model.geometry.weight_bytes,
            "layers": len(model.geometry.layers),
        },
        profile=request.profile.as_dict(),
        sequences=outcomes,
        memory=report.Memory(
            device_peak_bytes=torch.cuda.max_memory_allocated(model.device) if cuda else None,
            host_pinned_bytes=kv.host if cuda else 0,
            device_kv_bytes=kv.device,
            host_kv_bytes=kv.host,
            process_peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        ),
    )


def _unread(prompt: EncodedPrompt, sample: int) -> report.Sequence:
    """Report a prompt that never became a sequence: it failed, or Ctrl-C came before its turn."""
    return report.Sequence(
        source=prompt.source,
        sample=sample,
        text="",
        token_ids=[],
        finish_reason="interrupted" if prompt.error is None else "error",
        prompt_tokens=len(prompt.ids),
        output_tokens=0,
        error=None if prompt.error is None else prompt.error.what,
    )


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
