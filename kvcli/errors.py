"""The exception that users see, its exit codes, and one-line descriptions of pydantic's errors."""

from __future__ import annotations

import re
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails


class ExitCode(IntEnum):
    """The exit code of the process; docs/guide.md lists all codes."""

    OK = 0
    RUNTIME = 1
    USAGE = 2
    WILL_NOT_FIT = 3
    PARTIAL = 4
    INTERRUPTED = 130


class KvcliError(Exception):
    """An error that the user can act on: the problem, with the value in it, and the way out.

    `what` is one line without a full stop at its end; `hint` says what to do (may be empty).
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


def first_problem(error: ValidationError) -> str:
    """Describe the first problem of a validation, such as "context should be a valid string" or "no field 'answer'"."""
    return all_problems(error)[0]


def all_problems(error: ValidationError) -> list[str]:
    """Describe every problem of a validation as `first_problem` does the first."""
    return [_said(problem) for problem in error.errors(include_url=False, include_input=False, include_context=False)]


def _said(problem: ErrorDetails) -> str:
    place = ".".join(map(str, problem["loc"]))
    if problem["type"] == "missing":
        return f"no field {place!r}"
    if problem["type"] == "json_invalid":
        return bad_json(problem["msg"].removeprefix("Invalid JSON: "))
    if problem["type"] == "extra_forbidden":
        return f"unknown field {place!r}"
    message = re.sub(r"^(Value error, |Input )", "", problem["msg"])
    return f"{place} {message}".lstrip()


def bad_json(problem: object) -> str:
    """Describe a JSON parser's problem with one line of a file; the caller adds the line's number."""
    return f"bad JSON: {re.sub(r' at line [0-9]+ column', ' at column', str(problem))}"
