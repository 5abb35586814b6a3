"""Local files of benchmarks: one JSON object a line, whose fields say which benchmark it is.

| fields | benchmark |
|---|---|
| `input`, `outputs` | RULER, also the rows of `python -m kvcli.quality.tasks` |
| `context`, `input`, `answers`, `dataset` | LongBench v1 |
| `context`, `question`, `choice_A` to `choice_D`, `answer` | LongBench v2 |
| `context`, `input`, `answer`, `options` | InfiniteBench; the file's name says which of its tasks |
| `context`, `question`, `answer` | any other; `metric` may name a scorer, else it is the F1 of words |
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from kvcli.errors import ExitCode, KvcliError
from kvcli.quality.eval.example import Example
from kvcli.quality.eval.scorers import SCORERS

_MAX_TOKENS = 128

# Longest answers of RULER's tasks: arXiv 2404.06654, tokens_to_generate in its repository; 128 for the needles.
_RULER_MAX_TOKENS = {"vt": 30, "cwe": 120, "fwe": 50, "qa": 32}
_SPLITS = ("validation", "test", "train", "data")
_LETTERS = "ABCD"
_GENERIC = "{context}\n\n{question}"

Row = dict[str, Any]


class _RowError(Exception):
    """A row lacks what its benchmark has, or holds it in another form; the message says what."""


def read_examples(path: Path) -> dict[str, list[Example]]:
    """Read a file; returns the examples of each task in it, in order.

    Raises:
        KvcliError: usage: no such file, no text, a line that is no JSON object or lacks a field (with its number), a
            file of no examples, a task or metric that is not known.
    """
    found: dict[str, list[Example]] = {}
    for number, row in _rows(path):
        try:
            task, example = _example(path, row)
        except _RowError as error:
            raise _usage(f"{path}: line {number}: {error}", _hint(row)) from None
        found.setdefault(task, []).append(example)
    if not found:
        raise _usage(f"{path}: holds no examples", "it should have one JSON object a line")
    return found


def _rows(path: Path) -> Iterator[tuple[int, Row]]:
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
            row = json.loads(line)
        except json.JSONDecodeError as error:
            what = f"{path}: line {number}: bad JSON: {error.msg} at column {error.colno}"
            raise _usage(what, "every line is one whole JSON object") from None
        if not isinstance(row, dict):
            raise _usage(
                f"{path}: line {number}: a {type(row).__name__}, not an object", 'a line looks like {"...": ...}'
            )
        yield number, row


def _example(path: Path, row: Row) -> tuple[str, Example]:
    for fields, read in _FORMATS:
        if fields <= set(row):
            return read(path, row)
    nearest = min(_FORMATS, key=lambda form: len(form[0] - set(row)))[0]
    raise _RowError(f"no field {sorted(nearest - set(row))[0]!r}")


def _hint(row: Row) -> str:
    have = ", ".join(sorted(row)) or "none"
    return f"it has {have}; at the least a line has context, question and answer"


def _ruler(path: Path, row: Row) -> tuple[str, Example]:
    task = str(row.get("task") or (path.parent.name if path.stem in _SPLITS else path.stem))
    kind = task.partition("_")[0]
    example = Example(
        prompt=_text(row, "input"),
        question=str(row.get("question", "")),
        references=_texts(row, "outputs"),
        metric="contains" if kind == "qa" else "recall",
        max_tokens=_RULER_MAX_TOKENS.get(kind, _MAX_TOKENS),
        answer_prefix=str(row.get("answer_prefix", "")),
    )
    return task, example


def _longbench(_: Path, row: Row) -> tuple[str, Example]:
    task = _text(row, "dataset")
    classes = row.get("all_classes") or []
    entry = _entry("longbench", task.removesuffix("_e"))
    values = {"context": _text(row, "context"), "input": str(row["input"])}
    return task, _from_entry(entry, values, _texts(row, "answers"), tuple(map(str, classes)))


def _longbench_v2(_: Path, row: Row) -> tuple[str, Example]:
    keys = ("context", "question", "choice_A", "choice_B", "choice_C", "choice_D")
    values = {key: _text(row, key).strip() for key in keys}
    answer = _text(row, "answer")
    if answer not in _LETTERS:
        raise _RowError(f"answer {answer!r} is not one of A, B, C, D")
    return "longbench_v2", _from_entry(_entry("longbench_v2", "longbench_v2"), values, (answer,))


def _infinitebench(path: Path, row: Row) -> tuple[str, Example]:
    task = path.stem
    entry = _entry("infinitebench", task)
    references = _texts(row, "answer")
    values = {"context": _text(row, "context"), "input": str(row["input"])}
    if entry["metric"] in ("choice", "function_choice"):
        options = _texts(row, "options")
        if len(options) != len(_LETTERS) or references[0] not in (*options, *_LETTERS):
            raise _RowError("options are not four, with the answer among them")
        values |= {f"option_{letter}": option for letter, option in zip(_LETTERS, options, strict=True)}
        if references[0] in options:
            references = (references[0], _LETTERS[options.index(references[0])])
    elif task == "math_find":
        wanted = _found(r"The .+ of", values["input"]).lower().removesuffix(" of")
        values["prefix"] = f"What is {wanted} in the following list?"
    elif task == "code_run":
        values["func_call"] = _found(r"func_[0-9]+\(-?[0-9]+\)", values["input"])
        values["func"] = values["func_call"].partition("(")[0]
    return task, _from_entry(entry, values, references)


def _plain(path: Path, row: Row) -> tuple[str, Example]:
    metric = row.get("metric", "qa_f1")
    if metric not in SCORERS:
        close = get_close_matches(str(metric), SCORERS, n=1)
        raise _RowError(f"unknown metric {metric!r}" + (f", did you mean {close[0]!r}?" if close else ""))
    values = {"context": _text(row, "context"), "question": _text(row, "question")}
    entry = {"prompt": _GENERIC, "metric": metric, "max_tokens": _MAX_TOKENS, "chat": True}
    return path.stem, _from_entry(entry, values, _texts(row, "answer"))


_FORMATS: Sequence[tuple[frozenset[str], Callable[[Path, Row], tuple[str, Example]]]] = (
    (frozenset({"input", "outputs"}), _ruler),
    (frozenset({"context", "input", "answers", "dataset"}), _longbench),
    (frozenset({"context", "question", "choice_A", "choice_B", "choice_C", "choice_D", "answer"}), _longbench_v2),
    (frozenset({"context", "input", "answer", "options"}), _infinitebench),
    (frozenset({"context", "question", "answer"}), _plain),
)


@cache
def _table(name: str) -> dict[str, Row]:
    return tomllib.loads((resources.files("kvcli.quality.eval") / f"{name}.toml").read_text(encoding="utf-8"))


def _entry(benchmark: str, task: str) -> Row:
    table = _table(benchmark)
    if task not in table:
        close = get_close_matches(task, table, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(table)}"
        raise _usage(f"{benchmark} has no task {task!r}", hint)
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


def _text(row: Row, field: str) -> str:
    value = row[field]
    if not isinstance(value, str) or not value.strip():
        raise _RowError(f"{field} is no text" if not isinstance(value, str) else f"{field} is empty")
    return value


def _texts(row: Row, field: str) -> tuple[str, ...]:
    """The answers as strings, whether there is one or a list, of numbers or of strings."""
    value = row[field]
    entries = value if isinstance(value, list) else [value]
    if len(entries) == 1 and isinstance(entries[0], list):  # InfiniteBench's math_calc
        entries = entries[0]
    if not entries or not all(isinstance(entry, str | int | float) and str(entry) for entry in entries):
        raise _RowError(f"{field} holds no answers")
    return tuple(map(str, entries))


def _found(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise _RowError(f"input does not match {pattern!r}")
    return found[0]


def _usage(what: str, hint: str) -> KvcliError:
    return KvcliError(what, hint, ExitCode.USAGE)
