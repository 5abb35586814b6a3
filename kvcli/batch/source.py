"""The source of rows: a file of lines, compressed or not, standard input, or a folder of documents.

A file is read more than once: to check all rows, and each row again when its turn comes. So only rows in flight are in
memory, however many rows there are. A source that cannot be read twice is copied, uncompressed, to a temporary file.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple, Self

from kvcli.errors import usage_error
from kvcli.inputs.prompts import STDIN

_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_LONGEST = 1 << 30  # bytes of a line


class Line(NamedTuple):
    """The place of a line: its number from 1 on, its first byte and its length in bytes."""

    number: int
    start: int
    size: int


class RowSource:
    """The lines of a batch; to be used as a context manager.

    Raises:
        KvcliError: there is no such file, it cannot be read or uncompressed, or has no rows (usage).
    """

    def __init__(self, name: str):
        self.name = "stdin" if name == STDIN else name
        self._path = None if name == STDIN else Path(name)
        self.folder = Path() if self._path is None else self._path.parent
        """The folder to which the names of documents are relative."""
        self._file: BinaryIO

    def __enter__(self) -> Self:
        try:
            self._file = self._open()
        except (OSError, ValueError, EOFError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or error
            hint = "give a .jsonl file (or .jsonl.gz, .jsonl.zst), a folder of documents, or - for standard input"
            raise usage_error(f"{self.name}: cannot be read: {reason}", hint) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def lines(self) -> Iterator[tuple[Line, bytes]]:
        """Yield every line that is not blank."""
        self._file.seek(0)
        start = number = 0
        while data := self._file.readline(_LONGEST):
            number += 1
            if not data.endswith(b"\n") and len(data) == _LONGEST:
                raise usage_error(f"{self.name}: line {number} is longer than {_LONGEST >> 30} GiB", "split the file")
            line, start = Line(number, start, len(data)), start + len(data)
            if number == 1:
                data = data.removeprefix(b"\xef\xbb\xbf")
            if data.strip():
                yield line, data
        if not number:
            raise usage_error(f"{self.name}: no rows", "a batch needs a line for each prompt")

    def read(self, line: Line) -> bytes:
        """Read a line again."""
        self._file.seek(line.start)
        data = self._file.read(line.size)
        return data.removeprefix(b"\xef\xbb\xbf") if line.number == 1 else data

    def _open(self) -> BinaryIO:
        if self._path is not None and self._path.is_dir():
            self.folder = self._path
            return _listed(self._path)
        file = sys.stdin.buffer if self._path is None else self._path.open("rb")
        start = file.peek(4)[:4] if hasattr(file, "peek") else b""
        if self._path is not None and self._path.is_file() and not start.startswith((_GZIP, _ZSTD)):
            return file
        with file if self._path is not None else nullcontext():
            return _unpacked(file, start)


def _unpacked(file: BinaryIO, start: bytes) -> BinaryIO:
    """Copy a file's content to a temporary one; its first bytes tell how it is compressed, if at all."""
    spool = tempfile.TemporaryFile()  # noqa: SIM115 - the source closes it
    try:
        if start.startswith(_GZIP):
            with gzip.open(file) as packed:
                shutil.copyfileobj(packed, spool)
        elif start.startswith(_ZSTD):
            import zstandard

            with zstandard.open(file) as packed:
                shutil.copyfileobj(packed, spool)
        else:
            shutil.copyfileobj(file, spool)
    except BaseException as error:
        spool.close()
        if type(error).__name__ == "ZstdError":
            raise ValueError(str(error)) from None
        raise
    return spool


def _listed(folder: Path) -> BinaryIO:
    """Write a row for each document in a folder, named by its path there; hidden files and results are left out."""
    spool = tempfile.TemporaryFile()  # noqa: SIM115 - the source closes it
    for directory, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(name for name in files if not name.startswith(".")):
            if _holds_results(Path(directory) / name):
                continue
            path = str((Path(directory) / name).relative_to(folder))
            spool.write(json.dumps({"custom_id": path, "document_file": path}).encode() + b"\n")
    return spool


def _holds_results(path: Path) -> bool:
    """Tell whether a file holds results of a batch or of a shard, or is to hold them: an empty file of lines."""
    try:
        with path.open("rb") as file:
            first = file.readline(1 << 20)
    except OSError:
        return False  # what is wrong with it is said where it is read
    return (not first and path.suffix == ".jsonl") or (first.startswith(b'{"custom_id"') and b'"response"' in first)
