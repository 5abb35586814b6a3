"""Which cells a list of tasks and lengths comes to, and their examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial

from kvcli.errors import ExitCode, KvcliError
from kvcli.eval.example import Cell, Example
from kvcli.tasks import SEPARATOR, TASKS, CountTokens, make_row

DEFAULT_LENGTH = 4096
MAX_TOKENS = 80
"""Longest answer to a synthetic task: the longest right one has about 70 tokens in the demo model's tokenizer."""


@dataclass(frozen=True)
class Request:
    """What to ask. `lengths` are tokens of a prompt, `frame` those of them that the chat template adds.

    `limit` is documents of each cell, `seed` chooses them.
    """

    tasks: Sequence[str]
    lengths: Sequence[int]
    limit: int
    seed: int
    frame: int
    max_tokens: int | None
    count_tokens: CountTokens


def cells(request: Request) -> list[Cell]:
    """The cells of a run, in the order in which they are worked off.

    Raises:
        KvcliError: usage: an unknown task, a task named twice.
    """
    found = []
    for task in request.tasks:
        if task not in TASKS:
            close = get_close_matches(task, TASKS, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(TASKS)}"
            raise KvcliError(f"unknown task {task!r}", hint, ExitCode.USAGE)
        found += [
            Cell(task, length, None, "recall", request.limit, partial(_example, request, task, length))
            for length in request.lengths or [DEFAULT_LENGTH]
        ]
    return found


def _example(request: Request, task: str, length: int, index: int) -> Example:
    row = make_row(
        task, length=length - request.frame, seed=request.seed, index=index, count_tokens=request.count_tokens
    )
    return Example(
        prompt=row.document + SEPARATOR + row.question,
        question=row.question,
        references=row.outputs,
        metric="recall",
        max_tokens=request.max_tokens or MAX_TOKENS,
    )
