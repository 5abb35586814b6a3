"""A chart as one picture for a paper: as wide as a column, light, in a file of its own, without a network.

    check_figure(path)                                # first thing: refuses other formats, and if the extra is missing
    points = [Mark("quest", 512, 71.7, 60.0, 81.0), ...]
    chart = line_chart(points, places_of([512, 1024]), "budget, tokens", "score, %", reference="full")
    write_file(path, picture([chart], path))

Lengths are points, of which an inch has 72. A method has a colour and a shape, so that a picture in grey tells them
apart as well.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcli.errors import usage_error
from kvcli.ui.html import chart_of, check_installed, colour

if TYPE_CHECKING:
    from altair import FacetChart, LayerChart

    Drawn = LayerChart | FacetChart

FORMATS = (".svg", ".pdf", ".png")
WIDTH = 238  # 3.3 inches: a column of most papers in two columns
ROW = 13  # height of a bar and its label
_HEIGHT, _LOW_HEIGHT = 140, 95  # of a chart by itself, and of one among others
_PIXELS = 300  # of a PNG, to an inch
_LETTER, _KEY = 4.1, 20  # widths in a legend: of a letter, about, and of what stands before a name
_APART, _SPREAD = 0.04, 0.3  # parts of the distance of two places: of two methods at one place, and of all at most
_SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right")
_CONFIG: dict[str, Any] = {
    "background": "white",
    "font": "Liberation Sans, Arial, Helvetica, sans-serif",
    "padding": 2,
    "view": {"stroke": None},
    "axis": {
        "labelColor": "var(--ink)",
        "titleColor": "var(--ink)",
        "titleFontWeight": "normal",
        "titlePadding": 4,
        "gridColor": "var(--line)",
        "gridWidth": 0.5,
        "domainColor": "var(--muted)",
        "tickColor": "var(--muted)",
        "tickSize": 3,
        "labelFontSize": 7.5,
        "titleFontSize": 8,
        "labelOverlap": "greedy",
        "labelLimit": WIDTH / 2,
    },
    "legend": {
        "labelColor": "var(--ink)",
        "labelFontSize": 7.5,
        "labelLimit": 0.9 * WIDTH,
        "orient": "bottom",
        "direction": "horizontal",
        "symbolType": "square",
        "symbolSize": 36,
        "symbolOpacity": 1,
        "columnPadding": 6,
        "rowPadding": 1,
        "offset": 6,
        "title": None,
    },
    "title": {"fontSize": 8, "fontWeight": "normal", "color": "var(--ink)", "anchor": "start", "offset": 3},
}


class Figure(NamedTuple):
    """The content of a picture's file, and notes on what the picture shows."""

    content: str | bytes
    notes: list[str]


@dataclass(frozen=True)
class Mark:
    """A figure of a `series` at a place, one of the values across the chart, and the ends of its error bar."""

    series: str
    place: Any
    value: float
    low: float
    high: float


class Place(NamedTuple):
    """A value across a chart, where it stands there, and its name."""

    value: Any
    at: float
    name: str


def places_of(values: Sequence[Any]) -> list[Place]:
    """Place numbers of tokens in order: plain ones by their logarithms, shares of a prompt and none by their ranks."""
    plain = all(type(value) in (int, float) for value in values)
    if plain and values and isinstance(values[0], float):
        return [Place(value, value, f"{value:.0f}") for value in values]
    return [
        Place(value, math.log2(value) if plain else rank, "files" if value is None else tokens_text(value))
        for rank, value in enumerate(values)
    ]


def tokens_text(tokens: int) -> str:
    """Return a number of tokens as briefly as an option takes it: "512", "2K", "20%"."""
    return f"{tokens // 1024}K" if type(tokens) is int and tokens % 1024 == 0 else f"{tokens}"


def check_figure(path: Path) -> None:
    """Refuse at once a picture that cannot be made. Raises KvcliError (usage)."""
    if path.suffix.lower() not in FORMATS:
        raise usage_error(f"--figure {path}: a picture is {', '.join(FORMATS)}", "give the file one of these endings")
    check_installed("a picture")


def line_chart(
    points: Sequence[Mark],
    places: Sequence[Place],
    across: str,
    up: str,
    reference: str | None = None,
    log: bool = False,
    title: str = "",
) -> Drawn:
    """Draw a line of each series over the places, with error bars; the `reference` is dashed.

    Points of several series at one place stand slightly apart. With `log` the figures, all above 0, are on a
    logarithmic axis, which the bars do not make longer.
    """
    import altair as alt

    series = list(dict.fromkeys(point.series for point in points))
    where = {place.value: place.at for place in places}
    stands = sorted(where.values())
    gap = min((later - earlier for earlier, later in pairwise(stands)), default=1.0)
    spread = gap * min(_SPREAD, _APART * len(series))
    apart = {name: spread * ((at + 0.5) / len(series) - 0.5) for at, name in enumerate(series)}
    floor = min((point.value for point in points), default=0.0) / 2 if log else -math.inf
    rows = [
        vars(point) | {"place": where[point.place] + apart[point.series], "low": max(point.low, floor)}
        for point in points
    ]
    names = f"{json.dumps([place.name for place in places])}[indexof({json.dumps([*where.values()])}, datum.value)]"
    margin = _SPREAD * gap
    x = alt.X(
        "place:Q",
        title=across,
        scale=alt.Scale(domain=[stands[0] - margin, stands[-1] + margin], nice=False, zero=False),
        axis=alt.Axis(values=[*where.values()], labelExpr=names, grid=False),
    )
    scale = alt.Scale(type="log", nice=False) if log else alt.Scale(zero=False)
    low, value = (
        alt.Y(f"{name}:Q", title=up, scale=scale, axis=alt.Axis(tickCount=5, format="~r")) for name in ("low", "value")
    )
    shade, shape = _told_apart(series, reference)
    base = chart_of(rows).encode(x=x, color=shade)
    bars = base.mark_rule(strokeWidth=0.8, opacity=0.6).encode(y=low, y2="high:Q")
    lines = base.mark_line(strokeWidth=1.2).encode(y=value).transform_filter(alt.datum.series != reference)
    marks = base.mark_point(filled=True, opacity=1, size=22).encode(y=value, shape=shape)
    true = [row for row in rows if row["series"] == reference]
    dashed: dict[str, Any] = {"strokeWidth": 1.2, "strokeDash": [3, 2], "color": "var(--ink)"}
    if len({row["value"] for row in true}) == 1:  # all the way across
        last = chart_of(true[:1]).mark_rule(**dashed).encode(y=value)
    else:
        last = chart_of(true).mark_line(**dashed).encode(x=x, y=value)
    layered: Drawn = alt.layer(bars, lines, marks, last)
    return layered.properties(title=title) if title else layered


def dot_chart(points: Sequence[Mark], across: str, reference: str | None = None) -> Drawn:
    """Draw a row of each series, its figure with an error bar; a dashed line goes through that of the `reference`."""
    import altair as alt

    series = list(dict.fromkeys(point.series for point in points))
    rows = [vars(point) for point in points]
    low, value = (
        alt.X(f"{name}:Q", title=across, scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=5, format="~r"))
        for name in ("low", "value")
    )
    shade, shape = (each.legend(None) for each in _told_apart(series, reference))
    base = chart_of(rows).encode(
        y=alt.Y(
            "series:N",
            title=None,
            sort=None,
            axis=alt.Axis(labelOverlap=False, domain=False, ticks=False, labelPadding=6),
        ),
        color=shade,
    )
    bars = base.mark_rule(strokeWidth=1).encode(x=low, x2="high:Q")
    marks = base.mark_point(filled=True, opacity=1, size=28).encode(x=value, shape=shape)
    line = chart_of([row for row in rows if row["series"] == reference]).mark_rule(
        strokeWidth=0.8, strokeDash=[3, 2], color="var(--ink)"
    )
    layered: Drawn = alt.layer(line.encode(x=value), bars, marks)
    return layered.properties(height=alt.Step(ROW))


def picture(charts: Sequence[Drawn], path: Path) -> str | bytes:
    """Return the file: the charts one below the other with one legend, in the format that the path's ending names."""
    import altair as alt
    import vl_convert

    many = len(charts) > 1
    heights = [chart if "height" in chart.to_dict() else None for chart in charts]
    sized = [
        chart if known is not None else chart.properties(height=_LOW_HEIGHT if many else _HEIGHT)
        for chart, known in zip(charts, heights, strict=True)
    ]
    spec = (alt.vconcat(*sized, spacing=8) if many else sized[0]).to_dict()
    spec["config"] = _CONFIG
    spec = json.loads(re.sub(r"var\(--(\w+)\)", lambda name: _light()[name[1]], json.dumps(spec)))
    parts = spec["vconcat"] if many else [spec]
    room = float(WIDTH)
    for _ in range(3):  # what axes and their labels take is known once they are drawn
        for part in parts:
            part["width"] = room
        svg: str = vl_convert.vegalite_to_svg(spec)
        width, height = (float(each) for each in re.findall(r'<svg[^>]*? width="([\d.]+)" height="([\d.]+)"', svg)[0])
        if abs(width - WIDTH) < 1:
            break
        room = max(WIDTH / 4, room + WIDTH - width)
    kind = path.suffix.lower()
    if kind == ".svg":
        return svg.replace(f'width="{width:g}" height="{height:g}"', f'width="{width:g}pt" height="{height:g}pt"', 1)
    if kind == ".pdf":
        found: bytes = vl_convert.vegalite_to_pdf(spec)
    else:
        found = vl_convert.vegalite_to_png(spec, ppi=_PIXELS)
    return found


def legend_columns(names: Sequence[str]) -> int:
    """Return how many of the names stand side by side in a legend."""
    return max(1, math.floor(WIDTH / (_KEY + _LETTER * max(map(len, names), default=1))))


def _told_apart(series: Sequence[str], reference: str | None) -> tuple[Any, Any]:
    """Return the encodings of series by colour and by shape, with one legend; the reference is black."""
    import altair as alt

    others = [name for name in series if name != reference]
    colours = ["var(--ink)" if name == reference else colour(others.index(name)) for name in series]
    shapes = ["stroke" if name == reference else _SHAPES[others.index(name) % len(_SHAPES)] for name in series]
    legend = alt.Legend(columns=legend_columns(series), title=None)
    return (
        alt.Color("series:N", sort=None, legend=legend, scale=alt.Scale(domain=list(series), range=colours)),
        alt.Shape("series:N", sort=None, legend=legend, scale=alt.Scale(domain=list(series), range=shapes)),
    )


@cache
def _light() -> dict[str, str]:
    """Return the colours of a page in light, by the names of their variables."""
    style, _, _ = (files("kvcli.ui") / "page.css").read_text().partition("@media")
    return dict(re.findall(r"--(\w+): (#[0-9a-f]{6});", style))
