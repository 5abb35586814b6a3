"""A generation request, and everything that is settled or refused before the weights are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvcli.capacity import memory, pipelines, unnamed
from kvcli.capacity.ahead import prepare_host_memory
from kvcli.capacity.disk import disk_tier
from kvcli.errors import usage_error
from kvcli.inputs.encoding import EncodedPrompt, by_document, in_common, plain_text_notice
from kvcli.inputs.options import (
    GENERATION,
    DiskOptions,
    Input,
    Keep,
    KVOptions,
    MethodOptions,
    Sampling,
    Stepping,
    Template,
    take,
)
from kvcli.inputs.profiles import Profile, profile_notices, reference_profile, resolve_profile, verifying_profile
from kvcli.inputs.prompts import Prompt
from kvcli.memory.disk_tier import DiskTier
from kvcli.models.geometry import rotates_by_length
from kvcli.models.loading import Checkpoint
from kvcli.runtime.checkpoint.kept_run import Asked, KeptRun
from kvcli.runtime.pipeline import Pipeline
from kvcli.runtime.saved.library import KVLibrary
from kvcli.telemetry.observer import Observer


@dataclass(frozen=True)
class GenerationRequest(Stepping):
    """What to generate: the prompts, the method, and the sampling."""

    profile: Profile
    prompts: tuple[Prompt, ...]
    sampling: Sampling = field(default_factory=Sampling)
    template: Template = field(default_factory=Template)
    keep: Keep | None = None
    """Where to keep the run, so that `resume` can continue it."""
    kv: KVOptions = field(default_factory=KVOptions)
    """Where prompts' KV is loaded from and saved to."""
    disk: DiskOptions | None = None
    """Where to put KV that host memory is not to hold, see `kvcli.memory.disk_tier`."""

    def beside(self, device: str) -> Profile | None:
        """Return the profile of the second method that each sequence brings on a type of device, if any."""
        if self.lossless is not None:
            return verifying_profile(device)
        return None if self.audit is None else reference_profile()


def capacities(request: GenerationRequest, prompts: Sequence[EncodedPrompt]) -> list[int]:
    """Return the tokens of each sequence if it runs to its end."""
    return [len(prompt.ids) + request.sampling.max_tokens for prompt in prompts]


def open_library(request: GenerationRequest, checkpoint: Checkpoint, observer: Observer) -> KVLibrary | None:
    """Open the library that KV is loaded from and saved to; None if the request has no KV options.

    Raises:
        KvcliError: it cannot be used, or not with this model or method (usage); it is damaged (runtime).
    """
    if not request.kv.any:
        return None
    if memory.reads_by_windows(request.profile, checkpoint):
        what = f"method {request.profile.method!r} prefills in windows: its KV is neither saved nor loaded"
        raise usage_error(what, "use a method that prefills exactly, or leave --kv, --save-kv and --kv-cache out")
    sources = [prompt.source for prompt in request.prompts]
    reading = request.profile.settings.prefill
    return KVLibrary(request.kv, checkpoint, request.template, sources, observer.notice, reading)


def open_disk(request: GenerationRequest, checkpoint: Checkpoint, prompts: Sequence[EncodedPrompt]) -> DiskTier | None:
    """Make the tier below host memory, shared by all sequences; None if there is to be none.

    Raises:
        KvcliError: the directory cannot be used, or not with the other options (usage).
    """
    asked = request.disk
    if asked is None:
        return None
    beside = {"--lossless": request.lossless, "--checkpoint": request.keep}
    if (other := next((name for name, value in beside.items() if value is not None), None)) is not None:
        raise usage_error(f"{other} does not work with --kv-disk: it keeps copies of all KV", "leave one of them out")
    sequences = request.sampling.num_samples * sum(prompt.error is None for prompt in prompts)
    return disk_tier(asked, request.profile, checkpoint.device, sequences)


def settle_method(
    request: GenerationRequest,
    checkpoint: Checkpoint,
    prompts: Sequence[EncodedPrompt],
    observer: Observer,
    loaded: bool = False,
) -> GenerationRequest:
    """Choose by what fits if nobody named a method; show what a user of the profile should know.

    The notices come before anything else may refuse the run: the refusal is then one of a method that was named.
    Retrieval stays where something is asked of it: a disk, drafts to check, an audit. A model that selects by itself
    does so in any case.

    Raises:
        KvcliError: drafts or an audit are asked of a model that selects by itself, a budget that is a share of the
            shortest prompt is too small for the method (usage).
    """
    request = _with_method(request, checkpoint, prompts, observer, loaded)
    show_profile_notices(request, checkpoint, prompts, observer)
    return request


def show_profile_notices(
    request: GenerationRequest, checkpoint: Checkpoint, prompts: Sequence[EncodedPrompt], observer: Observer
) -> None:
    """Show what a user of the request's profile should know before the run."""
    lengths = [len(prompt.ids) for prompt in prompts if prompt.error is None]
    for notice in profile_notices(request.profile, checkpoint, min(lengths)):
        observer.notice(notice)


def _with_method(
    request: GenerationRequest,
    checkpoint: Checkpoint,
    prompts: Sequence[EncodedPrompt],
    observer: Observer,
    loaded: bool,
) -> GenerationRequest:
    """Return the request with the method that serves; drafts that gain nothing are named."""
    selects = checkpoint.geometry.selects is not None
    if selects:
        beside = {"--lossless": request.lossless, "--audit": request.audit}
        if (other := next((name for name, value in beside.items() if value is not None), None)) is not None:
            what = f"{other} compares with full attention, but this model's layers select by themselves"
            raise usage_error(what, "leave it out: native is exact")
    about = {"--kv-disk": request.disk, "--lossless": request.lossless, "--audit": request.audit}
    asked = next((name for name, value in about.items() if value), None)
    samples = request.sampling.num_samples
    lengths = samples * capacities(request, [prompt for prompt in prompts if prompt.error is None])
    costs = request.profile, checkpoint.geometry, checkpoint.dtype, checkpoint.place, lengths
    if request.lossless and lengths and checkpoint.device.type == "cpu" and unnamed.is_cheap(*costs):
        observer.notice(
            f"--lossless saves no time here, because reading all of {max(lengths):,} tokens is cheap; --method full "
            "writes the same text"
        )
    if request.profile.unnamed and asked is not None and not selects:
        chosen = f"no --method: using {request.profile.method}, because {asked} is for retrieval"
        request = replace(request, profile=replace(request.profile, unnamed=False, chosen=chosen))
    if not request.profile.unnamed or not lengths:
        return request
    free = memory.available(checkpoint.place)

    def lack(profile: Profile) -> str | None:
        sizes, beside = _memory_of(replace(request, profile=profile), checkpoint, prompts)
        wanted = memory.need(
            *(profile, checkpoint.geometry, checkpoint.dtype, sizes, request.sampling.max_tokens, samples),
            device=checkpoint.place,
            **beside,
        )
        run = memory.contexts(len(lengths), max(sizes).tokens)
        return memory.shortage(run, replace(wanted, weights=0) if loaded else wanted, checkpoint.place, free)

    return replace(request, profile=unnamed.choose(*costs, lack))


def check(
    request: GenerationRequest,
    checkpoint: Checkpoint,
    prompts: Sequence[EncodedPrompt],
    observer: Observer,
    loaded: bool = False,
    disk: DiskTier | None = None,
) -> None:
    """Refuse what does not fit into memory or `disk`, and give notice of uses beyond the model's.

    Raises:
        KvcliError: the run will not fit (exit code 3); the weights count unless they are `loaded` already.
    """
    sizes, beside = _memory_of(request, checkpoint, prompts)
    memory.check(request.profile, checkpoint, sizes, request.sampling, loaded=loaded, disk=disk, **beside)
    asked = any(prompt.prompt is not None and prompt.prompt.is_asked for prompt in prompts)
    plain = plain_text_notice(checkpoint, request.template) if asked else None
    penalty = request.sampling.repetition_penalty if request.sampling.max_tokens > 1 else None
    for notice in [*checkpoint.notices(penalty), *filter(None, [plain])]:
        observer.notice(notice)
    shortest, longest = min(each.tokens for each in sizes), max(capacities(request, prompts))
    if rotates_by_length(checkpoint.config, shortest, longest):
        observer.notice(
            f"this model's rotary frequencies follow the length: all tokens have those of {longest:,}, "
            "the prompt and --max-tokens"
        )
    beyond = checkpoint.geometry.beyond_positions(longest, checkpoint.name)
    if beyond is not None and not memory.reads_by_windows(request.profile, checkpoint):
        observer.notice(f"{beyond}: the text may be poor")


def _memory_of(
    request: GenerationRequest, checkpoint: Checkpoint, prompts: Sequence[EncodedPrompt]
) -> tuple[list[memory.PromptSize], dict[str, Any]]:
    """Return the sizes of the prompts, and what else `kvcli.capacity.memory.need` counts."""
    sizes, together = [], 0
    for group in by_document([prompt for prompt in prompts if prompt.error is None]):
        common, lengths = in_common(group), [len(prompt.ids) for prompt in group]
        sizes += [memory.PromptSize(length, common if place else 0) for place, length in enumerate(lengths)]
        together = max(together, sum(lengths) - common * (len(group) - 1))
    saving, loading = ((kind or request.kv.cache) is not None for kind in (request.kv.save, request.kv.use))
    return sizes, {
        "beside": request.beside(checkpoint.device.type),
        "together": together,
        "layers_beside": 2 * saving + 2 * loading,
    }


def begin_to_pin(
    request: GenerationRequest, checkpoint: Checkpoint, prompts: Sequence[EncodedPrompt], disk: DiskTier | None
) -> None:
    """Start to prepare host memory for the first prompt's KV while the weights are read, if all of that KV is new."""
    loaded = request.kv.use is not None or request.kv.cache is not None
    lengths = [len(prompt.ids) for prompt in prompts if prompt.error is None]
    if lengths and disk is None and not loaded:
        prepare_host_memory(request.profile, checkpoint, lengths[0], request.sampling.max_tokens)


def choose_pipeline(request: GenerationRequest, checkpoint: Checkpoint, traced: bool = False) -> Pipeline:
    """Choose how steps run; they are blocking if `traced`, audited, kept or checked.

    Raises:
        KvcliError: options contradict each other (usage).
    """
    asked: dict[str, object] = {"--lossless": request.lossless, "--audit": request.audit, "--trace": traced or None}
    if checkpoint.device.type == "cuda":
        asked["--kv-disk"] = request.disk
    watching = [option for option, value in asked.items() if value is not None]
    return pipelines.choose(request.pipeline, request.profile, checkpoint, watching, request.keep is not None)


def begin_to_keep(
    request: GenerationRequest, checkpoint: Checkpoint, prompts: Sequence[EncodedPrompt], pipeline: Pipeline
) -> KeptRun | None:
    """Make the directory that a run is to be kept in, if any; raises KvcliError (usage) if it cannot be kept."""
    if request.keep is None:
        return None
    if checkpoint.placement is not None:
        what = f"--checkpoint works on one device, but layers are on {checkpoint.placement}"
        raise usage_error(what, "name one device, or leave it out")
    return KeptRun.begin(
        request.keep, Asked.of(checkpoint, request.profile, request.sampling, pipeline, prompts), prompts
    )


def request_of(
    texts: Sequence[str], prompt: str | Sequence[str] | None, observer: Observer | None = None, **given: Any
) -> tuple[GenerationRequest, Observer]:
    """Sort the options of `kvcli.api.LanguageModel.generate` by subject into a request and its observer.

    Raises:
        KvcliError: a document is empty, a name is unknown, a value is bad (usage).
    """
    groups: dict[type, Any] = {group: take(group, given, names) for group, names in GENERATION.items()}
    named, asked, stepping = (groups[group] for group in (MethodOptions, Input, Stepping))
    if not texts or not all(text.strip() for text in texts):
        raise usage_error("a document is empty" if texts else "no document", "give some text")
    questions = [prompt] if isinstance(prompt, str) else list(prompt or [""])
    request = GenerationRequest(
        profile=resolve_profile(named.method, named.profile, given),
        prompts=tuple(
            Prompt(f"text {index}", text, question, question_first=asked.question_first)
            for index, text in enumerate(texts)
            for question in questions
        ),
        sampling=groups[Sampling],
        template=groups[Template],
        keep=groups[Keep],
        kv=groups[KVOptions],
        disk=groups[DiskOptions],
        **vars(stepping),
    )
    return request, observer or Observer()
