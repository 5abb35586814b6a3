"""ReFreeKV: what its threshold keeps and what that costs (arXiv 2502.16886, figure 3 and table 2).

The realised budget is the mean over layers of kept / prompt, with the leading layers that are kept whole as 1. The
paper keeps 2 of 32 whole; in a model of 4 layers 2 are half of it, so fewer are tried beside. Tokens are ranked from
the newest on, so a value is kept only together with all that follows it. Documents in which no pruned layer keeps a
value that is asked for stand apart (`lost`): whoever answers these got the value through the layers kept whole.
"""

import argparse
from collections import defaultdict
from typing import Any

from subject import Answer, Subject, percent, table

from kvcli.inputs.profiles import Profile, resolve_profile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what is swept."""
    parser.add_argument("--thresholds", type=float, nargs="+", default=[0.001, 0.01, 0.1])
    parser.add_argument("--dense-layers", type=int, nargs="+", default=[2, 1, 0], help="leading layers kept whole")


def run(subject: Subject, args: argparse.Namespace) -> dict[str, Any]:
    """Measure and print."""
    points = [(dense, threshold) for dense in args.dense_layers for threshold in args.thresholds]
    profiles: dict[Any, Profile] = {"full": resolve_profile(method="full")}
    for dense, threshold in points:
        settings = {"threshold": threshold, "dense_layers": dense}
        profiles[dense, threshold] = resolve_profile(method="refreekv", overrides=settings)
    given: dict[Any, list[Answer]] = defaultdict(list)
    pruned, lost = defaultdict(list), defaultdict(list)
    for document, answers in subject.answers(args.tasks, args.rows, profiles):
        behind = subject.tokens_behind(document)
        for point, answer in answers.items():
            key = (document.row.task, point)
            given[key].append(answer)
            if point != "full":
                tokens = answer.statistics["kept_tokens"][point[0] :]
                pruned[key].append([kept / len(document.ids) for kept in tokens])
                if max(tokens) < behind:
                    lost[key].append(answer.score)
    rows: list[dict[str, Any]] = []
    for task in args.tasks:
        full = percent([answer.score for answer in given[task, "full"]])
        for point in points:
            key = (task, point)
            by_layer = [percent(layer) for layer in zip(*pruned[key], strict=True)]
            rows.append(
                {
                    "task": task,
                    "dense layers": point[0],
                    "threshold": point[1],
                    "budget %": percent([answer.statistics["realised_budget"] for answer in given[key]]),
                    "kept by pruned layers %": " ".join(f"{kept:.0f}" for kept in by_layer),
                    "accuracy %": percent([answer.score for answer in given[key]]),
                    "full %": full,
                    "lost %": round(100 * len(lost[key]) / len(given[key]), 1),
                    "accuracy of lost %": percent(lost[key]) if lost[key] else None,
                }
            )
    table("refreekv: realised budget and accuracy by threshold", rows)
    notes = []
    for dense in args.dense_layers:
        scores = [score for task in args.tasks for point in points if point[0] == dense for score in lost[task, point]]
        if scores:
            notes.append(f"{percent(scores)} % with {dense} dense layers ({len(scores)} answers)")
    note = f"Accuracy where no pruned layer kept a value asked for: {', '.join(notes)}" if notes else None
    print(f"  note: {note}")
    return {"note": note, "rows": rows}
