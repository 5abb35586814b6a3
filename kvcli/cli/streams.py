"""The standard streams of the process, where the caller closed them or they can take no more."""

import fcntl
import os
import sys
from contextlib import suppress


def open_missing_streams() -> None:
    """Give every standard stream that the caller closed (`>&-`) a descriptor again, on which its use fails.

    Without one Python has None in its place, and the next file opened would get its number.
    """
    if sys.stdin is None:
        sys.stdin = os.fdopen(os.open(os.devnull, os.O_WRONLY), "r")
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")


def stdout_is_closed() -> bool:
    """Whether nothing can be written to standard output."""
    with suppress(OSError, ValueError, AttributeError):
        return fcntl.fcntl(sys.stdout.fileno(), fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    return False


def give_up_stdout() -> None:
    """Drop what standard output could not take; the interpreter would try again on its way out and complain."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
