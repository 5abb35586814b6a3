"""Reading prompts: from text to sequences that have their first token."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from kvcli.errors import KvcliError
from kvcli.inputs.profiles import Profile, reference_profile
from kvcli.inputs.prompts import Prompt, Template, encode, encode_question
from kvcli.methods.base import Method, SequenceContext
from kvcli.quality.audit import Audit
from kvcli.runtime.detokenizer import StreamingDetokenizer
from kvcli.runtime.engine import Engine
from kvcli.runtime.sampling import Sampler, Sampling
from kvcli.runtime.sequence import RunningSequence
from kvcli.telemetry.observer import Observer
from kvcli.telemetry.timeline import Timeline


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt in tokens, and its question's tokens alone; or why there are none."""

    source: str
    ids: list[int]
    question: list[int] = field(default_factory=list)
    error: KvcliError | None = None


def encode_all(
    prompts: Sequence[Prompt], template: Template, tokenizer: PreTrainedTokenizerBase
) -> list[EncodedPrompt]:
    """Tokenise every prompt; one that fails is kept with its error.

    Raises:
        KvcliError: every prompt failed; the first one's error.
    """
    encoded = []
    for prompt in prompts:
        try:
            ids = encode(prompt, template, tokenizer)
            encoded.append(EncodedPrompt(prompt.source, ids, encode_question(prompt, tokenizer)))
        except KvcliError as error:
            encoded.append(EncodedPrompt(prompt.source, [], error=error))
    if all(prompt.error is not None for prompt in encoded):
        raise next(prompt.error for prompt in encoded if prompt.error is not None)
    return encoded


class Reader:
    """Prefills prompts: from token ids to sequences that have their first token."""

    def __init__(
        self,
        engine: Engine,
        profile: Profile,
        sampling: Sampling,
        observer: Observer,
        timeline: Timeline,
        audit: int | None = None,
    ):
        self.engine, self.profile, self.sampling = engine, profile, sampling
        self.observer, self.timeline = observer, timeline
        self.audit = audit  # steps, or None
        self.audits: list[Audit] = []
        self.started = time.perf_counter()
        self.eos = frozenset() if sampling.ignore_eos else engine.eos

    def read(self, index: int, prompt: EncodedPrompt) -> Iterator[RunningSequence]:
        """Yield the samples of one prompt; nothing for a prompt that could not be encoded."""
        if prompt.error is not None:
            return
        sampling, model = self.sampling, self.engine.model
        self.observer.stage("prefill", len(prompt.ids) * len(self.engine.layers))
        contexts = [self._context(index, prompt, sample) for sample in range(sampling.num_samples)]
        method = self.engine.method(self.profile, contexts[0])
        beside = [self.engine.context(len(prompt.ids), sampling.max_tokens) for _ in contexts]
        references = [] if self.audit is None else [self.engine.method(reference_profile(), beside[0])]
        begun = time.perf_counter()
        with self.timeline.span("prefill", source=prompt.source, tokens=len(prompt.ids)):
            logits, *_ = self.engine.read(prompt.ids, [method, *references], self.observer.advance)
        self.observer.stage_done()
        now = time.perf_counter()
        methods = _copies(method, contexts)
        references = [copy for reference in references for copy in _copies(reference, beside)]
        for sample, each in enumerate(methods):
            sequence = RunningSequence(
                index=index * sampling.num_samples + sample,
                source=prompt.source,
                sample=sample,
                prompt_tokens=len(prompt.ids),
                method=each,
                counters=contexts[sample].counters,
                sampler=Sampler(sampling, sample, model.device),
                stream=StreamingDetokenizer(model.tokenizer, sampling.stop),
                eos=self.eos,
                max_tokens=sampling.max_tokens,
                prefill_ms=1000 * (now - begun),
            )
            piece = sequence.accept(logits)
            sequence.ttft_ms = 1000 * (time.perf_counter() - self.started)
            if self.audit is not None:
                self.audits.append(Audit(self.engine, sequence, references[sample], self.audit))
            announce([(sequence, piece)], sampling.max_tokens, self.observer)
            yield sequence

    def _context(self, index: int, prompt: EncodedPrompt, sample: int) -> SequenceContext:
        track = f"sequence {index * self.sampling.num_samples + sample}"
        return self.engine.context(len(prompt.ids), self.sampling.max_tokens, prompt.question, self.timeline, track)


def _copies(method: Method[Any, Any], contexts: Sequence[SequenceContext]) -> list[Method[Any, Any]]:
    """The method, made with the first context, and a fork for each of the others."""
    return [method, *(method.fork(context.counters, context.track) for context in contexts[1:])]


def announce(step: Sequence[tuple[RunningSequence, str]], max_tokens: int, observer: Observer) -> None:
    """Tell the observer what a step gave: every sequence's new text, and which of them ended."""
    for sequence, piece in step:
        if piece:
            observer.text(sequence.index, piece)
        if not sequence.running:
            observer.finished(sequence.index)
    observer.step(max(len(sequence.token_ids) for sequence, _ in step), max_tokens)
