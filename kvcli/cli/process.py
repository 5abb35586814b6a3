"""The process: signals that end it, all treated alike, and standard streams that are closed or take no more."""

import fcntl
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from kvcli.ui import starting

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# `timeout` and some schedulers send a signal twice at once, to the process and to its group.
_REPEATED = 1.0  # seconds


@contextmanager
def end_at_once() -> Iterator[None]:
    """End the process with one line on a signal within this context: libraries are being imported, no work is lost."""

    def end(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature of a handler
        starting.erase()
        os.write(2, b"kvcli: error: interrupted\n")
        os._exit(128 + number)

    with handled_by(end):
        yield


@contextmanager
def caught_signals() -> Iterator[list[int]]:
    """Raise KeyboardInterrupt on a signal within this context; yields the list of the signals received.

    Commands keep what there is on KeyboardInterrupt, and so does a job that its scheduler ends.
    """
    received: list[int] = []
    last = [float("-inf")]

    def interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature of a handler
        now = time.monotonic()
        repeated, last[0] = now - last[0] < _REPEATED and number != signal.SIGINT, now
        received.append(number)
        if not repeated:
            raise KeyboardInterrupt

    with handled_by(interrupt):
        yield received


@contextmanager
def handled_by(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """Install the handler for the signals that are not ignored, and restore the former handlers."""
    before: dict[signal.Signals, Any] = {}
    for number in _SIGNALS:
        # A shell's background jobs ignore Ctrl-C, and nohup ignores SIGHUP.
        if signal.getsignal(number) is not signal.SIG_IGN:
            try:
                before[number] = signal.signal(number, handler)
            except ValueError:  # signals are handled in the main thread only
                break
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def open_missing_streams() -> None:
    """Give every standard stream that the caller closed (`>&-`) a descriptor again, on which its use fails.

    Otherwise Python has None in its place, and the next file opened would get its number.
    """
    if sys.stdin is None:
        sys.stdin = os.fdopen(os.open(os.devnull, os.O_WRONLY), "r")
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")


def stdout_is_closed() -> bool:
    """Tell whether nothing can be written to standard output."""
    with suppress(OSError, ValueError, AttributeError):
        return fcntl.fcntl(sys.stdout.fileno(), fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    return False


def give_up_stdout() -> None:
    """Drop what standard output could not take; the interpreter would try again on its way out and complain."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
