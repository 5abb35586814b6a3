"""A table of results as text: figures rounded, with their units; the console lays it out."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import product

from kvcli.quality.eval.estimate import Estimate, by_task, mean
from kvcli.quality.eval.suite import FED, FIDELITY, PERPLEXITY
from kvcli.quality.eval.table import FAILING, CellScore, EvaluationTable, VariantCost, fails_by
from kvcli.ui.summary import HeatMap, Table, counted, duration, percent, size_text, without_empty_columns

COST = "cost"
"""The beginning of the titles of the tables of costs."""
MARK = "†"
"""Stands after the name of a task that full attention itself fails."""
_NARROW = 5  # points, below which bounds of an interval have a digit after the point


def tables(table: EvaluationTable) -> list[tuple[str, Table]]:
    """Return scores and costs of each length, one variant per row.

    There are also differences from full attention where that has run, and pass@k if there are several samples.
    """
    found = []
    for length in dict.fromkeys(result.length for result in table.results):
        everything = [result for result in table.results if result.length == length]
        results = [result for result in everything if result.metric != FIDELITY]
        where = "" if length is None else f" at {length:,} tokens"
        for task in dict.fromkeys(result.task for result in everything if result.metric == FIDELITY):
            own = [result for result in everything if result.task == task]
            found.append((f"{task}{where}: next token, against full attention; {_texts(own)}", _closeness(own)))
        if results:
            scores = [(result, result.score) for result in results]
            found.append((f"score{where}: {_what(results)}", _scores(scores, share, _failed(table, length))))
        if compared := [(result, result.difference) for result in results if result.difference is not None]:
            what = _apart([result for result, _ in compared])
            found.append((f"less full attention{where}: {what}", _scores(compared, signed)))
        if any(result.pass_at and result.depth is None for result in results):
            found.append((f"one of k answers entirely right{where}: % (95 % interval)", _passes(results)))
        found.append((f"{COST}{where}: tokens attended per KV head, bytes, time", _costs(everything)))
    return found


def notes(table: EvaluationTable) -> list[tuple[str, str]]:
    """Explain the mark of tasks that full attention fails: labels with their texts; none without such a task."""
    failed = []
    for length in dict.fromkeys(result.length for result in table.results):
        where = "" if length is None else f" at {length:,}"
        failed += [f"{task}{where} ({score.value:.0f} %)" for task, score in _failed(table, length).items()]
    if not failed:
        return []
    what = f"full attention itself scores less than {FAILING:.0f} %: the model fails the task, and a comparison of"
    return [(MARK, f"{what} methods by it says little: {', '.join(failed)}")]


def _failed(table: EvaluationTable, length: int | None) -> dict[str, Estimate]:
    """Return the tasks of a length that full attention fails, over all depths, with its scores."""
    label = None if table.full is None else table.full.label
    own = [result for result in table.results if (result.variant, result.length) == (label, length)]
    metrics = {result.task: result.metric for result in own}
    scores = by_task((result.task, result.score) for result in own)
    return {task: score for task, score in scores.items() if fails_by(metrics[task], score)}


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
    fed = [result.score for result in results if result.metric == PERPLEXITY]
    perplexity = f"; ppl is perplexity ± standard error, {_over(fed)}" if fed else ""
    cut = max(result.cut for result in results)
    most = max(result.cut_tokens for result in results)
    middle = f", {cut:,} of them truncated in the middle by up to {most:,} tokens" if cut else ""
    return f"% (95 % interval), documents a task: {documents}{middle}{grid}{perplexity}"


def _over(fed: Sequence[Estimate]) -> str:
    """Say how many tokens, in how many texts, a figure is over; if cells differ, of the one with the most."""
    most = max(fed, key=lambda each: each.tokens or 0)
    return f"over {most.tokens:,} tokens in {counted(most.examples, 'text')}"


def share(figure: Estimate) -> str:
    """Return a value and its interval as text: "98.0 (86 to 100)", with a digit more if that is narrow."""
    if figure.low is None or figure.high is None:
        return number(figure)
    digits = 0 if figure.high - figure.low >= _NARROW else 1
    return f"{_rounded(figure.value)} ({figure.low:.{digits}f} to {figure.high:.{digits}f})"


def signed(figure: Estimate) -> str:
    """Return a difference as text: "-5.0 (-19 to +9)" with an interval, "+0.0050 ±0.0060" with a standard error."""
    if figure.low is None or figure.high is None:
        return ("+" if figure.value > 0 else "") + exact(figure)
    digits = 0 if figure.high - figure.low >= _NARROW else 1
    return f"{figure.value:+.1f} ({figure.low:+.{digits}f} to {figure.high:+.{digits}f})"


def number(figure: Estimate) -> str:
    """Return a value and its standard error as text: "98.0 ±2.0", "1.04 ±0.01"; "1.04 (n = 1)" without one."""
    digits = 1 if figure.value >= 10 or figure.value == 0 else 2
    return f"{_rounded(figure.value)}{_error(figure, digits)}"


def exact(figure: Estimate) -> str:
    """Return a value with two digits of its standard error: "0.0312 ±0.0042"."""
    scale = figure.stderr or abs(figure.value)
    digits = min(6, max(1, 1 - math.floor(math.log10(scale)))) if scale else 1
    return f"{figure.value:.{digits}f}{_error(figure, digits)}"


def _rounded(value: float) -> str:
    return f"{value:.{1 if value >= 10 or value == 0 else 2}f}"


def _error(figure: Estimate, digits: int) -> str:
    if figure.stderr is None:
        return " (n = 1)" if figure.examples == 1 else ""
    return f" ±{figure.stderr:.{digits}f}"


def _texts(results: Sequence[CellScore]) -> str:
    return f"mean ± standard error {_over([result.score for result in results])}"


def _closeness(results: Sequence[CellScore]) -> Table:
    columns = ("", "KL, nats", "same top, %", "log-perplexity", "tokens read")
    rows = []
    for result in results:
        close, read = result.closeness, result.cost.attended
        assert close is not None
        tokens = "-" if read is None else f"{read:,.0f}"
        rows.append((result.variant, exact(close.kl), number(result.score), signed(close.nll_gap), tokens))
    return Table(columns, rows)


def _scores(
    given: Sequence[tuple[CellScore, Estimate]], form: Callable[[Estimate], str], marked: Collection[str] = ()
) -> Table:
    """Tabulate figures of results, one task per column, with their mean over the tasks, of which perplexity is none."""
    tasks = list(dict.fromkeys(result.task for result, _ in given))
    averaged = {result.task for result, _ in given if result.metric != PERPLEXITY}
    rows = []
    for variant in dict.fromkeys(result.variant for result, _ in given):
        own = by_task((result.task, figure) for result, figure in given if result.variant == variant)
        scores = [figure for task, figure in own.items() if task in averaged]
        row = [form(own[task]) if task in own else "-" for task in tasks]
        rows.append((variant, *row, *([form(mean(scores)) if scores else "-"] if len(averaged) > 1 else [])))
    heads = [f"{task} {MARK}" if task in marked else task for task in tasks]
    return Table(("", *heads, *(["mean"] if len(averaged) > 1 else [])), rows)


def _apart(results: Sequence[CellScore]) -> str:
    metrics = {result.metric == PERPLEXITY for result in results}
    points = ["points of % (95 % interval)"] if False in metrics else []
    nats = ["of ppl nats per token ± standard error"] if True in metrics else []
    return f"{', '.join(points + nats)}, on the same documents"


def _passes(results: Sequence[CellScore]) -> Table:
    sampled = [result for result in results if result.pass_at and result.depth is None]
    counts = sorted({k for result in sampled for k in result.pass_at})
    heads = [f"pass@{k}" for k in counts]
    rows = [
        (
            f"{result.variant}, {result.task}",
            share(result.score),
            *(share(result.pass_at[k]) if k in result.pass_at else "-" for k in counts),
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
