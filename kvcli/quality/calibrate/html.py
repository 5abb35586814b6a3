"""A calibration as one page: the curve, and what else was seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from kvcli.quality.calibrate.curve import told
from kvcli.quality.calibrate.outcome import Calibration
from kvcli.ui.html import Page, colour

_ROW = 20  # pixels of a row of the map


def page(found: Calibration) -> str:
    """Make the page's HTML: curve, choice, similarity or spectrum where the target looked at them, all tables."""
    sweep, origin = found.sweep, found.provenance
    made = Page(f"kvcli calibrate {sweep.name}", f"{origin['method']} on {origin['model']}: {sweep.title}")
    made.section("Loss and cost", found.choice.reason)
    made.chart(
        _curve(found, "added_bound", "loss added at most, nats"),
        f"Loss that each value adds, two standard errors included, against {sweep.cost.name}.",
    )
    made.chart(_curve(found, "mass", "attention mass covered"), f"Attention mass covered against {sweep.cost.name}.")
    if "similarity" in found.figures:
        made.section("Query similarity", "Mean cosine of consecutive queries while decoding, by layer and KV head.")
        made.chart(_similarity(found.figures["similarity"]), "Mean cosine of consecutive queries by layer and KV head.")
        made.chart(_below(found.figures["below"]), "Part of the consecutive queries less alike than a cosine.")
    if "spectrum" in found.figures:
        made.section("Spectrum of the keys", "Relative error (Frobenius) of keys without rotation at each rank.")
        made.chart(_spectrum(found.figures["spectrum"]), "Relative error of the keys against rank, one line a layer.")
    made.section("Figures")
    for title, table in found.tables():
        made.table(table, title)
    made.section("Where this comes from")
    made.facts([(key.replace("_", " "), value) for key, value in origin.items()])
    return made.render()


def _curve(found: Calibration, field: str, title: str) -> alt.LayerChart | alt.FacetChart:
    """One figure of every point against its cost; the chosen one is filled."""
    cost = found.sweep.cost
    rows = [
        {
            "cost": cost.of(point),
            "figure": getattr(point, field),
            "setting": point.label,
            "value": ", ".join(told(value) for value in point.settings.values()),
            "chosen": point is found.choice.point,
        }
        for point in found.points
        if getattr(point, field) is not None
    ]
    unit = f", {cost.unit}" if cost.unit else ""
    base = _chart(rows).encode(
        x=alt.X("cost:Q", title=f"{cost.name}{unit}", scale=alt.Scale(zero=False), axis=alt.Axis(format="~s")),
        y=alt.Y("figure:Q", title=title, scale=alt.Scale(zero=field == "added_bound")),
        tooltip=[alt.Tooltip("setting:N"), alt.Tooltip("figure:Q", format=".4g"), alt.Tooltip("cost:Q", format=",.0f")],
    )
    points = base.mark_point(size=70, color=colour(0)).encode(
        fill=alt.condition("datum.chosen", alt.value(colour(0)), alt.value("transparent"))
    )
    labels = base.mark_text(align="left", dx=8, dy=-6).encode(text="value:N")
    return (
        alt.layer(base.mark_line(color=colour(0), opacity=0.4), points, labels) if len(rows) < 8 else alt.layer(points)
    )


def _similarity(layers: list[dict[str, Any]]) -> alt.Chart:
    rows = [
        {"layer": layer["layer"], "head": head, "cosine": cosine}
        for layer in layers
        for head, cosine in enumerate(layer["heads"])
    ]
    squares: alt.Chart = (
        _chart(rows)
        .mark_rect()
        .encode(
            x=alt.X("head:O", title="KV head", axis=alt.Axis(labelAngle=0)),
            y=alt.Y("layer:O", title="layer"),
            color=alt.Color("cosine:Q", title="cosine", scale=alt.Scale(domain=[0, 1], scheme="viridis")),
            tooltip=["layer:O", "head:O", alt.Tooltip("cosine:Q", format=".3f")],
        )
        .properties(height=_ROW * len(layers))
    )
    return squares


def _below(rows: list[dict[str, float]]) -> alt.Chart:
    line: alt.Chart = (
        _chart(rows)
        .mark_line(color=colour(0))
        .encode(
            x=alt.X("cosine:Q", title="cosine"),
            y=alt.Y("part:Q", title="part below", axis=alt.Axis(format="%")),
        )
    )
    return line


def _spectrum(layers: list[dict[str, Any]]) -> alt.Chart:
    rows = [
        {"layer": layer["layer"], "rank": rank, "error": error}
        for layer in layers
        for rank, error in enumerate(layer["error"])
    ]
    lines: alt.Chart = (
        _chart(rows)
        .mark_line()
        .encode(
            x=alt.X("rank:Q", title="rank"),
            y=alt.Y("error:Q", title="relative error", axis=alt.Axis(format="%")),
            color=alt.Color("layer:O", title="layer", scale=alt.Scale(scheme="viridis")),
        )
    )
    return lines


def _chart(rows: Sequence[Mapping[str, Any]]) -> alt.Chart:
    return alt.Chart(alt.Data(values=rows))  # type: ignore[no-untyped-call]
