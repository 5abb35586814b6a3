"""Results, a line of JSON each, in a file that only grows: each is on disk before the next row takes its place.

A run that ends at any moment, by a power cut even, has lost the rows in flight and nothing else. The same command goes
on from the file: a last line that was cut off is taken away, rows that are there are not run again.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from kvcli.errors import KvcliError, usage_error
from kvcli.inputs.validation import first_problem
from kvcli.store.journal import sync_folder

_SHOWN = 3  # rows named in a message
_START = b'{"custom_id"'


class Key(BaseModel):
    """What a result is of, besides its name: hashes of all that the row says, of profile, model and sampling.

    Two results of equal keys have the same text.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    row: str
    profile: str
    model: str
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
    """What is read of a line that was written before; what else it says is left as it is."""

    custom_id: str
    response: _Response | None
    error: _Error | None
    kvcli: _Extra

    @property
    def failed(self) -> bool:
        """Whether the row came to nothing."""
        return self.error is not None

    @property
    def output_tokens(self) -> int:
        """Tokens that were generated."""
        return 0 if self.response is None else self.response.body.usage.completion_tokens


@dataclass(frozen=True)
class Known:
    """A row that the file has: its key, and whether it failed."""

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
        self.known: dict[str, Known] = {}
        self._file: BinaryIO
        self._locked: list[BinaryIO] = []

    def __enter__(self) -> Self:
        if self.path is None:
            self._file = sys.stdout.buffer
            return self
        try:
            self._open(self.path)
        except BaseException as error:
            self._close()
            if isinstance(error, OSError):
                what = f"{self.path}: {(error.strerror or 'cannot be read').lower()}"
                raise KvcliError(what, "give -o another file") from None
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def add(self, result: Mapping[str, Any]) -> None:
        """Put a result at the end, and wait until it is on disk."""
        self._write(self._file, json.dumps(result, ensure_ascii=False).encode(errors="replace") + b"\n")

    def take_out(self, names: Callable[[str], bool]) -> None:
        """Take the results of some rows out: the file without them takes the place of the file."""
        assert self.path is not None
        if not any(names(name) for name in self.known):
            return
        beside = self.path.with_name(f".{self.path.name}.kvcli")
        rest = beside.open("w+b", buffering=0)
        _lock(self.path, rest)
        self._locked.append(rest)  # the lock of the file before is kept as well: who waits for it must not get it
        for _, line, result in _results(self.path, self._file):
            if not names(result.custom_id):
                rest.write(line)
        os.fsync(rest.fileno())
        beside.replace(self.path)
        sync_folder(self.path.resolve().parent)
        self._file = rest
        self.known = {name: known for name, known in self.known.items() if not names(name)}

    def _close(self) -> None:
        for file in self._locked:
            with suppress(OSError):  # what could not be written has been told by the write that failed
                file.close()

    def _open(self, path: Path) -> None:
        if path.exists() and not path.is_file():
            raise usage_error(f"{path}: no regular file, which results are kept in", "give -o a file, or leave it out")
        is_new = not path.exists()
        self._file = path.open("w+b" if is_new else "r+b", buffering=0)
        self._locked.append(self._file)
        _lock(path, self._file)
        if is_new:
            sync_folder(path.resolve().parent)
        end = 0
        for number, line, result in _results(path, self._file):
            if result.custom_id in self.known:
                what = f"{path}: line {number}: a second result of row {result.custom_id!r}"
                raise usage_error(what, "take one of the two lines out")
            self.known[result.custom_id] = Known(result.kvcli.key, result.failed)
            end += len(line)
        self._file.truncate(end)
        self._file.seek(end)

    def _write(self, file: BinaryIO, data: bytes) -> None:
        try:
            if self.path is None:
                file.write(data)
                file.flush()
                return
            while data:
                data = data[file.write(data) :]
            os.fsync(file.fileno())
        except BrokenPipeError:
            raise
        except OSError as error:
            what = f"{self.path or 'standard output'}: cannot be written: {error.strerror}"
            raise KvcliError(what, "free some space and run the same command again") from None


def read_results(path: Path) -> Iterator[tuple[bytes, Result]]:
    """Give the lines of a file of results that a run may be writing to; what is behind the last line end is left out.

    Raises:
        KvcliError: it cannot be read, or holds something else (usage).
    """
    try:
        with path.open("rb") as file:
            yield from ((line, result) for _, line, result in _results(path, file))
    except OSError as error:
        raise usage_error(f"{path}: {(error.strerror or 'cannot be read').lower()}", "name a file of results") from None


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


def _results(path: Path, file: BinaryIO) -> Iterator[tuple[int, bytes, Result]]:
    """Give the whole lines of a file from its beginning, with their numbers from 1 on."""
    file.seek(0)
    with open(os.dup(file.fileno()), "rb") as lines:  # noqa: PTH123 - a buffer over the same descriptor
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                if number == 1 and line[: len(_START)] != _START[: len(line)]:
                    raise _not_ours(path)
                return
            try:
                yield number, line, Result.model_validate_json(line)
            except ValidationError as error:
                if number == 1:
                    raise _not_ours(path) from None
                what = f"{path}: line {number} is no result: {first_problem(error)}"
                raise usage_error(what, "take that line out to have its row done again") from None


def _not_ours(path: Path) -> KvcliError:
    return usage_error(f"{path} is there already and no file of results", "give -o another file")


def _lock(path: Path, file: BinaryIO) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise usage_error(f"{path}: another run is writing to it", "wait for it, or give -o another file") from None
