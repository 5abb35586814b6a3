"""A profile as one picture: the phases of a step, or the time of a step over several contexts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import altair as alt

from kvcli.bench.html import case_title, parts_chart
from kvcli.bench.report import Case, ProfileReport
from kvcli.capacity.roofline import PHASES
from kvcli.ui.figure import ROW, Figure, Point, legend_columns, line_chart, picture, places_of

if TYPE_CHECKING:
    from kvcli.ui.figure import Drawn


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
    charts = _over_contexts(shown, report) if over else [_phases(shown, report)]
    return Figure(picture(charts, path), notes if missing else [])


def _over_contexts(cases: Sequence[Case], report: ProfileReport) -> list[Drawn]:
    places = places_of(sorted({case.context for case in cases}))
    charts = []
    for batch in report.options["batch_sizes"]:
        points = [
            Point(case.label, case.context, case.step_ms.median, case.step_ms.least, case.step_ms.most)
            for case in cases
            if case.batch == batch and case.step_ms is not None
        ]
        title = f"batch {batch}" if len(report.options["batch_sizes"]) > 1 else ""
        if points:
            first = report.cases[0].label
            charts.append(line_chart(points, places, "context, tokens", "step, ms", first, log=True, title=title))
    return charts


def _phases(cases: Sequence[Case], report: ProfileReport) -> Drawn:
    present = {
        part.phase for case in cases if case.breakdown for part in case.breakdown.parts if part.ms or part.hidden_ms
    }
    phases = [phase for phase in PHASES if phase in present]
    legend = alt.Legend(columns=legend_columns(phases), values=phases)
    named = [(case_title(case, report), case) for case in cases]
    chart: Drawn = parts_chart(named, legend, alt.Axis(labelOverlap=False)).properties(height=alt.Step(ROW))
    return chart
