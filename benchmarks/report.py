"""Quality against budget for every method, with its costs, from one command that goes on where it was cut off.

    python benchmarks/report.py                         the bundled model: short tasks at 4K, 8K and 16K, three budgets
    python benchmarks/report.py --tasks records_json,long_lookup --rows 1 --folder DIR --prefix long-
    python benchmarks/report.py -m MODEL --lengths 16384 --rows 20 --folder DIR

FOLDER keeps every answer (answers-LENGTH.jsonl), and gets the figures (answers.json) and the page with the curves
(answers.html). `--document FILE`, as often as wanted, puts tables between the marks of a page: "overview", the mean
of every method at each length and budget, and "answers", each length by itself with all tasks and costs. Scores are
means over the tasks with their standard errors, where a task has several documents; bytes and time are those of a
decode step.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from common import RESULTS, arguments, put_between_marks

from kvcli.inputs.variants import variants
from kvcli.methods import method_names
from kvcli.models.loading import ModelSpec
from kvcli.quality.eval import layout
from kvcli.quality.eval.estimate import mean
from kvcli.quality.eval.evaluate import evaluate
from kvcli.quality.eval.html import page
from kvcli.quality.eval.suite import EvaluationPlan
from kvcli.quality.eval.table import CellScore, EvaluationTable, VariantCost
from kvcli.quality.tasks import TASKS
from kvcli.sizes import format_bytes
from kvcli.telemetry.observer import Observer

SMALL = {"sink": "32", "window": "32", "page_size": "16", "dense_layers": "1"}  # for budgets of a few hundred tokens
LONG = ("records_json", "long_lookup")  # answers of hundreds or thousands of tokens, which take most of the time


def overview(table: EvaluationTable) -> str:
    """Return one table: a method a row, its mean score over the tasks at each length and budget a column."""
    found = layout.overview(table)
    heads = [", ".join(f"{number:,}" for number in place if number is not None) for place in found.places]
    lines = [_row(("", *heads)), _row(["---"] * (len(heads) + 1))]
    for method, means in found.means.items():
        lines.append(_row((f"`{method}`", *("-" if mean is None else layout.number(mean) for mean in means))))
    return "\n".join(lines) + "\n"


def answers(table: EvaluationTable) -> str:
    """Return one table a length: a variant a row, its mean score and costs; then the scores of each task."""
    parts = []
    for length, rows in _by_length(table):
        tasks = list(dict.fromkeys(result.task for each in rows.values() for result in each))
        documents = min(result.score.examples for each in rows.values() for result in each)
        parts.append(f"{length:,} tokens, {documents} {'document' if documents == 1 else 'documents'} a task:\n")
        heads = ("", "mean", "KV on the device", "moved a step", "step, ms", *tasks)
        parts += [_row(heads), _row(["---"] * len(heads))]
        for variant, results in rows.items():
            scores, cost = {result.task: result.score for result in results}, _cost(results)
            parts.append(
                _row(
                    (
                        f"`{variant}`",
                        layout.number(mean(list(scores.values()))),
                        format_bytes(cost.device_kv_bytes),
                        format_bytes(cost.bytes_to_device_step or 0),
                        "-" if cost.step_ms is None else f"{cost.step_ms:.1f}",
                        *(f"{scores[task].value:.0f}" if task in scores else "-" for task in tasks),
                    )
                )
            )
        parts.append("")
    return "\n".join(parts) + "\n"


PARTS = {"overview": overview, "answers": answers}


def figures(table: EvaluationTable) -> dict[str, Any]:
    """Return what is worth keeping: where it comes from, and scores [value, error] and costs of every variant."""
    return {
        "complete": table.complete,
        "environment": table.environment,
        "configuration": table.configuration,
        "lengths": {
            str(length): {
                variant: {
                    "scores": {result.task: [round(result.score.value, 2), result.score.stderr] for result in results},
                    "documents": results[0].score.examples,
                    "cost": asdict(_cost(results)),
                }
                for variant, results in rows.items()
            }
            for length, rows in _by_length(table)
        },
    }


def _marked(document: Path, prefix: str) -> list[str]:
    """Name the parts that a page has marks for, which begin with `prefix`.

    Raises:
        ValueError: it has none.
    """
    text = document.read_text()
    found = [name for name in PARTS if f"<!-- {prefix}{name} -->" in text]
    for name in found:
        put_between_marks(text, "", prefix + name)
    if not found:
        raise ValueError(f"{document} has the marks of none of {', '.join(prefix + name for name in PARTS)}")
    return found


def _lengths(table: EvaluationTable) -> list[int | None]:
    return list(dict.fromkeys(result.length for result in table.results))


def _by_length(table: EvaluationTable) -> Iterator[tuple[int | None, dict[str, list[CellScore]]]]:
    """Give the results of each length by their variants."""
    for length in _lengths(table):
        rows: dict[str, list[CellScore]] = {}
        for result in table.results:
            if result.length == length:
                rows.setdefault(result.variant, []).append(result)
        yield length, rows


def _cost(results: Sequence[CellScore]) -> VariantCost:
    return VariantCost.sum([result.cost for result in results])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _asked(options: argparse.Namespace) -> EvaluationTable:
    """Ask what is not yet answered, length by length; returns one table of all of them."""
    compared = variants(options.methods.split(","), [], _numbers(options.budgets), SMALL)
    rows = _numbers(options.rows)
    if len(rows) not in (1, len(_numbers(options.lengths))):
        raise SystemExit(f"--rows {options.rows}: one number, or one for each of --lengths {options.lengths}")
    tables = []
    for number, length in enumerate(_numbers(options.lengths)):
        plan = EvaluationPlan(
            ModelSpec(options.model),
            compared,
            options.tasks.split(","),
            lengths=[length],
            limit=rows[min(number, len(rows) - 1)],
            predictions=options.folder / f"answers-{length}.jsonl",
        )
        tables.append(evaluate(plan, Observer()))
        if not tables[-1].complete:
            raise SystemExit("interrupted; the same command goes on")
    return replace(tables[0], results=[result for table in tables for result in table.results])


def main(given: Sequence[str] | None = None) -> None:
    """Ask, and write figures, page and documents."""
    parser = arguments(__doc__)
    parser.add_argument("-m", "--model", help="the bundled model by default")
    parser.add_argument("--tasks", default=",".join(task for task in TASKS if task not in LONG))
    parser.add_argument("--methods", default=",".join(method_names()))
    parser.add_argument("--lengths", default="4096,8192,16384")
    parser.add_argument("--budgets", default="256,512,1024")
    parser.add_argument("--rows", default="3,2,1", help="documents a task, of each length or of all")
    parser.add_argument("--folder", type=Path, default=RESULTS / "answers")
    parser.add_argument("--document", type=Path, action="append", default=[], help="a page with marks")
    parser.add_argument("--prefix", default="", help="what the names of the marks begin with")
    options = parser.parse_args(given)

    # Missing marks are found before the work.
    parts = {document: _marked(document, options.prefix) for document in options.document}
    options.folder.mkdir(parents=True, exist_ok=True)
    table = _asked(options)
    (options.folder / "answers.json").write_text(json.dumps(figures(table), indent=1) + "\n")
    (options.folder / "answers.html").write_text(page(table))
    for document, names in parts.items():
        text = document.read_text()
        for name in names:
            text = put_between_marks(text, PARTS[name](table), options.prefix + name)
        document.write_text(text)
    print(overview(table), answers(table), sep="\n")


if __name__ == "__main__":
    main()
