"""Rows in flight: read as soon as there is room, decoded together, written as each ends.

While a prompt is read, the running rows take steps between its chunks. A row's result does not depend on the others:
each has its own method object and its own sampler, and a step always has enough rows (`BlockingStepper`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from typing_extensions import override

from kvcli.batch.jobs import Job, Rules
from kvcli.batch.order import work
from kvcli.batch.rows import Row, RowProblem
from kvcli.batch.stop import Stop
from kvcli.batch.tally import Tally
from kvcli.capacity import memory
from kvcli.capacity.memory import Need, PromptSize
from kvcli.capacity.workspace import Workspace
from kvcli.errors import ExitCode, KvcliError, is_out_of_memory
from kvcli.inputs.encoding import EncodedPrompt, by_document, in_common
from kvcli.inputs.profiles import Profile
from kvcli.memory.disk_tier import DiskTier
from kvcli.memory.tiers import Footprint
from kvcli.models.loading import Model
from kvcli.runtime.engine import Engine
from kvcli.runtime.not_finite import describe_origin
from kvcli.runtime.prefill_runner import PrefillRunner
from kvcli.runtime.saved.library import KVLibrary
from kvcli.runtime.sequence import RunningSequence
from kvcli.telemetry.observer import Observer
from kvcli.telemetry.timeline import Timeline


class Room:
    """The free memory next to a loaded model, and the part that rows in flight take.

    `layers_beside` and `disk` are as in `memory.need`.
    """

    def __init__(self, profile: Profile, model: Model, layers_beside: int = 0, disk: DiskTier | None = None):
        self.profile, self.model, self.layers_beside, self.disk = profile, model, layers_beside, disk
        self.free = memory.available(model.place)
        self.taken = Footprint()
        self._needs: dict[tuple[PromptSize, int, int, int], Need] = {}

    def needed(self, prompts: Sequence[EncodedPrompt]) -> tuple[Footprint, Workspace]:
        """Return the KV of prompts that are read together, each with its own sampling, and the workspace for them."""
        lengths, samplings = [len(prompt.ids) for prompt in prompts], [prompt.sampling for prompt in prompts]
        common = in_common(prompts) if len(prompts) > 1 else 0
        together = sum(lengths) - common * (len(prompts) - 1)
        tokens = [sampling.max_tokens if sampling else 0 for sampling in samplings]
        capacity = max(map(sum, zip(lengths, tokens, strict=True)))  # all get the room that the longest needs
        needs = [
            self._need(PromptSize(length, common if place else 0), capacity, sampling.num_samples, together)
            for place, (length, sampling) in enumerate(zip(lengths, samplings, strict=True))
            if sampling is not None
        ]
        most = max((need.prefill for need in needs), key=lambda prefill: prefill.on_device)
        return sum((need.kv for need in needs), Footprint()), most

    def holds(self, kv: Footprint, workspace: Workspace) -> bool:
        """Tell whether there is room for this in addition."""
        return self._fits(self.taken + kv, workspace)

    def held_alone(self, kv: Footprint, workspace: Workspace) -> bool:
        """Tell whether there would be room with nothing else in flight."""
        return self._fits(kv, workspace)

    def take(self, kv: Footprint) -> None:
        """Record memory that rows take from now on."""
        self.taken += kv

    def give_back(self, kv: Footprint) -> None:
        """Record memory that rows no longer take."""
        self.taken += kv.times(-1)

    def _fits(self, kv: Footprint, workspace: Workspace) -> bool:
        return memory.fits(Need(0, kv, workspace).on(self.model.place), self.free)

    def _need(self, size: PromptSize, capacity: int, samples: int, together: int) -> Need:
        key = (size, capacity, samples, together)
        if key not in self._needs:
            model = self.model
            self._needs[key] = memory.need(
                *(self.profile, model.geometry, model.dtype, [size], capacity - size.tokens, samples),
                device=model.place,
                together=together,
                layers_beside=self.layers_beside,
                disk=self.disk,
            )
        return self._needs[key]


@dataclass
class Flight:
    """A row that is read or decoded: its tokens until they have been read, and then its samples."""

    job: Job
    row: Row
    prompt: EncodedPrompt | None
    samples: list[RunningSequence] = field(default_factory=list)


@dataclass
class Part:
    """Rows that are read together; their memory is given back when the last of them has ended."""

    flights: list[Flight]
    alone: bool
    kv: Footprint
    workspace: Workspace


class Alone(list[Job]):
    """A group of one row that runs while no other does."""


def problem_of(error: Exception) -> RowProblem:
    """Describe the problem of a row that an error hit while it was alone."""
    text = " ".join(str(error).split())[:500]
    if is_out_of_memory(error) or (isinstance(error, KvcliError) and error.exit_code == ExitCode.WILL_NOT_FIT):
        return RowProblem("out_of_memory", f"out of memory: {text}" if text else "out of memory")
    return RowProblem("failed", text if isinstance(error, KvcliError) else f"{type(error).__name__}: {text}")


_TOKENS_TOGETHER = 1 << 22  # of prompts that are in memory at once to be read


class Dropped(Exception):  # noqa: N818 - nothing went wrong
    """The time of rows in flight is over."""


class _OnlyNotices(Observer):
    """Shows no stages: those of a prefill are not those of the batch."""

    def __init__(self, engine: Engine):
        self._engine = engine

    @override
    def notice(self, message: str) -> None:
        self._engine.notice(message)


class InFlight:
    """Runs groups of rows on one engine.

    `answered` takes a row when all its samples have ended, `refused` a row that failed, with its problem.
    """

    def __init__(
        self,
        engine: Engine,
        rules: Rules,
        room: Room,
        tally: Tally,
        stop: Stop,
        answered: Callable[[Flight], None],
        refused: Callable[[Job, RowProblem], None],
        max_inflight: int,
        prefill_share: float,
        library: KVLibrary | None = None,
    ):
        self.engine, self.rules, self.room, self.tally, self.stop = engine, rules, room, tally, stop
        self.answered, self.refused = answered, refused
        self.max_inflight = max_inflight
        self.owed_by_second = (1 - prefill_share) / prefill_share  # of decode per second of prefill
        on_gpu = engine.model.device.type == "cuda"
        self.rows = max_inflight if on_gpu else 2  # on a CPU, all numbers of rows except one give the same results
        self.runner = PrefillRunner(
            *(engine, rules.profile, rules.inputs.sampling, _OnlyNotices(engine), Timeline()),
            library=library,
            advance=self._between_chunks,
        )
        self.waiting: deque[list[Job]] = deque()
        self.next: deque[Part] = deque()
        self.flights: dict[str, Flight] = {}
        self.parts: list[Part] = []
        self.read: deque[RunningSequence] = deque()  # waiting for their first step
        self.decoding: list[RunningSequence] = []
        self.steps: Iterator[object] | None = None
        self.broken: BaseException | None = None  # the error of a step within a prefill, which ends the run
        self.begun = self.owed = 0.0  # start of the current chunk of a prefill; seconds of decode

    def run(self, groups: Sequence[list[Job]]) -> None:
        """Run groups in order, until all rows have ended or the time is over."""
        self.waiting.extend(groups)
        try:
            self._run()
        finally:
            self.runner.abandon()  # no row of what was not finished has ended
        self.tally.dropped = len(self.flights)

    def _run(self) -> None:
        while (self.waiting or self.next or self.flights) and not self.stop.over:
            if self.stop.asked and not self.flights:
                break
            self._admit()
            self._step()

    def _admit(self) -> None:
        """Read the next rows, as long as there is room."""
        while (free := self.max_inflight - len(self.decoding) - len(self.read)) > 0 and not self.stop.asked:
            if not self.next:
                self._take()
            if not self.next or not self._fits(self.next[0]):
                return
            part = self.next.popleft()
            reads_weights = self.engine.hook.streamed is not None and self.runner.library is None
            self._prefill(self._with_more(part, free) if reads_weights else part)

    def _with_more(self, part: Part, free: int) -> Part:
        """Add the next rows to a part of one row, up to `free` in all: a pass over streamed weights then reads all.

        Questions on one document stay a part of their own, as they are read once.
        """
        if len(part.flights) > 1 or part.alone:
            return part
        while len(part.flights) < free:
            if not self.next:
                self._take()
            if not self.next or self.next[0].alone or len(self.next[0].flights) > 1:
                break
            flights = part.flights + self.next[0].flights
            prompts = [flight.prompt for flight in flights if flight.prompt is not None]
            more = Part(flights, False, *self.room.needed(prompts))
            if not self.room.holds(more.kv, more.workspace):
                break
            part = more
            self.next.popleft()
        return part

    def _fits(self, part: Part) -> bool:
        if not self.flights:
            return True  # memory was checked before; an error there will show
        if part.alone or any(running.alone for running in self.parts):
            return False
        return self.room.holds(part.kv, part.workspace)

    def _take(self) -> None:
        """Take rows off the first group and make parts of them: rows that begin alike together."""
        group = self.waiting.popleft() if self.waiting else []
        flights: list[Flight] = []
        tokens = 0
        while group and tokens < _TOKENS_TOGETHER:
            job = group.pop(0)
            try:
                row = self.rules.inputs.row(job)
                prompt = self.rules.encode(row)
            except RowProblem as problem:
                self._refuse(job, problem)
                continue
            flights.append(Flight(job, row.without_text(), prompt))
            tokens += len(prompt.ids)
        alike = by_document([flight.prompt for flight in flights if flight.prompt is not None])
        if group and len(alike) > 1:  # more of the last ones may follow
            group[:0] = [flight.job for flight in flights[-len(alike.pop()) :]]
        if group:
            self.waiting.appendleft(group)
        for prompts in alike:
            self.next.extend(self._parts(flights[: len(prompts)], prompts, isinstance(group, Alone)))
            del flights[: len(prompts)]

    def _parts(self, flights: list[Flight], prompts: list[EncodedPrompt], alone: bool) -> Iterator[Part]:
        """Cut rows that are to be read together into parts that memory holds with nothing else."""
        while flights:
            count = len(flights)
            while count > 1 and not self.room.held_alone(*self.room.needed(prompts[:count])):
                count -= 1
            yield Part(flights[:count], alone, *self.room.needed(prompts[:count]))
            flights, prompts = flights[count:], prompts[count:]

    def _prefill(self, part: Part) -> None:
        """Read a part; its rows are in flight from now on."""
        for flight in part.flights:
            self.flights[flight.job.custom_id] = flight
            self.engine.rope.cover(flight.job.capacity)
        self.parts.append(part)
        self.room.take(part.kv)
        self.tally.in_flight = len(self.flights)
        prompts = [flight.prompt for flight in part.flights if flight.prompt is not None]
        self.begun, self.owed = time.perf_counter(), 0.0
        sequences: list[RunningSequence] = []
        try:
            sequences.extend(sequence for sequence, _ in self.runner.prefill(0, prompts))
        except Dropped:
            return
        except Exception as error:
            if self.broken is not None:
                raise
            self._again(part.flights, error)
            return
        finally:
            self.tally.prefill_seconds += time.perf_counter() - self.begun
            self._count_weights()
            for flight in part.flights:
                flight.prompt = None
        for sequence in sequences:
            self.flights[sequence.source].samples.append(sequence)
            self.tally.output_tokens += 1
            if sequence.running:
                self.read.append(sequence)
        for saved in self.runner.finish():
            if saved.error is not None:
                self.engine.notice(f"{saved.source}: its KV was not saved: {saved.error}")
        for flight in part.flights:
            kv = flight.samples[0].kv
            self.tally.prompt_tokens += kv.read_tokens
            self.tally.shared_tokens += kv.shared_tokens
            self._settle(flight.job.custom_id)

    def _between_chunks(self, tokens: int) -> None:  # noqa: ARG002 - what `advance` is called with
        """Let running rows take steps while a prompt is read, as far as their share of the time goes."""
        taken = time.perf_counter() - self.begun
        self.tally.prefill_seconds += taken
        self.owed += taken * self.owed_by_second
        try:
            if self.stop.over:
                raise Dropped
            while self.owed > 0 and (self.decoding or self.read):
                begun = time.perf_counter()
                with self.engine.rope.aside():
                    self._step()
                self.owed -= time.perf_counter() - begun
            self.tally.tell()
        except BaseException as error:
            self.broken = None if isinstance(error, Dropped) else error
            raise
        finally:
            self.begun = time.perf_counter()

    def _step(self) -> None:
        """Take one step with all rows that were read, up to `max_inflight`."""
        while self.read and len(self.decoding) < self.max_inflight:
            self.decoding.append(self.read.popleft())
        if not self.decoding:
            return
        begun = time.perf_counter()
        batch = list(self.decoding)
        if self.steps is None:
            self.steps = self.engine.decode(self.decoding, rows=self.rows)
        try:
            next(self.steps)
        except Exception as error:
            self.steps = None
            self._again([self.flights[name] for name in dict.fromkeys(each.source for each in batch)], error)
            return
        self.tally.decode_seconds += time.perf_counter() - begun
        self._count_weights()
        self.tally.steps += 1
        self.tally.output_tokens += len(batch)
        self.decoding[:] = [sequence for sequence in batch if sequence.running]
        for name in dict.fromkeys(sequence.source for sequence in batch if not sequence.running):
            self._settle(name)
        self.tally.tell()

    def _count_weights(self) -> None:
        if (streamed := self.engine.hook.streamed) is not None:
            found, tally = streamed.taken(), self.tally
            tally.weight_bytes += found.nbytes
            tally.weight_wait_seconds += found.waited / 1e9
            tally.experts_asked += found.asked
            tally.experts_cached += found.cached

    def _settle(self, name: str) -> None:
        """Write the result of a row whose samples have all ended."""
        flight = self.flights[name]
        if any(sequence.running for sequence in flight.samples):
            return
        broken = next((sequence for sequence in flight.samples if sequence.error is not None), None)
        self._land(flight)
        if broken is None:
            self.tally.done += 1
            self.tally.work_done += work(flight.job)
            self.answered(flight)
            return
        prompt = self.rules.encode(self.rules.inputs.row(flight.job))
        with self.engine.rope.aside():
            origin = describe_origin(self.engine, prompt.ids)
        self._refuse(flight.job, RowProblem("not_finite", f"{broken.error}: {origin}"))

    def _land(self, flight: Flight) -> None:
        """Remove a row from those in flight."""
        del self.flights[flight.job.custom_id]
        self.tally.in_flight = len(self.flights)
        for part in list(self.parts):
            if not any(each.job.custom_id in self.flights for each in part.flights):
                self.parts.remove(part)
                self.room.give_back(part.kv)

    def _refuse(self, job: Job, problem: RowProblem) -> None:
        self.tally.work_done += work(job)
        self.refused(job, problem)

    def _again(self, flights: Sequence[Flight], error: Exception) -> None:
        """Remove rows that an error hit: a row that was alone has failed, others are tried again one by one."""
        if isinstance(error, KvcliError) and error.exit_code == ExitCode.USAGE:
            raise error  # the method or the model, not the row
        was_alone = len(self.flights) == 1
        names = {flight.job.custom_id for flight in flights}
        self.decoding[:] = [sequence for sequence in self.decoding if sequence.source not in names]
        self.read = deque(sequence for sequence in self.read if sequence.source not in names)
        for flight in flights:
            self._land(flight)
            if was_alone:
                self._refuse(flight.job, problem_of(error))
            else:
                self.waiting.append(Alone([flight.job]))
