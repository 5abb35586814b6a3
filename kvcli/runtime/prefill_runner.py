"""Prefilling prompts: from token ids to sequences that have their first token.

Questions on one document are read together, and all get the room that the longest needs, so that any can be a copy of
any other.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

from kvcli.inputs.encoding import EncodedPrompt, in_common
from kvcli.inputs.profiles import Profile
from kvcli.methods.base import AnyMethod, SequenceContext
from kvcli.runtime.engine import Engine, shared_windows
from kvcli.runtime.prefill import Branches
from kvcli.runtime.sampling import Sampling
from kvcli.runtime.sequence import RunningSequence
from kvcli.telemetry.observer import Observer
from kvcli.telemetry.report import KVOrigin
from kvcli.telemetry.timeline import Timeline

T = TypeVar("T")


class PrefillRunner:
    """Reads prompts into methods of `profile`, those on one document together, and forks each for its samples.

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

    def prefill(self, index: int, prompts: Sequence[EncodedPrompt]) -> Iterator[tuple[RunningSequence, str]]:
        """Read prompts together, what they begin with in common once; yield their samples, each with its first text.

        `index` is the place of the first of them among all prompts. Those that were not encoded give nothing.
        """
        readable = [(index + place, prompt) for place, prompt in enumerate(prompts) if prompt.error is None]
        if not readable:
            return
        ids = [prompt.ids for _, prompt in readable]
        capacities = [len(tokens) + self.sampling.max_tokens for tokens in ids]
        if len(readable) > 1 and not self.engine.rope.alike(capacities):
            for place, prompt in readable:
                yield from self.prefill(place, [prompt])
            return
        branches = Branches.of(ids, in_common([prompt for _, prompt in readable]) if len(ids) > 1 else 0)
        timelines = [self.timeline, Timeline()]  # the reference's work is no part of the run's
        contexts = [  # [prompt][profile][sample]
            [self._contexts(place, prompt, timeline, max(capacities)) for _, timeline in self._pairs(timelines)]
            for place, prompt in readable
        ]
        methods = [
            [self.engine.method(profile, first) for profile, (first, *_) in self._pairs(row)] for row in contexts
        ]
        shared = self._shared(branches, [row[0] for row in methods])
        computed = sum(map(len, ids)) - shared * (len(ids) - 1)
        self.observer.stage("prefill", computed * len(self.engine.layers))
        begun = time.perf_counter()
        with self.timeline.span("prefill", source=prompts[0].source, tokens=computed):
            logits = self.engine.prefill_branches(branches, methods, self.observer.advance)
        self.observer.stage_done()
        prefill_ms = 1000 * (time.perf_counter() - begun)
        for row, (place, prompt) in enumerate(readable):
            served, *references = (_forks(*pair) for pair in zip(methods[row], contexts[row], strict=True))
            for sample, method in enumerate(served):
                sequence = self.engine.sequence(
                    method,
                    self.sampling,
                    index=place * self.sampling.num_samples + sample,
                    sample=sample,
                    source=prompt.source,
                    reference=references[0][sample] if references else None,
                )
                if prompt.prompt is not None:
                    sequence.question, sequence.id = prompt.prompt.question or None, prompt.prompt.id
                sequence.kv = self._origin(len(prompt.ids), shared if row else 0, method)
                sequence.prefill_ms = 0.0 if row else prefill_ms
                piece = sequence.accept(logits[row][0])
                sequence.ttft_ms = 1000 * (time.perf_counter() - self.started)
                yield sequence, piece

    def _pairs(self, entries: Sequence[T]) -> Iterator[tuple[Profile, T]]:
        """The profiles, each with its entry."""
        return zip(self.profiles, entries, strict=False)

    def _contexts(self, place: int, prompt: EncodedPrompt, timeline: Timeline, capacity: int) -> list[SequenceContext]:
        """Make the context of every sample of a prompt."""
        samples, (tokens, most) = self.sampling.num_samples, (len(prompt.ids), self.sampling.max_tokens)
        return [
            self.engine.context(tokens, most, prompt.question, timeline, f"sequence {number}", capacity)
            for number in range(place * samples, (place + 1) * samples)
        ]

    def _origin(self, prompt_tokens: int, shared: int, method: AnyMethod) -> KVOrigin:
        return KVOrigin(prompt_tokens - shared, shared, shared_bytes=method.footprint().shared)

    def _shared(self, branches: Branches, methods: Sequence[AnyMethod]) -> int:
        """How many tokens are read once for all prompts."""
        window = methods[0].prefill_window
        return len(branches.common) if window is None else shared_windows(branches, methods, window)


def _forks(method: AnyMethod, contexts: Sequence[SequenceContext]) -> list[AnyMethod]:
    """The method, which was made with the first context, and a fork for each of the others."""
    return [method, *(method.fork(context.counters, context.track) for context in contexts[1:])]
