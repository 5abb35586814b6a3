"""Local files of benchmarks: rows of JSONL, CSV or Parquet, whose fields tell which benchmark it is.

| fields | benchmark |
|---|---|
| `input`, `outputs` | RULER, also the rows of `python -m kvcli.quality.tasks` |
| `context`, `input`, `answers`, `dataset` | LongBench v1 |
| `context`, `question`, `choice_A` to `choice_D`, `answer` | LongBench v2 |
| `context`, `input`, `answer`, `options` | InfiniteBench; the file's name is that of its task |
| `context`, `multi_turns` | SCBench; the file's name is that of its task |
| `problem`, `answer`, `unique_id` or `subject` | MATH500 |
| `problem`, `Problem` or `question`, with `answer` or `Answer` | AIME |
| `Question`, `Correct Answer`, `Incorrect Answer 1` to `3` | GPQA |
| `context`, `question`, `answer_prefix`, `task`, `answer` or `answers` | RULER, LongBench, LooGLE in kvpress's form |
| `prompt`, `answer`, `random_string_to_prepend` | MRCR |
| `input`, `qa_pairs`, `output` | LooGLE; the file's name is that of its task |
| `qid`, `query`, `ctxs` | HELMET's re-ranking |
| `prompt_id`, `prompt`, `targets` | LOFT, as its dump_prompts.py writes it; the file's name has task and data set |
| `context`, `question`, `answer` | any other; `metric` may name a scorer, by default the F1 of words |

lm-evaluation-harness has tasks of the same names, but it reads them only from the hub, runs InfiniteBench with its
prompts for chat models and LongBench v2 by the likelihood of four letters. Here the files are local, the prompts are
the benchmarks' own for open models, and every answer is generated, since that is where a KV-cache method acts.

MATH500 is the 500 problems of MATH (arXiv 2103.03874) on which arXiv 2305.20050 tests, AIME the competition's problems
of a year, as several data sets have them, GPQA that of arXiv 2311.12022. They come without prompts, which are in
`reasoning.toml`.

SCBench asks several queries on one long context, turn after turn or each on its own (arXiv 2412.10319, section 3). In
turns, a query follows the right answers to those before it. As requests, only the context is read beforehand: a method
prunes or indexes it without knowing the questions, and every query finds it in the same state. Each query is a task of
its own, "NAME turn 2" or "NAME request 2". The tasks that repeat functions of a repository are left out: a parser of
six programming languages scores them.

LooGLE's files of short and long questions, as its data set on the hub has them today, are rows of context, question and
answer: the file's name gives them LooGLE's prompt. HELMET's in-context learning comes without files: its code draws
examples from data sets of the hub. LOFT's prompts of several turns are not among what dump_prompts.py writes.
"""

import csv
import hashlib
import io
import json
import random
import re
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from importlib import import_module, resources
from pathlib import Path
from reprlib import repr as shortened
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import AfterValidator, AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import from_json
from typing_extensions import override

from kvcli.errors import bad_json, first_problem, usage_error
from kvcli.quality.eval.example import Example, conversation
from kvcli.quality.eval.final_answer import LETTERS
from kvcli.quality.eval.long_context import constant
from kvcli.quality.eval.scorers import SCORERS, why_unscorable

_SPLITS = ("validation", "test", "train", "data")


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("is empty")
    return text


Text = Annotated[str, AfterValidator(_not_blank)]


def _strings(value: object) -> tuple[str, ...]:
    """Return one answer or a list of them, strings or numbers, as strings; empty for anything else.

    SQuAD and what derives from it have the list within an object, as `text`.
    """
    value = value.get("text") if isinstance(value, dict) else value
    entries = value if isinstance(value, list) else [value]
    if len(entries) == 1 and isinstance(entries[0], list):  # InfiniteBench's math_calc
        entries = entries[0]
    answers = [entry for entry in entries if isinstance(entry, str | int | float) and not isinstance(entry, bool)]
    return tuple(map(str, answers)) if len(answers) == len(entries) and all(map(str, answers)) else ()


def _answers(value: object) -> tuple[str, ...]:
    if not (answers := _strings(value)):
        raise ValueError("holds no answers")
    return answers


Answers = Annotated[tuple[str, ...], BeforeValidator(_answers)]
Options = Annotated[tuple[str, ...], BeforeValidator(_strings)]


class BenchmarkRow(BaseModel, ABC):
    """A row of a benchmark's file; only the fields in use are declared."""

    model_config = ConfigDict(strict=True, frozen=True)

    @abstractmethod
    def example(self, path: Path) -> tuple[str, Example]:
        """Make an example of the row of the file `path`; return it with the name of its task.

        Raises:
            ValueError: the row holds a field in a form that its benchmark does not have; the message says which.
        """

    def examples(self, path: Path, requests: bool = False) -> Iterator[tuple[str, Example]]:
        """Make the examples of the row, one if it has a single question; each with the name of its task.

        Raises:
            KvcliError: the row has no queries that could be `requests` (usage).
            ValueError: as `example`.
        """
        if requests:
            raise usage_error(f"{path}: its rows have no queries on one context", "name the file without requests:")
        yield self.example(path)

    @classmethod
    def missing(cls, row: Mapping[str, Any]) -> int:
        """Count the required fields that this row has under none of their names."""
        wanted = {name: field.validation_alias for name, field in cls.model_fields.items() if field.is_required()}
        names = [
            alias.choices if isinstance(alias, AliasChoices) else [alias or name] for name, alias in wanted.items()
        ]
        return sum(not any(each in row for each in known) for known in names)


def named(path: Path) -> str:
    """Name a task after its file, or after the folder of a file that is named like a split of a data set."""
    stem = path.stem.partition("-0000")[0]  # test-00000-of-00001.parquet
    return (path.parent.name or stem) if stem in _SPLITS else stem


def table_entry(benchmark: str, task: str) -> dict[str, Any]:
    """Look up a task in a benchmark's table.

    Raises:
        KvcliError: it has no such task (usage).
    """
    table = _table(benchmark)
    if task not in table:
        close = get_close_matches(task, table, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(table)}"
        raise usage_error(f"{benchmark} has no task {shortened(task)}", hint)
    return table[task]


def four_options(answer: str, options: Sequence[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Name the options of a choice for a prompt; return also the right one's text and its letter.

    Raises:
        ValueError: they are not four, or the answer is neither one of them nor a letter.
    """
    if len(options) != len(LETTERS) or answer not in (*options, *LETTERS):
        raise ValueError("options are not four, with the answer among them")
    right = options.index(answer) if answer in options else LETTERS.index(answer)
    shown = {f"option_{letter}": option for letter, option in zip(LETTERS, options, strict=True)}
    return shown, (options[right], LETTERS[right])


def found(pattern: str, text: str) -> str:
    """Find the first match in a text.

    Raises:
        ValueError: there is none.
    """
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"input does not match {pattern!r}")
    return match[0]


def example_of(
    entry: Mapping[str, Any], values: Mapping[str, str], references: tuple[str, ...], choices: tuple[str, ...] = ()
) -> Example:
    """Fill in a prompt; the question is the part after the document."""
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
        whole=entry.get("whole", False),
    )


@cache
def _table(name: str) -> dict[str, dict[str, Any]]:
    return tomllib.loads((resources.files("kvcli.quality.eval") / f"{name}.toml").read_text(encoding="utf-8"))


_LETTERS = "ABCD"


def _integer(value: object) -> str:
    """Parse an AIME answer, a number or its digits, perhaps of an angle, into digits without leading zeros."""
    found = re.fullmatch(r"\$?0*([0-9]{1,3})(?:\^\{?\\circ\}?)?\$?", str(value).strip())
    if found is None or not isinstance(value, int | str) or isinstance(value, bool):
        raise ValueError("is not an integer from 0 to 999, as AIME's answers are")
    return found[1]


class MathRow(BenchmarkRow):
    """MATH500: an answer in LaTeX, and a field that AIME's problems lack: a subject, or the place in MATH."""

    problem: Text
    answer: Text
    place: Annotated[str, Field(validation_alias=AliasChoices("unique_id", "subject"))]

    @override
    def example(self, path: Path) -> tuple[str, Example]:
        return "math500", example_of(table_entry("reasoning", "math500"), {"problem": self.problem}, (self.answer,))


class AimeRow(BenchmarkRow):
    """AIME: an answer from 0 to 999; the file's name is that of the task."""

    problem: Annotated[Text, Field(validation_alias=AliasChoices("problem", "Problem", "question"))]
    answer: Annotated[str, BeforeValidator(_integer), Field(validation_alias=AliasChoices("answer", "Answer"))]

    @override
    def example(self, path: Path) -> tuple[str, Example]:
        return named(path), example_of(table_entry("reasoning", "aime"), {"problem": self.problem}, (self.answer,))


class GpqaRow(BenchmarkRow):
    """GPQA: four choices, in an order that depends only on the question's text, so that a row is always asked alike."""

    question: Annotated[Text, Field(alias="Question")]
    right: Annotated[Text, Field(alias="Correct Answer")]
    wrong_1: Annotated[Text, Field(alias="Incorrect Answer 1")]
    wrong_2: Annotated[Text, Field(alias="Incorrect Answer 2")]
    wrong_3: Annotated[Text, Field(alias="Incorrect Answer 3")]

    @override
    def example(self, path: Path) -> tuple[str, Example]:
        right, *others = (each.strip() for each in (self.right, self.wrong_1, self.wrong_2, self.wrong_3))
        choices = [right, *others]
        random.Random(self.question.strip()).shuffle(choices)
        values = {"question": self.question.strip()}
        values |= {f"choice_{letter}": choice for letter, choice in zip(_LETTERS, choices, strict=True)}
        letters = tuple(letter for letter, choice in zip(_LETTERS, choices, strict=True) if choice == right)
        return named(path), example_of(table_entry("reasoning", "gpqa"), values, letters)


_REPOSITORIES = ("scbench_repoqa", "scbench_repoqa_and_kv")

# The numbers of scbench_mf are a list.
_Context = Annotated[Text, BeforeValidator(lambda value: str(value) if isinstance(value, list) else value)]


class ScBenchQuery(BaseModel):
    """One query with its answer; in a file of mixed tasks it names its `task`."""

    input: Text
    answer: Answers
    options: Options = ()
    task: str | None = None


class ScBenchRow(BenchmarkRow):
    """A context and its queries."""

    context: _Context
    multi_turns: Annotated[list[ScBenchQuery], Field(min_length=1)]

    @override
    def example(self, path: Path) -> tuple[str, Example]:
        return next(self.examples(path))

    @override
    def examples(self, path: Path, requests: bool = False) -> Iterator[tuple[str, Example]]:
        """Make an example of every query.

        Raises:
            KvcliError: the file's name is none of the tasks that are scored here (usage).
        """
        task = named(path)
        if task in _REPOSITORIES:
            raise usage_error(f"{path}: {task} is scored by a parser of code, which is not here", "leave it out")
        alone = [self._asked(task, query) for query in self.multi_turns]
        said: list[tuple[str, str]] = []
        for number, (query, example) in enumerate(zip(self.multi_turns, alone, strict=True), 1):
            if requests:
                yield f"{task} request {number}", replace(example, question="", whole=True)
                continue
            _, turns = conversation(said, example.question)
            first = alone[0]
            yield (
                f"{task} turn {number}",
                replace(example, prompt=first.prompt, question=first.question, shared="", turns=turns),
            )
            said.append((example.question, " ".join(query.answer)))

    def _asked(self, task: str, query: ScBenchQuery) -> Example:
        """Make the example of a query on its own."""
        entry = table_entry("scbench", query.task or task)
        values, references = {"context": self.context, "input": query.input}, query.answer
        if entry["metric"] == "choice":
            shown, references = four_options(references[0], query.options)
            values |= shown
        elif task == "scbench_mf":
            wanted = found(r"The .+ is", query.input).lower().removesuffix(" is")
            values["prefix"] = f"What is {wanted}?"
        example = example_of(entry, values, references)
        before = entry["prompt"].partition("{context}")[0].format(**values)
        later = entry.get("later", "").format(**values)
        return replace(example, question=later or example.question, shared=before + self.context)


_MAX_TOKENS = 128

# Longest answers of RULER's tasks: arXiv 2404.06654, tokens_to_generate in its repository; 128 for the needles.
_RULER_MAX_TOKENS = {"vt": 30, "cwe": 120, "fwe": 50, "qa": 32}
RULER = (*_RULER_MAX_TOKENS, "niah")
"""The beginnings of the names of RULER's tasks."""
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


class KvpressRow(BenchmarkRow):
    """RULER, LongBench and LooGLE as kvpress has them: the context apart from the question, which follows directly."""

    context: Text
    question: str
    answer_prefix: str
    task: Text
    answer: Annotated[Answers, Field(validation_alias=AliasChoices("answer", "answers"))]
    max_new_tokens: Annotated[int, Field(ge=1)] | None = None
    all_classes: list[str] | None = None

    @override
    def example(self, path: Path) -> tuple[str, Example]:
        kind = self.task.partition("_")[0]
        if kind in RULER:
            metric, length, first = "contains" if kind == "qa" else "recall", _RULER_MAX_TOKENS.get(kind), False
        else:
            benchmark = "loogle" if self.task in _table("loogle") else "longbench"
            entry = table_entry(benchmark, self.task.removesuffix("_e"))
            metric, length, first = entry["metric"], entry["max_tokens"], entry.get("first_line", False)
        return self.task, Example(
            prompt=self.context + self.question,
            question=self.question.strip(),
            references=self.answer,
            metric=metric,
            max_tokens=self.max_new_tokens or length or _MAX_TOKENS,
            choices=tuple(self.all_classes or ()),
            first_line=first,
            answer_prefix=self.answer_prefix,
        )

    @override
    def examples(self, path: Path, requests: bool = False) -> Iterator[tuple[str, Example]]:
        task, example = self.example(path)
        yield task, replace(example, question="", shared=self.context, whole=True) if requests else example


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
    """A document, a question and its answer, of no benchmark or of LooGLE's data set on the hub."""

    context: Text
    question: Text
    answer: Answers
    metric: str | None = None

    @override
    def example(self, path: Path) -> tuple[str, Example]:
        if self.metric is None and (task := named(path)) in _table("loogle"):
            values = {"context": self.context, "input": self.question}
            return task, example_of(table_entry("loogle", task), values, self.answer)
        metric = self.metric or "qa_f1"
        if metric not in SCORERS:
            close = get_close_matches(metric, SCORERS, n=1)
            meant = f", did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"unknown metric {shortened(metric)}{meant}")
        values = {"context": self.context, "question": self.question}
        entry = {"prompt": _GENERIC, "metric": metric, "max_tokens": _MAX_TOKENS}
        return path.stem, example_of(entry, values, self.answer)


_LONG_MAX_TOKENS = 2048  # of MRCR and LOFT, which state none


class MrcrRow(BenchmarkRow):
    """MRCR: a conversation as JSON, of which one answer is to be repeated after a given prefix."""

    prompt: Text
    answer: Text
    prefix: Annotated[Text, Field(alias="random_string_to_prepend")]

    @override
    def example(self, path: Path) -> tuple[str, Example]:
        try:
            said = [(message["role"], message["content"]) for message in json.loads(self.prompt)]
        except (ValueError, TypeError, KeyError):
            raise ValueError("prompt is not a JSON list of messages with role and content") from None
        if [role for role, _ in said] != ["user", "assistant"] * (len(said) // 2) + ["user"]:
            raise ValueError("messages are not those of user and assistant in turns, the user's first and last")
        texts = [text for _, text in said]
        return named(path), Example(
            prompt=texts[0],
            question=texts[-1],
            references=(self.answer, self.prefix),
            metric="mrcr",
            max_tokens=_LONG_MAX_TOKENS,
            whole=True,
            turns=tuple(zip(texts[1::2], texts[2::2], strict=True)),
            turns_read=True,
        )


class LooglePair(NamedTuple):
    """A question and its answer; that of a cloze is a mapping."""

    question: str
    answer: str


def _pairs(value: object) -> list[LooglePair]:
    """Read LooGLE's list of questions, in Python's notation; "none" for a document without any."""
    found: Any = value
    if isinstance(value, str):
        found = [] if value == "none" else constant(value)
    try:
        answers = [each["A"] for each in found]
        texts = [json.dumps(each) if isinstance(each, dict) else str(each) for each in answers]
        return [LooglePair(each["Q"], text) for each, text in zip(found, texts, strict=True)]
    except (TypeError, KeyError):
        raise ValueError("is not a list of questions Q with answers A") from None


class LoogleRow(BenchmarkRow):
    """LooGLE (arXiv 2311.04939): a document with all its questions, or a paper with its abstract as `output`."""

    input: Text
    pairs: Annotated[list[LooglePair], BeforeValidator(_pairs), Field(alias="qa_pairs")]
    output: str

    @override
    def example(self, path: Path) -> tuple[str, Example]:
        return next(iter(self.examples(path)))

    @override
    def examples(self, path: Path, requests: bool = False) -> Iterator[tuple[str, Example]]:
        """Make an example of every question; as `requests`, the document is read before the question is known.

        Raises:
            KvcliError: the file's name is none of LooGLE's tasks (usage).
        """
        task = named(path)
        entry = table_entry("loogle", task)
        before = entry["prompt"].partition("{context}")[0].format() + self.input
        if not self.pairs and self.output.lower() == "none":
            raise ValueError("has neither questions nor an output")
        for pair in self.pairs or [LooglePair("", self.output)]:
            example = example_of(entry, {"context": self.input, "input": pair.question}, (pair.answer,))
            yield task, replace(example, question="", shared=before, whole=True) if requests else example


_DEMONSTRATIONS = "test_reranking_data_k10_dep3.jsonl"


class HelmetPassage(BaseModel):
    """A passage with its number and its grade of relevance."""

    id: str
    text: str
    label: int
    title: str | None = None

    @property
    def shown(self) -> str:
        """The passage as it stands in the prompt."""
        title = "" if self.title is None else f" (Title: {self.title})"
        return f"[ID: {self.id}] Document{title}: {self.text}"


class HelmetRerankRow(BenchmarkRow):
    """HELMET's re-ranking of MS MARCO (arXiv 2410.02694), after two examples from the file of rankings of ten."""

    qid: Text
    query: Text
    ctxs: Annotated[list[HelmetPassage], Field(min_length=1)]

    @override
    def example(self, path: Path) -> tuple[str, Example]:
        ranked = "".join(
            f"{each._passages}\n\nQuery: {each.query}\nRanking: {each._ranking}\n\n"
            for each in self._shown_before(path.with_name(_DEMONSTRATIONS))
        )
        values = {"context": ranked + self._passages, "input": self.query}
        relevant = tuple(f"{each.id} {each.label}" for each in self.ctxs if each.label > 0)
        return named(path), example_of(table_entry("helmet", "rerank"), values, relevant)

    def _shown_before(self, path: Path) -> list["HelmetRerankRow"]:
        """Choose the two examples as HELMET does: by a permutation drawn by the question's hash."""
        others = [each for each in _rankings(path) if each.qid != self.qid]
        seed = int(hashlib.sha256(self.qid.encode()).hexdigest(), 16) % 2**31
        chosen: dict[str, HelmetRerankRow] = {}
        for place in np.random.default_rng(seed).permutation(len(others)):
            chosen.setdefault(others[place].qid, others[place])
        return list(chosen.values())[:2]

    @property
    def _passages(self) -> str:
        return "\n\n".join(each.shown for each in self.ctxs)

    @property
    def _ranking(self) -> str:
        return " > ".join(each.id for each in sorted(self.ctxs, key=lambda each: each.label, reverse=True))


@cache
def _rankings(path: Path) -> tuple[HelmetRerankRow, ...]:
    """Read the examples.

    Raises:
        KvcliError: they are not there (usage).
    """
    if not path.is_file():
        raise usage_error(f"{path}: no such file", "HELMET takes its examples from there: put it beside the others")
    return tuple(HelmetRerankRow.model_validate(row) for _, row in read_rows(path))


# What LOFT scores a task by (its README): of data sets with several right answers, and of all others.
_LOFT = {
    "retrieval": (
        {"hotpotqa": "mrecall_2", "musique": "mrecall_5", "qampari": "mrecall_5", "quest": "mrecall_3"},
        "recall_1",
    ),
    "rag": ({"qampari": "subspans", "quest": "subspans"}, "subspan"),
    "sql": ({}, "same_rows"),
    "icl": ({}, "first_entry"),
}


class LoftRow(BenchmarkRow):
    """LOFT (arXiv 2406.13121): a prompt with its corpus, and the right answers of its one turn in Python's notation."""

    prompt_id: str
    prompt: Text
    targets: str

    @override
    def example(self, path: Path) -> tuple[str, Example]:
        name = named(path).partition(":")[0]
        parts = re.fullmatch(r"(retrieval|rag|sql|icl)_(\w+)_(?:32k|128k|1m)_\w+", name)
        if parts is None:
            raise ValueError('the file\'s name is not that of a prompt of LOFT, as in "rag_nq_128k_test:few_shot.csv"')
        task, dataset = parts.groups()
        found = constant(self.targets)
        answers = found[0] if isinstance(found, list | tuple) and len(found) == 1 else ()
        if task == "icl" and answers:  # the words of the answer, each of which is right
            answers = answers[0]
        if not isinstance(answers, list | tuple) or not answers:
            raise ValueError("targets are not the answers of one turn")
        several, otherwise = _LOFT[task]
        return name, Example(
            prompt=self.prompt,
            question=self.prompt.rpartition("Now let's start! ======\n")[2],
            references=tuple(repr([*each]) if task == "sql" else str(each) for each in answers),
            metric=several.get(dataset, otherwise),
            max_tokens=_LONG_MAX_TOKENS,
            whole=True,
        )


_FORMATS: tuple[type[BenchmarkRow], ...] = (
    RulerRow,
    KvpressRow,
    LongBenchRow,
    LongBenchV2Row,
    InfiniteBenchRow,
    PlainRow,
    ScBenchRow,
    MathRow,
    GpqaRow,
    MrcrRow,
    LoogleRow,
    HelmetRerankRow,
    LoftRow,
    AimeRow,  # the fewest fields: a row that also fits another benchmark belongs to that one
)


def read_examples(
    path: Path, requests: bool = False, notice: Callable[[str], None] = lambda _: None
) -> dict[str, list[Example]]:
    """Read a file; return the examples of each task in it, in order.

    Each query of a row with several is a task of its own, in turns, or as separate `requests`. A `notice` names the
    fields that nothing reads of rows that belong to no benchmark.

    Raises:
        KvcliError: there is no such file, it is not text, a row is not a JSON object or lacks a field (its number is
            named), the file holds no examples, a task or metric is not known (usage).
    """
    tasks: dict[str, list[Example]] = {}
    unread: set[str] = set()
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
        unread |= row.keys() - PlainRow.model_fields.keys() if nearest is PlainRow else set()
    if not tasks:
        raise usage_error(f"{path}: holds no examples", "it should have a row for each")
    if unread:
        notice(
            f"{path}: rows of no benchmark that is known here; not used: {', '.join(sorted(unread)[:_SHOWN_FIELDS])}"
        )
    return tasks


def _hint(row: Mapping[str, Any]) -> str:
    names = sorted(name for name in row if name.isidentifier() and len(name) < 40)
    have = ", ".join(names[:_SHOWN_FIELDS]) or "none"
    return f"it has {have}; at the least a row has context, question and answer"


SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Read a file; return each row and its place, "line 3" or "row 3".

    Raises:
        KvcliError: there is no such file, it does not have its form, a row is malformed (its place is named), its
            reader is not installed (usage).
    """
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return _parquet(path)
    return _csv(path, _text(path, "it should be a CSV file")) if suffix == ".csv" else _json_lines(path)


def _json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    text = _text(path, "it should have one JSON object a line")
    if text.lstrip().startswith("["):  # as LongBench v2 is distributed
        yield from _json_array(path, text)
        return
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = from_json(line)
        except ValueError as error:
            what = f"{path}: line {number}: {bad_json(error)}"
            raise usage_error(what, "every line is one whole JSON object") from None
        if not isinstance(row, dict):
            what = f"{path}: line {number}: a {type(row).__name__}, not an object"
            raise usage_error(what, 'a line looks like {"...": ...}')
        yield f"line {number}", row


def _json_array(path: Path, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        rows = from_json(text)
    except ValueError as error:
        raise usage_error(
            f"{path}: {bad_json(error)}", "it should be one array of objects, or an object a line"
        ) from None
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise usage_error(f"{path}: row {number}: a {type(row).__name__}, not an object", "every row is an object")
        yield f"row {number}", row


def _csv(path: Path, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows, counted without the header; a row of several lines counts as one."""
    hint = "the first row names the columns, every other one has a field for each"
    number = 0
    csv.field_size_limit(max(csv.field_size_limit(), len(text) + 1))  # a field may hold a long document
    try:
        for number, row in enumerate(csv.DictReader(io.StringIO(text, newline=""), strict=True), 1):
            if None in row or None in row.values():
                raise usage_error(f"{path}: row {number}: not as many fields as columns", hint)
            yield f"row {number}", row
    except csv.Error as error:
        raise usage_error(f"{path}: row {number + 1}: bad CSV: {error}", hint) from None


def _parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        lib, parquet = import_module("pyarrow.lib"), import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        what = f"{path}: a Parquet file needs pyarrow, which is not installed"
        raise usage_error(what, "pip install 'kvcli[parquet]'") from None
    try:
        with path.open("rb") as file:
            rows = parquet.ParquetFile(file).read().to_pylist()
    except lib.ArrowException:
        raise usage_error(f"{path}: not a Parquet file", "a .parquet file is read as Parquet") from None
    except OSError as error:
        raise _unreadable(path, error) from None
    yield from ((f"row {number}", row) for number, row in enumerate(rows, 1))


def _text(path: Path, hint: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise _unreadable(path, error) from None
    except UnicodeDecodeError as error:
        raise usage_error(f"{path}: not UTF-8 text (byte {error.start})", hint) from None


def _unreadable(path: Path, error: OSError) -> Exception:
    return usage_error(f"{path}: {(error.strerror or 'cannot be read').lower()}", "check the path")
