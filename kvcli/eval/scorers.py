"""Scorers by name: how right a text is, 0 to 1."""

from __future__ import annotations

from collections.abc import Callable

from kvcli.eval.example import Example
from kvcli.tasks import recall

Scorer = Callable[[str, Example], float]


def _recall(text: str, example: Example) -> float:
    return recall(text, example.references)


SCORERS: dict[str, Scorer] = {"recall": _recall}


def score(text: str, example: Example) -> float:
    """Score an answer, 0 to 1, as the example's benchmark does."""
    return SCORERS[example.metric](text, example)
