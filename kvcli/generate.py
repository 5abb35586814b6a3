"""The main path: load a model, read the prompts into a method's caches, decode, report.

Read this first; every other module serves one of its lines.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from kvcli import memory, report
from kvcli.attention import Hook, attached
from kvcli.decode import decode
from kvcli.errors import KvcliError
from kvcli.linear import onednn_linears
from kvcli.methods import get_method
from kvcli.methods.base import SequenceContext
from kvcli.model import Checkpoint, Model, ModelSpec, open_checkpoint
from kvcli.observer import Observer
from kvcli.profile import Profile
from kvcli.prompts import Prompt, Template, encode, encode_question
from kvcli.rope import Rope, installed
from kvcli.sampling import Sampler, Sampling
from kvcli.sequence import RunningSequence
from kvcli.stats import Counters
from kvcli.store.cache import Footprint, Tiers
from kvcli.text import TextStream
from kvcli.timeline import Timeline
from kvcli.windowed import read_prompt


@dataclass(frozen=True)
class Request:
    """What to generate: a model, a profile, prompts, how to sample; `trace` asks for a Chrome trace file."""

    model: ModelSpec
    profile: Profile
    prompts: tuple[Prompt, ...]
    sampling: Sampling = field(default_factory=Sampling)
    template: Template = field(default_factory=Template)
    trace: Path | None = None


def generate(request: Request, observer: Observer) -> report.Report:
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
        prompts = _encode_all(request, checkpoint)
        _check_fit(request, checkpoint, prompts, observer)
        model = checkpoint.load()
    sequences: list[RunningSequence] = []
    try:
        with (
            attached(model.module) as hook,
            onednn_linears(model.module),
            installed(model.module, _capacities(request, prompts)) as rope,
        ):
            reader = _Reader(request, model, hook, rope, observer, timeline)
            for index, prompt in enumerate(prompts):  # one at a time, each of its own length
                sequences += reader.read(index, prompt)
            for step in decode(model.module, hook, sequences, timeline, rope):  # all together, one token each
                _announce(step, request.sampling.max_tokens, observer)
    except KeyboardInterrupt:
        _flush(sequences, observer)
    observer.stage_done()
    if request.trace is not None:
        timeline.save(request.trace)
    return _report(request, model, prompts, sequences)


@dataclass(frozen=True)
class _Encoded:
    source: str
    ids: list[int]
    question: list[int] = field(default_factory=list)
    error: KvcliError | None = None


def _encode_all(request: Request, checkpoint: Checkpoint) -> list[_Encoded]:
    """Tokenise every prompt; one that fails is kept with its error, unless none is left to go on with."""
    encoded = []
    for prompt in request.prompts:
        try:
            ids = encode(prompt, request.template, checkpoint.tokenizer)
            encoded.append(_Encoded(prompt.source, ids, encode_question(prompt, checkpoint.tokenizer)))
        except KvcliError as error:
            encoded.append(_Encoded(prompt.source, [], error=error))
    if all(prompt.error is not None for prompt in encoded):
        raise next(prompt.error for prompt in encoded if prompt.error is not None)
    return encoded


def _capacities(request: Request, prompts: Sequence[_Encoded]) -> list[int]:
    """Tokens of each sequence if it runs to its end."""
    return [len(prompt.ids) + request.sampling.max_tokens for prompt in prompts]


def _check_fit(request: Request, checkpoint: Checkpoint, prompts: Sequence[_Encoded], observer: Observer) -> None:
    """Refuse what memory does not hold; warn of what the model was not made for."""
    lengths = [len(prompt.ids) for prompt in prompts if prompt.error is None]
    memory.check(request.profile, checkpoint, lengths, request.sampling)
    limit, capacity = checkpoint.geometry.max_positions, max(_capacities(request, prompts))
    if limit is not None and capacity > limit:
        observer.notice(
            f"{capacity:,} tokens (prompt and output) are more than the {limit:,} positions {checkpoint.name} was "
            "made for: the text may be poor"
        )


class _Reader:
    """Prefills prompts: from token ids to sequences that have their first token."""

    def __init__(
        self,
        request: Request,
        model: Model,
        hook: Hook,
        rope: Rope,
        observer: Observer,
        timeline: Timeline,
    ):
        self.request, self.model, self.hook, self.rope = request, model, hook, rope
        self.observer, self.timeline = observer, timeline
        self.started = time.perf_counter()
        self.eos = frozenset() if request.sampling.ignore_eos else _eos_ids(model)

    def read(self, index: int, prompt: _Encoded) -> Iterator[RunningSequence]:
        """Yield the samples of one prompt; nothing for a prompt that could not be encoded."""
        if prompt.error is not None:
            return
        sampling, model, layers = self.request.sampling, self.model, self.model.geometry.layers
        self.observer.stage("prefill", len(prompt.ids) * len(layers))
        method_class = get_method(self.request.profile.method)
        contexts = [self._context(index, prompt, sample) for sample in range(sampling.num_samples)]
        method = method_class(self.request.profile.settings, layers, contexts[0])
        self.rope.use([contexts[0].capacity])
        begun = time.perf_counter()
        with self.timeline.span("prefill", source=prompt.source, tokens=len(prompt.ids)):
            logits = read_prompt(model.module, self.hook, prompt.ids, method, layers, self.observer.advance)
        self.observer.stage_done()
        now = time.perf_counter()
        methods = [method, *(method.fork(context.counters, context.track) for context in contexts[1:])]
        for sample, each in enumerate(methods):
            sequence = RunningSequence(
                index=index * sampling.num_samples + sample,
                source=prompt.source,
                sample=sample,
                prompt_tokens=len(prompt.ids),
                method=each,
                counters=contexts[sample].counters,
                sampler=Sampler(sampling, sample, model.device),
                stream=TextStream(model.tokenizer, sampling.stop),
                eos=self.eos,
                max_tokens=sampling.max_tokens,
                prefill_ms=1000 * (now - begun),
            )
            piece = sequence.accept(logits)
            sequence.ttft_ms = 1000 * (time.perf_counter() - self.started)
            _announce([(sequence, piece)], sampling.max_tokens, self.observer)
            yield sequence

    def _context(self, index: int, prompt: _Encoded, sample: int) -> SequenceContext:
        sampling, model = self.request.sampling, self.model
        capacity = len(prompt.ids) + sampling.max_tokens
        return SequenceContext(
            capacity=capacity,
            tiers=Tiers.for_device(model.device, model.dtype),
            counters=Counters(len(model.geometry.layers)),
            timeline=self.timeline,
            rotary=self.rope.rotary(capacity),
            track=f"sequence {index * sampling.num_samples + sample}",
            question=prompt.question,
            prompt_tokens=len(prompt.ids),
        )


def _eos_ids(model: Model) -> frozenset[int]:
    """Tokens that end a text: the generation config's, else the tokenizer's."""
    config = model.module.generation_config
    ids = (
        config.eos_token_id if config is not None and config.eos_token_id is not None else model.tokenizer.eos_token_id
    )
    return frozenset() if ids is None else frozenset([ids] if isinstance(ids, int) else ids)


def _announce(step: Sequence[tuple[RunningSequence, str]], max_tokens: int, observer: Observer) -> None:
    for sequence, piece in step:
        if piece:
            observer.text(sequence.index, piece)
        if not sequence.running:
            observer.finished(sequence.index)
    observer.step(max(len(sequence.token_ids) for sequence, _ in step), max_tokens)


def _flush(sequences: Sequence[RunningSequence], observer: Observer) -> None:
    """End what Ctrl-C cut off, and show the text that was held back."""
    for sequence in sequences:
        if sequence.running:
            piece = sequence.end("interrupted")
            if piece:
                observer.text(sequence.index, piece)
            observer.finished(sequence.index)


def _report(
    request: Request, model: Model, prompts: Sequence[_Encoded], sequences: Sequence[RunningSequence]
) -> report.Report:
    by_index = {sequence.index: sequence.report() for sequence in sequences}
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


def _unread(prompt: _Encoded, sample: int) -> report.Sequence:
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
