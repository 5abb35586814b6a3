"""A table of results as text: figures rounded, with their units; the console lays it out."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from kvcli.quality.eval.suite import FED, FIDELITY, PERPLEXITY
from kvcli.quality.eval.table import CellScore, Estimate, EvaluationTable, VariantCost
from kvcli.ui.summary import HeatMap, Table, duration, percent, size_text, without_empty_columns

COST = "cost"
"""The beginning of the titles of the tables of costs."""


def tables(table: EvaluationTable) -> list[tuple[str, Table]]:
    """Return scores and costs of each length, one variant per row, and pass@k if there are several samples."""
    found = []
    for length in dict.fromkeys(result.length for result in table.results):
        everything = [result for result in table.results if result.length == length]
        results = [result for result in everything if result.metric != FIDELITY]
        where = "" if length is None else f" at {length:,} tokens"
        for task in dict.fromkeys(result.task for result in everything if result.metric == FIDELITY):
            own = [result for result in everything if result.task == task]
            found.append((f"{task}{where}: next token, against full attention; {_texts(own)}", _closeness(own)))
        if results:
            found.append((f"score{where}: {_what(results)}", _scores(results)))
        if any(result.pass_at and result.depth is None for result in results):
            found.append((f"one of k answers entirely right{where}: % ± standard error", _passes(results)))
        found.append((f"{COST}{where}: tokens attended per KV head, bytes, time", _costs(everything)))
    return found


@dataclass(frozen=True)
class Overview:
    """The mean over the tasks of every method at each of the `places`: tokens of the prompt, and budget."""

    places: Sequence[tuple[int | None, int | None]]
    means: dict[str, list[Estimate | None]]
    """By method, the best first. A method without a budget has the same mean at all places of a length."""

    @property
    def repeated(self) -> bool:
        """Whether a mean occurs at several places."""
        return any(len(set(map(id, row))) < len(row) for row in self.means.values())

    def heat_map(self) -> HeatMap:
        """Draw the means, one method per row."""
        columns = [
            ", ".join(f"{number:,}" for number in place if number is not None) or "files" for place in self.places
        ]
        values = [[None if mean is None else mean.value for mean in row] for row in self.means.values()]
        return HeatMap("overview", "method", "length, budget", list(self.means), columns, values)


def overview(table: EvaluationTable) -> Overview:
    """Average the tasks, except for texts that are fed."""
    found: dict[tuple[str, int | None, int | None], Estimate] = {}
    lengths = list(dict.fromkeys(result.length for result in table.results))
    for length, variant in product(lengths, table.variants):
        own = [result for result in table.results if (result.variant, result.length) == (variant.label, length)]
        scores = [result.score for result in own if result.metric not in FED]
        if scores:
            found[variant.name, length, variant.budget] = mean(scores)
    budgets: list[int | None] = [*sorted({budget for *_, budget in found if budget is not None})] or [None]
    places = list(product(lengths, budgets))
    rows = {
        method: [found.get((method, *place), found.get((method, place[0], None))) for place in places]
        for method in dict.fromkeys(method for method, *_ in found)
    }
    best = sorted(rows, key=lambda method: -sum(each.value for each in rows[method] if each is not None))
    return Overview(places, {method: rows[method] for method in best})


def heat_maps(table: EvaluationTable) -> list[HeatMap]:
    """Return one map per variant; none if the run has no needle grid."""
    grid = [result for result in table.results if result.depth is not None]
    depths = sorted({result.depth for result in grid if result.depth is not None})
    lengths = sorted({result.length for result in grid if result.length is not None})
    scores = {(result.variant, result.depth, result.length): result.score.value for result in grid}
    return [
        HeatMap(
            title=f"{variant}: score in %",
            down="depth",
            across="length",
            rows=[f"{100 * depth:.0f} %" for depth in depths],
            columns=[f"{length:,}" for length in lengths],
            values=[[scores.get((variant, depth, length)) for length in lengths] for depth in depths],
        )
        for variant in dict.fromkeys(result.variant for result in grid)
    ]


def _what(results: Sequence[CellScore]) -> str:
    counts = sorted({result.score.examples for result in results})
    documents = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
    depths = len({result.depth for result in results if result.depth is not None})
    grid = f" (and each of {depths} depths)" if depths else ""
    perplexity = "; ppl is perplexity" if any(result.metric == PERPLEXITY for result in results) else ""
    cut = max(result.cut for result in results)
    middle = f", {cut:,} of them truncated in the middle" if cut else ""
    return f"% ± standard error, documents a task: {documents}{middle}{grid}{perplexity}"


def number(figure: Estimate) -> str:
    """Return a value and its standard error as text: "98.0 ±2.0", "1.04 ±0.01"."""
    digits = 1 if figure.value >= 10 or figure.value == 0 else 2
    return f"{figure.value:.{digits}f}" + ("" if figure.stderr is None else f" ±{figure.stderr:.{digits}f}")


def exact(figure: Estimate) -> str:
    """Return a value with two digits of its standard error: "0.0312 ±0.0042"."""
    scale = figure.stderr or abs(figure.value)
    digits = min(6, max(1, 1 - math.floor(math.log10(scale)))) if scale else 1
    return f"{figure.value:.{digits}f}" + ("" if figure.stderr is None else f" ±{figure.stderr:.{digits}f}")


def _texts(results: Sequence[CellScore]) -> str:
    count = max(result.score.examples for result in results)
    return f"mean ± standard error over {count:,} stretch{'es' * (count > 1)} of text"


def _closeness(results: Sequence[CellScore]) -> Table:
    columns = ("", "KL, nats", "same top, %", "log-perplexity", "tokens read")
    rows = []
    for result in results:
        close, read = result.closeness, result.cost.attended
        assert close is not None
        gap = ("+" if close.nll_gap.value > 0 else "") + exact(close.nll_gap)
        tokens = "-" if read is None else f"{read:,.0f}"
        rows.append((result.variant, exact(close.kl), number(result.score), gap, tokens))
    return Table(columns, rows)


def mean(figures: Sequence[Estimate]) -> Estimate:
    """Return the mean over tasks, each weighted equally; their errors are independent of each other."""
    errors = [figure.stderr for figure in figures if figure.stderr is not None]
    whole = math.sqrt(sum(error**2 for error in errors)) / len(figures) if len(errors) == len(figures) else None
    return Estimate(statistics.mean(figure.value for figure in figures), whole, sum(f.examples for f in figures))


def _scores(results: Sequence[CellScore]) -> Table:
    tasks = list(dict.fromkeys(result.task for result in results))
    averaged = {result.task for result in results if result.metric != PERPLEXITY}
    rows = []
    for variant in dict.fromkeys(result.variant for result in results):
        by_task = {
            task: mean([result.score for result in results if (result.variant, result.task) == (variant, task)])
            for task in tasks
            if any((result.variant, result.task) == (variant, task) for result in results)
        }
        cells = [number(by_task[task]) if task in by_task else "-" for task in tasks]
        scores = [figure for task, figure in by_task.items() if task in averaged]
        rows.append((variant, *cells, *([number(mean(scores)) if scores else "-"] if len(averaged) > 1 else [])))
    return Table(("", *tasks, *(["mean"] if len(averaged) > 1 else [])), rows)


def _passes(results: Sequence[CellScore]) -> Table:
    sampled = [result for result in results if result.pass_at and result.depth is None]
    counts = sorted({k for result in sampled for k in result.pass_at})
    heads = [f"pass@{k}" for k in counts]
    rows = [
        (
            f"{result.variant}, {result.task}",
            number(result.score),
            *(number(result.pass_at[k]) if k in result.pass_at else "-" for k in counts),
        )
        for result in sampled
    ]
    return Table(("", f"avg@{counts[-1]}", *heads), rows)


def _costs(results: Sequence[CellScore]) -> Table:
    columns = ("", "attended", "of all KV", "device KV", "host KV", "to device / step", "step")
    rows = []
    for variant in dict.fromkeys(result.variant for result in results):
        cost = VariantCost.sum([result.cost for result in results if result.variant == variant])
        rows.append(
            (
                variant,
                "-" if cost.attended is None else f"{cost.attended:,.0f}",
                percent(cost.attended_share),
                size_text(cost.device_kv_bytes),
                size_text(cost.host_kv_bytes),
                size_text(cost.bytes_to_device_step),
                duration(cost.step_ms),
            )
        )
    return without_empty_columns(Table(columns, rows))
