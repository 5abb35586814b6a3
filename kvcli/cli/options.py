"""Building blocks of the commands: options with their environment variable, and what an option's value came from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import typer

from kvcli.errors import ExitCode, KvcliError
from kvcli.sizes import parse_count

T = TypeVar("T")


def option(*names: str, panel: str, env: bool = True, **settings: Any) -> Any:
    """Declare an option in a help panel; `env` lets KVCLI_NAME set it, after its first long name."""
    long = next(name for name in names if name.startswith("--")).split("/")[0]
    variable = "KVCLI_" + long[2:].replace("-", "_").upper()
    return typer.Option(*names, rich_help_panel=panel, envvar=variable if env else None, show_envvar=False, **settings)


def flag(*names: str, panel: str, env: bool = True, **settings: Any) -> Any:
    """Declare an option that takes no value."""
    return option(*names, panel=panel, env=env, metavar="", **settings)


def positive_count(text: object) -> int:
    """Read a count of at least one: 512, 32K, 1M."""
    value = parse_count(str(text))
    if value < 1:
        raise ValueError(f"{text} is not at least 1")
    return value


def whole(text: object) -> int:
    """Read a whole number."""
    try:
        return int(str(text))
    except ValueError:
        raise ValueError(f"{text!r} is not a whole number") from None


def number(text: object) -> float:
    """Read a number."""
    try:
        return float(str(text))
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None


def assignments(settings: Iterable[str], name: str = "--set") -> dict[str, str]:
    """Read what --set was given, or another option `name`: KEY=VALUE, the last of a key counts."""
    values: dict[str, str] = {}
    for assignment in settings:
        key, equals, value = assignment.partition("=")
        if not equals or not key.strip():
            example = f"for example {name} budget=4K"
            raise KvcliError(f"{name} {assignment!r} is not KEY=VALUE", example, ExitCode.USAGE)
        values[key.strip().replace("-", "_")] = value.strip()
    return values


def names(text: str | None, name: str) -> list[str]:
    """Split a comma-separated list; `name` is the option it was given to."""
    return each(text, name, str)


def each(text: str | None, name: str, read: Callable[[str], T]) -> list[T]:
    """Read the entries of a comma-separated list, at least one where the option is given."""
    if text is None:
        return []
    entries = [entry.strip() for entry in text.split(",")]
    if not all(entries):
        raise KvcliError(f"{name} {text!r} has an empty entry", "separate the entries by single commas", ExitCode.USAGE)
    try:
        return [read(entry) for entry in entries]
    except ValueError as error:
        raise KvcliError(f"{name}: {error}", "separate the entries by commas", ExitCode.USAGE) from None


def given(context: typer.Context, names: Iterable[str]) -> list[str]:
    """Those of `names` that the command line itself sets (not the environment, not a default)."""
    return [name for name in names if _source(context, name) == "COMMANDLINE"]


def by_precedence(context: typer.Context, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values that are set at all, those of the environment first, so that the command line's come to lie on top."""
    present = {name: value for name, value in values.items() if value is not None}
    from_command_line = set(given(context, present))
    return {name: present[name] for name in sorted(present, key=lambda name: name in from_command_line)}


def _source(context: typer.Context, name: str) -> str:
    source = context.get_parameter_source(name)
    return source.name if source is not None else "DEFAULT"
