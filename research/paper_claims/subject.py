"""The subject of a study: a model, held-out documents, methods that read and answer them, and the answers' scores."""

import argparse
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvcli.inputs.encoding import encode, encode_question
from kvcli.inputs.options import Template
from kvcli.inputs.profiles import Profile
from kvcli.inputs.prompts import Prompt
from kvcli.methods.contract import AnyMethod, SequenceContext
from kvcli.models.loading import Model, ModelSpec, load_model
from kvcli.quality.tasks import TASKS, TaskRow, make_row, recall
from kvcli.runtime.engine import Engine, engine
from kvcli.runtime.prefill import PrefillConsumer, PrefillFanout
from kvcli.runtime.sampling import Sampling
from kvcli.runtime.sequence import RunningSequence

NEEDLES = ["niah_single", "niah_multikey", "niah_multiquery"]
MAX_TOKENS = 80
FRAME = 8  # tokens that the chat template may add


@dataclass(frozen=True)
class Document:
    """A held-out row and the tokens of its prompt."""

    row: TaskRow
    ids: list[int]
    question: list[int]


@dataclass(frozen=True)
class Answer:
    """RULER's recall of one answer, 0..1, and what the method says of itself."""

    score: float
    statistics: dict[str, Any]


@dataclass
class Subject:
    """A model made ready for prompts of at most `length` tokens."""

    engine: Engine
    length: int
    seed: int

    @property
    def model(self) -> Model:
        """What is loaded."""
        return self.engine.model

    def documents(self, tasks: Sequence[str], rows: int) -> Iterator[Document]:
        """Make `rows` documents of the evaluation split for each task."""
        for task in tasks:
            for index in range(rows):
                length, count = self.length - FRAME, self.count_tokens
                row = make_row(task, length=length, seed=self.seed, index=index, count_tokens=count)
                prompt, tokenizer = Prompt("row", row.document, row.question), self.model.tokenizer
                yield Document(row, encode(prompt, Template(), tokenizer), encode_question(prompt, tokenizer))

    def count_tokens(self, text: str) -> int:
        """Count the tokens of a piece of text."""
        return len(self.model.tokenizer.encode(text, add_special_tokens=False))

    def tokens_behind(self, document: Document) -> int:
        """Count the prompt's tokens from the last value that is asked for to the end."""
        row = document.row
        last = max(row.document.find(value) for value in row.outputs)
        return len(document.ids) - self.count_tokens(row.document[:last])

    def context(self, document: Document) -> SequenceContext:
        """Give a method what it needs for a document and its answer."""
        prompt = len(document.ids)
        return self.engine.context(prompt, self.length + MAX_TOKENS - prompt, document.question)

    def methods(self, document: Document, profiles: dict[str, Profile]) -> dict[str, AnyMethod]:
        """Make one method object a profile."""
        return {name: self.engine.method(profile, self.context(document)) for name, profile in profiles.items()}

    def read(self, document: Document, methods: Sequence[PrefillConsumer]) -> Tensor:
        """Read a document once, by exact prefill, into all methods; returns the logits [vocab] of the first token."""
        return self.engine.prefill_into(document.ids, PrefillFanout(methods), capacity=self.length + MAX_TOKENS)

    def answer(self, document: Document, method: AnyMethod, logits: Tensor) -> float:
        """Let a method that has read the document answer greedily; returns RULER's recall, 0..1."""
        return recall(self.first_answer(document, method, logits).detokenizer.text, document.row.outputs)

    def first_answer(self, document: Document, method: AnyMethod, logits: Tensor) -> RunningSequence:
        """Let a method that has read the document answer greedily, as long as there is room."""
        room = method.context.capacity - len(document.ids)
        sequence = self.engine.sequence(method, Sampling(max_tokens=min(MAX_TOKENS, room)))
        sequence.accept(logits)
        return self.run(sequence)

    def run(self, sequence: RunningSequence) -> RunningSequence:
        """Decode a sequence to its end."""
        for _ in self.engine.decode([sequence]):
            pass
        return sequence

    def answers(
        self, tasks: Sequence[str], rows: int, profiles: dict[str, Profile]
    ) -> Iterator[tuple[Document, dict[str, Answer]]]:
        """Let every profile answer every document, read once."""
        for document in self.documents(tasks, rows):
            methods = self.methods(document, profiles)
            logits = self.read(document, list(methods.values()))
            scores = {name: self.answer(document, method, logits) for name, method in methods.items()}
            yield document, {name: Answer(score, methods[name].statistics()) for name, score in scores.items()}


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


def _mean_of(side: Sequence[Scores], index: int) -> float:
    return statistics.mean((each.documents or {})[index] for each in side)


def _per_cent(values: Sequence[float]) -> tuple[float, float]:
    if not values:
        return math.nan, math.nan
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return 100 * statistics.mean(values), 100 * error


@contextmanager
def opened(args: argparse.Namespace) -> Iterator[Subject]:
    """Load the model of `add_arguments` and make it ready."""
    with engine(load_model(ModelSpec(args.model)), [args.length + MAX_TOKENS]) as ready:
        yield Subject(ready, args.length, args.seed)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what to study, and on how many documents."""
    parser.add_argument("-m", "--model", help="checkpoint directory; the bundled demo model without it")
    parser.add_argument(
        "--tasks", nargs="+", default=["niah_single", "niah_multikey", "niah_multiquery"], choices=TASKS
    )
    parser.add_argument("--length", type=int, default=4096, help="tokens of a prompt")
    parser.add_argument("--rows", type=int, default=25, help="held-out documents of each task")
    parser.add_argument("--seed", type=int, default=0)


def percent(shares: Sequence[float]) -> float:
    """Mean of shares 0..1 in per cent."""
    return round(100 * statistics.mean(shares), 2)


def table(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print rows of equal keys below a title, columns aligned."""
    cells = [list(rows[0])] + [[_cell(value) for value in row.values()] for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    print(f"\n{title}")
    for line in cells:
        print("  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)), flush=True)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"
