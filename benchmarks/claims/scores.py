"""Scores of methods on the same documents, and how far they are apart."""

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Table = dict[str, dict[str, "Scores"]]
"""Task -> variant -> scores."""


@dataclass(frozen=True)
class Scores:
    """Mean and standard error in per cent; the scores 0..1 of the documents by their numbers, where they are known."""

    mean: float
    error: float
    documents: Mapping[int, float] | None = None

    @classmethod
    def of(cls, documents: Mapping[int, float]) -> "Scores":
        """Of one score a document."""
        return cls(*_per_cent(list(documents.values())), documents)

    def among(self, chosen: set[int]) -> "Scores":
        """Those of some documents."""
        return Scores.of({index: score for index, score in (self.documents or {}).items() if index in chosen})


def difference(left: Sequence[Scores], right: Sequence[Scores]) -> tuple[float, float]:
    """Mean of some methods less that of others, and its standard error, in percentage points.

    Paired over the documents that all have answered; where only means are known, as if they were independent.
    """
    both = [each.documents for each in (*left, *right)]
    if None in both:
        error = math.hypot(*(each.error / len(side) for side in (left, right) for each in side))
        return statistics.mean(each.mean for each in left) - statistics.mean(each.mean for each in right), error
    shared = sorted(set.intersection(*(set(documents or ()) for documents in both)))
    gaps = [_mean_of(left, index) - _mean_of(right, index) for index in shared]
    return _per_cent(gaps)


def read_scores(path: Path) -> Table:
    """Read the scores of a `kvcli eval` run: its --predictions (one for each document) or its --json (means alone)."""
    first, *lines = path.read_text().splitlines()
    head = json.loads(first)
    return _of_results(head["results"]) if "results" in head else _of_predictions(map(json.loads, lines))


def _of_results(results: Sequence[dict[str, Any]]) -> Table:
    table: Table = defaultdict(dict)
    for result in results:
        if result["metric"] != "ppl":
            score = result["score"]
            table[_task(result)][result["variant"]] = Scores(score["value"], score["stderr"] or 0.0)
    return table


def _of_predictions(predictions: Any) -> Table:
    samples: dict[tuple[str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for each in predictions:
        if each["score"] is not None:
            samples[_task(each), each["variant"]][each["index"]].append(each["score"])
    table: Table = defaultdict(dict)
    for (task, variant), found in samples.items():
        table[task][variant] = Scores.of({index: statistics.mean(scores) for index, scores in found.items()})
    return table


def _task(entry: Mapping[str, Any]) -> str:
    parts = [entry["task"], entry["length"], entry["depth"]]
    return " ".join(str(part) for part in parts if part is not None)


def _mean_of(side: Sequence[Scores], index: int) -> float:
    return statistics.mean((each.documents or {})[index] for each in side)


def _per_cent(values: Sequence[float]) -> tuple[float, float]:
    if not values:
        return math.nan, math.nan
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return 100 * statistics.mean(values), 100 * error
