"""A profile as an HTML page (the main result, charts, the same figures as tables, the machine), or as one picture."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from math import ceil, floor, log10
from pathlib import Path
from typing import TYPE_CHECKING, Any

import altair as alt

from kvcli.bench.phases import STEP, phase_of
from kvcli.bench.profiler import Outcome, case_name
from kvcli.bench.report import Case, ProfileReport, headline, largest, notes, tables
from kvcli.capacity.roofline import PHASES, rate_rows
from kvcli.sizes import format_bytes
from kvcli.telemetry.report import HeadCounts
from kvcli.telemetry.timeline import Span
from kvcli.ui.figure import ROW, Figure, Mark, legend_columns, line_chart, picture, places_of
from kvcli.ui.html import Page, chart_of, coloured, heat_map, labelled
from kvcli.ui.summary import HeatMap

if TYPE_CHECKING:
    from kvcli.ui.figure import Drawn

_TABLE_WIDTH = 130  # characters; wider tables would be cut off at the edge of the page
_ROW = 24  # pixels
_MOST_TICKS = 10
_LONG_NAME = 24  # characters; two such names do not fit next to each other on a narrow page
_MILLISECONDS = alt.Axis(labelSeparation=8)  # else the last label, which is moved inwards, touches the one before it
_TOKENS = "datum.value % 1024 ? format(datum.value, ',') : datum.value / 1024 + 'K'"
_NAMES = alt.Axis(labelLimit=320)  # characters at the end tell long names apart
_APART = 0.035  # distance of two methods at the same context, in powers of two
_SHARES = (
    ("corrected", "KV heads that were corrected", "heads_corrected", "heads_checked"),
    ("missed", "selected pages that were not on the device", "misses", "pages_requested"),
)


def page(outcome: Outcome) -> str:
    """Render the whole file."""
    report, model = outcome.report, outcome.report.model
    weights = ", random weights" if model["source"] == "dummy" else ""
    made = Page("Where a decode step goes", f"kvcli profile · {model['name']}{weights} · {model['dtype']}")
    made.text(headline(report))
    made.facts(notes(report))
    _parts(made, report)
    _contexts(made, report)
    made.section("Figures")
    made.tables(tables(report), _TABLE_WIDTH)
    _timelines(made, outcome)
    _heat_maps(made, report)
    made.section("Hardware and versions")
    made.facts(facts(report))
    return made.render()


def facts(report: ProfileReport) -> list[tuple[str, object]]:
    """List what the figures depend on: labels with their values."""
    model = report.model
    size = f"{model['layers']} layers, {format_bytes(model['weight_bytes'])} of weights in {model['dtype']}"
    measured = [(label, f"{value}, measured") for label, value in rate_rows(report.ceilings)]
    profiles = {case.label: case.profile for case in report.cases if case.profile is not None}
    settings = [
        (label, ", ".join(f"{key} {value}" for key, value in profile["settings"].items()))
        for label, profile in profiles.items()
    ]
    return [
        ("model", f"{model['name']} ({model['source']}), {size}"),
        *measured,
        *settings,
        *labelled(report.environment),
    ]


def _parts(made: Page, report: ProfileReport) -> None:
    named = [(case_title(case, report), case) for case in report.cases if case.breakdown is not None]
    if named:
        made.section("Phases of a step", "From separate runs with clocks inside. The phases add up to the step.")
        roofline = "The mark across is the roofline: the bytes and operations of the step at the rates measured here."
        made.chart(parts_chart(named), f"Time of a step by phase. {roofline}")


def _contexts(made: Page, report: ProfileReport) -> None:
    if len(report.options["contexts"]) < 2:
        return
    made.section("Step time and context")
    for batch in report.options["batch_sizes"]:
        cases = [case for case in report.cases if case.batch == batch]
        title = f" Batch {batch}." if len(report.options["batch_sizes"]) > 1 else ""
        made.chart(context_chart(cases), f"Solid: measured, with minimum and maximum. Dashed: the roofline.{title}")


def _timelines(made: Page, outcome: Outcome) -> None:
    last = largest(outcome.report)
    named = []
    for case in last:
        spans = outcome.spans.get(case_name(case.label, case.context, case.batch))
        if spans:
            named.append((case.label, bool(case.host_kv_bytes), spans))
    if named:
        moves = "Drag to move, Alt and the wheel to zoom, double-click to go back."
        made.section("One step", f"At {_load(last[0])}. {moves}")
        made.chart(timeline_chart(named), "The step of median length of each case; where it is blank, the host works.")


def _heat_maps(made: Page, report: ProfileReport) -> None:
    cases = [case for case in largest(report) if case.counts is not None and any(map(any, case.counts.misses))]
    if cases:
        made.section("Corrections and recalls", f"At {_load(cases[0])}, by KV head and by step.")
    for case in cases:
        for share in _SHARES:
            _share(made, case, *share)


def _share(made: Page, case: Case, name: str, meaning: str, part: str, whole: str) -> None:
    """Add two heat maps of a share, `part` and `whole` being names of counts in the report."""
    counts = case.counts
    if counts is None or not any(map(any, getattr(counts, whole))):
        return
    layers = [layer or HeadCounts([], [], [], []) for layer in counts.by_head]
    some, every = ([getattr(layer, which) for layer in layers] for which in (part, whole))  # [layers][Hk] each
    heads = share_map(some, every, name, "layer", "KV head")
    some, every = getattr(counts, part), getattr(counts, whole)  # [steps][layers] each
    steps = share_map(some, every, name, "step", "layer")
    captions = (f"{case.label}: {meaning}, by {by}." for by in ("head", "step"))
    made.charts(zip((heads, steps), captions, strict=True))


def case_title(case: Case, report: ProfileReport) -> str:
    """Name a case by its label, and by its context and batch size where those differ."""
    parts = [case.label]
    if len(report.options["contexts"]) > 1:
        parts.append(f"{case.context // 1024}K" if case.context % 1024 == 0 else f"{case.context:,}")
    if len(report.options["batch_sizes"]) > 1:
        parts.append(f"batch {case.batch}")
    return " · ".join(parts)


def _load(case: Case) -> str:
    return f"{case.context:,} tokens, batch {case.batch}"


def parts_chart(
    named: Sequence[tuple[str, Case]], legend: alt.Legend | None = None, names: alt.Axis = _NAMES
) -> alt.LayerChart | alt.FacetChart:
    """Draw one bar of phases for each case, with its roofline as a mark across."""
    rows: list[dict[str, Any]] = []
    rooflines: list[dict[str, Any]] = []
    for name, case in named:
        if case.breakdown is None:
            continue
        for order, part in enumerate(case.breakdown.parts):
            rows.append({"case": name, "phase": part.phase, "ms": part.ms, "order": order})
            if part.hidden_ms:
                overlapped = {"case": f"{name}, overlapped", "phase": part.phase, "ms": part.hidden_ms, "order": order}
                rows.append(overlapped)
        if case.floor_ms is not None:
            rooflines.append({"case": name, "roofline": case.floor_ms})
    across = alt.Y("case:N", title=None, sort=None, axis=names)
    bars = (
        chart_of(rows)
        .mark_bar(height={"band": 0.75})
        .encode(
            x=alt.X("ms:Q", title="milliseconds a step", axis=_MILLISECONDS),
            y=across,
            color=coloured("phase:N", PHASES, title=None, legend=legend or alt.Legend()),
            order="order:Q",
            tooltip=["case:N", "phase:N", alt.Tooltip("ms:Q", format=".3f")],
        )
    )
    ticks = (
        chart_of(rooflines)
        .mark_tick(color="var(--ink)", thickness=2, height={"band": 0.95})
        .encode(
            x="roofline:Q", y=across, tooltip=["case:N", alt.Tooltip("roofline:Q", format=".3f", title="roofline, ms")]
        )
    )
    return alt.layer(bars, ticks).properties(height=alt.Step(_ROW))


def context_chart(cases: Sequence[Case]) -> alt.LayerChart | alt.FacetChart:
    """Draw step time over context: for each method a solid line with its spread, and a dashed one for its roofline.

    Points of several methods at one context are slightly apart.
    """
    times: list[dict[str, Any]] = []
    rooflines: list[dict[str, Any]] = []
    labels = list(dict.fromkeys(case.label for case in cases))
    for case in cases:
        if case.step_ms is None:
            continue
        apart = 2.0 ** (_APART * (labels.index(case.label) - (len(labels) - 1) / 2))
        at = {"method": case.label, "context": case.context, "x": case.context * apart}
        times.append(at | {"ms": case.step_ms.median, "least": case.step_ms.least, "most": case.step_ms.most})
        if case.floor_ms is not None:
            rooflines.append(at | {"ms": case.floor_ms})
    marks = sorted({case.context for case in cases})
    x = alt.X(
        "x:Q",
        title="context, tokens",
        scale=alt.Scale(type="log", base=2, nice=False, padding=12),
        axis=alt.Axis(values=marks, labelExpr=_TOKENS, labelOverlap="greedy", labelSeparation=8, grid=False),
    )
    y = alt.Y(
        "ms:Q",
        title="milliseconds a step",
        scale=alt.Scale(type="log", nice=False, padding=12),
        axis=alt.Axis(values=_round_values([row["ms"] for row in times + rooflines]), format="~g"),
    )
    tooltip = ["method:N", "context:Q", alt.Tooltip("ms:Q", format=".3f")]
    long = max(map(len, labels), default=0) > _LONG_NAME
    legend = alt.Legend(labelLimit=320, columns=1) if long else alt.Legend()
    shade = coloured("method:N", labels, title=None, legend=legend)
    measured = chart_of(times).encode(x=x, color=shade)
    line = measured.mark_line(point={"size": 50, "filled": True}).encode(y=y, tooltip=tooltip)
    spread = measured.mark_rule().encode(y="least:Q", y2="most:Q", color=shade)
    bounds = chart_of(rooflines).mark_line(strokeDash=[3, 4]).encode(x=x, y=y, color=shade)
    return alt.layer(bounds, spread, line).properties(height=320)


def _round_values(values: Sequence[float]) -> list[float]:
    """Choose ticks of a logarithmic axis: 1, 2 and 5 times powers of ten, or only the powers if those are many."""
    least, most = min(values), max(values)
    powers = [10.0**exponent for exponent in range(floor(log10(least)) - 1, ceil(log10(most)) + 1)]
    found = [factor * power for power in powers for factor in (1, 2, 5) if least <= factor * power <= most]
    return found if len(found) <= _MOST_TICKS else [power for power in powers if least <= power <= most]


def timeline_chart(named: Sequence[tuple[str, bool, Sequence[Span]]]) -> alt.Chart:
    """Draw one step of each case, beginning at zero, with a row for each of its tracks.

    A case is its name, whether it keeps KV in host memory, and its spans.
    """
    rows = [row for each in named for row in _step_rows(*each)]
    zoom = alt.selection_interval(bind="scales", encodings=["x"], zoom="wheel![event.altKey]")
    bars: alt.Chart = (
        chart_of(rows)
        .mark_bar(height={"band": 0.8})
        .encode(
            x=alt.X("start:Q", title="milliseconds since the step began", axis=_MILLISECONDS),
            x2="end:Q",
            y=alt.Y("track:N", title=None, sort=None, axis=_NAMES),
            color=coloured("phase:N", PHASES, title=None),
            tooltip=["track:N", "phase:N", "what:N", "layer:N", alt.Tooltip("ms:Q", format=".3f")],
        )
        .properties(height=alt.Step(_ROW))
        .add_params(zoom)
    )
    return bars


def share_map(
    part: Sequence[Sequence[int]], whole: Sequence[Sequence[int]], what: str, across: str, down: str
) -> alt.Chart | alt.LayerChart:
    """Draw the share of `part` in `whole`, both [across][down], as a heat map; cells whose whole is 0 stay empty."""
    cells = [list(zip_longest(*counts, fillvalue=0)) for counts in (part, whole)]  # [down][across] each
    shares = [
        [some / every if every else None for some, every in zip(*counts, strict=True)]
        for counts in zip(*cells, strict=True)
    ]
    notes = [[f"{some} of {every}" for some, every in zip(*counts, strict=True)] for counts in zip(*cells, strict=True)]
    rows, columns = (list(map(str, range(len(each)))) for each in (shares, part))
    return heat_map(HeatMap(what, down, across, rows, columns, shares, most=1.0, notes=notes), "share", ".0%")


def _step_rows(name: str, offloaded: bool, spans: Sequence[Span]) -> list[dict[str, Any]]:
    """List the spans of the step of median length, inner spans after the ones around them."""
    steps = sorted((span for span in spans if span.name == STEP), key=lambda span: span.end - span.start)
    step = steps[len(steps) // 2]
    inside = [s for s in spans if s.name != STEP and step.start <= s.start and s.end <= step.end]
    inside.sort(key=lambda span: (span.start, -span.end))
    return [
        {
            "track": f"{name} · {span.track}",
            "phase": phase_of(span.name, offloaded),
            "what": span.details.get("module", span.name),
            "layer": span.details.get("layer", ""),
            "start": (span.start - step.start) / 1000,
            "end": (span.end - step.start) / 1000,
            "ms": (span.end - span.start) / 1000,
        }
        for span in inside
    ]


def figure(report: ProfileReport, path: Path) -> Figure | None:
    """Draw a profile in the format that the path's ending names; None if nothing was measured.

    Several contexts are places on an axis, with a line of each method and a chart of each batch size; the first method
    is dashed. Otherwise every case is a bar of its phases, with a mark at its roofline.
    """
    over = len(report.options["contexts"]) > 1
    shown = [case for case in report.cases if (case.step_ms if over else case.breakdown) is not None]
    if not shown:
        return None
    missing = [case_title(case, report) for case in report.cases if case not in shown]
    notes = [f"{path} does not show {', '.join(missing)}, of which it has no {'time' if over else 'phases'}"]
    charts = _over_contexts(shown, report) if over else [_phases_picture(shown, report)]
    return Figure(picture(charts, path), notes if missing else [])


def _over_contexts(cases: Sequence[Case], report: ProfileReport) -> list[Drawn]:
    places = places_of(sorted({case.context for case in cases}))
    charts = []
    for batch in report.options["batch_sizes"]:
        points = [
            Mark(case.label, case.context, case.step_ms.median, case.step_ms.least, case.step_ms.most)
            for case in cases
            if case.batch == batch and case.step_ms is not None
        ]
        title = f"batch {batch}" if len(report.options["batch_sizes"]) > 1 else ""
        if points:
            first = report.cases[0].label
            charts.append(line_chart(points, places, "context, tokens", "step, ms", first, log=True, title=title))
    return charts


def _phases_picture(cases: Sequence[Case], report: ProfileReport) -> Drawn:
    present = {
        part.phase for case in cases if case.breakdown for part in case.breakdown.parts if part.ms or part.hidden_ms
    }
    phases = [phase for phase in PHASES if phase in present]
    legend = alt.Legend(columns=legend_columns(phases), values=phases)
    named = [(case_title(case, report), case) for case in cases]
    chart: Drawn = parts_chart(named, legend, alt.Axis(labelOverlap=False)).properties(height=alt.Step(ROW))
    return chart
