"""All candidates under one load: run in turn, split into phases, and summed up as cases."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace

import torch

from kvcli.bench.phases import StepParts, middle, step_parts
from kvcli.bench.report import Breakdown, Case, Counts, PhaseTime, Spread
from kvcli.bench.runs import Candidate, Load, TimedRun
from kvcli.capacity.roofline import PHASES, MachineRates, RatesOverTime, equivalent_bandwidth, least_seconds
from kvcli.errors import KvcliError
from kvcli.telemetry.counters import Count, Counters
from kvcli.telemetry.observer import Observer
from kvcli.telemetry.report import HeadCounts
from kvcli.telemetry.timeline import Span, Timeline


class Rounds:
    """Runs the candidates under `load`, round after round; `cases` can be called at any time, after Ctrl-C as well.

    Rooflines come from the `rates` before and after a candidate's runs; `overlapped` as in `least_seconds`.
    """

    def __init__(self, candidates: Sequence[Candidate], load: Load, rates: RatesOverTime, overlapped: bool):
        self.candidates, self.load = candidates, load
        self.rates, self.overlapped = rates, overlapped
        self.measured: dict[str, list[MachineRates]] = {candidate.label: [] for candidate in candidates}
        self.medians: dict[str, list[float]] = {candidate.label: [] for candidate in candidates}
        self.last: dict[str, TimedRun] = {}
        self.spans: dict[str, list[Span]] = {}  # of the last run that was split into phases
        self.steps: dict[str, list[tuple[float, StepParts]]] = {}  # of all such runs
        self.disturbances: dict[str, list[float]] = {}
        self.errors: dict[str, str] = {}

    def run_all(self, repeat: int, recording: Callable[[], Timeline], observer: Observer) -> None:
        """Run every candidate in each round, once without clocks inside the step and once with them.

        Every second round goes backwards, so that what a run leaves to the next one in caches, memory and clock rates
        does not always meet the same candidate.
        """
        for turn in range(repeat):
            for candidate in self.candidates[:: -1 if turn % 2 else 1]:
                if candidate.label not in self.errors:
                    measured = self.measured[candidate.label]
                    measured.append(self.rates.now())
                    self._try(candidate, recording)
                    measured.append(self.rates.now())
                observer.advance()

    def cases(self) -> list[Case]:
        """Sum up each candidate that was run at least once."""
        return [self._case(candidate) for candidate in self.candidates if self._known(candidate)]

    def _known(self, candidate: Candidate) -> bool:
        return bool(self.medians[candidate.label]) or candidate.label in self.errors

    def _try(self, candidate: Candidate, recording: Callable[[], Timeline]) -> None:
        try:
            self._round(candidate, recording)
        except KvcliError as error:
            self.errors[candidate.label] = error.what
        except (MemoryError, torch.OutOfMemoryError):
            self.errors[candidate.label] = "out of memory"

    def _round(self, candidate: Candidate, recording: Callable[[], Timeline]) -> None:
        label = candidate.label
        run = self.last[label] = candidate.run(self.load, Timeline())
        self.medians[label].append(statistics.median(run.steps_ms))
        if candidate.profile is None:  # the step of a peer has no spans
            return
        timeline = recording()
        split = candidate.run(self.load, timeline)
        if split.parts == []:
            return
        offloaded = split.footprint is not None and split.footprint.host > 0
        parts = step_parts(timeline.spans, offloaded) if split.parts is None else split.parts
        times = zip(split.steps_ms, parts[self.load.warmup :], strict=True)
        self.steps.setdefault(label, []).extend(times)
        self.disturbances.setdefault(label, []).append(statistics.median(split.steps_ms) / self.medians[label][-1])
        self.spans[label] = timeline.spans

    def _case(self, candidate: Candidate) -> Case:
        label, load = candidate.label, self.load
        profile = None if candidate.profile is None else candidate.profile.as_dict()
        known = label, candidate.kind, load.context, load.batch, profile, candidate.pipeline(load)
        if label in self.errors:
            return Case(*known, error=self.errors[label])
        own, last = self.medians[label], self.last[label]
        # The baseline is the first that did not fail; Ctrl-C can leave some one round more than others.
        first = next(each.label for each in self.candidates if each.label not in self.errors)
        pairs = zip(self.medians[first], own, strict=False)
        ratios = [theirs / mine for theirs, mine in pairs]
        rates = MachineRates.over(self.measured[label])
        if last.pipeline is not None:  # which may be another one than was promised
            known = *known[:-1], last.pipeline
        return Case(
            *known,
            runs_ms=own,
            step_ms=Spread.of(own),
            tokens_per_s=1000 * load.batch / statistics.median(own),
            ratio=Spread.of(ratios) if ratios else None,
            floor_ms=1000 * least_seconds(last.work, rates, self.overlapped) if last.work else None,
            equivalent_bandwidth=equivalent_bandwidth(last.work, last.kv_bytes, rates) if last.work else None,
            breakdown=self._breakdown(label, rates),
            counts=counts(last.counters, load.warmup) if last.counters else None,
            device_kv_bytes=None if last.footprint is None else last.footprint.device,
            host_kv_bytes=None if last.footprint is None else last.footprint.host,
            prefill_ms=last.prefill_ms,
            disk_kv_bytes=None if last.footprint is None else last.footprint.disk,
            notices=list(last.notices),
        )

    def _breakdown(self, label: str, rates: MachineRates) -> Breakdown | None:
        if label not in self.steps:
            return None
        steps, work = middle(self.steps[label]), self.last[label].work
        parts = []
        for phase in PHASES:
            exposed = sum(step.exposed.get(phase, 0.0) for _, step in steps) / len(steps) / 1000
            hidden = sum(step.hidden.get(phase, 0.0) for _, step in steps) / len(steps) / 1000
            floor = 1000 * work[phase].seconds(rates) if phase in work else None
            parts.append(PhaseTime(phase, exposed, hidden, floor, work.get(phase)))
        step_ms = sum(ms for ms, _ in steps) / len(steps)
        outside = step_ms - sum(part.ms for part in parts)  # the time of the loop around the step's own span
        return Breakdown(
            step_ms=step_ms,
            steps=len(steps),
            parts=[replace(part, ms=part.ms + outside) if part.phase == "host" else part for part in parts],
            disturbance=Spread.of(self.disturbances[label]),
        )


def counts(counters: Sequence[Counters], warmup: int) -> Counts:
    """Add up the counts of all sequences without the first `warmup` steps."""
    total = torch.tensor([each.counts[warmup:] for each in counters]).sum(0)  # [steps, layers, Count]

    names = [each.name for each in fields(Counts) if each.name not in ("by_head", "disk_wait_ms")]
    by_head = [_add_heads([each.by_head(layer) for each in counters]) for layer in range(counters[0].num_layers)]
    waited = (total[..., Count.DISK_WAIT_US] / 1000).tolist()
    moved = {name: total[..., Count[name.upper()]].tolist() for name in names}
    return Counts(**moved, by_head=by_head, disk_wait_ms=waited)


def _add_heads(sequences: Sequence[HeadCounts | None]) -> HeadCounts | None:
    """Add up the counts of one layer by KV head; None where no sequence has any."""
    found = [asdict(each) for each in sequences if each is not None]
    if not found:
        return None
    return HeadCounts(**{name: torch.tensor([each[name] for each in found]).sum(0).tolist() for name in found[0]})
