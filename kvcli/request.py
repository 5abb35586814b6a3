"""What is asked of a generation, and what is settled and refused before the weights are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from kvcli.capacity import memory, pipelines
from kvcli.capacity.ahead import prepare_host_memory
from kvcli.capacity.disk import disk_tier
from kvcli.errors import usage_error
from kvcli.inputs.encoding import EncodedPrompt, Template, by_document, in_common
from kvcli.inputs.kv_options import DiskOptions, KVOptions, disk_options
from kvcli.inputs.profiles import Profile, reference_profile, resolve_profile, verifying_profile
from kvcli.inputs.prompts import Prompt, QuestionFirst
from kvcli.inputs.provenance import profile_mismatch
from kvcli.memory.disk_tier import DiskTier
from kvcli.models.loading import Checkpoint
from kvcli.runtime.checkpoint.kept_run import EVERY, Asked, Keep, KeptRun
from kvcli.runtime.pipeline import Pipeline
from kvcli.runtime.sampling import Sampling
from kvcli.runtime.saved.library import KVLibrary
from kvcli.sizes import parse_bytes
from kvcli.telemetry.observer import Observer

_SAMPLING = frozenset(field.name for field in fields(Sampling))


@dataclass(frozen=True)
class GenerationRequest:
    """What to generate: prompts, by which method, and how to sample."""

    profile: Profile
    prompts: tuple[Prompt, ...]
    sampling: Sampling = field(default_factory=Sampling)
    template: Template = field(default_factory=Template)
    audit: int | None = None
    """Compare every so many steps with full attention, see `kvcli.quality.audit`."""
    pipeline: Literal["auto", "blocking", "overlapped", "compiled"] = "auto"
    """How a step runs, see `kvcli.runtime.pipeline.Pipeline`."""
    keep: Keep | None = None
    """Where to keep the run, so that `resume` can go on with it."""
    kv: KVOptions = field(default_factory=KVOptions)
    """Where prompts' KV is taken from, and saved to."""
    lossless: int | None = None
    """Let full attention check so many drafted tokens in one pass, see `kvcli.runtime.lossless`."""
    disk: DiskOptions | None = None
    """Where KV lies that host memory is not to hold, see `kvcli.memory.disk_tier`."""

    def beside(self, device: str) -> Profile | None:
        """The profile of the second method that each sequence brings on a type of device, if it does."""
        if self.lossless is not None:
            return verifying_profile(device)
        return None if self.audit is None else reference_profile()


def capacities(request: GenerationRequest, prompts: Sequence[EncodedPrompt]) -> list[int]:
    """Tokens of each sequence if it runs to its end."""
    return [len(prompt.ids) + request.sampling.max_tokens for prompt in prompts]


def open_library(request: GenerationRequest, checkpoint: Checkpoint, observer: Observer) -> KVLibrary | None:
    """Open what KV is taken from and saved to; None where there is nothing of the kind.

    Raises:
        KvcliError: it cannot be used, or not with this model or method (usage); it is damaged (runtime).
    """
    if not request.kv.any:
        return None
    method = memory.planned_method(request.profile, checkpoint.geometry, 1, checkpoint.dtype)
    if method.prefill_window is not None:
        what = f"method {request.profile.method!r} reads prompts by windows: KV of its own is neither saved nor loaded"
        raise usage_error(what, "take a method that reads exactly, or leave --kv, --save-kv and --kv-cache out")
    sources = [prompt.source for prompt in request.prompts]
    reading = request.profile.settings.prefill
    return KVLibrary(request.kv, checkpoint, request.template, sources, observer.notice, reading)


def open_disk(request: GenerationRequest, checkpoint: Checkpoint, prompts: Sequence[EncodedPrompt]) -> DiskTier | None:
    """Make the tier below host memory, for all sequences together; None where there is to be none.

    Raises:
        KvcliError: the directory cannot be used, or not with what else was asked for (usage).
    """
    asked = request.disk
    if asked is None:
        return None
    beside = {"--lossless": request.lossless, "--checkpoint": request.keep}
    if (other := next((name for name, value in beside.items() if value is not None), None)) is not None:
        raise usage_error(f"{other} does not go with --kv-disk: it keeps copies of all KV", "leave one of them out")
    sequences = request.sampling.num_samples * sum(prompt.error is None for prompt in prompts)
    return disk_tier(asked, request.profile, checkpoint.device, sequences)


def check(
    request: GenerationRequest,
    checkpoint: Checkpoint,
    prompts: Sequence[EncodedPrompt],
    observer: Observer,
    loaded: bool = False,
    disk: DiskTier | None = None,
) -> None:
    """Refuse what memory or `disk` does not hold, and give notice of what model or profile was not made for.

    Raises:
        KvcliError: the run will not fit (exit code 3); `loaded` weights are there already.
    """
    sizes, together = [], 0
    for group in by_document([prompt for prompt in prompts if prompt.error is None]):
        common, lengths = in_common(group), [len(prompt.ids) for prompt in group]
        sizes += [memory.PromptSize(length, common if place else 0) for place, length in enumerate(lengths)]
        together = max(together, sum(lengths) - common * (len(group) - 1))
    memory.check(
        *(request.profile, checkpoint, sizes, request.sampling, request.beside(checkpoint.device.type)),
        loaded=loaded,
        together=together,
        layers_beside=2 * ((request.kv.save or request.kv.cache) is not None)
        + 2 * ((request.kv.use or request.kv.cache) is not None),
        disk=disk,
    )
    for notice in checkpoint.notices():
        observer.notice(notice)
    if (mismatch := profile_mismatch(request.profile, checkpoint)) is not None:
        observer.notice(mismatch)
    beyond = checkpoint.geometry.beyond_positions(max(capacities(request, prompts)), checkpoint.name)
    if beyond is not None:
        observer.notice(f"{beyond}: the text may be poor")


def begin_to_pin(
    request: GenerationRequest, checkpoint: Checkpoint, prompts: Sequence[EncodedPrompt], disk: DiskTier | None
) -> None:
    """Have host memory for the first prompt's KV get ready while the weights are read, if all of it is new."""
    loaded = request.kv.use is not None or request.kv.cache is not None
    lengths = [len(prompt.ids) for prompt in prompts if prompt.error is None]
    if lengths and disk is None and not loaded:
        prepare_host_memory(request.profile, checkpoint, lengths[0], request.sampling.max_tokens)


def choose_pipeline(request: GenerationRequest, checkpoint: Checkpoint, traced: bool = False) -> Pipeline:
    """Choose how steps run; those that are `traced`, audited, kept or checked are blocking.

    Raises:
        KvcliError: what was asked for cannot do what else was asked for (usage).
    """
    asked: dict[str, object] = {"--lossless": request.lossless, "--audit": request.audit, "--trace": traced or None}
    if checkpoint.device.type == "cuda":
        asked["--kv-disk"] = request.disk
    watching = [option for option, value in asked.items() if value is not None]
    return pipelines.choose(request.pipeline, request.profile, checkpoint, watching, request.keep is not None)


def begin_to_keep(
    request: GenerationRequest, checkpoint: Checkpoint, prompts: Sequence[EncodedPrompt], pipeline: Pipeline
) -> KeptRun | None:
    """Make the directory that a run is to be kept in, if it is; raises KvcliError (usage) where it cannot be."""
    if request.keep is None:
        return None
    if checkpoint.placement is not None:
        what = f"--checkpoint keeps what lies on one device, and layers lie on {checkpoint.placement}"
        raise usage_error(what, "name one device, or leave it out")
    return KeptRun.begin(
        request.keep, Asked.of(checkpoint, request.profile, request.sampling, pipeline, prompts), prompts
    )


def request_of(
    texts: Sequence[str],
    prompt: str | Sequence[str] | None,
    *,
    method: str | None = None,
    profile: str | None = None,
    system: str | None = None,
    raw: bool = False,
    question_first: QuestionFirst = "no",
    chat_template_kwargs: dict[str, Any] | None = None,
    audit: int | None = None,
    pipeline: Literal["auto", "blocking", "overlapped", "compiled"] = "auto",
    checkpoint: str | Path | None = None,
    every: int = EVERY,
    kv: str | Path | None = None,
    save_kv: str | Path | None = None,
    kv_cache: str | Path | None = None,
    kv_cache_size: int | str | None = None,
    lossless: int | None = None,
    kv_disk: str | Path | None = None,
    host_memory: int | str | None = None,
    observer: Observer | None = None,
    **settings: Any,
) -> tuple[GenerationRequest, Observer]:
    """Sort the options of `kvcli.api.LanguageModel.generate` into what they are about: a request and its observer.

    Raises:
        KvcliError: a document is empty, a name is unknown, a value is bad (usage).
    """
    for name, count in {"audit": audit, "lossless": lossless, "every": every}.items():
        if count is not None and count < 1:
            raise usage_error(f"{name} is {count}", "give 1 at least")
    sampling = {name: settings.pop(name) for name in _SAMPLING & settings.keys()}
    if isinstance(sampling.get("stop"), list | str):
        stop = sampling["stop"]
        sampling["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    if not texts or not all(text.strip() for text in texts):
        raise usage_error("a document is empty" if texts else "no document", "give some text")
    questions = [prompt] if isinstance(prompt, str) else list(prompt or [""])
    use, save, cache = (None if each is None else Path(each) for each in (kv, save_kv, kv_cache))
    request = GenerationRequest(
        profile=resolve_profile(method, profile, settings),
        prompts=tuple(
            Prompt(f"text {index}", text, question, question_first=question_first)
            for index, text in enumerate(texts)
            for question in questions
        ),
        sampling=Sampling(**sampling),
        template=Template(system, raw, chat_template_kwargs or {}),
        audit=audit,
        pipeline=pipeline,
        keep=None if checkpoint is None else Keep(Path(checkpoint), every),
        kv=KVOptions(use, save, cache, None if kv_cache_size is None else parse_bytes(str(kv_cache_size))),
        lossless=lossless,
        disk=disk_options(kv_disk, host_memory),
    )
    return request, observer or Observer()
