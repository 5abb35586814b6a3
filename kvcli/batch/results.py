"""Results, a line of JSON each, in a file that only grows: each is on disk before the next row takes its place.

A run that ends at any moment, even by a power cut, loses only the rows in flight. The same command continues from the
file: a last line that was cut off is removed, and rows with a result are not run again.
"""

from __future__ import annotations

import fcntl
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from kvcli.errors import KvcliError, first_problem, usage_error
from kvcli.inputs.line_file import LineFile, not_ours, whole_lines

_SHOWN = 3  # rows named in a message
_START = b'{"custom_id"'


class Key(BaseModel):
    """The identity of a result besides its name: hashes of the row's content, profile, model, tokenizer and sampling.

    Two results of equal keys have the same text. A tokenizer of "" is that of an earlier version's file: not known.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    row: str
    profile: str
    model: str
    tokenizer: str = ""
    sampling: str


class _Error(BaseModel):
    code: str
    message: str


class _Extra(BaseModel):
    key: Key
    line: int


class _Usage(BaseModel):
    completion_tokens: int


class _AnswerBody(BaseModel):
    usage: _Usage


class _Response(BaseModel):
    body: _AnswerBody


class Result(BaseModel):
    """The fields read from an existing line; its other fields are kept as they are."""

    custom_id: str
    response: _Response | None
    error: _Error | None
    kvcli: _Extra

    @property
    def failed(self) -> bool:
        """Whether the row failed."""
        return self.error is not None

    @property
    def output_tokens(self) -> int:
        """Tokens that were generated."""
        return 0 if self.response is None else self.response.body.usage.completion_tokens


@dataclass(frozen=True)
class Known:
    """A row with a result in the file: its key, and whether it failed."""

    key: Key
    failed: bool


class ResultFile:
    """Results by the names of their rows, in `path`; without one they go to standard output and are not kept track of.

    To be used as a context manager.

    Raises:
        KvcliError: the file holds something else, or another run writes to it (usage); it cannot be read or written.
    """

    def __init__(self, path: Path | None):
        self.path = path
        self.file = None if path is None else LineFile(path, "results", _START, "-o", lasting=True)
        self.known: dict[str, Known] = {}

    def __enter__(self) -> Self:
        if self.file is None:
            return self
        path, end = self.file.path, 0
        with ExitStack() as stack:
            stack.enter_context(self.file)
            for number, line, result in _results(path, self.file.lines(), self.file.hint):
                if result.custom_id in self.known:
                    what = f"{path}: line {number}: a second result for row {result.custom_id!r}"
                    raise usage_error(what, "remove one of the two lines")
                self.known[result.custom_id] = Known(result.kvcli.key, result.failed)
                end += len(line)
            self.file.end_after(end)
            stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.file is not None:
            self.file.__exit__(kind, error, trace)

    def add(self, result: Mapping[str, Any]) -> None:
        """Append a result, and wait until it is on disk."""
        line = json.dumps(result, ensure_ascii=False).encode(errors="replace") + b"\n"
        if self.file is not None:
            self.file.add(line)
            return
        try:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            what = f"standard output: cannot be written: {error.strerror}"
            raise KvcliError(what, "free some space and run the same command again") from None

    def take_out(self, names: Callable[[str], bool]) -> None:
        """Remove the results of some rows: a file without them replaces the file."""
        assert self.file is not None
        if not any(names(name) for name in self.known):
            return
        found = _results(self.file.path, self.file.lines(), self.file.hint)
        self.file.replace(line for _, line, result in found if not names(result.custom_id))
        self.known = {name: known for name, known in self.known.items() if not names(name)}


def read_results(path: Path) -> Iterator[tuple[bytes, Result]]:
    """Yield the lines of a file of results that a run may be writing to; an incomplete last line is left out.

    Raises:
        KvcliError: it cannot be read, or holds something else (usage).
    """
    hint = "name a file of results"
    try:
        with path.open("rb") as file:
            lines = whole_lines(path, file, "results", _START, hint)
            yield from ((line, result) for _, line, result in _results(path, lines, hint))
    except OSError as error:
        raise usage_error(f"{path}: {(error.strerror or 'cannot be read').lower()}", hint) from None


def is_written(path: Path) -> bool:
    """Tell whether a run is writing to the file."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def shown(names: list[str]) -> str:
    """Name a few of many rows."""
    rest = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + rest


def _results(path: Path, lines: Iterable[bytes], hint: str) -> Iterator[tuple[int, bytes, Result]]:
    """Parse the lines of a file, numbered from 1."""
    for number, line in enumerate(lines, 1):
        try:
            yield number, line, Result.model_validate_json(line)
        except ValidationError as error:
            if number == 1:
                raise not_ours(path, "results", hint) from None
            what = f"{path}: line {number} is not a result: {first_problem(error)}"
            raise usage_error(what, "remove that line to redo its row") from None
