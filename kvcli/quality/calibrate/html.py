"""A calibration as one page: the curve, and the collector's figures."""

from collections.abc import Sequence
from typing import Any

import altair as alt

from kvcli.quality.calibrate.outcome import Calibration
from kvcli.quality.calibrate.sweep import value_text
from kvcli.ui.html import Page, chart_of, colour, coloured, heat_map, labelled
from kvcli.ui.summary import HeatMap

_NAMED = 12  # points, up to which each is labelled with its value
_NOTHING = 1e-9  # a figure that counts as zero
_CHOSEN, _OTHER = 220, 50  # square pixels of a point


def page(found: Calibration) -> str:
    """Make the page's HTML: choice, curve, similarity or spectrum if the target collected them, all tables."""
    sweep, origin = found.sweep, found.provenance
    made = Page(f"kvcli calibrate {sweep.name}", f"{origin['method']} on {origin['model']}: {sweep.title}")
    made.section("Choice")
    made.facts(found.summary())
    (title, table), *others = found.tables()
    made.table(table, title)
    made.section("Loss and cost")
    base = f"added to {found.points[-1].label}" if sweep.relative else "from full attention"
    made.chart(
        _losses(found),
        f"Loss {base}, two standard errors included, against {sweep.cost.name}: the line is the limit, the large point "
        "is chosen.",
    )
    if any(point.mass is not None for point in found.points):
        made.chart(_masses(found), f"Attention mass that is left out, against {sweep.cost.name}.")
    if "similarity" in found.figures:
        made.section("Query similarity", "Mean cosine of consecutive queries while decoding, by layer and KV head.")
        made.chart(_similarity(found.figures["similarity"]), "Mean cosine of consecutive queries by layer and KV head.")
        made.chart(_below(found.figures["below"]), "Part of the consecutive queries less alike than a cosine.")
    if "spectrum" in found.figures:
        made.section("Spectrum of the keys", "Relative error (Frobenius) of keys without rotation at each rank.")
        made.chart(_spectrum(found.figures["spectrum"]), "Relative error of the keys against rank, one line a layer.")
    made.tables(others)
    made.section("Where this comes from")
    made.facts(labelled(origin))
    return made.render()


def _losses(found: Calibration) -> alt.LayerChart | alt.FacetChart:
    limit: float = found.provenance["max_loss"]
    curve = _curve(found, [point.added_bound for point in found.points], "nats, at most", [limit] * (limit > 0))
    rule = chart_of([{"figure": limit}] * (limit > 0)).mark_rule(strokeDash=[4, 4], color="var(--muted)")
    return alt.layer(*curve, rule.encode(y="figure:Q"))


def _masses(found: Calibration) -> alt.LayerChart | alt.FacetChart:
    return alt.layer(*_curve(found, [1 - (point.mass or 0.0) for point in found.points], "mass left out", []))


def _curve(found: Calibration, figures: Sequence[float], title: str, shown: Sequence[float]) -> list[alt.Chart]:
    """Chart layers of a figure of every point against its cost; the chosen point is the large one.

    Figures range over orders of magnitude, and a logarithmic axis has no zero: zeros are drawn at a third of the
    smallest other figure, including `shown`. Colour tells points apart that differ in a second setting.
    """
    cost, keys = found.sweep.cost, list(found.points[0].settings)
    some = [figure for figure in (*figures, *shown) if figure > _NOTHING] or [1.0]
    floor = min(some) / (3 if min(figures) <= _NOTHING else 1)
    rows: list[dict[str, Any]] = [
        {
            "cost": cost.of(point),
            "figure": max(figure, floor),
            "exact": figure,
            "setting": point.label,
            "value": value_text(point.settings[keys[0]]),
            "group": value_text(point.settings[keys[-1]]),
            "chosen": point is found.choice.point,
        }
        for point, figure in zip(found.points, figures, strict=True)
    ]
    spread = alt.Scale(type="log" if min(row["cost"] for row in rows) > 0 else "linear", nice=False, padding=24)
    unit = f", {cost.unit}" if cost.unit not in cost.name else ""
    shade = coloured("group:N", title=keys[-1].replace("_", " "))
    base = chart_of(rows).encode(
        x=alt.X("cost:Q", title=f"{cost.name}{unit}", scale=spread, axis=alt.Axis(format="~s", tickCount=8)),
        y=alt.Y(
            "figure:Q",
            title=title,
            scale=alt.Scale(type="log", domain=[floor / 1.5, 1.5 * max(some)], nice=False),
            axis=alt.Axis(format="~g", tickCount=6),
        ),
        color=shade if len(keys) > 1 else alt.value(colour(0)),
        tooltip=["setting:N", alt.Tooltip("exact:Q", format=".4g", title=title), alt.Tooltip("cost:Q", format=",.0f")],
    )
    sizes = alt.condition("datum.chosen", alt.value(_CHOSEN), alt.value(_OTHER))
    points = base.mark_point(filled=True, opacity=1).encode(size=sizes)
    names = base.mark_text(dy=-14, fontSize=11).encode(text="value:N", color=alt.value("var(--ink)"))
    return [base.mark_line(strokeOpacity=0.4), points, *([names] if len(rows) < _NAMED else [])]


def _similarity(layers: list[dict[str, Any]]) -> alt.Chart | alt.LayerChart:
    heads = [str(head) for head in range(max(len(layer["heads"]) for layer in layers))]
    rows = [[*layer["heads"], *[None] * (len(heads) - len(layer["heads"]))] for layer in layers]
    names = [f"{layer['layer']}" for layer in layers]
    return heat_map(HeatMap("cosine", "layer", "KV head", names, heads, rows, most=1.0), "cosine", ".3f")


def _below(rows: list[dict[str, float]]) -> alt.Chart:
    line: alt.Chart = chart_of(rows).mark_line(color=colour(0))
    return line.encode(
        x=alt.X("cosine:Q", title="cosine", axis=alt.Axis(tickCount=10)),
        y=alt.Y("part:Q", title="part below", axis=alt.Axis(format="%", tickCount=5)),
    )


def _spectrum(layers: list[dict[str, Any]]) -> alt.Chart:
    rows = [
        {"layer": layer["layer"], "rank": rank, "error": error}
        for layer in layers
        for rank, error in enumerate(layer["error"])
    ]
    lines: alt.Chart = chart_of(rows).mark_line()
    return lines.encode(
        x=alt.X("rank:Q", title="rank"),
        y=alt.Y("error:Q", title="relative error", axis=alt.Axis(format="%")),
        color=alt.Color("layer:O", title="layer", scale=alt.Scale(scheme="viridis")),
    )
