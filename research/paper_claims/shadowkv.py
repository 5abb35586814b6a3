"""ShadowKV: what rank its keys need, and what its outliers are for (arXiv 2410.21465, figures 5 and 9, table 7).

Two sweeps around one setting: the rank with `--kept` outliers, and the number of outliers at full rank, so that neither
hides the other. All variants and full attention answer the same documents, each read once. The paper's 2,048 selected
tokens and 48 outlier chunks are 1.56 % and 0.293 % of 128K tokens; the same shares of 4K are 64 tokens and 1.5 chunks.
"""

import argparse
from collections import defaultdict
from typing import Any

from subject import Answer, Subject, percent, table

from kvcli.inputs.profiles import Profile, resolve_profile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what is swept."""
    parser.add_argument("--ranks", type=int, nargs="+", help="ranks; by default parts of the keys' width")
    parser.add_argument("--outliers", type=int, nargs="+", default=[0, 1, 2, 4, 8, 16, 48], help="outlier chunks")
    parser.add_argument("--kept", type=int, default=2, help="outlier chunks while the rank is swept")
    parser.add_argument("--selected", type=int, nargs="+", default=[64, 256], help="selected tokens")
    parser.add_argument("--chunk", type=int, default=8, help="tokens of a chunk")


def run(subject: Subject, args: argparse.Namespace) -> dict[str, Any]:
    """Measure and print."""
    layer = subject.model.geometry.layers[0]
    width = layer.num_kv_heads * layer.head_dim
    ranks = args.ranks or [width * eighths // 8 for eighths in (1, 2, 3, 4, 6, 8)]
    sweeps = {
        "rank": [(selected, rank, args.kept) for selected in args.selected for rank in ranks],
        "outliers": [(selected, width, outliers) for selected in args.selected for outliers in args.outliers],
    }
    profiles: dict[Any, Profile] = {"full": resolve_profile(method="full")}
    for point in [*sweeps["rank"], *sweeps["outliers"]]:
        selected, rank, outliers = point
        settings = {"budget": selected, "chunk": args.chunk, "rank": rank, "outliers": outliers}
        profiles[point] = resolve_profile(method="shadowkv", overrides=settings)

    given: dict[Any, list[Answer]] = defaultdict(list)
    by_task: dict[Any, list[float]] = defaultdict(list)
    for document, answers in subject.answers(args.tasks, args.rows, profiles):
        for point, answer in answers.items():
            given[point].append(answer)
            by_task[point, document.row.task].append(answer.score)
    scores = {point: {task: percent(by_task[point, task]) for task in args.tasks} for point in given}
    result: dict[str, Any] = {"width": width, "full": scores["full"]}
    for sweep, points in sweeps.items():
        result[sweep] = [
            {
                "selected": selected,
                "rank": rank,
                "outliers": outliers,
                "outliers %": round(100 * outliers * args.chunk / subject.length, 3),
                "key error": round(max(answer.statistics["key_error"] for answer in given[point]), 5),
                **{f"{task} %": score for task, score in scores[point].items()},
                "mean %": percent([answer.score for answer in given[point]]),
            }
            for point in points
            for selected, rank, outliers in [point]
        ]
        whole = ", ".join(f"{task} {score:.0f} %" for task, score in scores["full"].items())
        table(f"shadowkv: accuracy by {sweep} (keys are {width} wide; full attention: {whole})", result[sweep])
    return result
