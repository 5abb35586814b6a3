"""Spans on the host clock, and the Chrome trace they make (opens in Perfetto)."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

_NOTHING = nullcontext()


class Timeline:
    """Collects spans when switched on; costs one call and no clock when off.

    Each track is a line of the picture: one for the run, one for each sequence's cache work.
    """

    def __init__(self, enabled: bool = False):
        self.enabled = enabled
        self._origin = time.perf_counter_ns()
        self._events: list[dict[str, Any]] = []
        self._tracks: dict[str, int] = {}

    def span(self, name: str, track: str = "run", **details: Any) -> AbstractContextManager[None]:
        """Time a block as `name` on `track`; `details` show up when the span is clicked."""
        return self._timed(name, track, details) if self.enabled else _NOTHING

    def counter(self, name: str, values: dict[str, float]) -> None:
        """Draw values over time, as of now."""
        if self.enabled:
            self._events.append({"ph": "C", "name": name, "pid": 0, "ts": self._now(), "args": values})

    def save(self, path: Path) -> None:
        """Write the Chrome trace event format: complete events in microseconds, tracks named."""
        names = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": track}}
            for track, tid in self._tracks.items()
        ]
        process = {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "kvcli"}}
        path.write_text(json.dumps({"traceEvents": [process, *names, *self._events], "displayTimeUnit": "ms"}))

    @contextmanager
    def _timed(self, name: str, track: str, details: dict[str, Any]) -> Iterator[None]:
        start = self._now()
        try:
            yield
        finally:
            tid = self._tracks.setdefault(track, len(self._tracks))
            event = {"ph": "X", "name": name, "pid": 0, "tid": tid, "ts": start, "dur": self._now() - start}
            self._events.append({**event, "args": details} if details else event)

    def _now(self) -> float:
        return (time.perf_counter_ns() - self._origin) / 1000
