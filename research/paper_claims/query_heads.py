"""What pooling over the query heads of a KV head costs, at an equal budget of each query head.

Quest and FIER as published let each query head choose; kvcli pools, so that a KV head is read once. Both answer the
same documents, and are fed the right answer beside full attention: `output off` is the relative error of a layer's
output (`kvcli.quality.fidelity`), `tokens read` what a KV head is read for, with pooling none the union.
"""

import argparse
from collections import defaultdict
from typing import Any

from subject import Subject, percent, table

from kvcli.inputs.variants import variants
from kvcli.kernels.group_pooling import Pooling
from kvcli.quality.fidelity import Fidelity, Passage, measure

POOLED: Pooling = "max_s"  # the default of both


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what is compared."""
    parser.add_argument("--choosing", nargs="+", default=["quest", "fier"], help="methods that can choose by head")
    parser.add_argument("--head-budgets", type=int, nargs="+", default=[128, 256], help="tokens of a query head")


def run(subject: Subject, args: argparse.Namespace) -> dict[str, Any]:
    """Measure and print."""
    profiles = {
        (each.name, each.budget, pooling): each.profile
        for pooling in (POOLED, "none")
        for each in variants(args.choosing, [], args.head_budgets, {"pooling": pooling})
    }
    scores: dict[Any, list[float]] = defaultdict(list)
    found: dict[Any, Fidelity] = defaultdict(Fidelity)
    names = {" ".join(map(str, key)): key for key in profiles}
    for document, answers in subject.answers(args.tasks, args.rows, {name: profiles[names[name]] for name in names}):
        for name, answer in answers.items():
            scores[names[name]].append(answer.score)
        right = subject.model.tokenizer.encode(" " + document.row.answer, add_special_tokens=False)
        passage = Passage("row", document.ids, right, document.question)
        subject.engine.rope.cover(passage.capacity)
        measured, _ = measure(subject.engine, passage, list(profiles.values()))
        for key, each in zip(profiles, measured, strict=True):
            found[key].add(each.fidelity)
    rows = []
    for name, budget, _ in [key for key in profiles if key[2] == "none"]:
        row: dict[str, Any] = {"method": name, "budget": budget}
        for pooling in (POOLED, "none"):
            key = name, budget, pooling
            attention = found[key].attention()
            error, read = attention["error"] or 0.0, attention["attended"] or 0.0
            row |= {
                f"answers %, {pooling}": percent(scores[key]),
                f"output off %, {pooling}": round(100 * error, 3),
                f"tokens read, {pooling}": round(read),
            }
        row["error, pooled / alone"] = round(row[f"output off %, {POOLED}"] / row["output off %, none"], 2)
        rows.append(row)
    table(f"query-heads: pooled over the KV head, or each query head alone ({args.rows} documents of a task)", rows)
    return {"rows": rows}
