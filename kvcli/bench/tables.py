"""A profile in tables: for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from kvcli.bench.report import Case, Part, ProfileReport, Spread
from kvcli.capacity.ceilings import rates_text
from kvcli.sizes import format_bytes
from kvcli.ui.summary import Table, counted, duration, rate, without_empty_columns


def tables(report: ProfileReport) -> list[tuple[str, Table]]:
    """Every table with its title: the times of a context and batch size, and below it where they go."""
    found = []
    for (context, batch), cases in groups(report):
        name = f"{context:,} tokens, batch {batch}"
        found.append((f"step at {name}", steps_table(cases)))
        parts = parts_table(cases)
        if parts.rows:
            found.append((f"where the step goes at {name}, ms", parts))
    return found


def groups(report: ProfileReport) -> Iterator[tuple[tuple[int, int], list[Case]]]:
    """The cases of each context and batch size."""
    for load, cases in groupby(report.cases, key=lambda case: (case.context, case.batch)):
        yield load, list(cases)


def steps_table(cases: Sequence[Case]) -> Table:
    """Times with their spread, how they compare with the first case's, and what was moved."""
    timed = [case for case in cases if case.step_ms is not None]
    first = timed[0].label if timed else ""
    times = ("", "step", "least to most", "tokens/s", f"speed, {first} = 1", "floor", "of floor")
    moves = ("heads corrected", "pages missed", "recalled a step", "waited for", "KV device", "KV host")
    return without_empty_columns(Table((*times, *moves), [_steps_row(case) for case in cases]))


def _steps_row(case: Case) -> tuple[str, ...]:
    if case.step_ms is None:
        return (case.label, case.error or "-", *["-"] * 11)
    step, counts = case.step_ms, case.counts
    corrected = missed = recalled = exposed = "-"
    if counts is not None:
        corrected = _share(counts.heads_corrected, counts.heads_checked)
        if case.host_kv_bytes:
            missed = _share(counts.misses, counts.pages_requested)
            moved = _sum(counts.bytes_to_device)
            recalled = format_bytes(moved / len(counts.bytes_to_device))
            exposed = f"{_sum(counts.bytes_exposed) / moved:.0%}" if moved else "-"
    return (
        case.label,
        duration(step.median),
        f"{duration(step.least)} to {duration(step.most)}",
        f"{case.tokens_per_s:,.1f}",
        ratio(case.ratio),
        "-" if case.floor_ms is None else duration(case.floor_ms),
        "-" if not case.floor_ms else f"{step.median / case.floor_ms:.1f}x",
        corrected,
        missed,
        recalled,
        exposed,
        "-" if case.device_kv_bytes is None else format_bytes(case.device_kv_bytes),
        "-" if not case.host_kv_bytes else format_bytes(case.host_kv_bytes),
    )


def parts_table(cases: Sequence[Case]) -> Table:
    """Milliseconds of each phase that the step waits for, below them how many times its floor that is.

    Beside them stands what is hidden behind others, and how much the clocks disturbed the step.
    """
    broken = [(case.label, case.breakdown) for case in cases if case.breakdown is not None]
    if not broken:
        return Table(("",), [])
    phases = [part.phase for part in broken[0][1].parts]
    columns = ("", "step", *phases, "hidden", "disturbed by")
    rows = []
    for label, breakdown in broken:
        hidden = ", ".join(f"{part.phase} {_ms(part.hidden_ms)}" for part in breakdown.parts if part.hidden_ms)
        parts = [_ms(part.ms) for part in breakdown.parts]
        change = breakdown.disturbance
        disturbed = f"{change.median - 1:+.0%} ({change.least - 1:+.0%} to {change.most - 1:+.0%})"
        rows.append((label, _ms(breakdown.step_ms), *parts, hidden or "-", disturbed))
        rows.append(("  of floor", "", *(_of_floor(part) for part in breakdown.parts), "", ""))
    return without_empty_columns(Table(columns, rows))


def ratio(spread: Spread | None) -> str:
    """A median with its spread: "1.8x (1.7 to 1.9)"."""
    return "-" if spread is None else f"{spread.median:.2f}x ({spread.least:.2f} to {spread.most:.2f})"


def notes(report: ProfileReport) -> list[str]:
    """What has to be known to read the figures."""
    options, environment = report.options, report.environment
    rounds = max((len(case.runs_ms) for case in report.cases), default=0)
    found = [
        f"{counted(rounds, 'run')} of {counted(options['steps'], 'step')} each, in turn, "
        f"{counted(options['warmup'], 'step')} before them not counted; the median of the runs' medians",
        f"the floor is what has to be moved and computed, at rates measured here: {rates_text(report.ceilings)}",
        f"{environment['device']}, threads {environment['threads']}, cores {environment['cores']}, load "
        f"{environment['load']} at the end",
        "the prompts were read by the model" if options["kv"] == "read" else "the KV is seeded noise, not a text's",
    ]
    if report.model["source"] == "dummy":
        found.append("with random weights queries turn fully at every step: what can be corrected and recalled, is")
    if report.model["device"] == "cpu":
        found.append(
            "on a CPU nothing overlaps, so that recall is waited for; what lies in its caches can be faster than the "
            "floor, which is memory's"
        )
    return found


def _of_floor(part: Part) -> str:
    """How many times its floor a phase takes; nothing where it has none, or nothing to do with it."""
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
