"""Where the phases of a step run: a main stream, others beside it, and points that they wait for.

Work of one stream runs in the order in which it was given. Nothing else orders two streams but the points named in
`after`, `wait` and `join`: work that writes what another stream reads has to name one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from typing_extensions import override

Point = Any
"""A place in a stream that others can wait for."""

Work = Callable[[], None]

PRIORITIES = {"main": -1, "correction": -2}
"""What a step waits for goes before what it does not: the recall streams; a lower number is more urgent."""


class Streams(ABC):
    """The streams of one step after another."""

    @abstractmethod
    def mark(self) -> Point:
        """Name the point that the main stream has reached."""

    @abstractmethod
    def submit(self, name: str, work: Work, after: Sequence[Point]) -> Point:
        """Do work in a stream, once all points of `after` are reached; gives the point at which it is done."""

    @abstractmethod
    def wait(self, point: Point) -> None:
        """Let the main stream wait."""

    @abstractmethod
    def join(self) -> None:
        """Let the main stream wait for everything: called at the end of a step, and where it goes to another device.

        Points from before are reached then: to wait for one is to wait for nothing.
        """

    @abstractmethod
    def forget(self) -> None:
        """Wait for nothing from before: the capture that it belonged to was broken off."""


class SerialStreams(Streams):
    """Does all work at once, in the order in which it is given: for a CPU, which has nothing to overlap with."""

    @override
    def mark(self) -> Point: ...

    def submit(self, name: str, work: Work, after: Sequence[Point]) -> Point:  # noqa: ARG002
        """See `Streams.submit`."""
        work()

    @override
    def wait(self, point: Point) -> None: ...

    @override
    def join(self) -> None: ...

    @override
    def forget(self) -> None: ...


class CudaStreams(Streams):
    """A CUDA stream for each stream, forked from the current one; may be captured in graphs, one after another.

    A graph must not wait for an event of another one, so a point is an event and the number of joins before it. `delay`
    is called in a stream before its work, for tests that make streams late at random.
    """

    def __init__(self, device: torch.device, delay: Work = lambda: None):
        self.device, self.delay = device, delay
        self.streams: dict[str, torch.cuda.Stream] = {}
        self.forked: set[str] = set()  # since the last join; a graph must not wait for a stream that is not in it
        self.joins = 0

    @override
    def mark(self) -> Point:
        return torch.cuda.current_stream(self.device).record_event(), self.joins

    @override
    def submit(self, name: str, work: Work, after: Sequence[Point]) -> Point:
        # Work that names no point begins with the main stream's.
        if name not in self.streams:
            self.streams[name] = torch.cuda.Stream(self.device, priority=PRIORITIES.get(name, 0))  # type: ignore[no-untyped-call]
        stream = self.streams[name]
        for event, _ in [point for point in after if self._counts(point)] or [self.mark()]:
            stream.wait_event(event)
        self.forked.add(name)
        with torch.cuda.stream(stream):
            self.delay()
            work()
            return stream.record_event(), self.joins

    @override
    def wait(self, point: Point) -> None:
        if self._counts(point):
            torch.cuda.current_stream(self.device).wait_event(point[0])

    @override
    def join(self) -> None:
        for name in sorted(self.forked):
            torch.cuda.current_stream(self.device).wait_stream(self.streams[name])
        self.forget()

    @override
    def forget(self) -> None:
        self.forked.clear()
        self.joins += 1

    def _counts(self, point: Point) -> bool:
        return bool(point[1] == self.joins)


def streams_for(device: torch.device) -> Streams:
    """Choose what the device has."""
    return CudaStreams(device) if device.type == "cuda" else SerialStreams()
