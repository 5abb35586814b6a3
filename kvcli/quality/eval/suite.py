"""Which cells a list of tasks and lengths comes to, and their examples.

A task is a name of the synthetic suite (`kvcli/quality/tasks`), `needle_grid` (a single needle at every length and
depth), `ppl` (how likely the right answer about four needles is, fed token by token), `ppl:FILE` (how likely the text
of a file is after what stands before it), or a JSONL file of a benchmark (`formats`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.prompts import read_document
from kvcli.quality.eval.example import Cell, Example
from kvcli.quality.eval.formats import read_examples
from kvcli.quality.eval.scorers import check_installed
from kvcli.quality.tasks import SEPARATOR, TASKS, TaskRow, make_row

DEFAULT_LENGTH = 4096
MAX_TOKENS = 80
"""Longest answer to a synthetic task: the longest right one has about 70 tokens in the demo model's tokenizer."""

GRID, PERPLEXITY = "needle_grid", "ppl"
_FED_TOKENS = 128  # of a text, after its beginning
_NAMES = [*TASKS, GRID, PERPLEXITY]


@dataclass(frozen=True)
class SuiteRequest:
    """The tasks to evaluate, and their sizes.

    `lengths` are tokens of a prompt, `frame` of which the chat template takes. A prompt and its answer have `most`
    tokens together, where that is said: longer prompts are made shorter, since cutting them would cut what they ask
    for. `limit` is the number of documents of each cell, `seed` chooses them, `depths` is the number of rows of the
    needle grid. Where `max_tokens` is None the task says how long an answer may be.
    """

    tasks: Sequence[str]
    lengths: Sequence[int]
    depths: int
    limit: int
    seed: int
    frame: int
    most: int | None
    max_tokens: int | None
    tokenizer: PreTrainedTokenizerBase

    def beside(self, length: int, answer: int) -> int:
        """Return the tokens of a prompt of `length` that leaves room for an answer of so many."""
        return length if self.most is None else min(length, self.most - answer)

    def count_tokens(self, text: str) -> int:
        """Return the number of tokens of a text, special ones left out."""
        return len(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def cells(request: SuiteRequest) -> list[Cell]:
    """Return the cells of a run, in their order.

    Raises:
        KvcliError: a task is unknown or there twice, a file cannot be read, a length is too small for a task (usage).
    """
    found = [cell for task in request.tasks for cell in _cells_of(request, task)]
    for task in {cell.task for cell in found if cell.length is not None}:
        # A length that is too small for a task is refused before the model is loaded.
        min((cell for cell in found if cell.task == task), key=lambda cell: cell.length or 0).make(0)
    places = [(cell.task, cell.length, cell.depth) for cell in found]
    for place in places:
        if places.count(place) > 1:
            raise _usage(f"the task {place[0]!r} is there twice", "name each task and length once, rename a file")
    return found


def digests(tasks: Sequence[str]) -> dict[str, str]:
    """Return twelve hexadecimal digits over each file among the tasks: same digits, same examples."""
    files = {task: Path(task.removeprefix(f"{PERPLEXITY}:")) for task in tasks if task not in _NAMES}
    return {task: hashlib.sha256(path.read_bytes()).hexdigest()[:12] for task, path in files.items()}


def _cells_of(request: SuiteRequest, task: str) -> Iterator[Cell]:
    lengths = request.lengths or [DEFAULT_LENGTH]
    if task in TASKS:
        for length in lengths:
            yield Cell(task, length, None, "recall", request.limit, partial(_asked, request, task, length, None))
    elif task == GRID:
        for depth in (row / max(request.depths - 1, 1) for row in range(request.depths)):
            for length in lengths:
                make = partial(_asked, request, "niah_single", length, depth)
                yield Cell(task, length, depth, "recall", request.limit, make)
    elif task == PERPLEXITY:
        for length in lengths:
            yield Cell(task, length, None, PERPLEXITY, request.limit, partial(_fed_answer, request, length))
    elif task.startswith(f"{PERPLEXITY}:"):
        yield from _text_cells(request, task, lengths)
    elif "/" in task or task.endswith((".jsonl", ".json")):
        yield from _file_cells(request, Path(task))
    else:
        close = get_close_matches(task, _NAMES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(_NAMES)}, or name a .jsonl file"
        raise _usage(f"unknown task {task!r}", hint)


def _row(request: SuiteRequest, task: str, length: int, depth: float | None, index: int, answer: int) -> TaskRow:
    """Make a row whose prompt leaves room for `answer` tokens."""
    return make_row(
        task,
        length=request.beside(length, answer),
        frame=request.frame,
        seed=request.seed,
        index=index,
        depth=depth,
        count_tokens=request.count_tokens,
    )


def _asked(request: SuiteRequest, task: str, length: int, depth: float | None, index: int) -> Example:
    row = _row(request, task, length, depth, index, request.max_tokens or MAX_TOKENS)
    return Example(row.document + SEPARATOR + row.question, row.question, row.outputs, "recall", MAX_TOKENS)


def _fed_answer(request: SuiteRequest, length: int, index: int) -> Example:
    answer = 0
    while True:  # how long the right answer is, is known when the row is made
        row = _row(request, "niah_multiquery", length, None, index, answer)
        if (needed := request.count_tokens(f" {row.answer}")) <= answer or request.most is None:
            return _fed(row.document + SEPARATOR + row.question, f" {row.answer}", row.question, False)
        answer = needed


def _text_cells(request: SuiteRequest, task: str, lengths: Sequence[int]) -> Iterator[Cell]:
    """Cut a text into stretches: of each the first tokens are read and the ones after them are fed."""
    text = read_document(task.removeprefix(f"{PERPLEXITY}:"))
    if not request.tokenizer.is_fast:
        raise _usage(f"{task} needs a tokenizer that tells where its tokens stand", "this model's does not")
    encoded: Any = request.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    starts = [start for start, _ in encoded["offset_mapping"]] + [len(text)]
    fed = request.max_tokens or _FED_TOKENS
    for length in lengths:
        read = request.beside(length, fed)
        size = min((len(starts) - 1) // (read + fed), request.limit)
        if not size:
            what = f"{task} has {len(starts) - 1:,} tokens, fewer than {read:,} to read and {fed:,} to feed"
            raise _usage(what, "ask for a smaller --length")

        def make(index: int, read: int = read) -> Example:
            begin = index * (read + fed)
            first, middle, last = (starts[at] for at in (begin, begin + read, begin + read + fed))
            return _fed(text[first:middle], text[middle:last], "", True)

        yield Cell(task, length, None, PERPLEXITY, size, make)


def _fed(prompt: str, continuation: str, question: str, raw: bool) -> Example:
    return Example(prompt, question, (), PERPLEXITY, 0, raw=raw, continuation=continuation)


def _file_cells(request: SuiteRequest, path: Path) -> Iterator[Cell]:
    for task, examples in read_examples(path).items():
        metrics = {example.metric for example in examples}
        for metric in metrics:
            check_installed(metric)
        size = min(len(examples), request.limit)
        yield Cell(task, None, None, metrics.pop() if len(metrics) == 1 else "mixed", size, examples.__getitem__)


def _usage(what: str, hint: str) -> KvcliError:
    return KvcliError(what, hint, ExitCode.USAGE)
