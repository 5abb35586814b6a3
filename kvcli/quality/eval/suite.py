"""The cells of a list of tasks and lengths, and their examples.

A task is a name of the synthetic suite (`kvcli/quality/tasks`), `needle_grid` (a single needle at every length and
depth), `needle_turns` (four needles, asked one after the other, each turn with a score), `ppl` (the likelihood of the
right answer about four needles, fed token by token), `ppl:FILE` (the likelihood of a file's text given the text before
it), `fidelity:FILE` (the closeness of next tokens to those of full attention, token by token of such a text), or a file
of a benchmark (`formats`); `requests:FILE` asks each of several queries on a context on its own.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.options import DiskOptions, Template
from kvcli.inputs.prompts import read_document
from kvcli.inputs.variants import Variant
from kvcli.models.loading import ModelSpec
from kvcli.quality.eval.example import Cell, Example, conversation
from kvcli.quality.eval.formats import SUFFIXES, read_examples
from kvcli.quality.eval.scorers import check_installed
from kvcli.quality.tasks import TASKS, TaskRow, make_row
from kvcli.quality.tasks.needles import TURNS
from kvcli.runtime.sampling import Sampling

DEFAULT_LENGTH = 4096
MAX_TOKENS = 80
"""Longest answer to a synthetic task, unless the right one takes more than four fifths of that."""

GRID, NEEDLE_TURNS, PERPLEXITY, FIDELITY, REQUESTS = "needle_grid", "needle_turns", "ppl", "fidelity", "requests"
FED = (PERPLEXITY, FIDELITY)
"""Metrics of texts that are fed; `METRIC:FILE` is a task."""
_FED_TOKENS = 128  # of a text, after its beginning
_NAMES = [*TASKS, GRID, NEEDLE_TURNS, PERPLEXITY]


@dataclass(frozen=True)
class EvaluationPlan:
    """What to evaluate. `lengths` are tokens of a prompt; `limit` documents of every task and length.

    A `disk`, if given, takes the KV of methods that keep some in host memory. `predictions` is a file that grows during
    the run, and from which a run that was cut off continues. `kvpress` is the folder of a run in kvpress's form.
    """

    model: ModelSpec
    variants: Sequence[Variant]
    tasks: Sequence[str]
    lengths: Sequence[int] = ()
    depths: int = 5
    limit: int = 20
    max_tokens: int | None = None
    max_length: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    template: Template = field(default_factory=Template)
    predictions: Path | None = None
    disk: DiskOptions | None = None
    kvpress: Path | None = None


@dataclass(frozen=True)
class Suite:
    """The examples of a plan, for a tokenizer.

    `frame` tokens of a prompt are the chat template's. A prompt and its answer have at most `most` tokens together, if
    given: longer prompts are made shorter, since cutting them would cut the facts they ask for.
    """

    plan: EvaluationPlan
    tokenizer: PreTrainedTokenizerBase
    frame: int = 0
    most: int | None = None
    notice: Callable[[str], None] = lambda _: None

    def cells(self) -> list[Cell]:
        """Return the cells of a run, in order.

        Raises:
            KvcliError: a task is unknown or listed twice, a file cannot be read, a length is too small for a task
                (usage).
        """
        found = [cell for task in self.plan.tasks for cell in self._cells_of(task)]
        for task in {cell.task for cell in found if cell.length is not None}:
            # A length that is too small for a task is refused before the model is loaded.
            min((cell for cell in found if cell.task == task), key=lambda cell: cell.length or 0).make(0)
        places = Counter((cell.task, cell.length, cell.depth) for cell in found)
        for (task, _, _), count in places.items():
            if count > 1:
                raise _usage(f"the task {task!r} is there twice", "name each task and length once, rename a file")
        return found

    def _cells_of(self, task: str) -> Iterator[Cell]:
        lengths, limit = self.plan.lengths or [DEFAULT_LENGTH], self.plan.limit
        if task in TASKS:
            for length in lengths:
                yield Cell(task, length, None, "recall", limit, partial(self._asked, task, length, None))
        elif task == GRID:
            depths = self.plan.depths
            for depth, length in product((row / max(depths - 1, 1) for row in range(depths)), lengths):
                yield Cell(task, length, depth, "recall", limit, partial(self._asked, "niah_single", length, depth))
        elif task == NEEDLE_TURNS:
            for length, turn in product(lengths, range(TURNS)):
                make = partial(self._turn, length, turn)
                yield Cell(f"{task} turn {turn + 1}", length, None, "recall", limit, make, f"{task} {length}")
        elif task == PERPLEXITY:
            for length in lengths:
                yield Cell(task, length, None, PERPLEXITY, limit, partial(self._fed_answer, length))
        elif task.partition(":")[0] in FED and ":" in task:
            yield from self._text_cells(task, lengths)
        elif task.startswith(f"{REQUESTS}:"):
            yield from _file_cells(Path(task.removeprefix(f"{REQUESTS}:")), limit, self.notice, requests=True)
        elif "/" in task or task.lower().endswith(SUFFIXES):
            yield from _file_cells(Path(task), limit, self.notice)
        else:
            close = get_close_matches(task, _NAMES, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(_NAMES)}, or name a file"
            raise _usage(f"unknown task {task!r}", hint)

    def _beside(self, length: int, answer: int) -> int:
        """Return the tokens of a prompt of `length` that leaves room for an answer of `answer` tokens."""
        return length if self.most is None else min(length, self.most - answer)

    def _row(self, task: str, length: int, depth: float | None, index: int, answer: int) -> TaskRow:
        """Make a row whose prompt leaves room for `answer` tokens."""
        return make_row(
            task,
            length=self._beside(length, answer),
            frame=self.frame,
            seed=self.plan.sampling.seed,
            index=index,
            depth=depth,
            count_tokens=partial(count_tokens, self.tokenizer),
        )

    def _asked(self, task: str, length: int, depth: float | None, index: int) -> Example:
        row, room = self._row_and_room(task, length, depth, index, self.plan.max_tokens or MAX_TOKENS)
        first, turns = conversation(row.turns, row.question)
        return Example(row.input, first, row.outputs, "recall", room, turns=turns)

    def _turn(self, length: int, turn: int, index: int) -> Example:
        """Make one turn of several: the row of all of them, up to this one's question."""
        row, room = self._row_and_room("turns", length, None, index, self.plan.max_tokens or MAX_TOKENS)
        questions = [*(question for question, _ in row.turns), row.question]
        first, turns = conversation(row.turns[:turn], questions[turn])
        references = (*row.turn_outputs, row.outputs)[turn]
        return Example(row.input, first, references, "recall", room, turns=turns)

    def _row_and_room(
        self, task: str, length: int, depth: float | None, index: int, answer: int
    ) -> tuple[TaskRow, int]:
        """Make a row whose prompt leaves room for its turns and for `answer` tokens, or for its own answer."""
        between = 0  # the lengths of answer and turns are known once the row is made
        while True:
            row = self._row(task, length, depth, index, answer + between)
            needed = count_tokens(self.tokenizer, f" {row.answer}")
            said = sum(count_tokens(self.tokenizer, text) + self.frame for turn in row.turns for text in turn)
            wanted = answer if self.plan.max_tokens else max(answer, needed + needed // 4)
            if (wanted, said) == (answer, between) or self.most is None:
                return row, wanted
            answer, between = wanted, max(said, between)

    def _fed_answer(self, length: int, index: int) -> Example:
        answer = 0
        while True:  # the length of the right answer is known once the row is made
            row = self._row("niah_multiquery", length, None, index, answer)
            if (needed := count_tokens(self.tokenizer, f" {row.answer}")) <= answer or self.most is None:
                return _fed(row.input, f" {row.answer}", row.question, False)
            answer = needed

    def _text_cells(self, task: str, lengths: Sequence[int]) -> Iterator[Cell]:
        """Cut a text into stretches: the first tokens of each are read and the ones after them are fed."""
        metric, _, path = task.partition(":")
        text = read_document(path)
        if not self.tokenizer.is_fast:
            raise _usage(f"{task} needs a tokenizer that gives the positions of its tokens", "this model's does not")
        encoded: Any = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        starts = [start for start, _ in encoded["offset_mapping"]] + [len(text)]
        fed = self.plan.max_tokens or _FED_TOKENS
        if metric == FIDELITY and fed < 2:
            raise _usage(f"{task} compares what is said after a token that was fed", "give --max-tokens 2 or more")
        for length in lengths:
            read = self._beside(length, fed)
            size = min((len(starts) - 1) // (read + fed), self.plan.limit)
            if not size:
                what = f"{task} has {len(starts) - 1:,} tokens, fewer than {read:,} to read and {fed:,} to feed"
                raise _usage(what, "use a smaller --length")

            def make(index: int, read: int = read) -> Example:
                begin = index * (read + fed)
                first, middle, last = (starts[at] for at in (begin, begin + read, begin + read + fed))
                return _fed(text[first:middle], text[middle:last], "", True, metric)

            yield Cell(task, length, None, metric, size, make)


def count_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    """Return the number of tokens of a text, without special ones."""
    return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def digests(tasks: Sequence[str]) -> dict[str, str]:
    """Hash each file among the tasks into twelve hexadecimal digits; equal digits mean equal examples."""
    files = {task: Path(bare(task)) for task in tasks if task not in _NAMES}
    return {task: hashlib.sha256(path.read_bytes()).hexdigest()[:12] for task, path in files.items()}


def bare(task: str) -> str:
    """Return a task's file or name without its prefix: "ppl:FILE" is FILE."""
    asked, _, path = task.partition(":")
    return path if path and asked in (*FED, REQUESTS) else task


def _fed(prompt: str, continuation: str, question: str, raw: bool, metric: str = PERPLEXITY) -> Example:
    return Example(prompt, question, (), metric, 0, raw=raw, continuation=continuation)


def _file_cells(path: Path, limit: int, notice: Callable[[str], None], requests: bool = False) -> Iterator[Cell]:
    found = read_examples(path, requests, notice)
    several = any(example.turns or example.shared for examples in found.values() for example in examples)
    for task, examples in found.items():
        metrics = {example.metric for example in examples}
        for metric in metrics:
            check_installed(metric)
        size = min(len(examples), limit)
        metric = metrics.pop() if len(metrics) == 1 else "mixed"
        yield Cell(task, None, None, metric, size, examples.__getitem__, str(path) if several else "")


def _usage(what: str, hint: str) -> KvcliError:
    return KvcliError(what, hint, ExitCode.USAGE)
