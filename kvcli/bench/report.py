"""A profile as data, its JSON form, and its tables and notes for the terminal and the HTML page.

Times are milliseconds on the host's clock, sizes bytes, counts exact. The names are a contract with readers of
`--json`: fields may be added, but not renamed.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

from kvcli.capacity.roofline import Work, rate_rows
from kvcli.sizes import format_bytes
from kvcli.telemetry.report import HeadCounts
from kvcli.ui.summary import Table, counted, duration, rate, size_text, without_empty_columns

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Spread:
    """Several runs of one case: their median, the least and the most."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise at least one value."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class PhaseTime:
    """One phase of a step: `ms` is the time that the step waits for it, `hidden_ms` the time overlapped with others.

    `floor_ms` is the roofline of `work`, its bytes and operations.
    """

    phase: str
    ms: float
    hidden_ms: float = 0.0
    floor_ms: float | None = None
    work: Work | None = None


@dataclass(frozen=True)
class Breakdown:
    """The phases of a step: means over `steps` steps of separate runs, the half around the median.

    `parts` add up to `step_ms`, which the decode loop measures; the host's part is the rest that the clocks inside
    leave. `disturbance` is the median step with clocks inside over that of the run before without them: 1.05 is 5 %
    slower.
    """

    step_ms: float
    steps: int
    parts: list[PhaseTime]
    disturbance: Spread


@dataclass(frozen=True)
class Counts:
    """The checks, selections and traffic of the timed steps of a run, over all sequences: [steps][layers].

    `bytes_exposed` is the part of `bytes_to_device` that attention waited for. `by_head` has the sums over the steps by
    KV head, [layers]; None for a layer that requested nothing.

    With a disk below host memory, `host_hits` of the fetched pages were in host memory and `disk_reads` were not
    (tokens, for layers that are fetched whole). `bytes_from_disk` were read, `bytes_to_disk` written, and the run did
    nothing but wait for the disk for `disk_wait_ms`.
    """

    heads_checked: list[list[int]]
    heads_corrected: list[list[int]]
    pages_requested: list[list[int]]
    misses: list[list[int]]
    bytes_to_device: list[list[int]]
    bytes_exposed: list[list[int]]
    by_head: list[HeadCounts | None]
    host_hits: list[list[int]] = field(default_factory=list)
    disk_reads: list[list[int]] = field(default_factory=list)
    bytes_from_disk: list[list[int]] = field(default_factory=list)
    bytes_to_disk: list[list[int]] = field(default_factory=list)
    disk_wait_ms: list[list[float]] = field(default_factory=list)


@dataclass(frozen=True)
class Case:
    """One method or peer at one context in tokens and batch size.

    `pipeline` is how its steps ran: "graph", "piecewise" or "blocking" (see `kvcli.methods.card.gpu_step_of`), or
    "launched" if a graph or pieces could not be captured, for the reasons in `notices`; None for peers. `runs_ms` has
    the median step of each run, `ratio` the step time of the first case over this one's, `floor_ms` the roofline,
    `equivalent_bandwidth` the rate in bytes a second at which full attention would have to read to be as fast. With KV
    on a disk, `host_kv_bytes` is the cache. `prefill_ms` is the time of reading the prompt, if it was read: methods
    that read exactly share it, windows are read for each method. A case that could not run has the reason in `error`
    and no figures.
    """

    label: str
    kind: str  # "method", "ablation" or "peer"
    context: int
    batch: int
    profile: dict[str, Any] | None = None
    pipeline: str | None = None
    runs_ms: list[float] = field(default_factory=list)
    step_ms: Spread | None = None
    tokens_per_s: float | None = None
    ratio: Spread | None = None
    floor_ms: float | None = None
    equivalent_bandwidth: float | None = None
    breakdown: Breakdown | None = None
    counts: Counts | None = None
    device_kv_bytes: int | None = None
    host_kv_bytes: int | None = None
    prefill_ms: float | None = None
    disk_kv_bytes: int | None = None
    error: str | None = None
    notices: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ProfileReport:
    """All results of `kvcli profile`; `finished` is False after Ctrl-C.

    `options` has the request, including `kv`, "made up" or "read"; `ceilings` has the rates of the machine.
    """

    environment: dict[str, Any]
    model: dict[str, Any]
    options: dict[str, Any]
    ceilings: dict[str, Any]
    cases: list[Case]
    finished: bool = True
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> str:
        """Serialise as one JSON object; `schema_version` first."""
        body = asdict(self)
        return json.dumps({"schema_version": body.pop("schema_version"), **body}, ensure_ascii=False)


def tables(report: ProfileReport) -> list[tuple[str, Table]]:
    """List every table with its title: for each context and batch size the step times, then their phases."""
    found = []
    for (context, batch), cases in groups(report):
        name = f"{context:,} tokens, batch {batch}"
        found.append((f"step at {name}", steps_table(cases)))
        parts = parts_table(cases)
        if parts.rows:
            found.append((f"phases of a step at {name}, ms", parts))
    return found


def groups(report: ProfileReport) -> Iterator[tuple[tuple[int, int], list[Case]]]:
    """Group the cases by context and batch size."""
    for load, cases in groupby(report.cases, key=lambda case: (case.context, case.batch)):
        yield load, list(cases)


def steps_table(cases: Sequence[Case]) -> Table:
    """Tabulate step times with their spread, the speedup over the first case, and transfers."""
    times = ("", "pipeline", "step", "min to max", "tokens/s", "speedup", "roofline", "of roofline", "equivalent")
    moves = ("KV heads corrected", "page misses", "recalled a step", "exposed")
    disk = ("host hits", "from disk a step", "waited for it")
    held = ("KV device", "KV host", "KV disk", "prefill")
    texts = ("step",) if any(case.step_ms is None for case in cases) else ()  # why there is none
    rows = [_steps_row(case) for case in cases]
    return without_empty_columns(Table((*times, *moves, *disk, *held), rows, texts=texts))


def _steps_row(case: Case) -> tuple[str, ...]:
    if case.step_ms is None:
        return (case.label, case.pipeline or "-", case.error or "-", *["-"] * 17)
    step, counts = case.step_ms, case.counts
    corrected = missed = recalled = exposed = hits = from_disk = waited = "-"
    if counts is not None:
        corrected = _share(counts.heads_corrected, counts.heads_checked)
        if case.host_kv_bytes:
            missed = _share(counts.misses, counts.pages_requested)
            moved = _sum(counts.bytes_to_device)
            recalled = format_bytes(moved / len(counts.bytes_to_device))
            exposed = f"{_sum(counts.bytes_exposed) / moved:.0%}" if moved else "-"
        if case.disk_kv_bytes:
            steps, fetched = len(counts.disk_reads), _sum(counts.host_hits) + _sum(counts.disk_reads)
            hits = rate(_sum(counts.host_hits), fetched)
            from_disk = format_bytes(_sum(counts.bytes_from_disk) / steps)
            waited = duration(sum(map(sum, counts.disk_wait_ms)) / steps)
    return (
        case.label,
        case.pipeline or "-",
        duration(step.median),
        f"{duration(step.least)} to {duration(step.most)}",
        f"{case.tokens_per_s:,.1f}",
        ratio(case.ratio),
        duration(case.floor_ms),
        _over_roofline(case),
        "-" if case.equivalent_bandwidth is None else f"{case.equivalent_bandwidth / 1e9:,.0f} GB/s",
        corrected,
        missed,
        recalled,
        exposed,
        hits,
        from_disk,
        waited,
        size_text(case.device_kv_bytes),
        size_text(case.host_kv_bytes or None),
        size_text(case.disk_kv_bytes or None),
        duration(case.prefill_ms),
    )


def parts_table(cases: Sequence[Case]) -> Table:
    """Tabulate the milliseconds that a step waits for each phase, and below them the multiple of the phase's roofline.

    The last columns are the time of phases that ran overlapped with others, and the overhead of the clocks.
    """
    broken = [(case.label, case.breakdown) for case in cases if case.breakdown is not None]
    if not broken:
        return Table(("",), [])
    phases = [part.phase for part in broken[0][1].parts]
    columns = ("", "step", *phases, "overlapped", "overhead")
    rows = []
    for label, breakdown in broken:
        hidden = ", ".join(f"{part.phase} {_ms(part.hidden_ms)}" for part in breakdown.parts if part.hidden_ms)
        parts = [_ms(part.ms) for part in breakdown.parts]
        overhead = f"{breakdown.disturbance.median - 1:+.0%}"
        rows.append((label, _ms(breakdown.step_ms), *parts, hidden or "-", overhead))
        rows.append(("  of roofline", "", *(_of_roofline(part) for part in breakdown.parts), "", ""))
    return without_empty_columns(Table(columns, rows))


def ratio(spread: Spread | None) -> str:
    """Format a median with its spread: "1.8x (1.7 to 1.9)"."""
    return "-" if spread is None else f"{spread.median:.2f}x ({spread.least:.2f} to {spread.most:.2f})"


def headline(report: ProfileReport) -> str:
    """State the main result in a sentence: at the largest load the fastest method against the first one.

    The text is empty if nothing was measured.
    """
    timed = [case for case in largest(report) if case.step_ms is not None and case.kind != "peer"]
    if not timed:
        return ""
    first, *others = timed
    best = max(others, key=lambda case: case.ratio.median if case.ratio else 0.0, default=first)
    load = f"At {best.context:,} tokens, batch {best.batch}, a decode step of {best.label} takes {_step(best)}"
    if best is not first:
        told_apart = best.ratio is None or not best.ratio.least < 1 < best.ratio.most
        doubt = "" if told_apart else "; the runs vary too much to tell them apart"
        return f"{load} and one of {first.label} {_step(first)}, a speedup of {ratio(best.ratio)}{doubt}."
    return f"{load}, {_over_roofline(best)} its roofline." if best.floor_ms else f"{load}."


def largest(report: ProfileReport) -> list[Case]:
    """Return the cases of the longest context at the largest batch size."""
    return max(groups(report), key=lambda group: group[0], default=((0, 0), []))[1]


def notes(report: ProfileReport) -> list[tuple[str, str]]:
    """Say how the figures were measured: labels with their texts, the most important first."""
    options, environment = report.options, report.environment
    rounds = max((len(case.runs_ms) for case in report.cases), default=0)
    read = options["kv"] == "read"
    found = [
        (
            "runs",
            f"{counted(rounds, 'run')} of {counted(options['steps'], 'step')} each, alternating, after "
            f"{counted(options['warmup'], 'warm-up step')}; a step is the median of the runs' medians, a speedup that "
            "of the ratios to the first row, each within one round",
        ),
        ("KV", "of prompts that the model prefilled" if read else "seeded noise, not of a text"),
    ]
    said: dict[str, list[str]] = {}
    for case in report.cases:
        for notice in case.notices:
            said.setdefault(notice, []).append(case.label)
    found += [("pipeline", f"{', '.join(dict.fromkeys(labels))}: {notice}") for notice, labels in said.items()]
    if report.model["source"] == "dummy":
        found.append(
            ("weights", "random: low query similarity between steps, the worst case for corrections and recalls")
        )
    rates = ", ".join(f"{label} {value}" for label, value in rate_rows(report.ceilings))
    found.append(("roofline", f"the bytes and operations of a step, at rates measured here: {rates}"))
    if report.model["device"] == "cpu":
        found.append(
            (
                "CPU",
                "nothing overlaps, so every recall is exposed; data in the processor's caches can be faster than the "
                "roofline, which is that of memory",
            )
        )
    machine = (
        f"{environment['device']}, {counted(environment['threads'], 'thread')}, {counted(environment['cores'], 'core')}"
    )
    return [*found, ("machine", f"{machine}, load average {environment['load']} at the end")]


def _step(case: Case) -> str:
    return duration(case.step_ms.median if case.step_ms else None)


def _over_roofline(case: Case) -> str:
    """Format the multiple of its roofline that a step takes."""
    return f"{case.step_ms.median / case.floor_ms:.1f}x" if case.step_ms and case.floor_ms else "-"


def _of_roofline(part: PhaseTime) -> str:
    """Format the multiple of its roofline that a phase takes; empty without a time or a roofline."""
    if not part.ms or not part.floor_ms:
        return ""
    times = part.ms / part.floor_ms
    return f"{times:.1f}x" if times < 99.95 else f"{times:,.0f}x"


def _ms(value: float) -> str:
    return "-" if value == 0 else f"{value:.3f}" if value < 1 else f"{value:.2f}"


def _share(part: Sequence[Sequence[int]], whole: Sequence[Sequence[int]]) -> str:
    return rate(_sum(part), _sum(whole)) if _sum(whole) else "-"


def _sum(counts: Sequence[Sequence[int]]) -> int:
    return sum(map(sum, counts))
