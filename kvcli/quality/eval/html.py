"""A table of results as one HTML page: scores, heat maps, costs and their origin."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import altair as alt

from kvcli.quality.eval.estimate import mean
from kvcli.quality.eval.layout import COST, heat_maps, notes, overview, tables
from kvcli.quality.eval.suite import FED
from kvcli.quality.eval.table import EvaluationTable, VariantCost
from kvcli.ui.html import Page, chart_of, coloured, heat_map, labelled
from kvcli.ui.summary import HeatMap, Table

_MARK = 0.014  # width of a mark as a part of the axis
_AXES: tuple[tuple[str, str, Literal["log", "symlog"]], ...] = (  # costs differ by a hundred times, and may be zero
    ("attended", "tokens attended per KV head and step", "log"),
    ("device", "KV on the device, MiB", "log"),
    ("moved", "KiB moved to the device a step", "symlog"),
    ("step", "time of a step, ms", "log"),
)
_FEW = 6  # methods whose table a reader takes in at once; a table of more follows a map and the charts
_LOW = 60  # per cent, below which the axis of scores starts at 0


def page(table: EvaluationTable) -> str:
    """Make the page's HTML. Needs the extra `html`, see `kvcli.ui.html.check_installed`."""
    made = Page("kvcli eval", f"{table.configuration['model']}: {', '.join(table.configuration['tasks'])}")
    titled = tables(table)
    costs = [each for each in titled if each[0].startswith(COST)]
    scores = [each for each in titled if each not in costs]
    glance = overview(table)
    many = len(glance.means) > _FEW
    if many:
        made.section("At a glance", "Mean of all tasks in per cent, the best method first.")
        caption = "One without a budget has the same figure under every budget." if glance.repeated else ""
        made.chart(_scores(glance.heat_map()), f"Columns are tokens of the prompt and of the budget. {caption}".strip())
    else:
        _add_scores(made, scores, table)
    rows = _trade_rows(table)
    curves = [row for row in rows if row["budget"] is not None]
    if len({row["budget"] for row in curves}) > 1:
        what = "A line a method, its budgets from small to large; bars are 95 % intervals."
        made.section("Score against cost", f"{what} A click on a method's name shows it before the others.")
        made.charts((_curve(curves, *axis), f"Mean score against {axis[1]}.") for axis in _AXES)
    if rows:
        made.section("Score against what is read", "Each point is one variant: the mean of its tasks at one length.")
        made.chart(
            _trade(rows),
            "Mean score against tokens attended per KV head and step; marks in one place stand side by side.",
        )
    if maps := heat_maps(table):
        made.section("Needle grid", "Score in per cent by the depth of the needle and the tokens of the document.")
        made.charts((_scores(each), each.title) for each in maps)
    if many:
        _add_scores(made, scores, table)
    made.section("Costs")
    made.tables(costs)
    made.section("Where this comes from")
    made.facts(labelled(table.configuration | table.environment))
    return made.render()


def _add_scores(made: Page, scores: Sequence[tuple[str, Table]], table: EvaluationTable) -> None:
    made.section("Scores")
    made.tables(scores)
    made.facts(notes(table))


def _trade_rows(table: EvaluationTable) -> list[dict[str, Any]]:
    rows = []
    for length in dict.fromkeys(result.length for result in table.results):
        for variant in table.variants:
            found = [
                result
                for result in table.results
                if (result.variant, result.length) == (variant.label, length) and result.metric not in FED
            ]
            read = [result.cost.attended for result in found if result.cost.attended is not None]
            if read:
                rows.append(
                    {
                        "method": variant.name,
                        "variant": variant.label,
                        "length": "files" if length is None else f"{length:,}",
                        "score": (score := mean([result.score for result in found])).value,
                        "low": score.value if score.low is None else score.low,
                        "high": score.value if score.high is None else score.high,
                        "attended": sum(read) / len(read),
                        "budget": variant.budget,
                        "device": (cost := VariantCost.sum([result.cost for result in found])).device_kv_bytes / 2**20,
                        "moved": (cost.bytes_to_device_step or 0.0) / 2**10,
                        "step": cost.step_ms,
                    }
                )
    return rows


def _trade(rows: Sequence[dict[str, Any]]) -> alt.Chart:
    lowest, widest = min(row["score"] for row in rows), max(row["attended"] for row in rows)
    bottom = 0 if lowest < _LOW else 10 * math.floor((lowest - 1) / 10)  # scores that are all high fill the chart
    points: alt.Chart = (
        chart_of(_apart(rows, 100 - bottom))
        .mark_point(size=80, strokeWidth=2)  # outlines, which stay visible on top of each other
        .encode(
            x=alt.X(
                "shown:Q",
                title="tokens attended per KV head and step",
                scale=alt.Scale(type="log", nice=False, padding=24),
                axis=alt.Axis(format=",d", values=_powers_of_two(widest)),
            ),
            y=alt.Y("score:Q", title="score, %", scale=alt.Scale(domain=[bottom, 100]), axis=alt.Axis(tickCount=5)),
            color=coloured("method:N"),
            shape=alt.Shape("length:N", sort=None, title="prompt tokens"),
            tooltip=[
                "variant:N",
                "length:N",
                alt.Tooltip("score:Q", format=".1f"),
                alt.Tooltip("attended:Q", format=",.0f"),
            ],
        )
        .properties(height=320)
    )
    return points


def _curve(rows: Sequence[dict[str, Any]], figure: str, title: str, scale: Literal["log", "symlog"]) -> alt.LayerChart:
    chosen = alt.selection_point(fields=["method"], bind="legend")
    base = chart_of([row for row in rows if row[figure] is not None]).encode(
        x=alt.X(
            f"{figure}:Q", title=title, scale=alt.Scale(type=scale, nice=False, padding=12), axis=alt.Axis(tickCount=5)
        ),
        color=coloured("method:N"),
        detail="length:N",
        opacity=alt.when(chosen).then(alt.value(1)).otherwise(alt.value(0.06)),
        tooltip=[
            "variant:N",
            "length:N",
            alt.Tooltip("score:Q", format=".1f"),
            alt.Tooltip(f"{figure}:Q", format=",.2f"),
        ],
    )
    scores = alt.Y("score:Q", title="score, %", scale=alt.Scale(domain=[0, 100]), axis=alt.Axis(tickCount=5))
    lines = base.mark_line(strokeOpacity=0.5).encode(y=scores, order="attended:Q")
    shape = alt.Shape("length:N", sort=None, title="prompt tokens", legend=alt.Legend(orient="bottom"))
    points = base.mark_point(filled=True).encode(y=scores, shape=shape)
    errors = base.mark_rule().encode(y="low:Q", y2="high:Q")
    layered: alt.LayerChart = (lines + errors + points.add_params(chosen)).properties(height=260)
    return layered


def _apart(rows: Sequence[dict[str, Any]], height: float) -> list[dict[str, Any]]:
    """Give each row the place `shown` on the axis of tokens: next to each other if several would overlap."""
    span = max(math.log2(max(row["attended"] for row in rows) / min(row["attended"] for row in rows)), 1.0)
    places: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in rows:
        place = round(math.log2(row["attended"]) / (_MARK * span)), round(row["score"] / (2 * _MARK * height))
        places.setdefault(place, []).append(row)
    return [
        row | {"shown": row["attended"] * 2 ** (_MARK * span * (index - (len(same) - 1) / 2))}
        for same in places.values()
        for index, row in enumerate(same)
    ]


def _powers_of_two(largest: float) -> list[int]:
    return [2**power for power in range(math.ceil(math.log2(largest)) + 1)]


def _scores(found: HeatMap) -> alt.Chart | alt.LayerChart:
    return heat_map(found, "score", ".0f", numbers=True)
