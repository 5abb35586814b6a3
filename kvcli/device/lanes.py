"""Where the phases of a step run: a main lane, others beside it, and points that they wait for.

Work of one lane runs in the order in which it was given. Nothing else orders two lanes but the points named in
`after`, `wait` and `join`: whoever writes what another lane reads has to name one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

Point = Any
"""A place in a lane that others can wait for."""

Work = Callable[[], None]

PRIORITIES = {"correction": -1}
"""Lanes that the main one waits for go before those that it does not; a lower number is more urgent."""


class Lanes(ABC):
    """The lanes of one step after another."""

    @abstractmethod
    def mark(self) -> Point:
        """Name the point that the main lane has reached."""

    @abstractmethod
    def submit(self, lane: str, work: Work, after: Sequence[Point]) -> Point:
        """Do work in a lane, once all points of `after` are reached; gives the point at which it is done."""

    @abstractmethod
    def wait(self, point: Point) -> None:
        """Let the main lane wait."""

    @abstractmethod
    def join(self) -> None:
        """Let the main lane wait for everything: called at the end of a step."""


class OneAfterAnother(Lanes):
    """All work is done at once, by whoever gives it: for a CPU, which has nothing to overlap with."""

    def mark(self) -> Point:
        """See `Lanes.mark`."""

    def submit(self, lane: str, work: Work, after: Sequence[Point]) -> Point:  # noqa: ARG002
        """See `Lanes.submit`."""
        work()

    def wait(self, point: Point) -> None:
        """See `Lanes.wait`."""

    def join(self) -> None:
        """See `Lanes.join`."""


class Streams(Lanes):
    """A CUDA stream for each lane, forked from the current one; may be captured in a graph.

    `delay` is called in a lane before its work, for tests that make lanes late at random.
    """

    def __init__(self, device: torch.device, delay: Work = lambda: None):
        self.device, self.delay = device, delay
        self.streams: dict[str, torch.cuda.Stream] = {}
        self.forked: set[str] = set()  # since the last join; a graph must not wait for a stream that is not in it

    def mark(self) -> Point:
        """See `Lanes.mark`."""
        return torch.cuda.current_stream(self.device).record_event()

    def submit(self, lane: str, work: Work, after: Sequence[Point]) -> Point:
        """See `Lanes.submit`; work that names no point begins with the main lane's."""
        if lane not in self.streams:
            self.streams[lane] = torch.cuda.Stream(self.device, priority=PRIORITIES.get(lane, 0))  # type: ignore[no-untyped-call]
        stream = self.streams[lane]
        for point in after or [self.mark()]:
            stream.wait_event(point)
        self.forked.add(lane)
        with torch.cuda.stream(stream):
            self.delay()
            work()
            return stream.record_event()

    def wait(self, point: Point) -> None:
        """See `Lanes.wait`."""
        torch.cuda.current_stream(self.device).wait_event(point)

    def join(self) -> None:
        """See `Lanes.join`."""
        for lane in sorted(self.forked):
            torch.cuda.current_stream(self.device).wait_stream(self.streams[lane])
        self.forked.clear()


def lanes_of(device: torch.device) -> Lanes:
    """Choose what the device has."""
    return Streams(device) if device.type == "cuda" else OneAfterAnother()
