"""Answers with their scores, a line of JSON each, in a file that only grows: an interrupted run continues from it."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from kvcli.errors import ExitCode, KvcliError, first_problem
from kvcli.inputs.line_file import LineFile, not_ours

Key = tuple[str, int | None, float | None, int, str, int]
"""Task, length, depth, index, variant and sample of a prediction."""

Count = Annotated[int, Field(ge=0, lt=2**63)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True)
class Prediction:
    """One answer of one variant, its score, and its cost.

    `attended` is the mean number of tokens read, over decode steps, KV heads and the layers in which a method
    retrieves; `attended_share` the part of all KV that was read, over all layers. Bytes are those at the end,
    `bytes_to_device` the traffic of the decode. For a continuation that was fed, `nll` is the sum of its tokens'
    negative log-likelihoods in nats. If it was compared with full attention, `kl` and `nll_gap` are means over its
    tokens, in nats, `same_top` is the share of tokens with the same likeliest token, and nothing was timed.
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
    decode_ms: Amount | None
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
    kl: Amount | None = None
    same_top: Share | None = None
    nll_gap: Annotated[float, Field(allow_inf_nan=False)] | None = None

    @property
    def key(self) -> Key:
        """The prediction's place in a run."""
        return self.task, self.length, self.depth, self.index, self.variant, self.sample


class _Header(BaseModel):
    """The first line of a file: the configuration of its run."""

    model_config = ConfigDict(strict=True)

    kvcli_eval: Literal[1]
    hash: str
    configuration: dict[str, Any]


_LINE = TypeAdapter(Prediction)
_START = b'{"kvcli_eval"'


def digest(configuration: dict[str, Any]) -> str:
    """Hash plain data into twelve hexadecimal digits."""
    return hashlib.sha256(json.dumps(configuration, sort_keys=True).encode()).hexdigest()[:12]


class Predictions:
    """The predictions of a run, by key; kept in `path` if one is given.

    The file's first line holds the configuration of the run. An unfinished last line is cut off, the lines before it
    are kept. To be used as a context manager.

    Raises:
        KvcliError: the file belongs to a run of other models, tasks or settings, or is not a file of predictions
            (usage); it cannot be read or written.
    """

    def __init__(self, path: Path | None, configuration: dict[str, Any]):
        self.file = None if path is None else LineFile(path, "predictions", _START, "--predictions")
        self.configuration = configuration
        self.found: dict[Key, Prediction] = {}

    def __enter__(self) -> Self:
        if self.file is not None:
            with ExitStack() as stack:
                stack.enter_context(self.file)
                self._read(self.file)
                stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.file is not None:
            self.file.__exit__(kind, error, trace)

    def __contains__(self, key: Key) -> bool:
        return key in self.found

    def __iter__(self) -> Iterator[Prediction]:
        return iter(self.found.values())

    def __len__(self) -> int:
        return len(self.found)

    def add(self, predictions: Iterable[Prediction]) -> None:
        """Keep predictions that belong together: after a crash all of them are there, or some of the last are not."""
        new = list(predictions)
        if self.file is not None:
            self.file.add(_lines([asdict(prediction) for prediction in new]))
        self.found.update((prediction.key, prediction) for prediction in new)

    def _read(self, file: LineFile) -> None:
        """Load the existing predictions, or begin with the header."""
        lines = list(file.lines())
        file.end_after(sum(map(len, lines)))
        if not lines:
            header = {"kvcli_eval": 1, "hash": digest(self.configuration), "configuration": self.configuration}
            file.add(_lines([header]))
            return
        self._check(file, lines[0])
        for number, line in enumerate(lines[1:], 2):
            prediction = _parse(file.path, number, line)
            self.found[prediction.key] = prediction

    def _check(self, file: LineFile, header: bytes) -> None:
        try:
            found = _Header.model_validate_json(header)
        except ValidationError:
            raise not_ours(file.path, file.what, file.hint) from None
        if found.hash == digest(self.configuration) and found.configuration == self.configuration:
            return
        differing = [key for key, value in self.configuration.items() if value != found.configuration.get(key)]
        what = f"{file.path} belongs to another run: it differs in {', '.join(differing) or 'what it says of itself'}"
        raise KvcliError(what, f"{file.hint}, or repeat that run's options", ExitCode.USAGE)


def _lines(entries: Iterable[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries).encode()


def _parse(path: Path, number: int, line: bytes) -> Prediction:
    try:
        return _LINE.validate_json(line)
    except ValidationError as error:
        what = f"{path}: line {number} is not a prediction: {first_problem(error)}"
        raise KvcliError(what, "remove that line to have it answered again", ExitCode.USAGE) from None
