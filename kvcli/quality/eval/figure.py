"""A table of results as one picture: what methods score over their budgets, or over depths or lengths."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcli.quality.eval.estimate import Estimate, by_task, mean
from kvcli.quality.eval.suite import FED, FIDELITY, PERPLEXITY
from kvcli.quality.eval.table import CellScore, EvaluationTable
from kvcli.ui.figure import Figure, Mark, dot_chart, line_chart, picture, places_of

_UP = {"score": "score, %", FIDELITY: "KL from full attention, nats", PERPLEXITY: "perplexity"}
"""Kinds of figures with the titles of their axes; a picture has the first that there is."""
_ACROSS = {"budget": "budget, tokens", "depth": "depth of the needle, %", "length": "prompt, tokens"}
_WIDE = 30  # times the least figure, from which on the axis is logarithmic


def figure(table: EvaluationTable, path: Path) -> Figure | None:
    """Draw a table in the format that the path's ending names; None without a result.

    A picture has one kind of figure: scores if there are any, else closeness to full attention, else perplexity. It
    shows means over the tasks: over budgets where there are several, with a chart for each length, else over depths of
    the needle grid, else over lengths. Where only methods differ each has a row.
    """
    kind = next((kind for kind in _UP if any(_kind(result) == kind for result in table.results)), None)
    if kind is None:
        return None
    results = [result for result in table.results if _kind(result) == kind]
    tasks = list(dict.fromkeys(result.task for result in results))
    others = list(dict.fromkeys(result.task for result in table.results if _kind(result) != kind))
    up = _UP[kind] if len(tasks) == 1 else f"mean {_UP[kind]}"
    bars = "95 % intervals" if kind == "score" else "standard errors"
    notes = [f"{path} shows {', '.join(tasks)}; bars are {bars}"]
    if others:
        notes.append(f"{path} does not show {', '.join(others)}: a picture has one kind of figure")

    reference = None if table.full is None else table.full.label
    axis, values = _axis(table, results)
    log = kind == FIDELITY and axis is not None and _is_wide(table, results)
    if log and reference is not None:
        results = [result for result in results if result.variant != reference]
        notes.append(f"{path} does not show {reference}: it is 0, and the axis is logarithmic")
    charts = []
    for length in dict.fromkeys(None if axis == "length" else result.length for result in results):
        given = [result for result in results if axis == "length" or result.length == length]
        points = _points(table, given, axis, values)
        title = f"{length:,} tokens" if length is not None else "files"
        title = title if len({result.length for result in results}) > 1 and axis != "length" else ""
        if axis is None:
            charts.append(dot_chart(points, up, reference))
        else:
            charts.append(line_chart(points, places_of(values), _ACROSS[axis], up, reference, log, title))
    return Figure(picture(charts, path), notes)


def _kind(result: CellScore) -> str:
    return result.metric if result.metric in FED else "score"


def _is_wide(table: EvaluationTable, results: Sequence[CellScore]) -> bool:
    """Tell whether closeness differs so much that only a logarithmic axis shows the small figures."""
    full = None if table.full is None else table.full.label
    found = [_shown(result).value for result in results if result.variant != full]
    return bool(found) and 0 < _WIDE * min(found) < max(found)


def _axis(table: EvaluationTable, results: Sequence[CellScore]) -> tuple[str | None, list[Any]]:
    """Choose what varies across the picture, with its values in order; None if only methods do."""
    budgets = sorted({variant.budget for variant in table.variants if variant.budget is not None})
    depths = sorted({result.depth for result in results if result.depth is not None})
    lengths = sorted({result.length for result in results}, key=lambda length: length or 0)
    if len(budgets) > 1:
        return "budget", budgets
    if len(depths) > 1 and all(result.depth is not None for result in results):
        return "depth", [100 * depth for depth in depths]
    return ("length", lengths) if len(lengths) > 1 else (None, [])


def _points(
    table: EvaluationTable, results: Sequence[CellScore], axis: str | None, values: Sequence[Any]
) -> list[Mark]:
    """Average the tasks of every variant at every place; a method without a budget is the same at all of them."""
    points = []
    for variant in table.variants:
        own = [result for result in results if result.variant == variant.label]
        cells: dict[Any, list[CellScore]] = {}
        for result in own:
            depth = None if result.depth is None else 100 * result.depth
            at = {"budget": variant.budget, "depth": depth, "length": result.length, None: None}[axis]
            for place in values if axis == "budget" and at is None else [at]:
                cells.setdefault(place, []).append(result)
        name = variant.name if axis == "budget" else variant.label
        for place, there in cells.items():
            found = mean(list(by_task((result.task, _shown(result)) for result in there).values()))
            error = found.stderr or 0.0
            low = found.value - error if found.low is None else found.low
            high = found.value + error if found.high is None else found.high
            points.append(Mark(name, place, found.value, low, high))
    return points


def _shown(result: CellScore) -> Estimate:
    return result.score if result.closeness is None else result.closeness.kl
