"""The charts of a profile's HTML page. Imported only where a page is wanted, because Altair is optional."""

from collections.abc import Sequence
from math import ceil, floor, log10
from typing import Any

import altair as alt

from kvcli.bench.phases import STEP, phase_of
from kvcli.bench.report import Case
from kvcli.capacity.roofline import PHASES
from kvcli.telemetry.timeline import Span
from kvcli.ui.html import chart_of, colour, heat_map

_ROW = 24  # pixels
_MOST_TICKS = 10
_LONG_NAME = 24  # characters; two such names do not fit side by side on a narrow page
_MILLISECONDS = alt.Axis(labelSeparation=8)  # else the last label, which is moved inwards, touches the one before it
_TOKENS = "datum.value % 1024 ? format(datum.value, ',') : datum.value / 1024 + 'K'"
_NAMES = alt.Axis(labelLimit=320)  # characters at the end tell long names apart
_APART = 0.035  # distance of two methods at the same context, in powers of two
_COLOURS = alt.Scale(domain=list(PHASES), range=[colour(index) for index in range(len(PHASES))])


def parts_chart(named: Sequence[tuple[str, Case]]) -> alt.LayerChart | alt.FacetChart:
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
    across = alt.Y("case:N", title=None, sort=None, axis=_NAMES)
    bars = (
        chart_of(rows)
        .mark_bar(height={"band": 0.75})
        .encode(
            x=alt.X("ms:Q", title="milliseconds a step", axis=_MILLISECONDS),
            y=across,
            color=alt.Color("phase:N", title=None, scale=_COLOURS, sort=None),
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

    Points of several methods at one context stand a little apart.
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
    palette = alt.Scale(domain=labels, range=[colour(index) for index in range(len(labels))])
    tooltip = ["method:N", "context:Q", alt.Tooltip("ms:Q", format=".3f")]
    long = max(map(len, labels), default=0) > _LONG_NAME
    legend = alt.Legend(labelLimit=320, columns=1) if long else alt.Legend()
    shade = alt.Color("method:N", title=None, scale=palette, sort=None, legend=legend)
    measured = chart_of(times).encode(x=x, color=shade)
    line = measured.mark_line(point={"size": 50, "filled": True}).encode(y=y, tooltip=tooltip)
    spread = measured.mark_rule().encode(y="least:Q", y2="most:Q", color=shade)
    bounds = chart_of(rooflines).mark_line(strokeDash=[3, 4]).encode(x=x, y=y, color=shade)
    return alt.layer(bounds, spread, line).properties(height=320)


def _round_values(values: Sequence[float]) -> list[float]:
    """Choose ticks of a logarithmic axis: 1, 2 and 5 times powers of ten, or the powers alone where those are many."""
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
            color=alt.Color("phase:N", title=None, scale=_COLOURS, sort=None),
            tooltip=["track:N", "phase:N", "what:N", "layer:N", alt.Tooltip("ms:Q", format=".3f")],
        )
        .properties(height=alt.Step(_ROW))
        .add_params(zoom)
    )
    return bars


def share_map(
    part: Sequence[Sequence[int]], whole: Sequence[Sequence[int]], what: str, across: str, down: str
) -> alt.Chart:
    """Draw the share of `part` in `whole`, both [across][down], as a heat map; cells whose whole is 0 stay empty."""
    rows = [
        {across: column, down: row, "share": count / total, "of": f"{count} of {total}"}
        for column, (counts, totals) in enumerate(zip(part, whole, strict=True))
        for row, (count, total) in enumerate(zip(counts, totals, strict=True))
        if total
    ]
    return heat_map(rows, across, down, "share", what)


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
