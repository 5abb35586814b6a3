"""A table of results in words and numbers a person reads; the console lays it out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from kvcli import summary
from kvcli.eval.table import Cost, Figure, Result, Table
from kvcli.sizes import format_bytes

Titled = tuple[str, summary.Table]


def tables(table: Table) -> list[Titled]:
    """Scores and costs of each length, one variant a row."""
    lengths = list(dict.fromkeys(result.length for result in table.results))
    found = []
    for length in lengths:
        results = [result for result in table.results if result.length == length]
        where = "" if length is None else f" at {length:,} tokens"
        counts = sorted({result.score.examples for result in results})
        documents = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
        title = f"score{where}: % ± standard error, {documents} documents a task"
        found += [
            (title, _scores(results)),
            (f"cost{where}: tokens attended per KV head, bytes, time", _costs(results)),
        ]
    return found


def number(figure: Figure) -> str:
    """A mean and its standard error: "98.0 ±2.0"."""
    return f"{figure.value:.1f}" + ("" if figure.stderr is None else f" ±{figure.stderr:.1f}")


def mean(figures: Sequence[Figure]) -> Figure:
    """Mean over tasks, each counting the same; the tasks' errors are independent of each other."""
    errors = [figure.stderr for figure in figures if figure.stderr is not None]
    whole = math.sqrt(sum(error**2 for error in errors)) / len(figures) if len(errors) == len(figures) else None
    return Figure(statistics.mean(figure.value for figure in figures), whole, sum(f.examples for f in figures))


def _scores(results: Sequence[Result]) -> summary.Table:
    tasks = list(dict.fromkeys(result.task for result in results))
    rows = []
    for variant in dict.fromkeys(result.variant for result in results):
        by_task = {result.task: result.score for result in results if result.variant == variant}
        cells = [number(by_task[task]) if task in by_task else "-" for task in tasks]
        rows.append((variant, *cells, *([number(mean(list(by_task.values())))] if len(tasks) > 1 else [])))
    return summary.Table(("", *tasks, *(["mean"] if len(tasks) > 1 else [])), rows)


def _costs(results: Sequence[Result]) -> summary.Table:
    columns = ("", "attended", "of all KV", "device KV", "host KV", "to device / step", "step")
    rows = []
    for variant in dict.fromkeys(result.variant for result in results):
        cost = Cost.sum([result.cost for result in results if result.variant == variant])
        rows.append(
            (
                variant,
                "-" if cost.attended is None else f"{cost.attended:,.0f}",
                "-" if cost.attended_share is None else f"{100 * cost.attended_share:.1f} %",
                format_bytes(cost.device_kv_bytes),
                format_bytes(cost.host_kv_bytes),
                "-" if cost.bytes_to_device_step is None else format_bytes(cost.bytes_to_device_step),
                summary.duration(cost.step_ms),
            )
        )
    return summary.without_empty_columns(summary.Table(columns, rows))
