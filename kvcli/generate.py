"""The main path: load a model, read the prompts into a method's caches, decode, report.

Read this first; every other module serves one of its lines. `docs/architecture.md` continues from here.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace

from kvcli.capacity.ahead import forget_host_memory
from kvcli.capacity.planning.probe import rehearse
from kvcli.errors import KvcliError
from kvcli.inputs.encoding import EncodedPrompt, by_document, encode_all
from kvcli.memory.disk_tier import DiskError, DiskTier
from kvcli.memory.tiers import Footprint
from kvcli.models.loading import Checkpoint, Model, ModelSpec, open_checkpoint
from kvcli.quality.fidelity import Audit, conclude, prepare
from kvcli.request import (
    GenerationRequest,
    begin_to_keep,
    begin_to_pin,
    capacities,
    check,
    choose_pipeline,
    open_disk,
    open_library,
    settle_method,
    show_profile_notices,
)
from kvcli.runtime.checkpoint.kept_run import KeptRun
from kvcli.runtime.engine import Engine, engine
from kvcli.runtime.not_finite import describe_origin
from kvcli.runtime.pipeline import Pipeline
from kvcli.runtime.prefill_runner import PrefillRunner
from kvcli.runtime.run_report import run_report, weight_traffic
from kvcli.runtime.saved.library import KVLibrary
from kvcli.runtime.sequence import RunningSequence
from kvcli.runtime.streamed_weights import Streamed
from kvcli.telemetry import report
from kvcli.telemetry.observer import Observer
from kvcli.telemetry.timeline import Timeline

Step = list[tuple[RunningSequence, str]]
"""The sequences of one step, each with its new text."""


def generate(
    spec: ModelSpec,
    request: GenerationRequest,
    observer: Observer,
    timeline: Timeline | None = None,
    started: float | None = None,
) -> report.Report:
    """Load a model and continue every prompt `sampling.num_samples` times; return the report.

    Ctrl-C is not an error once the model is loaded: the report holds what there is, with `finish_reason` "interrupted".
    An enabled `timeline` receives the spans of all phases and makes the steps blocking. `started` is when the user
    began to wait, on the clock of `time.perf_counter`: the report then has the time from there to each first token.

    Raises:
        KvcliError: the model cannot be loaded or the only prompt not encoded (usage or runtime); the run will not fit
            (exit code 3), which is checked before the weights are read.
    """
    timeline = timeline or Timeline()
    observer.stage("load")
    with timeline.span("load"):
        checkpoint = open_checkpoint(spec)
        prompts = encode_all(request.prompts, request.template, checkpoint)
        generation = Generation.prepared(request, checkpoint, prompts, observer, timeline)
        generation.started = started
    return _run(generation)


def resume(
    kept: KeptRun, observer: Observer, timeline: Timeline | None = None, model: str | None = None
) -> report.Report:
    """Continue a generation that was kept in a directory; announce all of its text and return the report.

    A finished generation is only reported. `model` is the new location of the model, if it was moved.

    Raises:
        KvcliError: as for `generate`; the model or the tokenizer differs (usage); the kept files are damaged (runtime).
    """
    timeline = timeline or Timeline()
    with closing(kept):
        if (finished := kept.report()) is not None:
            observer.notice(f"{kept.directory}: this generation has finished; here is its text")
            for index, sequence in enumerate(finished.sequences):
                observer.text(index, sequence.text)
                observer.finished(index)
            return finished
        request = GenerationRequest(kept.profile, (), kept.sampling, pipeline=kept.asked.pipeline)
        observer.stage("load")
        with timeline.span("load"):
            checkpoint = open_checkpoint(kept.spec if model is None else replace(kept.spec, name=model))
            kept.check(checkpoint)
            show_profile_notices(request, checkpoint, kept.prompts, observer)
            check(request, checkpoint, kept.prompts, observer)
            loaded = checkpoint.load()
        return _run(Generation(request, loaded, kept.prompts, kept.asked.pipeline, observer, timeline, kept))


def _run(generation: Generation) -> report.Report:
    """Take all steps, announce them, and return the report."""
    request, observer = generation.request, generation.observer
    try:
        with closing(generation.steps()) as steps:
            for step in steps:
                announce(step, observer)
                observer.step(max(len(sequence.token_ids) for sequence, _ in step), request.sampling.max_tokens)
    except KeyboardInterrupt:
        announce(generation.interrupt(), observer)
        if generation.kept is not None:
            observer.notice(f"to resume: kvcli generate --resume {generation.kept.directory}")
    except DiskError as error:
        if not any(sequence.running for sequence in generation.sequences):
            raise
        announce(generation.fail(error), observer)
    observer.stage_done()
    return generation.report()


@dataclass
class Generation:
    """One run over encoded prompts on a loaded model: take its `steps`, then its `report`."""

    request: GenerationRequest
    model: Model
    prompts: Sequence[EncodedPrompt]
    pipeline: Pipeline
    observer: Observer
    timeline: Timeline = field(default_factory=Timeline)
    kept: KeptRun | None = None
    library: KVLibrary | None = None
    disk: DiskTier | None = None
    sequences: list[RunningSequence] = field(default_factory=list, init=False)
    audits: list[Audit] = field(default_factory=list, init=False)
    loaded: Footprint = field(default_factory=Footprint, init=False)
    """Host memory of loaded KV that the sequences use."""
    started: float | None = field(default=None, init=False)
    """When the user began to wait, see `generate`."""
    saved: list[report.SavedPrompt] = field(default_factory=list, init=False)
    streamed: list[Streamed] = field(default_factory=list, init=False)
    """Streamed weights that were loaded while prompts were read, and then in decode steps."""

    @classmethod
    def prepared(
        cls,
        request: GenerationRequest,
        checkpoint: Checkpoint,
        prompts: Sequence[EncodedPrompt],
        observer: Observer,
        timeline: Timeline | None = None,
        loaded: Model | None = None,
    ) -> Generation:
        """Settle how the run goes, refuse what cannot be done, then read the weights unless they are `loaded`.

        Raises:
            KvcliError: the run will not fit (exit code 3); options contradict each other (usage).
        """
        timeline = timeline or Timeline()
        request = settle_method(request, checkpoint, prompts, observer, loaded is not None)
        library = open_library(request, checkpoint, observer)
        disk = open_disk(request, checkpoint, prompts)
        check(request, checkpoint, prompts, observer, loaded=loaded is not None, disk=disk)
        pipeline = choose_pipeline(request, checkpoint, timeline.enabled)
        kept = begin_to_keep(request, checkpoint, prompts, pipeline)
        longest = max(len(prompt.ids) for prompt in prompts)
        rehearse(request.profile, checkpoint, longest, observer.notice, request.lossless)
        if loaded is None:
            begin_to_pin(request, checkpoint, prompts, disk)
            loaded = checkpoint.load()
        return cls(request, loaded, prompts, pipeline, observer, timeline, kept, library, disk)

    def steps(self) -> Generator[Step, None, None]:
        """Prefill the documents one by one, each with all its questions; then decode all together, a token per step."""
        request, kept = self.request, self.kept
        beside = request.beside(self.model.device.type)
        ready_for = engine(self.model, capacities(request, self.prompts), self.observer.notice, self.disk)
        with ready_for as ready, nullcontext() if kept is None else closing(kept), self.disk or nullcontext():
            runner = PrefillRunner(
                *(ready, request.profile, request.sampling, self.observer, self.timeline, beside, self.library),
                exact=request.lossless is not None,
            )
            try:
                yield from self._read(ready, runner)
                forget_host_memory(self.model.device)
                if (streamed := ready.hook.streamed) is not None:
                    self.streamed.append(streamed.taken())
                yield from self._decode(ready)
            finally:  # keep what was read, even if the run is interrupted
                if (streamed := ready.hook.streamed) is not None:
                    self.streamed.append(streamed.taken())
                self.loaded, self.saved = runner.kept, runner.finish()
                for each in self.saved:
                    if each.error is not None and each.cached:  # a failed --save-kv is an error of the run
                        self.observer.notice(each.error)
            if kept is not None:
                kept.finish(self.report(), self.observer.failure)

    def _read(self, ready: Engine, runner: PrefillRunner) -> Generator[Step, None, None]:
        """Restore a kept run, then prefill the prompts that it had not read."""
        kept, request = self.kept, self.request
        if kept is not None and (restored := kept.restore(ready, self.timeline)):
            self.sequences, runner.kept = restored, Footprint(host=kept.lent_bytes)
            yield [(sequence, sequence.detokenizer.text) for sequence in restored]
        read = {sequence.index // request.sampling.num_samples for sequence in self.sequences}
        sources = list(dict.fromkeys(prompt.source for prompt in self.prompts))
        stop = 0
        for prompts in by_document(self.prompts):
            first, stop = stop, stop + len(prompts)
            if not read.isdisjoint(range(first, stop)):
                continue
            self.observer.document(sources.index(prompts[0].source) + 1, len(sources))
            for sequence, piece in runner.prefill(first, prompts):
                if self.started is not None:
                    sequence.ttft_from_start_ms = 1000 * (time.perf_counter() - self.started)
                self.sequences.append(sequence)
                if request.audit is not None:
                    self.audits.append(Audit(ready, sequence, request.audit))
                yield [(sequence, piece)]
            if kept is not None and self.sequences:
                kept.lent_bytes = runner.kept.host
                kept.save(self.sequences, self.observer.failure)
        prepare(self.audits)

    def _decode(self, ready: Engine) -> Generator[Step, None, None]:
        for step in ready.decode(self.sequences, self.timeline, self.pipeline, lossless=self.request.lossless):
            yield step
            if self.kept is not None:
                self.kept.step(self.sequences, self.observer.failure)
            conclude(self.audits)
            prepare(self.audits)
        for sequence in self.sequences:
            if sequence.error is not None:
                prompt = self.prompts[sequence.index // self.request.sampling.num_samples]
                sequence.error += f": {describe_origin(ready, prompt.ids)}"

    def interrupt(self) -> Step:
        """End the running sequences; return them with their held-back text."""
        return [(sequence, sequence.end("interrupted")) for sequence in self.sequences if sequence.running]

    def fail(self, error: KvcliError) -> Step:
        """End the running sequences with one error; return them with their held-back text."""
        running = [sequence for sequence in self.sequences if sequence.running]
        for sequence in running:
            sequence.error = error.what
        return [(sequence, sequence.end("error")) for sequence in running]

    def report(self) -> report.Report:
        """Report the sequences in the order of the prompts, the samples of each next to each other.

        A prompt that could not be encoded has `finish_reason` "error"; one that was not reached, "interrupted".
        """
        request, model = self.request, self.model
        by_index = {sequence.index: sequence.report() for sequence in self.sequences}
        for audit in self.audits:
            by_index[audit.sequence.index] = replace(by_index[audit.sequence.index], fidelity=audit.summary())
        samples = request.sampling.num_samples
        kv = sum((sequence.footprint() for sequence in self.sequences), self.loaded)
        entries = [
            by_index.get(index * samples + sample) or _unread(prompt, sample)
            for index, prompt in enumerate(self.prompts)
            for sample in range(samples)
        ]
        weights = None
        if self.streamed:
            read, decoded = [*self.streamed, Streamed()][:2]
            weights = weight_traffic(read, decoded, max(len(entry.timing.decode_ms) for entry in entries))
        return run_report(model, request.profile, entries, kv, self.saved, weights)


def announce(step: Step, observer: Observer) -> None:
    """Tell the observer each sequence's new text and which sequences ended."""
    for sequence, piece in step:
        if piece:
            observer.text(sequence.index, piece)
        if not sequence.running:
            observer.finished(sequence.index)


def _unread(prompt: EncodedPrompt, sample: int) -> report.Sequence:
    """Make the entry of a prompt that never became a sequence: it failed, or Ctrl-C came before its turn."""
    return report.Sequence(
        source=prompt.source,
        sample=sample,
        question=prompt.prompt.question or None if prompt.prompt else None,
        id=prompt.prompt.id if prompt.prompt else None,
        text="",
        token_ids=[],
        finish_reason="interrupted" if prompt.error is None else "error",
        prompt_tokens=len(prompt.ids),
        output_tokens=0,
        error=None if prompt.error is None else prompt.error.what,
    )
