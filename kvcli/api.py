"""kvcli from Python: load a model, continue texts, plan a run; the same path as the command line.

    model = kvcli.load("path-or-id")
    answer = model.generate(text, prompt="Who signed?", method="freekv", budget=2048, max_tokens=64)
    print(answer.text, answer.statistics["correction"])

Keyword arguments have the command line's names: those of `Sampling` (max_tokens, temperature, top_p, top_k, min_p,
repetition_penalty, seed, stop, ignore_eos, num_samples) say how tokens are chosen, all others are settings of the
method (budget, sink, window, tau, page_size, ...). Settings may be numbers or text such as "4K".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, overload

from kvcli.capacity.memory import available
from kvcli.capacity.need import weights_by_pool
from kvcli.capacity.planning.estimate import Machine, PlannedRun
from kvcli.capacity.planning.plan import CapacityPlan, choice, plan
from kvcli.capacity.roofline import measure_rates
from kvcli.chat import Dialogue
from kvcli.errors import KvcliError, usage_error
from kvcli.generate import Generation, announce
from kvcli.generate import resume as go_on
from kvcli.inputs.encoding import EncodedPrompt, encode_all
from kvcli.inputs.options import Keep, ModelOptions, keywords
from kvcli.inputs.profiles import resolve_profile
from kvcli.models.loading import Checkpoint, Model, open_checkpoint
from kvcli.request import request_of
from kvcli.runtime.checkpoint.kept_run import KeptRun
from kvcli.telemetry.observer import Observer
from kvcli.telemetry.report import Report


@dataclass(frozen=True)
class Answer:
    """The continuation of one text; with `num_samples` above 1 the properties are those of the first sample."""

    report: Report

    @property
    def text(self) -> str:
        """The continuation."""
        return self.report.sequences[0].text

    @property
    def token_ids(self) -> list[int]:
        """Its tokens, including the one that ended it."""
        return self.report.sequences[0].token_ids

    @property
    def finish_reason(self) -> str:
        """The reason for its end: "eos", "stop", "length" or "interrupted"."""
        return self.report.sequences[0].finish_reason

    @property
    def statistics(self) -> dict[str, Any]:
        """Times in milliseconds, corrections, the cache's requests and traffic, and drafts, as in `to_dict`."""
        sequence = self.to_dict()["sequences"][0]
        told = ("timing", "correction", "cache", "method", "steps", "drafts")
        return {name: sequence[name] for name in told if name in sequence}

    def to_dict(self) -> dict[str, Any]:
        """Return what `kvcli generate --json` prints."""
        return self.report.to_dict()


class LanguageModel:
    """A checkpoint that continues texts, made by `load`; its weights are read when they are first needed."""

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint = checkpoint

    @cached_property
    def loaded(self) -> Model:
        """The model with its weights."""
        return self.checkpoint.load()

    @overload
    def generate(self, document: str, prompt: str | None = None, **options: Any) -> Answer: ...

    @overload
    def generate(
        self, document: str | Sequence[str], prompt: str | Sequence[str] | None = None, **options: Any
    ) -> list[Answer]: ...

    def generate(
        self, document: str | Sequence[str], prompt: str | Sequence[str] | None = None, **options: Any
    ) -> Answer | list[Answer]:
        """Continue a document, or several as one batch without padding; `prompt` is the question after each of them.

        Several questions on a document share it: it is read once, and held once in host memory.

        Args:
            document: a text, or several.
            prompt: the question after each of them, or several; without it the texts stand alone.
            options: those of the command line by their long names, as `kvcli.inputs.options.GENERATION` lists them
                (docs/python.md has the table): of the method, the conversation, the sampling, saved KV, a disk and a
                checkpoint; sizes may be text such as "200GiB". All others are settings of the method, except
                `observer`, a `kvcli.telemetry.observer.Observer`.

        Returns:
            An answer for one text and question; a list for several of either, with all questions on a text in a row.

        Raises:
            KvcliError: an unknown name or a bad value, a run that will not fit, a text that cannot be continued.
        """
        texts = [document] if isinstance(document, str) else list(document)
        generation, observer = self._generation(texts, prompt, options)
        with closing(generation.steps()) as steps:
            for step in steps:
                announce(step, observer)
        answers = _answers(generation.report(), generation.request.sampling.num_samples)
        return answers[0] if isinstance(document, str) and (prompt is None or isinstance(prompt, str)) else answers

    def stream(self, document: str, prompt: str | None = None, **options: Any) -> Iterator[str]:
        """Continue one document and yield the text as it comes; parameters and errors as in `generate`."""
        generation, _ = self._generation([document], prompt, options)
        if generation.request.sampling.num_samples > 1:
            raise usage_error("a stream has one sample", "leave num_samples out")
        with closing(generation.steps()) as steps:
            for step in steps:
                yield from (piece for _, piece in step if piece)
        if (error := generation.sequences[0].error) is not None:
            raise KvcliError(error)

    def chat(self, document: str = "", **options: Any) -> Chat:
        """Start a chat about a document (or about none): it is read once, and each turn reads what is new.

        Args:
            document: a text.
            options: as in `generate`, except `audit`, `lossless`, `pipeline`, `checkpoint`, `every`, `kv_disk` and
                `num_samples`.

        Raises:
            KvcliError: an unknown name or a bad value, or a document that will not fit.
        """
        request, observer = request_of([document or "-"], None, **options)
        watched = request.audit or request.lossless or request.disk
        if request.sampling.num_samples > 1 or watched or request.keep or request.pipeline != "auto":
            raise usage_error(
                "chat does not take num_samples, audit, lossless, checkpoint, kv_disk or pipeline", "leave it out"
            )
        model, checkpoint = self.loaded, self.checkpoint
        settings = (request.profile, request.sampling, request.template, document)
        return Chat(Dialogue(model, checkpoint, *settings, observer))

    def plan(
        self,
        context: int,
        method: str | None = None,
        profile: str | None = None,
        *,
        max_tokens: int = 256,
        batch_size: int = 1,
        times: bool = False,
        **settings: Any,
    ) -> CapacityPlan:
        """Plan the memory of a run over prompts of `context` tokens, and whether it fits, before it is run.

        Without a method, it is the one that `generate` would choose.

        With `times` a few layers are tried on this machine to time a step and the prefill, which takes seconds.

        Raises:
            KvcliError: an unknown name or a bad value (usage).
        """
        chosen, device = resolve_profile(method, profile, settings), self.checkpoint.device
        planned = PlannedRun(self.checkpoint.config, self.checkpoint.dtype, self.checkpoint.geometry)
        place = self.checkpoint.place
        free = available(place)
        if "loaded" in vars(self):
            for pool, size in weights_by_pool(self.checkpoint.geometry.held_bytes, place).items():
                free[pool] += size
        rates = measure_rates(device, planned.dtype) if times else None
        machine = Machine(device, free, rates, times, self.checkpoint.placement)
        if chosen.unnamed:
            chosen = choice(chosen, planned, machine, context, batch_size, max_tokens)
        (found,) = plan(planned, machine, [(chosen.name, chosen)], [context], [batch_size], max_tokens)
        return found

    def _generation(
        self, texts: Sequence[str], prompt: str | Sequence[str] | None, options: dict[str, Any]
    ) -> tuple[Generation, Observer]:
        request, observer = request_of(texts, prompt, **options)
        prompts: list[EncodedPrompt] = encode_all(request.prompts, request.template, self.checkpoint)
        if (failed := next((each.error for each in prompts if each.error is not None), None)) is not None:
            raise failed
        loaded = vars(self).get("loaded")
        generation = Generation.prepared(request, self.checkpoint, prompts, observer, loaded=loaded)
        self.loaded = generation.model
        return generation, observer


class Chat:
    """A conversation, made by `LanguageModel.chat`; `dialogue` has its exchanges."""

    def __init__(self, dialogue: Dialogue):
        self.dialogue = dialogue
        dialogue.read()

    def ask(self, question: str) -> Answer:
        """Ask about the document and the conversation.

        Raises:
            KvcliError: the conversation will not fit, or cannot be continued.
        """
        for _ in self.dialogue.ask(question):
            pass
        return Answer(self.dialogue.report(last=1))

    def stream(self, question: str) -> Iterator[str]:
        """Ask, and yield the answer as it comes; errors as in `ask`."""
        return self.dialogue.ask(question)

    def retry(self) -> Answer:
        """Ask the last question again and replace its answer; errors as in `ask`."""
        for _ in self.dialogue.retry():
            pass
        return Answer(self.dialogue.report(last=1))

    def use(self, method: str | None = None, profile: str | None = None, **settings: Any) -> None:
        """Answer by another method, or with other settings, from now on; without a name, the current method's.

        Raises:
            KvcliError: an unknown name or a bad value (usage).
        """
        name = method or (None if profile else self.dialogue.profile.method)
        self.dialogue.profile = resolve_profile(name, profile, settings)

    def to_dict(self) -> dict[str, Any]:
        """Return all turns as `kvcli chat --json` prints them."""
        return self.dialogue.report().to_dict()


@keywords
def load(options: ModelOptions) -> LanguageModel:
    """Open a checkpoint: a directory, a GGUF file, a hub id, with load_format "dummy" a shape; None is the demo model.

    Options are those of the command line: `model`, which may come first without its name, `device`, `dtype`, `weights`
    (quantised on loading as int8, int4 or fp8, with the extra kvcli[weights]; or those of a GGUF file, unpacked and
    wide), `load_format`, `offline` and `tokenizer`, the directory or hub id that replaces the checkpoint's.

    Raises:
        KvcliError: there is no such model, its files are broken, or it cannot be served (usage or runtime).
    """
    return LanguageModel(open_checkpoint(options.spec()))


def resume(directory: str | Path, *, model: str | None = None, observer: Observer | None = None) -> list[Answer]:
    """Continue what `generate(..., checkpoint=directory)` kept; return an answer for each text, as without the break.

    `model` is the new location of the model, if it was moved.

    Raises:
        KvcliError: there is no run in the directory, another process is at work on it, the model differs, or a file
            differs from what was written.
    """
    kept = KeptRun.open(Keep(Path(directory)))
    return _answers(go_on(kept, observer or Observer(), model=model), kept.sampling.num_samples)


def _answers(report: Report, samples: int) -> list[Answer]:
    """Split a report by texts; raises KvcliError if one could not be continued."""
    for sequence in report.sequences:
        if sequence.error is not None:
            raise KvcliError(f"{sequence.source}: {sequence.error}")
    starts = range(0, len(report.sequences), samples)
    return [Answer(replace(report, sequences=report.sequences[start : start + samples])) for start in starts]
