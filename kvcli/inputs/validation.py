"""Files from outside, validated by pydantic: what is wrong with one, in a single line."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails


def first_problem(error: ValidationError) -> str:
    """Say the first problem of a validation, such as "context should be a valid string" or "no field 'answer'"."""
    return all_problems(error)[0]


def all_problems(error: ValidationError) -> list[str]:
    """Say every problem of a validation as `first_problem` says the first."""
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
    """Say what a JSON parser found in one line of a file: the line's number is the caller's to tell."""
    return f"bad JSON: {re.sub(r' at line [0-9]+ column', ' at column', str(problem))}"
