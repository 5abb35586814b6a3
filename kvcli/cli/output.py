"""Where results go: text streamed to stdout, or a file written whole."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from collections.abc import Sequence as Many
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import typer

from kvcli.errors import ExitCode, KvcliError
from kvcli.telemetry.report import Report, Sequence


class SequenceWriter:
    """Writes the texts of several sequences one after another while they grow side by side.

    The first sequence that is not finished streams; what comes for later ones waits for its turn. `titles` has one
    entry a sequence; they head the texts where there is more than one.
    """

    def __init__(self, stream: TextIO, titles: Many[str], headed: bool):
        self._stream = stream
        self._titles = titles
        self._headed = headed
        self._waiting: dict[int, list[str]] = {}
        self._finished: set[int] = set()
        self._turn = 0
        self._last = ""  # the end of what was written for the sequence whose turn it is
        self._begun = False
        self._gap = ""  # what parts the next text from the one before it

    def text(self, sequence: int, piece: str) -> None:
        """Write `piece`, or keep it until the turn of `sequence` has come."""
        if sequence == self._turn:
            self._write(piece)
        else:
            self._waiting.setdefault(sequence, []).append(piece)

    def finished(self, sequence: int) -> None:
        """Let the next unfinished sequence stream if it was the turn of `sequence`."""
        self._finished.add(sequence)
        while self._turn in self._finished:
            self._end()

    def close(self) -> None:
        """Write what still waits, in order."""
        while self._turn < len(self._titles):
            self._end()

    def _end(self) -> None:
        if self._begun and not self._last.endswith("\n"):
            self._stream.write("\n")
        self._turn += 1
        self._begun, self._last = False, ""
        for piece in self._waiting.pop(self._turn, []):
            self._write(piece)
        self._stream.flush()

    def _write(self, piece: str) -> None:
        if not piece:
            return
        if not self._begun and self._headed:
            self._stream.write(self._gap + header(self._titles[self._turn]))
            self._gap = "\n"
        self._begun, self._last = True, piece
        self._stream.write(piece)
        self._stream.flush()


def header(title: str) -> str:
    """The line above one text of several."""
    return f"==> {title} <==\n"


def title(source: str, sample: int, num_samples: int) -> str:
    """How a text of several is named: its document, and which sample of it where there are more."""
    return f"{source} (sample {sample + 1})" if num_samples > 1 else source


def texts(report: Report, headed: bool, num_samples: int) -> str:
    """All texts of a report as one string, as `SequenceWriter` writes them."""
    parts = []
    for sequence in report.sequences:
        if not sequence.text:
            continue
        head = header(title(sequence.source, sequence.sample, num_samples)) if headed else ""
        parts.append(head + sequence.text + ("" if sequence.text.endswith("\n") else "\n"))
    return "\n".join(parts)


def failed_sequence(source: str, error: KvcliError) -> Sequence:
    """The entry of a report for a document that could not be read."""
    return Sequence(source, 0, "", [], "error", 0, 0, error=error.what)


def check_writable(path: Path, option: str) -> None:
    """Refuse an output path before the work is done, not after. Raises `KvcliError` (usage)."""
    hint = f"give {option} a file in a directory that you can write to"
    if path.is_dir():
        raise KvcliError(f"{option} {path}: is a directory", hint, ExitCode.USAGE)
    if not path.parent.is_dir():
        raise KvcliError(f"{option} {path}: no directory {path.parent}", hint, ExitCode.USAGE)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise KvcliError(f"{option} {path}: permission denied", hint, ExitCode.USAGE)


def check_outputs(paths: Mapping[str, Path | None]) -> None:
    """Do what `check_writable` does for all options that name a file, and refuse the same file twice."""
    seen: dict[Path, str] = {}
    for option, path in paths.items():
        if path is None:
            continue
        check_writable(path, option)
        kept = path.is_file() or not path.exists()  # else a pipe, say, that takes one after the other
        if kept and (other := seen.setdefault(path.resolve(), option)) != option:
            raise KvcliError(f"{other} and {option} name the same file, {path}", "name two", ExitCode.USAGE)


def write_result(output: Path | None, text: str) -> None:
    """Put the result into the file or on stdout; where the file cannot take it, stdout gets it before the error."""
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        write_file(output, text)
    except KvcliError:
        typer.echo(text, nl=False)
        raise


def write_file(path: Path, content: str | bytes) -> None:
    """Write `content` whole or not at all: to a temporary file beside `path` that then takes its place.

    What is no regular file (a pipe, /dev/null) is written to directly. Raises `KvcliError` naming the path.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)
        else:
            _replace(path.resolve(), data)
    except OSError as error:
        what = f"{path}: cannot be written: {error.strerror}"
        raise KvcliError(what, "free some space, or name another file") from None


def _replace(path: Path, data: bytes) -> None:
    if path.exists():
        mode = path.stat().st_mode & 0o777
    else:
        mask = os.umask(0)
        os.umask(mask)
        mode = 0o666 & ~mask
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        Path(temporary).chmod(mode)
        Path(temporary).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(temporary).unlink()
        raise
