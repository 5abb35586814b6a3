"""Asking a batch to end before all rows are done."""

from __future__ import annotations

import signal
import time

# `timeout` and some schedulers send a signal twice at once, to the process and to its group.
_REPEATED = 1.0  # seconds


class Stop:
    """Takes the request to end: no row begins any more, and those in flight have `grace` seconds to come to theirs.

    Asked a second time, they are dropped at once.
    """

    def __init__(self, grace: float = 0.0):
        self.grace = grace
        self.signal: int | None = None
        """The signal that asked first."""
        self._asked = self._deadline = float("inf")

    def ask(self, number: int = signal.SIGTERM) -> None:
        """Ask, because of a signal."""
        now = time.monotonic()
        if not self.asked:
            self.signal, self._asked, self._deadline = number, now, now + self.grace
        elif number == signal.SIGINT or now - self._asked > _REPEATED:
            self._deadline = now

    @property
    def asked(self) -> bool:
        """Whether no further row shall begin."""
        return self.signal is not None

    @property
    def over(self) -> bool:
        """Whether the time of rows in flight is over."""
        return time.monotonic() >= self._deadline
