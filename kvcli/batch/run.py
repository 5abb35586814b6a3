"""The main path of a batch: check all rows, skip those that are done, load the model, run the others."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from kvcli.batch.inflight import Flight, InFlight, Room
from kvcli.batch.jobs import Inputs, Job, Rules, read_jobs, refuse_changes
from kvcli.batch.order import Shard, grouped, work
from kvcli.batch.results import Key, ResultFile
from kvcli.batch.rows import Row, RowProblem
from kvcli.batch.source import RowSource
from kvcli.batch.stop import Stop
from kvcli.batch.tally import Tally, state_file, state_keeper
from kvcli.capacity import unnamed
from kvcli.capacity.disk import disk_for
from kvcli.inputs.encoding import plain_text_notice
from kvcli.inputs.options import DiskOptions, KVOptions, Sampling, Template
from kvcli.inputs.profiles import Profile, profile_notices
from kvcli.models.loading import ModelSpec, open_checkpoint
from kvcli.request import GenerationRequest, open_library
from kvcli.runtime.engine import engine
from kvcli.telemetry import report
from kvcli.telemetry.observer import Observer

# The fields of a sequence's report that a line of results leaves out: the answer itself, and lists with an entry for
# every step or layer.
_LEFT_OUT = ("text", "thoughts", "answer", "token_ids", "steps", "source", "question", "id", "error")
_FINISH = {"eos": "stop", "stop": "stop", "length": "length"}


class Writer:
    """Makes the lines of results of one run: `model` is its name, `facts` go into every `kvcli` object."""

    def __init__(self, model: str, facts: Mapping[str, Any]):
        self.model, self.facts = model, facts

    def answer(self, job: Job, key: Key, row: Row, samples: Sequence[report.Sequence]) -> dict[str, Any]:
        """Make the line of a row that was run, from its samples in order."""
        first = samples[0]
        completion = sum(sample.output_tokens for sample in samples)
        usage = {
            "prompt_tokens": first.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": first.prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": first.kv.shared_tokens + first.kv.disk_tokens},
        }
        name = f"{key.row}{key.sampling}"
        body = {
            "id": f"{'chatcmpl' if row.chat else 'cmpl'}-{name}",
            "object": "chat.completion" if row.chat else "text_completion",
            "created": int(time.time()),
            "model": row.model or self.model,
            "choices": [_choice(index, sample, row.chat) for index, sample in enumerate(samples)],
            "usage": usage,
        }
        response = {"status_code": 200, "request_id": f"req-{name}", "body": body}
        statistics = [_statistics(sample) for sample in samples]
        return self._line(job, key, response, None, {"statistics": statistics})

    def error(self, job: Job, key: Key, problem: RowProblem) -> dict[str, Any]:
        """Make the line of a row that failed."""
        return self._line(job, key, None, {"code": problem.code, "message": problem.message}, {})

    def _line(self, job: Job, key: Key, response: Any, error: Any, more: dict[str, Any]) -> dict[str, Any]:
        kvcli = {"key": key.model_dump(), "line": job.line.number, **self.facts, **more}
        return {"custom_id": job.custom_id, "response": response, "error": error, "kvcli": kvcli}


def _choice(index: int, sample: report.Sequence, chat: bool) -> dict[str, Any]:
    text: dict[str, Any] = {"text": sample.text}
    if chat:
        message = {"role": "assistant", "content": sample.text if sample.answer is None else sample.answer}
        text = {"message": message | ({} if sample.thoughts is None else {"reasoning_content": sample.thoughts})}
    return {"index": index, **text, "logprobs": None, "finish_reason": _FINISH[sample.finish_reason]}


def _statistics(sample: report.Sequence) -> dict[str, Any]:
    found = {name: value for name, value in asdict(sample).items() if name not in _LEFT_OUT}
    decode_ms = found["timing"].pop("decode_ms")
    found["timing"]["decode_ms"] = sum(decode_ms)
    del found["cache"]["layers"]
    return found


@dataclass(frozen=True)
class BatchRequest:
    """What to run: rows, by which method, and how.

    `sampling`, `template` and `question` are defaults for the rows. `prefill_share` is the share of the time that
    reading prompts gets while rows run; `kv` says where the KV of prompts is kept between runs. A `disk` takes the KV
    of rows in flight that host memory is not to hold; its cache is divided among `max_inflight`.
    """

    source: str
    output: Path | None
    profile: Profile
    sampling: Sampling = field(default_factory=Sampling)
    template: Template = field(default_factory=Template)
    question: str | None = None
    kv: KVOptions = field(default_factory=KVOptions)
    disk: DiskOptions | None = None
    shard: Shard | None = None
    max_inflight: int = 16
    prefill_share: float = 0.8
    overwrite: bool = False
    retry_errors: bool = False
    validate_only: bool = False

    @property
    def results(self) -> Path | None:
        """The file of results, or that of the shard."""
        return self.output if self.output is None or self.shard is None else self.shard.of(self.output)


def run(spec: ModelSpec, request: BatchRequest, observer: Observer, tally: Tally, stop: Stop) -> None:
    """Run all rows that have no result yet, and write each as it ends; `tally` counts the outcomes.

    Rows that cannot be run are reported to the observer, all of them before the model is loaded, and fail.

    Raises:
        KvcliError: the batch as a whole cannot be run: nothing to read, a duplicate name, results of other rows or
            another run (usage), a model that cannot be loaded, a file that takes no more.
    """
    with ExitStack() as until_the_end:
        results = ResultFile(None if request.validate_only else request.results)
        observer.stage("check")
        source = until_the_end.enter_context(RowSource(request.source))
        inputs = Inputs(source, request.sampling, request.template, request.question)
        jobs = read_jobs(inputs)
        until_the_end.enter_context(results)
        jobs = request.shard.jobs(jobs) if request.shard is not None else jobs
        checkpoint = open_checkpoint(spec)
        profile = unnamed.native(request.profile, checkpoint.geometry)
        if profile.unnamed:
            line = f"no --method: using {profile.method} for all rows, an approximation; --method full is exact"
            profile = replace(profile, unnamed=False, chosen=line)
        request = replace(request, profile=profile)
        disk = disk_for(request.disk, [request.profile], checkpoint.device, request.max_inflight)
        rules = Rules(request.profile, checkpoint, inputs, disk)
        keys = {job.custom_id: rules.key(job) for job in jobs}
        _settle_with(results, keys, request)
        tally.total, tally.earlier = len(jobs), len(results.known)
        tally.earlier_failed = sum(known.failed for known in results.known.values())
        measured = list(rules.measured(job for job in jobs if job.custom_id not in results.known))
        observer.stage_done()
        runner = _Run(request, rules, results, keys, tally, observer)
        for job in measured:
            if job.problem is not None:
                runner.refused(job, job.problem)
        good = [job for job in measured if job.problem is None]
        if good and not request.validate_only and not stop.asked:
            runner.run(good, stop)
        tally.tell(last=True)
        path = request.results
        if path is not None and not request.validate_only and not tally.dropped and not stop.asked:
            state_file(path).unlink(missing_ok=True)


def _settle_with(results: ResultFile, keys: dict[str, Key], request: BatchRequest) -> None:
    """Keep the results that belong to this batch; remove those to be done again, refuse others."""
    changed = {
        name: parts
        for name, known in results.known.items()
        if name in keys and (parts := _changed(known.key, keys[name]))
    }
    strangers = [name for name in results.known if name not in keys]
    if not request.overwrite:
        refuse_changes(changed, strangers, results.path)
    again = {*changed, *strangers}
    if request.retry_errors:
        again |= {name for name, known in results.known.items() if known.failed}
    if again:
        results.take_out(again.__contains__)


def _changed(known: Key, now: Key) -> list[str]:
    parts = [part for part in Key.model_fields if getattr(known, part) != getattr(now, part)]
    return [part for part in parts if part != "tokenizer" or known.tokenizer]


@dataclass
class _Run:
    """One run with its file: writes and counts the outcomes of rows."""

    request: BatchRequest
    rules: Rules
    results: ResultFile
    keys: dict[str, Key]
    tally: Tally
    observer: Observer

    def __post_init__(self) -> None:
        profile = self.request.profile
        facts = {"profile": profile.name, "profile_hash": profile.hash, "versions": report.environment()}
        self.writer = Writer(self.rules.checkpoint.name, facts)

    def run(self, jobs: Sequence[Job], stop: Stop) -> None:
        """Load the model and run the jobs."""
        request, observer, checkpoint = self.request, self.observer, self.rules.checkpoint
        shortest, penalty = min(job.tokens for job in jobs), request.sampling.repetition_penalty
        plain = plain_text_notice(checkpoint, request.template) if any(job.asked for job in jobs) else None
        own = profile_notices(request.profile, checkpoint, shortest)
        for notice in [*own, *checkpoint.notices(penalty), *filter(None, [plain])]:
            observer.notice(notice)
        library = open_library(GenerationRequest(request.profile, (), kv=request.kv), checkpoint, observer)
        observer.stage("load")
        model = checkpoint.load()
        observer.stage_done()
        tally = self.tally
        tally.work, tally.started = sum(map(work, jobs)), time.monotonic()
        if self.results.path is not None:
            tally.watchers.append(state_keeper(self.results.path))
        disk = self.rules.disk
        ready_for = engine(model, [max(job.capacity for job in jobs)], observer.notice, disk)
        with ready_for as ready, disk or nullcontext():
            room = Room(request.profile, model, layers_beside=4 if request.kv.any else 0, disk=disk)
            flights = InFlight(
                *(ready, self.rules, room, tally, stop, self.answered, self.refused),
                max_inflight=request.max_inflight,
                prefill_share=request.prefill_share,
                library=library,
            )
            with stop.listening():
                flights.run(grouped(jobs))

    def answered(self, flight: Flight) -> None:
        """Write an answer."""
        job = flight.job
        samples = [sequence.report() for sequence in flight.samples]
        self.results.add(self.writer.answer(job, self.keys[job.custom_id], flight.row, samples))

    def refused(self, job: Job, problem: RowProblem) -> None:
        """Write why a row has no answer."""
        self.tally.failed += 1
        self.observer.notice(f"{self.rules.inputs.source.name}: line {job.line.number}: {job.custom_id!r}: {problem}")
        if not self.request.validate_only:
            self.results.add(self.writer.error(job, self.keys[job.custom_id], problem))
