"""A generation that outlives its process: the request is kept once, its state after every few steps.

The journal stores a directory's content (`kvcli.runtime.checkpoint.journal`); a walk over a sequence's objects finds
its state (`kvcli.memory.state`). To continue a run, its sequences are made afresh from the kept prompts, and get their
state back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from safetensors.torch import load, save

from kvcli.errors import KvcliError, usage_error
from kvcli.inputs.encoding import EncodedPrompt
from kvcli.inputs.options import Keep
from kvcli.inputs.profiles import Profile
from kvcli.inputs.prompts import Prompt
from kvcli.memory.state import capture
from kvcli.methods import get_method
from kvcli.models.loading import Checkpoint, ModelSpec, fingerprint, tokenizer_fingerprint
from kvcli.models.streamed import WeightsOn
from kvcli.models.weights import Weights
from kvcli.runtime.checkpoint.journal import Journal
from kvcli.runtime.checkpoint.restoring import Restoring
from kvcli.runtime.engine import Engine
from kvcli.runtime.pipeline import Pipeline
from kvcli.runtime.sampling import Sampling
from kvcli.runtime.sequence import RunningSequence
from kvcli.telemetry.report import Report, environment
from kvcli.telemetry.timeline import Timeline

_ASKED, _PROMPTS, _REPORT = "run.json", "prompts.safetensors", "report.json"


class KeptPrompt(BaseModel):
    """A prompt's names, and the error that left it without tokens, if any."""

    source: str
    question: str
    id: str | None
    failed: tuple[str, str] | None
    """The error and its hint."""

    @classmethod
    def of(cls, encoded: EncodedPrompt) -> KeptPrompt:
        """Record everything but the tokens."""
        text, error = encoded.prompt or Prompt(encoded.source, ""), encoded.error
        failed = None if error is None else (error.what, error.hint)
        return cls(source=encoded.source, question=text.question, id=text.id, failed=failed)

    def encoded(self, ids: list[int], question: list[int]) -> EncodedPrompt:
        """Return the encoded prompt with these tokens."""
        error = None if self.failed is None else KvcliError(*self.failed)
        return EncodedPrompt(self.source, ids, question, error, Prompt(self.source, "", self.question, self.id))


class Asked(BaseModel):
    """The resolved request of a run: `run.json`."""

    model_config = ConfigDict(extra="forbid")

    kvcli: str
    model: str | None
    load_format: Literal["auto", "dummy"]
    device: str
    dtype: str
    weights: Weights = "auto"
    weights_on: WeightsOn = "device"
    weights_memory: int | None = None
    tokenizer_from: str | None = None
    offline: bool
    fingerprint: str
    tokenizer: str
    profile: dict[str, Any]
    sampling: dict[str, Any]
    pipeline: Pipeline
    prompts: list[KeptPrompt]

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        profile: Profile,
        sampling: Sampling,
        pipeline: Pipeline,
        prompts: Sequence[EncodedPrompt],
    ) -> Asked:
        """Record a run; a local model is recorded by its absolute path, so that any working directory finds it."""
        spec = checkpoint.spec
        local = spec.name is not None and Path(spec.name).exists()
        return cls(
            kvcli=environment()["kvcli"],
            model=str(Path(spec.name).resolve()) if local and spec.name else spec.name,
            load_format=spec.load_format,
            device=str(checkpoint.device),
            dtype=str(checkpoint.dtype).removeprefix("torch."),
            weights=spec.weights,
            weights_on=spec.weights_on,
            weights_memory=spec.weights_memory,
            tokenizer_from=spec.tokenizer,
            offline=spec.offline,
            fingerprint=fingerprint(checkpoint),
            tokenizer=tokenizer_fingerprint(checkpoint.tokenizer),
            profile=profile.as_dict() | {"scales": list(profile.scales)},
            sampling=asdict(sampling),
            pipeline=pipeline,
            prompts=[KeptPrompt.of(prompt) for prompt in prompts],
        )


class KeptRun:
    """A run with its directory: `begin` or `open` one, then `save` its sequences as it goes on."""

    def __init__(self, journal: Journal, asked: Asked, prompts: Sequence[EncodedPrompt], every: int):
        self.journal, self.asked, self.prompts, self.every = journal, asked, prompts, every
        self._steps = 0
        self._behind = False  # the disk did not take the last state
        self.lent_bytes = 0  # of host memory that no sequence counts as its own

    @classmethod
    def begin(cls, keep: Keep, asked: Asked, prompts: Sequence[EncodedPrompt]) -> KeptRun:
        """Begin in a new or empty directory; raises KvcliError (usage) for any other."""
        tokens = {
            f"{at}.{name}": torch.tensor(getattr(prompt, name), dtype=torch.int64)
            for at, prompt in enumerate(prompts)
            for name in ("ids", "question")
        }
        files = {_ASKED: asked.model_dump_json().encode(), _PROMPTS: save(tokens)}
        return cls(Journal.begin(keep.directory, files), asked, prompts, keep.every)

    @classmethod
    def open(cls, keep: Keep) -> KeptRun:
        """Open what `begin` made.

        Raises:
            KvcliError: there is no run, it is of a newer kvcli, or another process is at work on it (usage); a file
                differs from what was written (runtime).
        """
        journal = Journal(keep.directory)
        try:
            asked = Asked.model_validate_json(journal.read(_ASKED))
        except ValidationError as error:
            raise KvcliError(f"{keep.directory}: {_ASKED} is not of this version of kvcli: {_first(error)}") from None
        tokens = load(journal.read(_PROMPTS))
        prompts = [
            prompt.encoded(tokens[f"{at}.ids"].tolist(), tokens[f"{at}.question"].tolist())
            for at, prompt in enumerate(asked.prompts)
        ]
        return cls(journal, asked, prompts, keep.every)

    @property
    def directory(self) -> Path:
        """The directory that it is kept in."""
        return self.journal.directory

    @property
    def spec(self) -> ModelSpec:
        """The model that was asked for."""
        asked = self.asked
        how = (asked.load_format, asked.offline, asked.weights, asked.tokenizer_from)
        place = asked.weights_on, asked.weights_memory
        return ModelSpec(asked.model, asked.device, asked.dtype, *how, *place)

    @property
    def sampling(self) -> Sampling:
        """How tokens are chosen."""
        return Sampling(**{**self.asked.sampling, "stop": tuple(self.asked.sampling["stop"])})

    @property
    def profile(self) -> Profile:
        """The method and its settings.

        Raises:
            KvcliError: there is no such method, or its settings have changed (usage).
        """
        asked = {key: value for key, value in self.asked.profile.items() if key != "hash"}
        settings = asked.pop("settings")
        try:
            config = get_method(asked["method"]).Config.model_validate_json(json.dumps(settings))
        except ValidationError as error:
            what = f"{self.directory}: method {asked['method']} has other settings by now: {_first(error)}"
            raise usage_error(what, self._begun_with) from None
        return Profile(**asked, settings=config)

    @property
    def _begun_with(self) -> str:
        """The hint if the code has changed; a version under development may have changed within itself."""
        return f"resume with the version it began with, kvcli {self.asked.kvcli}, or start again"

    def check(self, checkpoint: Checkpoint) -> None:
        """Refuse another model or tokenizer than the run began with.

        Raises:
            KvcliError: one of them differs (usage).
        """
        found = {
            "model": (self.asked.fingerprint, fingerprint(checkpoint)),
            "tokenizer": (self.asked.tokenizer, tokenizer_fingerprint(checkpoint.tokenizer)),
        }
        for name, (began, now) in found.items():
            if began != now:
                what = f"{self.directory}: the {name} of {checkpoint.name} is not the one that this run began with"
                raise usage_error(what, f"its fingerprint was {began} and is {now}")

    def restore(self, engine: Engine, timeline: Timeline) -> list[RunningSequence]:
        """Make the sequences that were read, in their last kept state.

        Raises:
            KvcliError: a file differs from what was written, or the state is not of this version's method (runtime).
        """
        kept = self.journal.tree()
        if kept is None:
            return []
        self.lent_bytes = kept.get("lent_bytes", 0)
        profile, sampling = self.profile, self.sampling
        sequences = [
            self._fresh(engine, profile, sampling, number, capacity, timeline) for number, capacity in kept["sequences"]
        ]
        try:
            restoring = Restoring(sequences, kept["state"], sequences[0].method.context.tiers)
            for part in self.journal.parts():
                restoring.put(part)
            restoring.finish()
        except (ValueError, KeyError, RuntimeError) as error:
            what = f"{self.directory}: the state is not one of this version of {profile.method}: {error}"
            raise KvcliError(what, self._begun_with) from error
        return sequences

    def step(self, sequences: Sequence[RunningSequence], failure: Callable[[str], None]) -> None:
        """Count a step of all sequences, and save their state after every `every` steps."""
        self._steps += 1
        if self._steps % self.every == 0:
            self.save(sequences, failure)

    def save(self, sequences: Sequence[RunningSequence], failure: Callable[[str], None]) -> None:
        """Save the state of all sequences that were read.

        If the disk does not take it, the run continues without; `failure` is told once until a later write succeeds.
        """
        state = capture(list(sequences), self.journal.written)
        made = [(sequence.index, sequence.method.context.capacity) for sequence in sequences]
        state.tree = {"sequences": made, "lent_bytes": self.lent_bytes, "state": state.tree}
        try:
            self.journal.write(state)
            self._behind = False
        except OSError as error:
            if not self._behind:
                failure(self._unwritten(error))
            self._behind = True

    def finish(self, report: Report, failure: Callable[[str], None]) -> None:
        """Save the report, and drop the state."""
        try:
            self.journal.add(_REPORT, report.to_json().encode())
            self.journal.forget()
        except OSError as error:
            failure(self._unwritten(error))

    def report(self) -> Report | None:
        """Return the report; None until the run has finished."""
        if _REPORT not in self.journal.head.files:
            return None
        return TypeAdapter(Report).validate_json(self.journal.read(_REPORT))

    def _unwritten(self, error: OSError) -> str:
        return f"{self.directory}: not written, {error.strerror or error}; it holds what was kept before"

    def close(self) -> None:
        """Let other processes continue it."""
        self.journal.close()

    def _fresh(
        self, engine: Engine, profile: Profile, sampling: Sampling, number: int, capacity: int, timeline: Timeline
    ) -> RunningSequence:
        index, sample = divmod(number, sampling.num_samples)
        prompt, track = self.prompts[index], f"sequence {number}"
        context = engine.context(len(prompt.ids), sampling.max_tokens, prompt.question, timeline, track, capacity)
        method = engine.method(profile, context)
        return engine.sequence(method, sampling, index=number, sample=sample, source=prompt.source, ids=prompt.ids)


def _first(error: ValidationError) -> str:
    found = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, found['loc']))}: {found['msg']}"
