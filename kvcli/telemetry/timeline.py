"""Spans on the host clock, and their Chrome trace (opens in Perfetto)."""

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_NOTHING = nullcontext()


@dataclass(frozen=True)
class Span:
    """Work from `start` to `end`, in microseconds since the timeline began; `lane` is the thread it ran on.

    Spans of one lane are nested or disjoint; those of several overlap.
    """

    name: str
    track: str
    start: float
    end: float
    lane: int = 0
    details: Mapping[str, Any] = field(default_factory=dict)


class Timeline:
    """Collects spans when switched on; costs one call and no clock when off.

    Each track is a line of the picture: one for the run, one for each sequence's cache work.
    """

    def __init__(self, enabled: bool = False):
        self.enabled = enabled
        self._spans: list[Span] = []
        self._origin = time.perf_counter_ns()

    @property
    def spans(self) -> list[Span]:
        """Spans that have ended, in the order in which they ended."""
        return self._spans

    def span(self, name: str, track: str = "run", **details: Any) -> AbstractContextManager[None]:
        """Time a block as `name` on `track`; `details` show up when the span is clicked."""
        return self._timed(name, track, details) if self.enabled else _NOTHING

    def add(self, name: str, track: str, begun: int, ended: int, **details: Any) -> None:
        """Record work between two times of the clock in nanoseconds (`time.perf_counter_ns`)."""
        if self.enabled:
            start, end = ((each - self._origin) / 1000 for each in (begun, ended))
            self._spans.append(Span(name, track, start, end, threading.get_ident(), details))

    def save(self, path: Path) -> None:
        """Write the spans as a Chrome trace."""
        path.write_text(chrome_trace({"kvcli": self.spans}))

    @contextmanager
    def _timed(self, name: str, track: str, details: dict[str, Any]) -> Iterator[None]:
        start = self._now()
        try:
            yield
        finally:
            self._spans.append(Span(name, track, start, self._now(), threading.get_ident(), details))

    def _now(self) -> float:
        return (time.perf_counter_ns() - self._origin) / 1000


def chrome_trace(groups: Mapping[str, Sequence[Span]]) -> str:
    """Format spans as a Chrome trace: a process for each group, a named line for each track and lane of it."""
    events: list[dict[str, Any]] = []
    for pid, (group, spans) in enumerate(groups.items()):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": group}})
        lines = {line: tid for tid, line in enumerate(dict.fromkeys((span.track, span.lane) for span in spans))}
        lanes = Counter(track for track, _ in lines)
        for (track, lane), tid in lines.items():
            name = track if lanes[track] == 1 else f"{track}, lane {lane}"
            events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}})
        for span in spans:
            event = {"ph": "X", "name": span.name, "pid": pid, "tid": lines[span.track, span.lane]}
            event |= {"ts": span.start, "dur": span.end - span.start}
            events.append(event | ({"args": dict(span.details)} if span.details else {}))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
