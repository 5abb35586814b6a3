"""A file of lines that only grows, for one process at a time: a run that was ended while writing continues it.

A last line that was cut off is removed, and lines are written at once.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from kvcli.errors import KvcliError, usage_error


class LineFile:
    """Lines of `what`, of which the first begins with `start`, in `path`, given by `option`; use it in a `with`.

    With `lasting`, every line is on disk before `add` returns.

    Raises:
        KvcliError: it is not a regular file, or another process writes to it (usage); it cannot be opened or written.
    """

    def __init__(self, path: Path, what: str, start: bytes, option: str, lasting: bool = False):
        self.path, self.what, self.start, self.lasting = path, what, start, lasting
        self.hint = f"give {option} another file"
        self._file: BinaryIO
        self._locked: list[BinaryIO] = []

    def __enter__(self) -> Self:
        try:
            self._open()
        except BaseException as error:
            self.__exit__(None, None, None)
            if isinstance(error, OSError):
                raise KvcliError(f"{self.path}: {(error.strerror or 'cannot be read').lower()}", self.hint) from None
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._locked:
            with suppress(OSError):  # the write that failed has reported it
                file.close()

    def lines(self) -> Iterator[bytes]:
        """Yield the complete lines from the beginning.

        Raises:
            KvcliError: it has no complete line, and holds something else (usage).
        """
        return whole_lines(self.path, self._file, self.what, self.start, self.hint)

    def end_after(self, size: int) -> None:
        """Cut the file after `size` bytes, and continue there."""
        self._file.truncate(size)
        self._file.seek(size)

    def add(self, lines: bytes) -> None:
        """Append complete lines.

        Raises:
            KvcliError: they cannot be written.
        """
        try:
            while lines:
                lines = lines[self._file.write(lines) :]
            if self.lasting:
                os.fsync(self._file.fileno())
        except OSError as error:
            what = f"{self.path}: cannot be written: {error.strerror}"
            raise KvcliError(what, "free some space and run the same command again") from None

    def replace(self, lines: Iterable[bytes]) -> None:
        """Replace the file by a file of these lines."""
        beside = self.path.with_name(f".{self.path.name}.kvcli")
        rest = beside.open("w+b", buffering=0)
        self._locked.append(rest)  # the old file's lock is kept as well: whoever waits for it must not get it
        self._lock(rest)
        for line in lines:
            rest.write(line)
        os.fsync(rest.fileno())
        beside.replace(self.path)
        sync_folder(self.path.resolve().parent)
        self._file = rest

    def _open(self) -> None:
        if self.path.exists() and not self.path.is_file():
            raise usage_error(f"{self.path}: not a regular file, which {self.what} need", self.hint)
        is_new = not self.path.exists()
        self._file = self.path.open("w+b" if is_new else "r+b", buffering=0)
        self._locked.append(self._file)
        self._lock(self._file)
        if is_new:
            sync_folder(self.path.resolve().parent)

    def _lock(self, file: BinaryIO) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise usage_error(f"{self.path}: another run is writing to it", f"wait for it, or {self.hint}") from None


def whole_lines(path: Path, file: BinaryIO, what: str, start: bytes, hint: str) -> Iterator[bytes]:
    """Yield the complete lines of an open file of `what` from its beginning; another process may be writing to it.

    Raises:
        KvcliError: it has no complete line, and does not begin like `start` (usage).
    """
    file.seek(0)
    with open(os.dup(file.fileno()), "rb") as lines:  # noqa: PTH123 - a buffer over the same descriptor
        for number, line in enumerate(lines):
            if not line.endswith(b"\n"):
                if number == 0 and line[: len(start)] != start[: len(line)]:
                    raise not_ours(path, what, hint)
                return
            yield line


def not_ours(path: Path, what: str, hint: str) -> KvcliError:
    """Make the error of a file that holds something else."""
    return usage_error(f"{path} exists and is not a file of {what}", hint)


def sync_folder(folder: Path) -> None:
    """Make sure that the names of the files in a folder are on disk, too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
