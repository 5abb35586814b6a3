"""Answers with their scores, a line of JSON each, in a file that only grows: an interrupted run goes on from it."""

import fcntl
import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, BinaryIO, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.validation import first_problem

Key = tuple[str, int | None, float | None, int, str, int]
"""Task, length, depth, index, variant, sample: what a prediction is of."""

Count = Annotated[int, Field(ge=0, lt=2**63)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True)
class Prediction:
    """One answer of one variant, its score, and what it took.

    `attended` is the mean over decode steps, KV heads and the layers that a method retrieves in of the tokens read;
    `attended_share` the part of all KV that was read, over all layers. Bytes are those at the end, `bytes_to_device`
    what the decode moved. For a continuation that was fed, `nll` is the sum of its tokens' negative log-likelihoods
    in nats.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")  # of a line that is read

    task: str
    length: Count | None
    depth: Share | None
    index: Count
    variant: str
    sample: Count
    text: str
    score: Share | None
    finish_reason: str
    prompt_tokens: Count
    cut_tokens: Count
    output_tokens: Count
    nll: Annotated[float, Field(allow_inf_nan=False)] | None
    prefill_ms: Amount
    decode_ms: Amount
    steps: Count
    attended: Amount | None
    attended_share: Amount | None
    device_kv_bytes: Count
    host_kv_bytes: Count
    bytes_to_device: Count
    heads_checked: Count
    heads_corrected: Count
    pages_requested: Count
    misses: Count

    @property
    def key(self) -> Key:
        """What the prediction is of."""
        return self.task, self.length, self.depth, self.index, self.variant, self.sample


class _Header(BaseModel):
    """The first line of a file: the configuration of its run."""

    model_config = ConfigDict(strict=True)

    kvcli_eval: Literal[1]
    hash: str
    configuration: dict[str, Any]


_LINE = TypeAdapter(Prediction)


def digest(configuration: dict[str, Any]) -> str:
    """Return twelve hexadecimal digits over plain data."""
    return hashlib.sha256(json.dumps(configuration, sort_keys=True).encode()).hexdigest()[:12]


class Predictions:
    """The predictions of a run, by key; kept in `path` where there is one.

    The file's first line holds the configuration of the run. An unfinished last line is cut off, the lines before it
    are taken over. To be used as a context manager.

    Raises:
        KvcliError: the file belongs to a run of other models, tasks or settings, or is no file of predictions (usage);
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
            with suppress(OSError):  # what could not be written has been told by the write that failed
                self._file.close()

    def _open(self, path: Path) -> None:
        if path.exists() and not path.is_file():
            what = f"{path}: no regular file, which predictions are kept in and read from"
            raise KvcliError(what, "give --predictions another file", ExitCode.USAGE)
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
            found = _Header.model_validate_json(header)
        except ValidationError:
            raise _not_ours(path) from None
        if found.hash == digest(self.configuration) and found.configuration == self.configuration:
            return
        differing = [key for key, value in self.configuration.items() if value != found.configuration.get(key)]
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
        return _LINE.validate_json(line)
    except ValidationError as error:
        what = f"{path}: line {number} is no prediction: {first_problem(error)}"
        raise KvcliError(what, "remove that line to have it answered again", ExitCode.USAGE) from None


def _not_ours(path: Path) -> KvcliError:
    return KvcliError(
        f"{path} is there already and no file of predictions", "give --predictions another file", ExitCode.USAGE
    )
