"""A line on the terminal while the libraries are imported: there at once, gone before anything else is shown."""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress

_WAITS = ("generate", "batch", "chat", "prefill", "eval", "calibrate", "profile", "plan", "doctor")
_NOT_WITH = ("-q", "--quiet", "-h", "--help")
_TEXT = "kvcli: starting"

_shown = False


def say(arguments: Sequence[str]) -> None:
    """Show the line if stderr is a terminal and a command line, not parsed yet, is one of those that take seconds."""
    global _shown
    quiet = os.environ.get("KVCLI_QUIET", "0") not in ("", "0") or not set(arguments).isdisjoint(_NOT_WITH)
    if quiet or "_KVCLI_COMPLETE" in os.environ or not arguments or arguments[0] not in _WAITS:
        return
    with suppress(OSError, ValueError, AttributeError):  # of streams that are closed
        types_in = "-" in arguments and sys.stdin.isatty()
        if sys.stderr.isatty() and not types_in:
            sys.stderr.write(_TEXT)
            sys.stderr.flush()
            _shown = True


def erase() -> None:
    """Remove the line, if it is there."""
    global _shown
    if _shown:
        _shown = False
        with suppress(OSError, ValueError):
            sys.stderr.write(f"\r{' ' * len(_TEXT)}\r")  # spaces, which every terminal knows
            sys.stderr.flush()
