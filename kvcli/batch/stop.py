"""Requests to end a batch before all rows are done."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

# `timeout` and some schedulers send a signal twice at once, to the process and to its group.
_REPEATED = 1.0  # seconds


class Stop:
    """A request to end: no further row begins, and rows in flight have `grace` seconds to finish.

    A second request drops them at once. While no loop listens nothing is in flight, and `ask` interrupts.
    """

    def __init__(self, grace: float = 0.0, listening: bool = False):
        self.grace, self._listening = grace, listening
        self.signal: int | None = None
        """The signal that asked first."""
        self._asked = self._deadline = float("inf")

    def ask(self, number: int = signal.SIGTERM) -> None:
        """Ask the batch to end, because of a signal.

        Raises:
            KeyboardInterrupt: no loop listens, and it is the first request.
        """
        now = time.monotonic()
        if not self.asked:
            self.signal, self._asked, self._deadline = number, now, now + self.grace
            if not self._listening:
                raise KeyboardInterrupt
        elif number == signal.SIGINT or now - self._asked > _REPEATED:
            self._deadline = now

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Let a loop watch for the request within this context."""
        before, self._listening = self._listening, True
        try:
            yield
        finally:
            self._listening = before

    @property
    def asked(self) -> bool:
        """Whether no further row shall begin."""
        return self.signal is not None

    @property
    def over(self) -> bool:
        """Whether the time of rows in flight is over."""
        return time.monotonic() >= self._deadline
