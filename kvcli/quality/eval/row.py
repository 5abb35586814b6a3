"""A row of a benchmark's file, and the tables that say what a benchmark asks and how it scores."""

import tomllib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from importlib import resources
from pathlib import Path
from reprlib import repr as shortened
from typing import Annotated, Any

from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict

from kvcli.errors import usage_error
from kvcli.quality.eval.example import Example

_SPLITS = ("validation", "test", "train", "data")


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("is empty")
    return text


Text = Annotated[str, AfterValidator(_not_blank)]


class BenchmarkRow(BaseModel, ABC):
    """A row of a benchmark's file, of which the fields that are used are declared."""

    model_config = ConfigDict(strict=True, frozen=True)

    @abstractmethod
    def example(self, path: Path) -> tuple[str, Example]:
        """Make an example of the row of the file `path`; returns the name of its task as well.

        Raises:
            ValueError: the row holds a field in a form that its benchmark does not have; the message says which.
        """

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
