"""A table of results as one HTML page: scores, heat maps, costs and where they come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from kvcli.quality.eval import layout
from kvcli.quality.eval.layout import DepthHeatMap
from kvcli.quality.eval.suite import PERPLEXITY
from kvcli.quality.eval.table import EvaluationTable
from kvcli.ui.html import Page, colour

_ROW = 26  # pixels of a row of a heat map
_LOG = alt.Scale(type="log", nice=False, padding=24)


def page(table: EvaluationTable) -> str:
    """Make the page's HTML. Needs the extra `html`, see `pages.check_installed`."""
    made = Page("kvcli eval", f"{table.configuration['model']}: {', '.join(table.configuration['tasks'])}")
    made.section("Score against what is read", "Each point is one variant: the mean of its tasks at one length.")
    made.chart(_trade(table), "Mean score in per cent against tokens attended per KV head and step.")
    maps = layout.heat_maps(table)
    if maps:
        made.section("Needle grid", "Score by the depth of the needle and the length of the document.")
        for heat_map in maps:
            made.chart(_heat(heat_map), f"{heat_map.variant}: score in per cent by depth and length.")
    made.section("Figures")
    for title, content in layout.tables(table):
        made.table(content, title)
    made.section("Where this comes from")
    made.facts([(key.replace("_", " "), value) for key, value in (table.configuration | table.environment).items()])
    return made.render()


def _trade(table: EvaluationTable) -> alt.Chart:
    rows = []
    for length in dict.fromkeys(result.length for result in table.results):
        for variant in table.variants:
            found = [
                result
                for result in table.results
                if (result.variant, result.length) == (variant.label, length) and result.metric != PERPLEXITY
            ]
            read = [result.cost.attended for result in found if result.cost.attended is not None]
            if read:
                rows.append(
                    {
                        "method": variant.name,
                        "variant": variant.label,
                        "length": "files" if length is None else f"{length:,}",
                        "score": layout.mean([result.score for result in found]).value,
                        "attended": sum(read) / len(read),
                    }
                )
    points: alt.Chart = (
        _chart(rows)
        .mark_point(size=70, filled=True)
        .encode(
            x=alt.X("attended:Q", title="tokens attended per KV head and step", scale=_LOG),
            y=alt.Y("score:Q", title="score, %", scale=alt.Scale(domain=[0, 100])),
            color=alt.Color("method:N", sort=None, scale=alt.Scale(range=[colour(i) for i in range(10)])),
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


def _heat(heat_map: DepthHeatMap) -> alt.LayerChart:
    rows = [
        {"depth": depth, "length": length, "score": score}
        for depth, scores in zip(heat_map.rows, heat_map.values, strict=True)
        for length, score in zip(heat_map.columns, scores, strict=True)
        if score is not None
    ]
    base = _chart(rows).encode(
        x=alt.X("length:O", title="tokens", sort=None, axis=alt.Axis(labelAngle=0)),
        y=alt.Y("depth:O", title="depth", sort=None),
        tooltip=["depth:O", "length:O", alt.Tooltip("score:Q", format=".1f")],
    )
    # Seen through to the page, one colour suits light and dark, and the numbers stay readable on it.
    shade = alt.FillOpacity("score:Q", legend=None, scale=alt.Scale(domain=[0, 100], range=[0.05, 0.5]))
    squares = base.mark_rect(fill="var(--accent)", stroke="var(--paper)", strokeWidth=2).encode(fillOpacity=shade)
    numbers = base.mark_text().encode(text=alt.Text("score:Q", format=".0f"))
    layered: alt.LayerChart = (squares + numbers).properties(height=_ROW * len(heat_map.rows))
    return layered


def _chart(rows: Sequence[dict[str, Any]]) -> alt.Chart:
    return alt.Chart(alt.Data(values=rows))  # type: ignore[no-untyped-call]
