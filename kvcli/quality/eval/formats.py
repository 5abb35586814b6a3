"""Local files of benchmarks: rows (`row_files`) whose fields say which benchmark it is.

| fields | benchmark |
|---|---|
| `input`, `outputs` | RULER, also the rows of `python -m kvcli.quality.tasks` |
| `context`, `input`, `answers`, `dataset` | LongBench v1 |
| `context`, `question`, `choice_A` to `choice_D`, `answer` | LongBench v2 |
| `context`, `input`, `answer`, `options` | InfiniteBench; the file's name says which of its tasks |
| `context`, `multi_turns` | SCBench (`scbench`); the file's name says which of its tasks |
| `problem`, `answer`, `unique_id` or `subject` | MATH500 (`reasoning`) |
| `problem`, `Problem` or `question`, with `answer` or `Answer` | AIME (`reasoning`) |
| `Question`, `Correct Answer`, `Incorrect Answer 1` to `3` | GPQA (`reasoning`) |
| `context`, `question`, `answer` | any other; `metric` may name a scorer, else it is the F1 of words |

lm-evaluation-harness has tasks of the same names, but it reads them from the hub alone, asks InfiniteBench in its
prompts for chat models and LongBench v2 by the likelihood of four letters. Here the files are local, the prompts are
the benchmarks' own for open models, and every answer is generated, which is what a KV-cache method takes part in.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from reprlib import repr as shortened
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError
from typing_extensions import override

from kvcli.errors import first_problem, usage_error
from kvcli.quality.eval.example import Example, conversation
from kvcli.quality.eval.reasoning import AimeRow, GpqaRow, MathRow
from kvcli.quality.eval.row import (
    Answers,
    BenchmarkRow,
    Options,
    Text,
    example_of,
    found,
    four_options,
    named,
    table_entry,
)
from kvcli.quality.eval.row_files import read_rows
from kvcli.quality.eval.scbench import ScBenchRow
from kvcli.quality.eval.scorers import SCORERS, why_unscorable

_MAX_TOKENS = 128

# Longest answers of RULER's tasks: arXiv 2404.06654, tokens_to_generate in its repository; 128 for the needles.
_RULER_MAX_TOKENS = {"vt": 30, "cwe": 120, "fwe": 50, "qa": 32}
_GENERIC = "{context}\n\n{question}"
_SHOWN_FIELDS = 12  # of a row that fits no benchmark


Turn = Annotated[list[str], Field(min_length=2, max_length=2)]


class RulerRow(BenchmarkRow):
    """RULER: arXiv 2404.06654."""

    input: Text
    outputs: Answers
    task: str | None = None
    question: str | None = None
    turns: list[Turn] | None = None
    answer_prefix: str | None = None

    @override
    def example(self, path: Path) -> tuple[str, Example]:
        task = self.task or named(path)
        kind = task.partition("_")[0]
        first, turns = conversation([(asked, told) for asked, told in self.turns or ()], self.question or "")
        return task, Example(
            prompt=self.input,
            question=first,
            turns=turns,
            references=self.outputs,
            metric="contains" if kind == "qa" else "recall",
            max_tokens=_RULER_MAX_TOKENS.get(kind, _MAX_TOKENS),
            answer_prefix=self.answer_prefix or "",
        )


class LongBenchRow(BenchmarkRow):
    """LongBench v1: arXiv 2308.14508."""

    context: Text
    input: str
    answers: Answers
    dataset: Text
    all_classes: list[str] | None = None

    @override
    def example(self, path: Path) -> tuple[str, Example]:
        entry = table_entry("longbench", self.dataset.removesuffix("_e"))
        values = {"context": self.context, "input": self.input}
        return self.dataset, example_of(entry, values, self.answers, tuple(self.all_classes or ()))


class LongBenchV2Row(BenchmarkRow):
    """LongBench v2: arXiv 2412.15204."""

    context: Text
    question: Text
    choice_A: Text  # noqa: N815
    choice_B: Text  # noqa: N815
    choice_C: Text  # noqa: N815
    choice_D: Text  # noqa: N815
    answer: Literal["A", "B", "C", "D"]

    @override
    def example(self, path: Path) -> tuple[str, Example]:
        values = {name: text.strip() for name, text in self.model_dump(exclude={"answer"}).items()}
        return "longbench_v2", example_of(table_entry("longbench_v2", "longbench_v2"), values, (self.answer,))


class InfiniteBenchRow(BenchmarkRow):
    """InfiniteBench: arXiv 2402.13718."""

    context: Text
    input: str
    answer: Answers
    options: Options

    @override
    def example(self, path: Path) -> tuple[str, Example]:
        task = path.stem
        entry = table_entry("infinitebench", task)
        references, options = self.answer, self.options
        values = {"context": self.context, "input": self.input}
        if entry["metric"] in ("choice", "function_choice"):
            shown, references = four_options(references[0], options)
            values |= shown
        elif task == "math_find":
            wanted = found(r"The .+ of", self.input).lower().removesuffix(" of")
            values["prefix"] = f"What is {wanted} in the following list?"
        elif task == "code_run":
            values["func_call"] = found(r"func_[0-9]+\(-?[0-9]+\)", self.input)
            values["func"] = values["func_call"].partition("(")[0]
        return task, example_of(entry, values, references)


class PlainRow(BenchmarkRow):
    """A document, a question and its answer, of no benchmark."""

    context: Text
    question: Text
    answer: Answers
    metric: str = "qa_f1"

    @override
    def example(self, path: Path) -> tuple[str, Example]:
        if self.metric not in SCORERS:
            close = get_close_matches(self.metric, SCORERS, n=1)
            meant = f", did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"unknown metric {shortened(self.metric)}{meant}")
        values = {"context": self.context, "question": self.question}
        entry = {"prompt": _GENERIC, "metric": self.metric, "max_tokens": _MAX_TOKENS}
        return path.stem, example_of(entry, values, self.answer)


_FORMATS: tuple[type[BenchmarkRow], ...] = (
    RulerRow,
    LongBenchRow,
    LongBenchV2Row,
    InfiniteBenchRow,
    PlainRow,
    ScBenchRow,
    MathRow,
    GpqaRow,
    AimeRow,  # the fewest fields: what is another benchmark's row as well is that one's
)


def read_examples(path: Path, requests: bool = False) -> dict[str, list[Example]]:
    """Read a file; returns the examples of each task in it, in order.

    Of rows with several queries each is a task of its own, in turns, or as `requests` of their own.

    Raises:
        KvcliError: there is no such file, it is no text, a row is no JSON object or lacks a field (its number is
            named), the file holds no examples, a task or metric is not known (usage).
    """
    tasks: dict[str, list[Example]] = {}
    for place, row in read_rows(path):
        nearest = min(_FORMATS, key=lambda each: each.missing(row))  # the first of those that miss nothing
        try:
            examples = list(nearest.model_validate(row).examples(path, requests))
            for _, example in examples:
                if refused := why_unscorable(example.metric, example.references, example.choices):
                    raise ValueError(refused)
        except ValueError as error:
            problem = first_problem(error) if isinstance(error, ValidationError) else error
            raise usage_error(f"{path}: {place}: {problem}", _hint(row)) from None
        for task, example in examples:
            tasks.setdefault(task, []).append(example)
    if not tasks:
        raise usage_error(f"{path}: holds no examples", "it should have a row for each")
    return tasks


def _hint(row: Mapping[str, Any]) -> str:
    names = sorted(name for name in row if name.isidentifier() and len(name) < 40)
    have = ", ".join(names[:_SHOWN_FIELDS]) or "none"
    return f"it has {have}; at the least a row has context, question and answer"
