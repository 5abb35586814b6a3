"""Environment variables that set options: those that are unknown, and those that a bad value came from."""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any

import typer

from kvcli.errors import ExitCode, KvcliError

_PREFIX = "KVCLI_"


def warn_of_unknown_variables(context: typer.Context) -> None:
    """Say on stderr which variables set nothing, unless -q is given: a mistyped name would be silent otherwise."""
    names = sorted(name for name in os.environ if name.startswith(_PREFIX))
    if not names or {"-q", "--quiet"} & set(sys.argv):
        return
    known = [parameter.envvar for parameter in _parameters(context.command) if parameter.envvar]
    for name in (name for name in names if name not in known):
        from kvcli.ui.console import print_note

        near = get_close_matches(name, known, n=1)
        print_note(f"the environment variable {name} sets nothing" + (f"; did you mean {near[0]}?" if near else ""))


def _parameters(command: Any) -> Iterator[Any]:
    """The parameters of a command, or of all commands of a group."""
    yield from command.params
    for one in getattr(command, "commands", {}).values():
        yield from _parameters(one)


def with_variable(error: KvcliError, arguments: Sequence[str]) -> KvcliError:
    """Name the variable that a refused value came from, where the command line does not give that option itself."""
    if error.exit_code != ExitCode.USAGE:
        return error
    for name, value in os.environ.items():
        option = "--" + name.removeprefix(_PREFIX).lower().replace("_", "-")
        setting = re.escape(option[2:].replace("-", "_"))
        if not name.startswith(_PREFIX) or any(given.partition("=")[0] == option for given in arguments):
            continue
        if re.search(rf"(?<![\w-])({re.escape(option)}|{setting} =)(?![\w-])", error.what) or repr(value) in error.what:
            hint = f"{name}={value} is set in the environment; {error.hint}"
            return KvcliError(error.what, hint, error.exit_code)
    return error
