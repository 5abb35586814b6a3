"""The progress of a batch: counted while it runs, and passed to its watchers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO

from pydantic import ValidationError
from typing_extensions import override

from kvcli.errors import usage_error
from kvcli.telemetry.observer import Progress

if TYPE_CHECKING:
    from prometheus_client.core import Metric


class Watcher(Protocol):
    """A receiver of a batch's progress."""

    def update(self, tally: Tally, last: bool = False) -> None:
        """Take note; called after every step and every chunk of a prefill, and at the end of the run (`last`)."""


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
    """Rows that were in flight when a run was ended."""
    prompt_tokens: int = 0
    shared_tokens: int = 0
    output_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    steps: int = 0
    weight_bytes: int = 0
    weight_wait_seconds: float = 0.0
    experts_asked: int = 0
    experts_cached: int = 0
    work: float = 0.0
    work_done: float = 0.0
    reported: Progress | None = None
    """The progress that workers report, if they run the batch elsewhere."""
    watchers: list[Watcher] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def tell(self, last: bool = False) -> None:
        """Update all watchers."""
        for watcher in self.watchers:
            watcher.update(self, last)

    def progress(self) -> Progress:
        """Return the current counts."""
        if self.reported is not None:
            return self.reported
        seconds = time.monotonic() - self.started
        rate = self.work_done / seconds if seconds else 0.0
        counts = {name: value for name, value in vars(self).items() if name in Progress.model_fields}
        return Progress(
            **counts,
            seconds=seconds,
            left_seconds=(self.work - self.work_done) / rate if rate else None,
            output_tokens_per_second=self.output_tokens / seconds if seconds else 0.0,
            time=time.time(),
        )


class Regularly(Watcher):
    """Calls `write` at most once every `seconds`, and at the end."""

    def __init__(self, seconds: float, write: Callable[[Progress], None]):
        self.seconds, self.write = seconds, write
        self._next = time.monotonic() + seconds

    @override
    def update(self, tally: Tally, last: bool = False) -> None:
        if last or time.monotonic() >= self._next:
            self._next = time.monotonic() + self.seconds
            self.write(tally.progress())


def json_log(stream: TextIO) -> Callable[[Progress], None]:
    """Make a function that writes a line of JSON."""

    def write(found: Progress) -> None:
        with suppress(OSError):  # a reader of the log must not end the run
            stream.write(found.model_dump_json() + "\n")
            stream.flush()

    return write


def state_file(output: Path) -> Path:
    """Return the file in which a run that writes to `output` reports its progress."""
    return output.with_name(f".{output.name}.state")


def state_keeper(output: Path, seconds: float = 1.0) -> Watcher:
    """Make a watcher that keeps `state_file` up to date, for `kvcli batch status`."""
    path = state_file(output)
    beside = path.with_name(f"{path.name}.new")

    def write(found: Progress) -> None:
        with suppress(OSError):
            beside.write_text(found.model_dump_json())
            beside.replace(path)

    return Regularly(seconds, write)


def read_state(output: Path) -> Progress | None:
    """Read the last report of a run; None if there is none to read."""
    try:
        return Progress.model_validate_json(state_file(output).read_bytes())
    except (OSError, ValidationError):
        return None


_COUNTERS = {
    "rows_done": "Rows answered",
    "rows_failed": "Rows failed",
    "prompt_tokens": "Prompt tokens prefilled",
    "output_tokens": "Tokens generated",
    "prefill_seconds": "Time of prefills",
    "decode_seconds": "Time of decode steps",
    "steps": "Decode steps",
}
_GAUGES = {"rows": "Rows of the batch", "rows_in_flight": "Rows in prefill or decode"}


class _Collector:
    """Reads the counts whenever they are requested."""

    def __init__(self, tally: Tally):
        self.tally = tally

    def collect(self) -> Iterator[Metric]:
        """Yield every count as it is now."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        found = self.tally.progress()
        values = {"rows_done": found.done, "rows_failed": found.failed, **found.model_dump()}
        values |= {"rows": found.total, "rows_in_flight": found.in_flight}
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"kvcli_batch_{name}", text, value=values[name])
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"kvcli_batch_{name}", text, value=values[name])


def serve(tally: Tally, port: int) -> Callable[[], None]:
    """Serve the counts at /metrics of a port; return a function that ends it.

    Raises:
        KvcliError: the client library is not installed, or the port is taken (usage).
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError:
        raise usage_error("--metrics-port needs prometheus-client", "pip install 'kvcli[metrics]'") from None
    registry = CollectorRegistry()
    registry.register(_Collector(tally))
    try:
        server, thread = start_http_server(port, registry=registry)
    except (OSError, OverflowError) as error:
        raise usage_error(f"--metrics-port {port}: {error}", "give a free port") from None

    def end() -> None:
        server.shutdown()
        thread.join()
        server.server_close()

    return end
