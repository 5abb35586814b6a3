"""A journal directory: each write adds the new state, and the whole can be read at any moment.

    segment-000000.safetensors ..    settled state, in each file what settled since the one before; these stay
    changing-000012.safetensors      state that changes at any time, and the tree: of the last write only
    journal.json                     the extent of the last write, which counts once this file is renamed into place

Every file is written under a temporary name, synchronised and renamed. A segment holds the checksum of the one before
it, and `journal.json` those of the last segment and of the changing state, so that a read returns what was written, or
an error.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kvcli.errors import KvcliError, usage_error
from kvcli.inputs.line_file import sync_folder
from kvcli.memory.state import State, StatePart

FORMAT = 1
HEAD = "journal.json"
SEGMENT_BYTES = 256 << 20
"""Bytes at which a segment is closed, so that the copies that writing needs stay small."""


class Head(BaseModel):
    """The content of `journal.json`: the number of segments that count, and the checksums of the files."""

    model_config = ConfigDict(extra="forbid")

    format: int = FORMAT
    writings: int = 0
    segments: int = 0
    last: str = ""
    """The checksum of the last segment."""
    files: dict[str, str] = {}
    """Checksums of all other files by name: the changing state, once written, and the files of `Journal.begin`."""


class Journal:
    """Opens a directory to continue it, or starts one with `begin`; one process at a time.

    Raises:
        KvcliError: another process holds the directory, there is no journal in it, or one of a newer kvcli (usage).
    """

    def __init__(self, directory: Path, head: Head | None = None):
        self.directory = directory
        self.written: dict[str, int] = {}
        """The amount of settled state in segments, by name."""
        try:
            if head is None and not (directory / HEAD).exists():
                raise usage_error(f"{directory}: holds no {HEAD}", "name a directory written by --checkpoint")
            self._lock = (directory / "lock").open("a")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise usage_error(f"{directory}: another process is using it", "wait until it has ended") from None
        except OSError as error:
            raise usage_error(f"{directory}: {error.strerror}", "name another directory") from None
        self.head = _read_head(directory) if head is None else head

    @classmethod
    def begin(cls, directory: Path, files: Mapping[str, bytes]) -> Journal:
        """Start a journal in a new or empty directory, with further `files` that never change.

        Raises:
            KvcliError: something else is there, or nothing can be written (usage).
        """
        hint = "name a new directory"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            left = {path.name for path in directory.iterdir() if path.suffix != ".part"} - {"lock", *files}
            if HEAD in left:
                raise usage_error(
                    f"{directory}: holds a generation already", f"{hint}, or go on with --resume {directory}"
                )
            if left:
                raise usage_error(f"{directory}: holds something else, {min(left)}", hint)
            journal = cls(directory, Head())
            for name, content in files.items():
                journal.add(name, content)
            journal.commit()
        except OSError as error:
            raise usage_error(f"{directory}: {error.strerror or error}", hint) from None
        return journal

    def add(self, name: str, content: bytes) -> None:
        """Write a further file, which counts from the next `commit` on."""
        self._place(name, lambda path: path.write_bytes(content))

    def read(self, name: str) -> bytes:
        """Read a further file.

        Raises:
            KvcliError: it differs from what was written (runtime).
        """
        self._check(name, self.head.files.get(name, ""))
        return (self.directory / name).read_bytes()

    def write(self, state: State) -> None:
        """Write what has settled since the last time and everything that changes, and commit it.

        Raises:
            OSError: it cannot be written; the previous write remains complete.
        """
        before = self.head.model_copy(deep=True)
        try:
            for parts in _batches(state.added):
                name = _segment(self.head.segments)
                self._tensors(name, parts, {"before": self.head.last})
                self.head.last = self.head.files.pop(name)
                self.head.segments += 1
            self.head.files.pop(_changing(before.writings), None)
            self.head.writings += 1
            about = {"tree": json.dumps(state.tree), "settled": json.dumps(state.settled)}
            self._tensors(_changing(self.head.writings), state.changing, about)
            self.commit()
        except BaseException:
            self.head = before
            raise
        self.written = state.settled
        self._remove(_changing(before.writings))

    def commit(self) -> None:
        """Make what was written count."""
        self._place(HEAD, lambda path: path.write_text(self.head.model_dump_json()))

    def tree(self) -> Any:
        """Return the tree of the last write; None if there was none yet.

        Raises:
            KvcliError: a file differs from what was written (runtime); so does `parts`.
        """
        name = _changing(self.head.writings)
        if name not in self.head.files:
            return None
        self._check(name, self.head.files[name])
        return json.loads(_about(self.directory / name)["tree"])

    def parts(self) -> Iterator[StatePart]:
        """Read all parts of the last write in order; afterwards the journal can be continued."""
        expected, names = self.head.last, list(map(_segment, range(self.head.segments)))
        for name in reversed(names):
            self._check(name, expected)
            expected = _about(self.directory / name)["before"]
        changing = _changing(self.head.writings)
        for name in (*names, changing):
            yield from _parts(self.directory / name)
        self.written = json.loads(_about(self.directory / changing)["settled"])

    def forget(self) -> None:
        """Drop all state, so that only the further files are left."""
        states = [*map(_segment, range(self.head.segments)), _changing(self.head.writings)]
        self.head = Head(files={name: digest for name, digest in self.head.files.items() if name not in states})
        self.commit()
        self._remove(*states)

    def close(self) -> None:
        """Let other processes work on it."""
        self._lock.close()

    def _tensors(self, name: str, parts: Iterable[StatePart], about: Mapping[str, str]) -> None:
        tensors = {part.name: part.values.contiguous().cpu() for part in parts}
        starts = json.dumps({part.name: part.start for part in parts})
        self._place(name, lambda path: save_file(tensors, path, {**about, "starts": starts}))

    def _place(self, name: str, write: Callable[[Path], Any]) -> None:
        """Let `write` write a temporary file, note its checksum, and rename it into place."""
        path = self.directory / f"{name}.part"
        try:
            write(path)
        except SafetensorError as error:  # the library wraps errors of the system in it
            raise OSError(str(error)) from error
        with path.open("rb+") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        path.replace(self.directory / name)
        sync_folder(self.directory)
        if name != HEAD:
            self.head.files[name] = digest

    def _check(self, name: str, digest: str) -> None:
        path = self.directory / name
        hint = "the file is torn or was changed: nothing of it is used"
        try:
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise KvcliError(f"{path}: {error.strerror}", hint) from None
        if found != digest:
            raise KvcliError(f"{path}: its checksum is wrong", hint)

    def _remove(self, *names: str) -> None:
        for name in names:
            with suppress(OSError):
                (self.directory / name).unlink()


def _read_head(directory: Path) -> Head:
    path = directory / HEAD
    try:
        data = json.loads(path.read_bytes())
        if isinstance(data, dict) and isinstance(found := data.get("format"), int) and found > FORMAT:
            raise usage_error(
                f"{path}: format {found}, but this kvcli reads up to {FORMAT}", "use the version of kvcli that wrote it"
            )
        return Head.model_validate(data)
    except (OSError, ValueError) as error:  # pydantic's errors are ValueErrors
        raise KvcliError(f"{path}: not a journal of kvcli: {str(error).splitlines()[0]}") from None


def _batches(parts: Iterable[StatePart]) -> Iterator[list[StatePart]]:
    """Group parts into segments of `SEGMENT_BYTES`, or of one longer part."""
    batch: list[StatePart] = []
    for part in parts:
        if batch and sum(each.values.nbytes for each in batch) + part.values.nbytes > SEGMENT_BYTES:
            yield batch
            batch = []
        batch.append(part)
    if batch:
        yield batch


def _parts(path: Path) -> Iterator[StatePart]:
    starts = json.loads(_about(path)["starts"])
    with safe_open(path, framework="pt") as file:
        for name, start in starts.items():
            yield StatePart(name, start, file.get_tensor(name))


def _about(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        about: dict[str, str] = file.metadata()
    return about


def _segment(index: int) -> str:
    return f"segment-{index:06}.safetensors"


def _changing(writing: int) -> str:
    return f"changing-{writing:06}.safetensors"
