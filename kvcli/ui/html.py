"""Reports as one self-contained HTML page: text, tables and charts, without a network.

    check_installed()                            # first thing: refuses if the extra is missing
    page = Page("kvcli profile", "llama-3.1-8b, dummy weights")
    page.section("Step time", "Median of five runs each.")
    page.chart(alt.Chart(alt.Data(values=rows)).mark_bar().encode(...), "What the picture shows, in a sentence.")
    page.table(summary.Table(columns, rows), "The same as figures.")
    page.facts([("device", "CPU"), ("threads", "2")])
    write_file(path, page.render())

Charts are Altair's, single or layered views (a concatenation cannot take the width of the window). Leave width, fonts
and axis colours to the page, and take colours from `colour` or `PALETTE`, so that they follow light and dark. Add a
table of the same figures to a chart: not everybody sees it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from kvcli.errors import usage_error
from kvcli.ui.summary import HeatMap, Table, folded

if TYPE_CHECKING:
    from altair import Chart, Color, FacetChart, LayerChart

# The colours are variables of page.css: the browser fills them in, for light or for dark.
PALETTE = tuple(f"var(--c{index})" for index in range(10))
"""Colours for categories, in the order of use, which colour-blind people can tell apart."""

_ROW, _LEAST_ROW, _HEIGHT = 26, 8, 400  # pixels of a heat map's row, and the most of a whole map if rows can shrink
_FONT = "system-ui, sans-serif"
_CONFIG: dict[str, Any] = {
    "background": "transparent",
    "font": _FONT,
    "view": {"stroke": None},
    "axis": {
        "labelColor": "var(--muted)",
        "titleColor": "var(--muted)",
        "titleFontWeight": "normal",
        "gridColor": "var(--line)",
        "domainColor": "var(--line)",
        "tickColor": "var(--line)",
        "labelFontSize": 12,
        "titleFontSize": 12,
        "labelOverlap": "greedy",
        "labelFlush": False,
    },
    "legend": {
        "labelColor": "var(--ink)",
        "titleColor": "var(--muted)",
        "titleFontWeight": "normal",
        "labelFontSize": 12,
        "titleFontSize": 12,
        "orient": "top",
        "symbolType": "square",
        "symbolBaseFillColor": "var(--muted)",
        "symbolBaseStrokeColor": "var(--muted)",
    },
    "text": {"color": "var(--ink)", "fontSize": 12},
    "rule": {"color": "var(--ink)"},
}
# Draws all charts; the width of a chart is that of the page, anew when the window changes.
_DRAW = """
document.querySelectorAll("script[type='application/vega-lite+json']").forEach((script) => {
  const spec = JSON.parse(script.textContent), place = script.previousElementSibling;
  spec.config.legend.columns = Math.max(2, Math.floor((0.7 * place.clientWidth) / 120));
  spec.config.axis.labelLimit = Math.max(100, 0.3 * place.clientWidth);
  vegaEmbed(place, spec, { renderer: "svg", actions: false, mode: "vega-lite", logLevel: 1 });
});
"""


def colour(index: int) -> str:
    """Return the colour of category `index`; colours repeat after the last one."""
    return PALETTE[index % len(PALETTE)]


def chart_of(rows: Sequence[Mapping[str, Any]]) -> Chart:
    """Begin a chart of rows of plain data."""
    import altair as alt

    return alt.Chart(alt.Data(values=rows))  # type: ignore[no-untyped-call]


def coloured(field: str, domain: Sequence[str] | None = None, **options: Any) -> Color:
    """Colour by a category, in the order in which its values come or in that of `domain`."""
    import altair as alt

    own: dict[str, Any] = {"range": list(PALETTE)}
    if domain is not None:
        own = {"domain": list(domain), "range": [colour(index) for index in range(len(domain))]}
    return alt.Color(field, sort=None, scale=alt.Scale(**own), **options)


def heat_map(found: HeatMap, value: str, text: str, numbers: bool = False) -> Chart | LayerChart:
    """Draw a square for each number of a map, the stronger the closer it is to the most; pointing at it shows it.

    A number is a `value` in the form `text`. With `numbers` it is written in its square, otherwise a legend explains
    the strength. One translucent colour suits light and dark, and numbers stay readable on it.
    """
    import altair as alt

    rows = [
        {found.down: row, found.across: column, value: number} | ({"of": found.notes[y][x]} if found.notes else {})
        for y, (row, cells) in enumerate(zip(found.rows, found.values, strict=True))
        for x, (column, number) in enumerate(zip(found.columns, cells, strict=True))
        if number is not None
    ]
    others = [found.down, found.across, *(["of"] if found.notes else [])]
    strength = alt.Scale(domain=[0, found.most], range=[0.05, 0.5 if numbers else 1])
    base = chart_of(rows).encode(
        x=alt.X(f"{found.across}:O", sort=list(found.columns), axis=alt.Axis(labelOverlap=True, labelAngle=0)),
        y=alt.Y(f"{found.down}:O", sort=list(found.rows), axis=alt.Axis(labelOverlap=not numbers)),
        tooltip=[*(f"{name}:N" for name in others), alt.Tooltip(f"{value}:Q", format=text)],
    )
    squares = base.mark_rect(fill="var(--accent)", stroke="var(--paper)").encode(
        fillOpacity=alt.FillOpacity(
            f"{value}:Q", scale=strength, legend=None if numbers else alt.Legend(format=text, title=found.title)
        )
    )
    height = _ROW if numbers else max(_LEAST_ROW, min(_ROW, _HEIGHT // (1 + len(found.rows))))
    drawn: Chart | LayerChart = (
        squares + base.mark_text().encode(text=alt.Text(f"{value}:Q", format=text)) if numbers else squares
    )
    return drawn.properties(height=alt.Step(height))


def labelled(known: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Make labels of names, with their values."""
    return [(name.replace("_", " "), value) for name, value in known.items()]


def check_installed(wanted: str = "an HTML page") -> None:
    """Refuse at once if the charts of what is `wanted` cannot be made. Raises KvcliError (usage)."""
    missing = [name for name in ("altair", "vl_convert") if find_spec(name) is None]
    if missing:
        raise usage_error(f"{wanted} needs {missing[0]}, which is not installed", "pip install 'kvcli[html]'")


class Page:
    """A page that grows from top to bottom; `render` returns the whole file."""

    def __init__(self, title: str, subtitle: str = ""):
        self.title = title
        self._charts = 0
        self._parts = [f"<header><h1>{escape(title)}</h1><p>{escape(subtitle)}</p></header>"]

    def section(self, title: str, text: str = "") -> None:
        """Begin a section."""
        self._parts.append(f"<h2>{escape(title)}</h2>")
        if text:
            self.text(text)

    def text(self, text: str) -> None:
        """Add a paragraph."""
        self._parts.append(f"<p>{escape(text)}</p>")

    def chart(self, chart: Chart | LayerChart | FacetChart, caption: str) -> None:
        """Add a chart as wide as the page; `caption` describes it, also for those who do not see it."""
        self._parts.append(self._figure(chart, caption))

    def charts(self, charts: Iterable[tuple[Chart | LayerChart | FacetChart, str]]) -> None:
        """Add small charts with their captions in rows, as many in a row as the window has room for."""
        figures = "".join(self._figure(chart, caption) for chart, caption in charts)
        self._parts.append(f'<div class="multiples">{figures}</div>')

    def _figure(self, chart: Chart | LayerChart | FacetChart, caption: str) -> str:
        spec = chart.to_dict()
        spec["config"] = _CONFIG  # Altair's own theme has fixed colours
        spec["width"] = "container"
        spec["autosize"] = {"type": "fit-x", "contains": "padding"}
        spec["description"] = caption
        data = json.dumps(spec, ensure_ascii=False).replace("</", "<\\/")
        self._charts += 1
        return (
            f'<figure><div class="chart"></div><script type="application/vega-lite+json">{data}</script>'
            f"<figcaption>{escape(caption)}</figcaption></figure>"
        )

    def table(self, table: Table, caption: str = "") -> None:
        """Add a table; all but its first column are numbers."""
        head = "".join(f'<th scope="col">{escape(name)}</th>' for name in table.columns)
        rows = "".join(f"<tr>{_row(*cells)}</tr>" for cells in table.rows)
        label = f"<caption>{escape(caption)}</caption>" if caption else ""
        self._parts.append(
            '<div class="scroll" tabindex="0" role="region" aria-label="table">'
            f"<table>{label}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
        )

    def tables(self, titled: Iterable[tuple[str, Table]], width: int | None = None) -> None:
        """Add tables under their titles; columns beyond `width` characters continue below."""
        for title, table in titled:
            for number, part in enumerate([table] if width is None else folded(table, width)):
                self.table(part, f"{title}, continued" if number else title)

    def facts(self, rows: Iterable[tuple[str, object]]) -> None:
        """Add labels with their values: texts, numbers, lists and mappings of them; empty values are left out."""
        told = [(label, _told(value)) for label, value in rows]
        pairs = "".join(f"<dt>{escape(label)}</dt><dd>{escape(value)}</dd>" for label, value in told if value)
        self._parts.append(f"<dl>{pairs}</dl>")

    def render(self) -> str:
        """Return the file: style, text, charts and the script that draws them."""
        style = (files("kvcli.ui") / "page.css").read_text()
        script = f"<script>{_bundle()}</script>" if self._charts else ""
        return (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f'<meta name="color-scheme" content="light dark">\n<title>{escape(self.title)}</title>\n'
            f"<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
            + "\n".join(self._parts)
            + f"\n</main>\n{script}\n</body>\n</html>\n"
        )


def _row(first: str, *cells: str) -> str:
    return f'<th scope="row">{escape(first)}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in cells)


def _told(value: object) -> str:
    if isinstance(value, Mapping):
        parts = ((str(key), _told(each)) for key, each in value.items())
        return ", ".join(f"{key}: {part}" for key, part in parts if part)
    if isinstance(value, list | tuple):
        return ", ".join(map(_told, value))
    return "" if value is None else str(value)


@cache
def _bundle() -> str:
    """Bundle the drawing library with our few lines as one script, from the package: nothing is fetched."""
    import vl_convert

    return vl_convert.javascript_bundle(_DRAW).replace("</script", "<\\/script")
