"""What was answered, one line of JSON each, in a file that only grows: a run that was cut off goes on from it."""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from kvcli.errors import ExitCode, KvcliError

Key = tuple[str, int | None, float | None, int, str, int]
"""Task, length, depth, index, variant, sample: what a prediction is of."""


@dataclass(frozen=True)
class Prediction:
    """One answer of one variant, its score, and what it took.

    `attended` is the mean over decode steps, KV heads and the layers that a method retrieves in of the tokens read;
    `attended_share` the part of all KV that was read, over all layers. Bytes are those at the end, `bytes_to_device`
    what the decode moved. For a continuation that was fed, `nll` is the sum of its tokens' negative log-likelihoods
    in nats.
    """

    task: str
    length: int | None
    depth: float | None
    index: int
    variant: str
    sample: int
    text: str
    score: float | None
    finish_reason: str
    prompt_tokens: int
    cut_tokens: int
    output_tokens: int
    nll: float | None
    prefill_ms: float
    decode_ms: float
    steps: int
    attended: float | None
    attended_share: float | None
    device_kv_bytes: int
    host_kv_bytes: int
    bytes_to_device: int
    heads_checked: int
    heads_corrected: int
    pages_requested: int
    misses: int

    @property
    def key(self) -> Key:
        """What it is of."""
        return self.task, self.length, self.depth, self.index, self.variant, self.sample


_NAMES = frozenset(field.name for field in fields(Prediction))


def digest(configuration: dict[str, Any]) -> str:
    """Twelve hexadecimal digits over plain data."""
    return hashlib.sha256(json.dumps(configuration, sort_keys=True).encode()).hexdigest()[:12]


class Predictions:
    """The predictions of a run, by key; kept in `path` where there is one.

    The file's first line says what the run is. A last line that was not finished is cut off, everything before it is
    taken over. To be used as a context manager.

    Raises:
        KvcliError: usage: the file belongs to a run of other models, tasks or settings, or is no such file; runtime:
            it cannot be read or written.
    """

    def __init__(self, path: Path | None, configuration: dict[str, Any]):
        self.path = path
        self.configuration = configuration
        self.found: dict[Key, Prediction] = {}
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        if self.path is not None:
            try:
                self._open(self.path)
            except BaseException as error:
                self._close()
                if isinstance(error, OSError):
                    what = f"{self.path}: {(error.strerror or 'cannot be read').lower()}"
                    raise KvcliError(what, "name another file for --predictions") from None
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def __contains__(self, key: Key) -> bool:
        return key in self.found

    def __iter__(self) -> Iterator[Prediction]:
        return iter(self.found.values())

    def __len__(self) -> int:
        return len(self.found)

    def add(self, predictions: Iterable[Prediction]) -> None:
        """Keep predictions that belong together: after a crash all of them are there, or some of the last are not."""
        new = list(predictions)
        if self._file is not None:
            self._write([asdict(prediction) for prediction in new])
        self.found.update((prediction.key, prediction) for prediction in new)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _open(self, path: Path) -> None:
        self._file = path.open("r+b" if path.exists() else "w+b")
        _lock(path, self._file)
        known = self._file.read()
        whole = known[: known.rfind(b"\n") + 1]  # what follows the last line end was cut off in the middle
        header, *lines = whole.splitlines() or [b""]
        if header:
            self._check(path, header)
        elif known and not _is_beginning(known):
            raise _not_ours(path)
        for number, line in enumerate(lines, 2):
            prediction = _parse(path, number, line)
            self.found[prediction.key] = prediction
        self._file.truncate(len(whole))
        self._file.seek(len(whole))
        if not header:
            self._write([{"kvcli_eval": 1, "hash": digest(self.configuration), "configuration": self.configuration}])

    def _check(self, path: Path, header: bytes) -> None:
        try:
            found = json.loads(header)
            theirs, hashed = found["configuration"], found["hash"]
        except (ValueError, KeyError, TypeError):
            raise _not_ours(path) from None
        if hashed == digest(self.configuration) and theirs == self.configuration:
            return
        differing = [key for key in self.configuration if self.configuration[key] != theirs.get(key)]
        what = f"{path} belongs to another run: it differs in {', '.join(differing) or 'what it says of itself'}"
        raise KvcliError(what, "give --predictions another file, or repeat that run's options", ExitCode.USAGE)

    def _write(self, entries: list[dict[str, Any]]) -> None:
        assert self._file is not None
        try:
            self._file.write("".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries).encode())
            self._file.flush()
        except OSError as error:
            what = f"{self.path}: cannot be written: {error.strerror}"
            raise KvcliError(what, "free some space and run the same command again") from None


def _lock(path: Path, file: BinaryIO) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        what = f"{path}: another run is writing to it"
        raise KvcliError(what, "wait for it, or give --predictions another file", ExitCode.USAGE) from None


def _is_beginning(data: bytes) -> bool:
    """Tell whether a file without a whole line is one of ours that was cut off at once."""
    start = b'{"kvcli_eval"'
    return data[: len(start)] == start[: len(data)]


def _parse(path: Path, number: int, line: bytes) -> Prediction:
    try:
        entry = json.loads(line)
        if not isinstance(entry, dict) or set(entry) != _NAMES:
            raise ValueError
    except ValueError:
        what = f"{path}: line {number} is no prediction"
        raise KvcliError(what, "remove that line to have it answered again", ExitCode.USAGE) from None
    return Prediction(**entry)


def _not_ours(path: Path) -> KvcliError:
    return KvcliError(
        f"{path} is there already and no file of predictions", "give --predictions another file", ExitCode.USAGE
    )
