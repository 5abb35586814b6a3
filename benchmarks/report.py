"""Quality against budget for every method, with its costs, from one command that goes on where it was cut off.

    python benchmarks/report.py                         the bundled model: all tasks at 4K and 8K, three budgets
    python benchmarks/report.py -m DIR --lengths 16384 --folder DIR2

FOLDER keeps every answer (answers.jsonl), and gets the table (answers.json) and the page with the curves
(answers.html); `--document FILE` puts the table between the marks called "answers" of a page. Scores are means over the
tasks with their standard errors; bytes and time are those of a decode step.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from kvcli.inputs.variants import variants
from kvcli.methods import method_names
from kvcli.models.loading import ModelSpec
from kvcli.quality.eval import layout
from kvcli.quality.eval.evaluate import evaluate
from kvcli.quality.eval.html import page
from kvcli.quality.eval.suite import EvaluationPlan
from kvcli.quality.eval.table import EvaluationTable, VariantCost
from kvcli.quality.tasks import TASKS
from kvcli.sizes import format_bytes
from kvcli.telemetry.observer import Observer

ROOT = Path(__file__).parent.parent
SMALL = {"sink": "32", "window": "32", "page_size": "16", "dense_layers": "1"}  # for budgets of a few hundred tokens
MARKS = "<!-- answers -->\n", "<!-- end of answers -->\n"


def markdown(table: EvaluationTable) -> str:
    """Return one table a length: a variant a row, its mean score and costs; then the scores of each task."""
    parts = []
    for length in dict.fromkeys(result.length for result in table.results):
        found = [result for result in table.results if result.length == length]
        tasks = list(dict.fromkeys(result.task for result in found))
        parts.append(f"{length:,} tokens, {min(result.score.examples for result in found)} documents a task:\n")
        heads = ("", "mean", "KV on the device", "moved a step", "step, ms", *tasks)
        parts += [_row(heads), _row(["---"] * len(heads))]
        for variant in dict.fromkeys(result.variant for result in found):
            own = {result.task: result for result in found if result.variant == variant}
            cost = VariantCost.sum([result.cost for result in own.values()])
            parts.append(
                _row(
                    (
                        f"`{variant}`",
                        layout.number(layout.mean([result.score for result in own.values()])),
                        format_bytes(cost.device_kv_bytes),
                        format_bytes(cost.bytes_to_device_step or 0),
                        "-" if cost.step_ms is None else f"{cost.step_ms:.1f}",
                        *(f"{own[task].score.value:.0f}" if task in own else "-" for task in tasks),
                    )
                )
            )
        parts.append("")
    return "\n".join(parts) + "\n"


def put_between_marks(text: str, part: str) -> str:
    """Return `text` with `part` between the marks.

    Raises:
        ValueError: the marks are missing.
    """
    begin, end = MARKS
    if begin not in text or end not in text:
        raise ValueError(f"the marks {begin.strip()} and {end.strip()} are missing")
    return text.partition(begin)[0] + begin + part + end + text.partition(end)[2]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Ask what is not yet answered, and write table, page and document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", help="the bundled model by default")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--methods", default=",".join(method_names()))
    parser.add_argument("--lengths", default="4096,8192")
    parser.add_argument("--budgets", default="256,512,1024")
    parser.add_argument("--rows", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=ROOT / "benchmarks" / "results" / "answers")
    parser.add_argument("--document", type=Path, help="a page with the marks, docs/results.md for instance")
    options = parser.parse_args(arguments)

    text = options.document.read_text() if options.document else "".join(MARKS)
    put_between_marks(text, "")  # missing marks are found before the work
    options.folder.mkdir(parents=True, exist_ok=True)
    plan = EvaluationPlan(
        ModelSpec(options.model),
        variants(options.methods.split(","), [], [int(budget) for budget in options.budgets.split(",")], SMALL),
        options.tasks.split(","),
        lengths=[int(length) for length in options.lengths.split(",")],
        limit=options.rows,
        predictions=options.folder / "answers.jsonl",
    )
    table = evaluate(plan, Observer())
    (options.folder / "answers.json").write_text(json.dumps(json.loads(table.to_json()), indent=1) + "\n")
    (options.folder / "answers.html").write_text(page(table))
    if not table.complete:
        raise SystemExit("interrupted; the same command goes on")
    if options.document:
        options.document.write_text(put_between_marks(text, markdown(table)))
    print(markdown(table))


if __name__ == "__main__":
    main()
