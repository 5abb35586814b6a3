"""The one exception a user is meant to see."""

from enum import IntEnum


class ExitCode(IntEnum):
    """What the process tells its caller; docs/guide.md lists all codes."""

    OK = 0
    RUNTIME = 1
    USAGE = 2
    WILL_NOT_FIT = 3
    PARTIAL = 4
    INTERRUPTED = 130


class KvcliError(Exception):
    """Something the user can act on: what is wrong with the value in it, and the way out.

    `what` is one line without a full stop at its end, `hint` says what to do (may be empty).
    """

    def __init__(self, what: str, hint: str = "", exit_code: ExitCode = ExitCode.RUNTIME):
        super().__init__(what)
        self.what = what
        self.hint = hint
        self.exit_code = exit_code


def usage_error(what: str, hint: str = "") -> KvcliError:
    """Make the error of a bad input, exit code 2."""
    return KvcliError(what, hint, ExitCode.USAGE)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether memory has run out."""
    # Asked by name: torch may not be loaded, and its CPU allocator raises a plain RuntimeError.
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))
    )
