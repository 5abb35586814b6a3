"""Local files of benchmarks: one JSON object a line, whose fields say which benchmark it is.

| fields | benchmark |
|---|---|
| `input`, `outputs` | RULER, also the rows of `python -m kvcli.quality.tasks` |
| `context`, `input`, `answers`, `dataset` | LongBench v1 |
| `context`, `question`, `choice_A` to `choice_D`, `answer` | LongBench v2 |
| `context`, `input`, `answer`, `options` | InfiniteBench; the file's name says which of its tasks |
| `context`, `question`, `answer` | any other; `metric` may name a scorer, else it is the F1 of words |

lm-evaluation-harness has tasks of the same names, but it reads them from the hub alone, asks InfiniteBench in its
prompts for chat models and LongBench v2 by the likelihood of four letters. Here the files are local, the prompts are
the benchmarks' own for open models, and every answer is generated, which is what a KV-cache method takes part in.
"""

import re
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from importlib import resources
from pathlib import Path
from reprlib import repr as shortened
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import from_json
from typing_extensions import override

from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.validation import bad_json, first_problem
from kvcli.quality.eval.example import Example, conversation
from kvcli.quality.eval.scorers import SCORERS, why_unscorable

_MAX_TOKENS = 128

# Longest answers of RULER's tasks: arXiv 2404.06654, tokens_to_generate in its repository; 128 for the needles.
_RULER_MAX_TOKENS = {"vt": 30, "cwe": 120, "fwe": 50, "qa": 32}
_SPLITS = ("validation", "test", "train", "data")
_LETTERS = "ABCD"
_GENERIC = "{context}\n\n{question}"
_SHOWN_FIELDS = 12  # of a row that fits no benchmark


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("is empty")
    return text


def _strings(value: object) -> tuple[str, ...]:
    """One answer or a list of them, strings or numbers, as strings; empty where it is anything else."""
    entries = value if isinstance(value, list) else [value]
    if len(entries) == 1 and isinstance(entries[0], list):  # InfiniteBench's math_calc
        entries = entries[0]
    answers = [entry for entry in entries if isinstance(entry, str | int | float) and not isinstance(entry, bool)]
    return tuple(map(str, answers)) if len(answers) == len(entries) and all(map(str, answers)) else ()


def _answers(value: object) -> tuple[str, ...]:
    if not (answers := _strings(value)):
        raise ValueError("holds no answers")
    return answers


Text = Annotated[str, AfterValidator(_not_blank)]
Answers = Annotated[tuple[str, ...], BeforeValidator(_answers)]
Turn = Annotated[list[str], Field(min_length=2, max_length=2)]
Options = Annotated[tuple[str, ...], BeforeValidator(_strings)]


class BenchmarkRow(BaseModel, ABC):
    """A line of a benchmark's file, of which the fields that are used are declared."""

    model_config = ConfigDict(strict=True, frozen=True)

    @abstractmethod
    def example(self, path: Path) -> tuple[str, Example]:
        """Make an example of the row of the file `path`; returns the name of its task as well.

        Raises:
            ValueError: the row holds a field in a form that its benchmark does not have; the message says which.
            KvcliError: the benchmark has no such task (usage).
        """


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
        task = self.task or (path.parent.name if path.stem in _SPLITS else path.stem)
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
        entry = _entry("longbench", self.dataset.removesuffix("_e"))
        values = {"context": self.context, "input": self.input}
        return self.dataset, _from_entry(entry, values, self.answers, tuple(self.all_classes or ()))


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
        return "longbench_v2", _from_entry(_entry("longbench_v2", "longbench_v2"), values, (self.answer,))


class InfiniteBenchRow(BenchmarkRow):
    """InfiniteBench: arXiv 2402.13718."""

    context: Text
    input: str
    answer: Answers
    options: Options

    @override
    def example(self, path: Path) -> tuple[str, Example]:
        task = path.stem
        entry = _entry("infinitebench", task)
        references, options = self.answer, self.options
        values = {"context": self.context, "input": self.input}
        if entry["metric"] in ("choice", "function_choice"):
            answer = references[0]
            if len(options) != len(_LETTERS) or answer not in (*options, *_LETTERS):
                raise ValueError("options are not four, with the answer among them")
            values |= {f"option_{letter}": option for letter, option in zip(_LETTERS, options, strict=True)}
            right = options.index(answer) if answer in options else _LETTERS.index(answer)
            references = (options[right], _LETTERS[right])
        elif task == "math_find":
            wanted = _found(r"The .+ of", self.input).lower().removesuffix(" of")
            values["prefix"] = f"What is {wanted} in the following list?"
        elif task == "code_run":
            values["func_call"] = _found(r"func_[0-9]+\(-?[0-9]+\)", self.input)
            values["func"] = values["func_call"].partition("(")[0]
        return task, _from_entry(entry, values, references)


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
        return path.stem, _from_entry(entry, values, self.answer)


_FORMATS: tuple[type[BenchmarkRow], ...] = (RulerRow, LongBenchRow, LongBenchV2Row, InfiniteBenchRow, PlainRow)


def read_examples(path: Path) -> dict[str, list[Example]]:
    """Read a file; returns the examples of each task in it, in order.

    Raises:
        KvcliError: there is no such file, it is no text, a line is no JSON object or lacks a field (its number is
            named), the file holds no examples, a task or metric is not known (usage).
    """
    found: dict[str, list[Example]] = {}
    for number, row in _rows(path):
        missing = {each: _required(each) - set(row) for each in _FORMATS}
        nearest = min(_FORMATS, key=lambda each: len(missing[each]))  # the first of those that miss nothing
        try:
            task, example = nearest.model_validate(row).example(path)
            if refused := why_unscorable(example.metric, example.references, example.choices):
                raise ValueError(refused)
        except ValueError as error:
            problem = first_problem(error) if isinstance(error, ValidationError) else error
            raise _usage(f"{path}: line {number}: {problem}", _hint(row)) from None
        found.setdefault(task, []).append(example)
    if not found:
        raise _usage(f"{path}: holds no examples", "it should have one JSON object a line")
    return found


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise _usage(f"{path}: {(error.strerror or 'cannot be read').lower()}", "check the path") from None
    except UnicodeDecodeError as error:
        raise _usage(f"{path}: not UTF-8 text (byte {error.start})", "it should have one JSON object a line") from None
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = from_json(line)
        except ValueError as error:
            raise _usage(f"{path}: line {number}: {bad_json(error)}", "every line is one whole JSON object") from None
        if not isinstance(row, dict):
            what = f"{path}: line {number}: a {type(row).__name__}, not an object"
            raise _usage(what, 'a line looks like {"...": ...}')
        yield number, row


def _required(row: type[BenchmarkRow]) -> set[str]:
    return {name for name, field in row.model_fields.items() if field.is_required()}


def _hint(row: Mapping[str, Any]) -> str:
    names = sorted(name for name in row if name.isidentifier() and len(name) < 40)
    have = ", ".join(names[:_SHOWN_FIELDS]) or "none"
    return f"it has {have}; at the least a line has context, question and answer"


@cache
def _table(name: str) -> dict[str, dict[str, Any]]:
    return tomllib.loads((resources.files("kvcli.quality.eval") / f"{name}.toml").read_text(encoding="utf-8"))


def _entry(benchmark: str, task: str) -> dict[str, Any]:
    table = _table(benchmark)
    if task not in table:
        close = get_close_matches(task, table, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(table)}"
        raise _usage(f"{benchmark} has no task {shortened(task)}", hint)
    return table[task]


def _from_entry(
    entry: Mapping[str, Any], values: Mapping[str, str], references: tuple[str, ...], choices: tuple[str, ...] = ()
) -> Example:
    """Fill a prompt in; the question is what stands behind the document."""
    prompt: str = entry["prompt"]
    return Example(
        prompt=prompt.format(**values),
        question=prompt.partition("{context}")[2].format(**values).strip(),
        references=references,
        metric=entry["metric"],
        max_tokens=entry["max_tokens"],
        choices=choices,
        first_line=entry.get("first_line", False),
        raw=not entry.get("chat", True),
    )


def _found(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"input does not match {pattern!r}")
    return found[0]


def _usage(what: str, hint: str) -> KvcliError:
    return KvcliError(what, hint, ExitCode.USAGE)
