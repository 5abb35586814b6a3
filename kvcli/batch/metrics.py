"""Counts of a running batch for Prometheus, by its own client library (the extra kvcli[metrics])."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from kvcli.batch.tally import Tally
from kvcli.errors import usage_error

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_COUNTERS = {
    "rows_done": "Rows that were answered",
    "rows_failed": "Rows that came to nothing",
    "prompt_tokens": "Tokens of prompts that were read",
    "output_tokens": "Tokens that were generated",
    "prefill_seconds": "Time of reading prompts",
    "decode_seconds": "Time of decode steps",
    "steps": "Decode steps",
}
_GAUGES = {"rows": "Rows of the batch", "rows_in_flight": "Rows that are read or decoded"}


class _Collector:
    """Reads the counts when it is asked for them."""

    def __init__(self, tally: Tally):
        self.tally = tally

    def collect(self) -> Iterator[Metric]:
        """Give every count as it is now."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        found = self.tally.progress()
        values = {"rows_done": found.done, "rows_failed": found.failed, **found.model_dump()}
        values |= {"rows": found.total, "rows_in_flight": found.in_flight}
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"kvcli_batch_{name}", text, value=values[name])
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"kvcli_batch_{name}", text, value=values[name])


def serve(tally: Tally, port: int) -> Callable[[], None]:
    """Serve the counts at /metrics of a port; returns what ends it.

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
        raise usage_error(f"--metrics-port {port}: {error}", "give a port that is free") from None

    def end() -> None:
        server.shutdown()
        thread.join()
        server.server_close()

    return end
