"""Prefill prompts: from token ids to sequences that have their first token.

Questions on one document are read together, and all get the room that the longest needs, so that each can be a copy of
any other. KV that a library has of their beginning is loaded, and new KV is saved to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from kvcli.errors import KvcliError
from kvcli.inputs.encoding import EncodedPrompt, by_document, in_common
from kvcli.inputs.profiles import Profile
from kvcli.memory.tiers import Footprint
from kvcli.methods.contract import AnyMethod, SequenceContext
from kvcli.runtime.engine import Engine, shared_windows
from kvcli.runtime.prefill import (
    Branches,
)
from kvcli.runtime.sampling import Sampling
from kvcli.runtime.saved.library import KVLibrary
from kvcli.runtime.saved.manifest import PAGE
from kvcli.runtime.saved.reader import KVDamagedError, SavedKV
from kvcli.runtime.saved.writer import KVWriter
from kvcli.runtime.sequence import RunningSequence
from kvcli.telemetry.observer import Observer
from kvcli.telemetry.report import KVOrigin, SavedPrompt
from kvcli.telemetry.timeline import Timeline

if TYPE_CHECKING:
    pass


# Read prompts once for all methods that read them alike.


@dataclass
class _Reading:
    """Prompts that are read together, with their `places` among all prompts; rows are prompts, columns profiles."""

    places: Sequence[int]
    prompts: Sequence[EncodedPrompt]
    contexts: list[list[list[SequenceContext]]]
    """[row][column][sample]"""
    methods: list[list[AnyMethod]]
    """Those of the first samples: [row][column]."""
    branches: Branches
    logits: list[list[Tensor]]
    """[vocab] of the first tokens: [row][column]."""
    shared: int
    """Tokens that are read once for all prompts."""


class PrefillRunner:
    """Reads prompts into methods of `profile`, those on one document once, and forks each for its samples.

    With the profile `reference`, every sequence also brings a method object of that profile that has read the same
    prompt; with `exact`, its first token comes from that one's logits. `kept` counts the host memory of KV that a
    `library` loaded and sequences use. `advance` is called as in `Engine.prefill_branches`; by default it is the
    observer's.
    """

    def __init__(
        self,
        engine: Engine,
        profile: Profile,
        sampling: Sampling,
        observer: Observer,
        timeline: Timeline,
        reference: Profile | None = None,
        library: KVLibrary | None = None,
        advance: Callable[[int], None] | None = None,
        exact: bool = False,
    ):
        self.exact = exact
        self.engine, self.sampling, self.library = engine, sampling, library
        self.profiles = [profile] if reference is None else [profile, reference]
        self.observer, self.timelines = observer, [timeline, Timeline()]  # the reference's work is not part of the run
        self.advance = advance or observer.advance
        self.started = time.perf_counter()
        self.kept = Footprint()
        self._writers: list[KVWriter] = []

    def prefill(self, index: int, prompts: Sequence[EncodedPrompt]) -> Iterator[tuple[RunningSequence, str]]:
        """Read prompts together, their common beginning once if they are on one document; yield their samples.

        Each sample comes with its first text.

        `index` is the place of the first of them among all prompts. Prompts that failed to encode yield nothing.
        """
        places = [index + row for row, prompt in enumerate(prompts) if prompt.error is None]
        readable = [prompt for prompt in prompts if prompt.error is None]
        capacities = [len(prompt.ids) + self._sampling(prompt).max_tokens for prompt in readable]
        if len(readable) > 1 and not self.engine.rope.alike(capacities):
            for place, prompt in zip(places, readable, strict=True):
                yield from self.prefill(place, [prompt])
        elif readable:
            yield from self._sequences(*self._load_or_read(places, readable, max(capacities)))

    def finish(self) -> list[SavedPrompt]:
        """Wait until everything is saved; return an entry for each saved prompt, with its error if saving failed."""
        saved = []
        for writer in self._writers:
            error = None
            try:
                writer.finish()
            except KvcliError as failure:
                error = f"{failure.what}; {failure.hint}"
            saving = writer.saving
            tokens, path = saving.pages * PAGE, None if writer.path is None else str(writer.path)
            written = writer.bytes_written, writer.write_ms, writer.cached
            saved.append(SavedPrompt(saving.asked.source, path, tokens, *written, error))
        self._writers = []
        return saved

    def abandon(self) -> None:
        """Discard everything whose saving is not finished."""
        for writer in self._writers:
            writer.abandon()
        self._writers = []

    def _load_or_read(
        self, places: Sequence[int], prompts: Sequence[EncodedPrompt], capacity: int
    ) -> tuple[_Reading, KVOrigin, float]:
        """Read prompts with the library's KV, or without it if that turns out to be damaged."""
        try:
            return self._read(places, prompts, capacity, load=True)
        except KVDamagedError as error:
            assert self.library is not None
            self.library.forget(error)
            return self._read(places, prompts, capacity, load=False)

    def _read(
        self, places: Sequence[int], prompts: Sequence[EncodedPrompt], capacity: int, load: bool
    ) -> tuple[_Reading, KVOrigin, float]:
        """Read prompts; return them with the origin of the first one's KV and the milliseconds that all took."""
        for profile in self.profiles:
            self.engine.learn(profile)  # can take minutes, which do not count as reading
        begun, ids = time.perf_counter(), [prompt.ids for prompt in prompts]
        common = in_common(prompts) if len(prompts) > 1 == len(by_document(prompts)) else 0
        reading = self._prepare(places, prompts, capacity, Branches.of(ids, common))
        with ExitStack() as stack:
            found, writers = None, list[KVWriter]()
            if self.library is not None:
                rope, tiers = self.engine.rope.fingerprint(capacity), reading.methods[0][0].context.tiers
                if load and (found := self.library.find(ids[0], rope, tiers)) is not None:
                    stack.enter_context(found)
                    self._skip(reading, found)
                writers = self.library.writers(prompts[0], ids[0][: common or None], rope, found)
            try:
                self._compute(reading, writers)
            except BaseException:
                for writer in writers:
                    writer.abandon()
                raise
        self._writers += writers
        skipped = reading.branches.skip
        origin = KVOrigin(len(ids[0]) - skipped, 0, skipped)
        if found is not None and skipped:
            origin = replace(origin, disk_bytes=found.bytes_read, disk_ms=found.read_ms)
            self.kept += found.kept
        return reading, origin, 1000 * (time.perf_counter() - begun)

    def _prepare(
        self, places: Sequence[int], prompts: Sequence[EncodedPrompt], capacity: int, branches: Branches
    ) -> _Reading:
        """Make the methods that are to read prompts."""
        contexts = [
            [self._contexts(place, prompt, timeline, capacity) for timeline in self.timelines[: len(self.profiles)]]
            for place, prompt in zip(places, prompts, strict=True)
        ]
        methods = [
            [self.engine.method(profile, first, True) for profile, (first, *_) in zip(self.profiles, row, strict=True)]
            for row in contexts
        ]
        column = [row[0] for row in methods]
        window = column[0].prefill_window
        shared = len(branches.common) if window is None else shared_windows(branches, column, window)
        return _Reading(places, prompts, contexts, methods, branches, [], shared)

    def _skip(self, reading: _Reading, found: SavedKV) -> None:
        """Skip the tokens whose KV was found, except for the last queries that a method wants to see."""
        branches, methods = reading.branches, [method for row in reading.methods for method in row]
        least = min(len(prompt.ids) for prompt in reading.prompts)
        limit = len(branches.common) if len(branches.rests) > 1 else least - 1
        limit = min(limit, found.length, least - max(method.query_rows for method in methods))
        if any(method.observes for method in methods):
            limit = 0
            self.observer.notice(f"{self.profiles[0].method} needs every query: prefilling the document again")
        skip = found.cut(max(0, limit))
        if len(branches.rests) == 1:
            branches = Branches.of([reading.prompts[0].ids], skip)
        reading.branches = replace(branches, known=found if skip else None, skip=skip)

    def _compute(self, reading: _Reading, writers: Sequence[KVWriter]) -> None:
        """Run the prompts through the model."""
        branches, prompts = reading.branches, reading.prompts
        computed = sum(len(prompt.ids) for prompt in prompts) - reading.shared * (len(prompts) - 1) - branches.skip
        computed += self.engine.repeated_tokens(branches, reading.methods)
        self.observer.stage("prefill", computed * self.engine.depth)
        with self.timelines[0].span("prefill", source=prompts[0].source, tokens=computed):
            reading.logits = self.engine.prefill_branches(branches, reading.methods, self.advance, watchers=writers)
        self.observer.stage_done()

    def _sequences(
        self, reading: _Reading, origin: KVOrigin, prefill_ms: float
    ) -> Iterator[tuple[RunningSequence, str]]:
        """Give every sample of every prompt its first token; the first prompt's time covers all."""
        for row, prompt in enumerate(reading.prompts):
            served, *references = (
                _forks(*pair) for pair in zip(reading.methods[row], reading.contexts[row], strict=True)
            )
            for sample, method in enumerate(served):
                sequence = self.engine.sequence(
                    method,
                    self._sampling(prompt),
                    index=reading.places[row] * self.sampling.num_samples + sample,
                    sample=sample,
                    source=prompt.source,
                    reference=references[0][sample] if references else None,
                    ids=prompt.ids,
                )
                if prompt.prompt is not None:
                    sequence.question, sequence.id = prompt.prompt.question or None, prompt.prompt.id
                sequence.kv = origin
                if row:
                    own, shared_bytes = len(prompt.ids) - reading.shared, method.footprint().shared
                    sequence.kv = KVOrigin(own, reading.shared, shared_bytes=shared_bytes)
                sequence.prefill_ms = 0.0 if row else prefill_ms
                piece = sequence.accept(reading.logits[row][-1 if self.exact else 0])
                sequence.ttft_ms = 1000 * (time.perf_counter() - self.started)
                yield sequence, piece

    def _sampling(self, prompt: EncodedPrompt) -> Sampling:
        return prompt.sampling or self.sampling

    def _contexts(self, place: int, prompt: EncodedPrompt, timeline: Timeline, capacity: int) -> list[SequenceContext]:
        """Make the context of every sample of a prompt."""
        sampling, first = self._sampling(prompt), place * self.sampling.num_samples
        tracks = (f"sequence {first + sample}" for sample in range(sampling.num_samples))
        return [
            self.engine.context(len(prompt.ids), sampling.max_tokens, prompt.question, timeline, track, capacity)
            for track in tracks
        ]


def _forks(method: AnyMethod, contexts: Sequence[SequenceContext]) -> list[AnyMethod]:
    """Return the method, which was made with the first context, and a fork for each of the others."""
    return [method, *(method.fork(context.counters, context.track) for context in contexts[1:])]
