"""A row of a benchmark's file, and the tables that say what a benchmark asks and how it scores."""

import re
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from importlib import resources
from pathlib import Path
from reprlib import repr as shortened
from typing import Annotated, Any

from pydantic import AfterValidator, AliasChoices, BaseModel, BeforeValidator, ConfigDict

from kvcli.errors import usage_error
from kvcli.quality.eval.example import Example
from kvcli.quality.eval.final_answer import LETTERS

_SPLITS = ("validation", "test", "train", "data")


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("is empty")
    return text


Text = Annotated[str, AfterValidator(_not_blank)]


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


Answers = Annotated[tuple[str, ...], BeforeValidator(_answers)]
Options = Annotated[tuple[str, ...], BeforeValidator(_strings)]


class BenchmarkRow(BaseModel, ABC):
    """A row of a benchmark's file, of which the fields that are used are declared."""

    model_config = ConfigDict(strict=True, frozen=True)

    @abstractmethod
    def example(self, path: Path) -> tuple[str, Example]:
        """Make an example of the row of the file `path`; returns the name of its task as well.

        Raises:
            ValueError: the row holds a field in a form that its benchmark does not have; the message says which.
        """

    def examples(self, path: Path, requests: bool = False) -> Iterator[tuple[str, Example]]:
        """Make the examples of the row, one where it has a single question; each with the name of its task.

        Raises:
            KvcliError: the row has no queries that could be `requests` (usage).
            ValueError: as `example`.
        """
        if requests:
            raise usage_error(f"{path}: its rows have no queries on one context", "name the file without requests:")
        yield self.example(path)

    @classmethod
    def missing(cls, row: Mapping[str, Any]) -> int:
        """Count the fields that such a row must have and this one has under none of their names."""
        wanted = {name: field.validation_alias for name, field in cls.model_fields.items() if field.is_required()}
        names = [
            alias.choices if isinstance(alias, AliasChoices) else [alias or name] for name, alias in wanted.items()
        ]
        return sum(not any(each in row for each in known) for known in names)


def named(path: Path) -> str:
    """Name a task by its file, or by the folder of one that is called as a part of a data set is."""
    stem = path.stem.partition("-0000")[0]  # test-00000-of-00001.parquet
    return (path.parent.name or stem) if stem in _SPLITS else stem


def table_entry(benchmark: str, task: str) -> dict[str, Any]:
    """Look up what a benchmark's table says of a task.

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
    """Name the options of a choice for a prompt; returns also the right one's text and its letter.

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
        whole=entry.get("whole", False),
    )


@cache
def _table(name: str) -> dict[str, dict[str, Any]]:
    return tomllib.loads((resources.files("kvcli.quality.eval") / f"{name}.toml").read_text(encoding="utf-8"))
