"""Prefilling prompts: from token ids to sequences that have their first token."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from kvcli.inputs.encoding import EncodedPrompt
from kvcli.inputs.profiles import Profile
from kvcli.methods.base import AnyMethod, SequenceContext
from kvcli.runtime.engine import Engine
from kvcli.runtime.sampling import Sampling
from kvcli.runtime.sequence import RunningSequence
from kvcli.telemetry.observer import Observer
from kvcli.telemetry.timeline import Timeline


class PrefillRunner:
    """Reads prompts one at a time into methods of `profile`, and forks each for its samples.

    With `reference`, a profile, every sequence brings a method object of that profile, too, which has read the same
    prompt.
    """

    def __init__(
        self,
        engine: Engine,
        profile: Profile,
        sampling: Sampling,
        observer: Observer,
        timeline: Timeline,
        reference: Profile | None = None,
    ):
        self.engine, self.sampling = engine, sampling
        self.profiles = [profile] if reference is None else [profile, reference]
        self.observer, self.timeline = observer, timeline
        self.started = time.perf_counter()

    def prefill(self, index: int, prompt: EncodedPrompt) -> Iterator[tuple[RunningSequence, str]]:
        """Yield the samples of one prompt, each with its first text; nothing for a prompt that was not encoded."""
        if prompt.error is not None:
            return
        samples = range(index * self.sampling.num_samples, (index + 1) * self.sampling.num_samples)
        self.observer.stage("prefill", len(prompt.ids) * len(self.engine.layers))
        timelines = [self.timeline, Timeline()]  # the reference's work is no part of the run's
        contexts = [
            [self._context(number, prompt, timeline) for number in samples]
            for _, timeline in zip(self.profiles, timelines, strict=False)
        ]
        methods = [
            self.engine.method(profile, first) for profile, (first, *_) in zip(self.profiles, contexts, strict=True)
        ]
        begun = time.perf_counter()
        with self.timeline.span("prefill", source=prompt.source, tokens=len(prompt.ids)):
            logits, *_ = self.engine.prefill(prompt.ids, methods, self.observer.advance)
        self.observer.stage_done()
        prefill_ms = 1000 * (time.perf_counter() - begun)
        served, *references = (_forks(*pair) for pair in zip(methods, contexts, strict=True))
        for sample, number in enumerate(samples):
            sequence = self.engine.sequence(
                served[sample],
                self.sampling,
                index=number,
                sample=sample,
                source=prompt.source,
                reference=references[0][sample] if references else None,
            )
            sequence.prefill_ms = prefill_ms
            piece = sequence.accept(logits)
            sequence.ttft_ms = 1000 * (time.perf_counter() - self.started)
            yield sequence, piece

    def _context(self, number: int, prompt: EncodedPrompt, timeline: Timeline) -> SequenceContext:
        track = f"sequence {number}"
        return self.engine.context(len(prompt.ids), self.sampling.max_tokens, prompt.question, timeline, track)


def _forks(method: AnyMethod, contexts: Sequence[SequenceContext]) -> list[AnyMethod]:
    """The method, which was made with the first context, and a fork for each of the others."""
    return [method, *(method.fork(context.counters, context.track) for context in contexts[1:])]
