"""Decode steps of several cases, timed in turn: their lengths, batches, corrections, parts and phases."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

from gpu_parts.clock import Work, freed, in_turn, milliseconds
from gpu_parts.frame import Found, NotHere, Row, Rows
from gpu_parts.made_up import Workshop, workshop
from gpu_parts.setting import Setting
from gpu_parts.targets import BY_GRAPH
from kvcli.bench.phases import Kernel, parts_of, phases_of, products_of, traced
from kvcli.capacity.roofline import PHASES, step_work
from kvcli.methods.card import GRAPH, gpu_step_of
from kvcli.methods.freekv import FreeKV
from kvcli.runtime.gpu.piecewise import PiecewiseStepper
from kvcli.runtime.gpu.pipeline import DecisionRates
from kvcli.runtime.gpu.stepper import SlotStepper
from kvcli.runtime.sequence import RunningSequence
from kvcli.telemetry.counters import Count

TURNOVER = 0.2
"""Part of a head's pages that a step exchanges, as measured on reasoning (FreeKV, section 5)."""

USUAL = 0.3
"""Part of the heads that are corrected where nothing else is said: the most that the targets call usual."""

ROUND_SECONDS = 0.5
"""Of a case in a round, at most, where it takes more than one step: what recalls everything takes as long for one."""

LOOPED_SECONDS = 5.0
"""With the host in the loop, after which no further step begins: what brings all KV takes seconds for one."""

MOVED_AT_BEST = ("projections", "attention", "mlp", "score")
"""Phases whose bytes no step can do without: weights, budget KV and dense layers' KV, summaries."""


@dataclass(frozen=True)
class StepCase:
    """What decodes: a method, its settings where they are not the usual ones, and what is forced on it."""

    name: str
    method: str
    context: int
    batch: int = 1
    corrected: float | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def freekv(cls, name: str, context: int, batch: int = 1, corrected: float = USUAL, **settings: Any) -> StepCase:
        """Speculative retrieval with forced rates."""
        return cls(name, "freekv", context, batch, corrected, settings)


class Running:
    """A case while it is measured; served by slots, or in pieces, as `kvcli.runtime.pipeline` does it."""

    def __init__(self, case: StepCase, place: Workshop, copied: bool = False):
        self.case = case
        profile = place.profile(case.method, **case.settings)
        self.sequences = place.sequences(profile, case.context, case.batch, copied)
        self.bytes_at_best = bytes_at_best(place, self.sequences)
        self.notices: list[str] = []
        rates = None if case.corrected is None else DecisionRates(case.corrected, TURNOVER)
        parts = place.engine.hook, self.sequences, place.engine.rope, self.notices.append
        self.stepper: SlotStepper | PiecewiseStepper
        method = self.sequences[0].method
        if gpu_step_of(type(method), method) == GRAPH:
            self.stepper = SlotStepper(*parts, rates=rates)
        else:
            self.stepper = PiecewiseStepper(*parts)

    @property
    def captured(self) -> bool:
        """Whether a step is one graph."""
        return self.stepper.ran_by == GRAPH

    @property
    def work(self) -> Work:
        """One step: of a graph its replay, else what launches the kernels."""
        return partial(self.stepper.recorder.replay, 0) if self.captured and self.stepper.recorder else self.step

    def step(self) -> None:
        """Run one step as the decode loop does, which reads the tokens on the host."""
        rows = self.stepper.step(self.sequences)
        if isinstance(self.stepper, PiecewiseStepper):  # which is told the tokens by the sequences
            for sequence, row in zip(self.sequences, rows, strict=True):
                sequence.accept(*row)

    def looped(self, steps: int) -> Row:
        """Run steps with the host in the loop: their times, and what they recalled. Comes before all that is timed."""
        times, begun = list[float](), time.perf_counter()
        while len(times) < 2 or (len(times) < steps and time.perf_counter() - begun < LOOPED_SECONDS):
            for sequence in self.sequences:
                sequence.counters.next_step()
            started = time.perf_counter()
            self.step()
            times.append(time.perf_counter() - started)
        if isinstance(self.stepper, SlotStepper):
            self.stepper.pipeline.count()
        counted = [step for sequence in self.sequences for step in sequence.counters.counts[1:]]
        return {  # the first step finds nothing there
            "looped_ms": milliseconds(times[1:]),
            "missed_pages": sum(layer[Count.MISSES] for step in counted for layer in step) / (len(times) - 1),
        }


def bytes_at_best(place: Workshop, sequences: Sequence[RunningSequence]) -> int:
    """Bytes that a step of the batch has to read on the device; pages that cross the bus do so beside it."""
    model = place.engine.model
    held = [(sequence.method, sequence.length + 1) for sequence in sequences]
    work = step_work(model.geometry, model.dtype.itemsize, held)
    return sum(work[phase].read for phase in MOVED_AT_BEST)


def compared(
    place: Workshop,
    setting: Setting,
    cases: Sequence[StepCase],
    found: Found,
    repeats: int | None = None,
    copied: bool = False,
) -> Iterator[Rows]:
    """Build all cases, then time them in turn; yields a row for each at once, with its times repeat by repeat.

    What has been compared yields nothing. Of what the host has to launch, a step is long enough to be timed alone.
    `repeats`: other than usual; `copied`: see `Workshop.sequences`. What each puts in the place of the model's own goes
    as it came, also where one fails.
    """
    if found.has(*(case.name for case in cases)):
        return
    with ExitStack() as left:
        running = []
        for case in cases:
            running.append(Running(case, place, copied))
            left.callback(running[-1].stepper.finish)
        yield timed(running, setting, found, repeats or setting.repeats)


def timed(running: Sequence[Running], setting: Setting, found: Found, repeats: int) -> Rows:
    """Time what was built."""
    calls = [setting.calls if one.captured else 1 for one in running]
    extra = [one.looped(max(2, count)) for one, count in zip(running, calls, strict=True)]
    most = [max(1, int(1000 * ROUND_SECONDS / more["looped_ms"]["median"])) for more in extra]
    works = {one.case.name: (one.work, min(own)) for one, *own in zip(running, calls, most, strict=True)}
    times = in_turn(works, repeats, setting.device, setting.deadline)
    return [shown(row_of(one, times[one.case.name], found) | more) for one, more in zip(running, extra, strict=True)]


def row_of(one: Running, seconds: list[float], found: Found) -> Row:
    """Give what one case is and took; the floor is its bytes over the measured rate of a device copy."""
    case, copy = one.case, rate_of(found, "device copy")
    floor = None if copy is None else 1000 * one.bytes_at_best / copy
    step = milliseconds(seconds)
    return {
        "case": case.name,
        "method": case.method,
        "context": case.context,
        "batch": case.batch,
        "corrected": case.corrected,
        "turnover": None if case.corrected is None else TURNOVER,
        "settings": case.settings,
        "captured": one.captured,
        "ran_by": one.stepper.ran_by,
        "notices": one.notices,
        "rounds_ms": [1000 * taken for taken in seconds],
        "step_ms": step,
        "tokens_per_s": 1000 * case.batch / step["median"],
        "bytes_at_best": one.bytes_at_best,
        "floor_ms": floor,
    }


def rate_of(found: Found, what: str) -> float | None:
    """Look a measured rate up, bytes a second; None where it was not measured."""
    rows = found.parts.get("rates", {}).get("rows", [])
    rates = [row["bytes_per_s"]["median"] for row in rows if row["case"] == what]
    return rates[0] if rates else None


def shown(row: Row) -> Row:
    """Print a step, and pass it on."""
    step, floor = row["step_ms"], row["floor_ms"]
    line = f"  {row['case']:<40} {row['context']:>9,} x {row['batch']}: {step['median']:8.3f} ms"
    line += f" ({step['min']:.3f} to {step['max']:.3f})"
    line += "" if floor is None else f", floor {floor:.3f}"
    line += f", with the host {row['looped_ms']['median']:.3f}" if "looped_ms" in row else ""
    line += "" if row["captured"] else f", {row['ran_by']}"
    print(line, flush=True)
    for notice in row["notices"]:
        print(f"    {notice}", flush=True)
    return row


CORRECTED = (0.0, 0.1, 0.3, 1.0)


def speed(setting: Setting, found: Found) -> Iterator[Rows]:
    """Time a step at a short context: retrieval at several rates, a sliding window, everything resident."""
    context = setting.short
    cases = [StepCase("streaming", "streaming", context), StepCase("full", "full", context)]
    cases += [StepCase.freekv(f"freekv {part:.0%}", context, corrected=part) for part in CORRECTED]
    with workshop(setting, setting.shape, [context]) as place:
        yield from compared(place, setting, cases, found)


def length(setting: Setting, found: Found) -> Iterator[Rows]:
    """Time a step at a context 32 times as long, with and without a first layer that attends to everything."""
    contexts = {"short": setting.short, "long": setting.long}
    with workshop(setting, setting.shape, list(contexts.values())) as place:
        for dense in (1, 0):
            cases = [
                StepCase.freekv(f"{name}, {dense} dense", context, dense_layers=dense)
                for name, context in contexts.items()
            ]
            yield from compared(place, setting, cases, found)
            freed(setting.device)


FEW = 2
"""Rounds of what takes seconds a step, and hundreds of times as long as what it is held against."""

PAGE_BY_PAGE: dict[str, Any] = {"recall": "copy", "double_buffer": False}


def batch(setting: Setting, found: Found) -> Iterator[Rows]:
    """Time what more sequences at once give, and what recall costs that is blocking, page by page and NHD.

    `corrected` 1 is retrieval of all heads before attention: blocking.
    """
    context, few = setting.short, setting.few
    several = [StepCase.freekv("batch 1", context), StepCase.freekv("batch many", context, setting.many)]
    blocking = [
        StepCase.freekv("overlapped", context, few),
        StepCase.freekv("page by page, hnd", context, few, 1.0, **PAGE_BY_PAGE),
        StepCase.freekv("page by page, nhd", context, few, 1.0, **PAGE_BY_PAGE, host_layout="nhd"),
    ]
    with workshop(setting, setting.shape, [context]) as place:
        yield from compared(place, setting, several, found)
        freed(setting.device)
        yield from compared(place, setting, blocking, found, FEW)


def other(setting: Setting, found: Found) -> Iterator[Rows]:
    """Time steps of another architecture: fewer KV heads, each for more query heads."""
    context = setting.short
    cases = [
        StepCase("streaming", "streaming", context),
        *(StepCase.freekv(f"freekv {part:.0%}", context, corrected=part) for part in (0.0, 0.3, 1.0)),
        StepCase.freekv("freekv 30%, middle", setting.middle, corrected=0.3),
    ]
    with workshop(setting, setting.other_shape, [context, setting.middle]) as place:
        for rows in compared(place, setting, cases, found):
            yield [row | {"shape": setting.other_shape} for row in rows]


FURTHER: dict[str, dict[str, Any]] = {"copies, all else on": {"recall": "copy"}, "nhd pages": {"host_layout": "nhd"}}


def ablated(context: int) -> list[StepCase]:
    """Name the method with all its parts, and without some: without speculation all heads retrieve before attention."""
    switched = {"all parts": {}, **FreeKV.ablation, **FURTHER}
    return [
        StepCase.freekv(name, context, corrected=1.0 if settings.get("tau") == 1.0 else USUAL, **settings)
        for name, settings in switched.items()
    ]


def ablation(setting: Setting, found: Found) -> Iterator[Rows]:
    """Switch the parts of recall off one by one: those that the paper does (FreeKV, figure 9), and two more."""
    with workshop(setting, setting.shape, [setting.short]) as place:
        yield from compared(place, setting, ablated(setting.short), found)


REPLAYS = 8


def phases(setting: Setting, found: Found) -> Iterator[Rows]:
    """Trace a captured step: a row for each phase of each case by the kernels of its replays, and one for the step.

    See `kvcli.bench.phases`: a moment belongs to what the step waits for, the rest of what runs then is hidden. Tracing
    makes small kernels a little slower.
    """
    if setting.device.type != "cuda":
        raise NotHere("there are no kernels to trace on a CPU")
    context = setting.short
    cases = [StepCase("streaming", "streaming", context)]
    cases += [StepCase.freekv(f"freekv {part:.0%}", context, corrected=part) for part in (0.3, 1.0)]
    with workshop(setting, setting.shape, [context]) as place:
        products = products_of(place.engine.model.module)
        for case, one in replayed(cases, place, found):
            with traced() as replays:
                for _ in range(REPLAYS):
                    one.work()
            parts = parts_of(replays, products)
            whole = statistics.median(sum(step.exposed.values()) for step in parts) / 1000
            rows = [
                {
                    "phase": phase,
                    "exposed_ms": statistics.median(step.exposed.get(phase, 0.0) for step in parts) / 1000,
                    "hidden_ms": statistics.median(step.hidden.get(phase, 0.0) for step in parts) / 1000,
                }
                for phase in PHASES
            ]
            kernels = statistics.median(len(replay) for replay in replays)
            rows.append({"phase": "step", "exposed_ms": whole, "hidden_ms": 0.0, "kernels": kernels})
            yield [phase_shown({"case": case.name, "context": context, **row}) for row in rows]


def replayed(cases: Sequence[StepCase], place: Workshop, found: Found) -> Iterator[tuple[StepCase, Running]]:
    """Start the cases that are not found yet, one after another, and replay each a few times."""
    for case in cases:
        if not found.has(case.name):
            one = Running(case, place)
            for _ in range(REPLAYS):
                one.work()
            yield case, one


TRACED = "streaming", "full", "quest", "shadowkv", "fier", "arkvale", "twilight", "loki", "infinigen", "tokenselect"
TRACED += "duoattention", "fier-offload", "loki-offload", "quest-offload", "twilight-offload"
LAYER = 12  # in the middle, counted from 0


def layers(setting: Setting, found: Found) -> Iterator[Rows]:
    """Trace a captured step at the middle context: a row for each method, with the kernels of one layer in order."""
    if setting.device.type != "cuda":
        raise NotHere("there are no kernels to trace on a CPU")
    context = setting.middle
    cases = [StepCase.freekv(f"freekv {part:.0%}", context, corrected=part) for part in (0.0, 0.3, 1.0)]
    named = {each.name: each for each in BY_GRAPH}
    cases += [StepCase(name, named[name].method, context, settings=named[name].settings) for name in TRACED]
    with workshop(setting, setting.shape, [context]) as place:
        products = products_of(place.engine.model.module)
        for case, one in replayed(cases, place, found):
            times = in_turn({case.name: (one.work, setting.calls)}, FEW, setting.device, setting.deadline)
            with traced() as replays:
                one.work()
            row = {"case": case.name, "context": context, "step_ms": milliseconds(times[case.name])}
            yield [row | {"kernels": len(replays[0]), "layer": one_layer(replays[0], phases_of(replays[0], products))}]
            one.stepper.finish()
            del one
            freed(setting.device)


def one_layer(step: Sequence[Kernel], phases: Sequence[str]) -> Rows:
    """Give the kernels from a layer's first product of attention to the next layer's, with microseconds from there."""
    products = [(at, phase) for at, phase in enumerate(phases) if phase in ("projections", "mlp")]
    starts = [at for (_, before), (at, phase) in pairwise(products) if (before, phase) == ("mlp", "projections")]
    begin, end = starts[LAYER - 1 : LAYER + 1]  # the first layer has none before it
    streams: dict[int, int] = {}
    return [
        {
            "kernel": each.name.removeprefix("void ").split("<")[0].split("(")[0],
            "stream": streams.setdefault(each.stream, len(streams)),
            "start_us": round(each.start - step[begin].start, 2),
            "us": round(each.end - each.start, 2),
        }
        for each in step[begin:end]
    ]


def phase_shown(row: Row) -> Row:
    """Print a phase, and pass it on."""
    count = f", {row['kernels']:.0f} kernels" if "kernels" in row else ""
    line = f"  {row['case']:<14} {row['phase']:<12} {row['exposed_ms']:7.3f} ms, hidden {row['hidden_ms']:7.3f}"
    print(line + count, flush=True)
    return row
