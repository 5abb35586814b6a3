"""What a batch has done so far: counted while it runs, and told to whoever watches."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TextIO

from pydantic import BaseModel, ConfigDict, ValidationError


class Snapshot(BaseModel):
    """A batch at one moment. The names are a contract with readers of `--log-json` and of `status --json`.

    Rows: `total` of the batch or its shard, `earlier` in the file already (`earlier_failed` of them failed), `done` and
    `failed` by this run (a failed one is not done), `in_flight`. Seconds: since the run began, and those of prefill and decode steps within; `left`
    is estimated, None before there is something to go by.
    """

    model_config = ConfigDict(frozen=True)

    total: int
    earlier: int
    earlier_failed: int
    done: int
    failed: int
    in_flight: int
    prompt_tokens: int
    shared_tokens: int
    output_tokens: int
    seconds: float
    prefill_seconds: float
    decode_seconds: float
    steps: int
    left_seconds: float | None
    output_tokens_per_second: float
    time: float


class Watcher(Protocol):
    """Whoever is told how a batch gets on."""

    def update(self, tally: Tally, last: bool = False) -> None:
        """Take note; called after every step and every chunk of a prefill, and when the run has ended (`last`)."""


@dataclass
class Tally:
    """Counts of one run; `work` is in decode steps (`kvcli.batch.order.work`)."""

    total: int = 0
    earlier: int = 0
    earlier_failed: int = 0
    done: int = 0
    failed: int = 0
    in_flight: int = 0
    dropped: int = 0
    prompt_tokens: int = 0
    shared_tokens: int = 0
    output_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    steps: int = 0
    work: float = 0.0
    work_done: float = 0.0
    problems: dict[str, str] = field(default_factory=dict)
    """Messages of the first rows that failed, by their names."""
    watchers: list[Watcher] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def tell(self, last: bool = False) -> None:
        """Let all watchers look."""
        for watcher in self.watchers:
            watcher.update(self, last)

    def snapshot(self) -> Snapshot:
        """Give the counts of this moment."""
        seconds = time.monotonic() - self.started
        rate = self.work_done / seconds if seconds else 0.0
        return Snapshot(
            total=self.total,
            earlier=self.earlier,
            earlier_failed=self.earlier_failed,
            done=self.done,
            failed=self.failed,
            in_flight=self.in_flight,
            prompt_tokens=self.prompt_tokens,
            shared_tokens=self.shared_tokens,
            output_tokens=self.output_tokens,
            seconds=seconds,
            prefill_seconds=self.prefill_seconds,
            decode_seconds=self.decode_seconds,
            steps=self.steps,
            left_seconds=(self.work - self.work_done) / rate if rate else None,
            output_tokens_per_second=self.output_tokens / seconds if seconds else 0.0,
            time=time.time(),
        )


class _Timed(Watcher):
    """Calls `write` at most once in so many seconds, and at the end."""

    def __init__(self, seconds: float, write: Callable[[Snapshot], None]):
        self.seconds, self.write = seconds, write
        self._next = time.monotonic() + seconds

    def update(self, tally: Tally, last: bool = False) -> None:
        if last or time.monotonic() >= self._next:
            self._next = time.monotonic() + self.seconds
            self.write(tally.snapshot())


def json_log(stream: TextIO, seconds: float = 60.0) -> Watcher:
    """Make what writes a line of JSON a minute, and one at the end."""

    def write(found: Snapshot) -> None:
        with suppress(OSError):  # who reads the log must not end the run
            stream.write(found.model_dump_json() + "\n")
            stream.flush()

    return _Timed(seconds, write)


def state_file(output: Path) -> Path:
    """Where a run that writes to `output` says how it gets on."""
    return output.with_name(f".{output.name}.state")


def state_keeper(output: Path, seconds: float = 1.0) -> Watcher:
    """Make what keeps `state_file` up to date, for `kvcli batch status`."""
    path = state_file(output)
    beside = path.with_name(f"{path.name}.new")

    def write(found: Snapshot) -> None:
        with suppress(OSError):
            beside.write_text(found.model_dump_json())
            os.replace(beside, path)

    return _Timed(seconds, write)


def read_state(output: Path) -> Snapshot | None:
    """Read what a run has last said of itself; None where there is nothing to be read."""
    try:
        return Snapshot.model_validate_json(state_file(output).read_bytes())
    except (OSError, ValidationError):
        return None

