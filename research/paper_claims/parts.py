"""Which part of a method loses facts on the demo model: that part alone is changed, on the same documents.

ArkVale, InfiniGen and ShadowKV stand below Quest here at small budgets, where their papers have them beside or above
it. Each is asked two facts of a document, in two turns (see `second-turn`), as the tables have it and with one setting
changed; the last two columns are paired over the documents and turns.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from second_turn import TASK, answers, capacity, other_fact, shared_settings
from subject import Scores, Subject, difference, table

from kvcli.inputs.variants import Variant, variants

PARTS: dict[str, list[dict[str, str]]] = {
    "full": [],
    "quest": [],
    "arkvale": [{"top_part": "1"}],
    "infinigen": [{"alpha": "1000"}, {"columns": "1"}, {"alpha": "1000", "columns": "1"}, {"dense_layers": "2"}],
    "shadowkv": [{"rank": "128"}, {"outliers": "32"}, {"chunk": "32"}, {"dense_layers": "2"}],
}
"""Method -> what is changed, each for itself."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say how much is attended to."""
    parser.add_argument("--parts-budgets", type=int, nargs="+", default=[256, 512], help="tokens")


def run(subject: Subject, args: argparse.Namespace) -> dict[str, Any]:
    """Measure and print."""
    subject.engine.rope.cover(capacity(subject))
    compared = list(_compared(args.parts_budgets))
    scores: dict[str, dict[tuple[int, int], float]] = defaultdict(dict)
    for document in subject.documents([TASK], args.rows):
        for label, turns in answers(subject, document, compared, *other_fact(document)):
            for turn, score in enumerate(turns):
                scores[label][document.row.index, turn] = score
    rows = []
    for each in compared:
        method, _, changed = each.name.partition(" ")
        published = scores[replace(each, name=method).label]
        found = Scores.of(scores[each.label])
        gain, error = difference([found], [Scores.of(published)])
        first, second = (found.among({key for key in published if key[1] == turn}) for turn in (0, 1))
        rows.append(
            {
                "method": method,
                "budget": each.budget,
                "changed": changed or "-",
                "first turn %": first.mean,
                "second turn %": second.mean,
                "gain": gain,
                "error": error,
            }
        )
    table(f"parts: facts found with one part changed ({args.rows} documents)", rows)
    return {"rows": rows}


def _compared(budgets: Sequence[int]) -> Iterator[Variant]:
    for method, changes in PARTS.items():
        for changed in ({}, *changes):
            name = " ".join([method, *(f"{key}={value}" for key, value in changed.items())])
            for each in variants(
                [method], [], budgets if method != "full" else [], shared_settings([method]) | changed
            ):
                yield replace(each, name=name)
