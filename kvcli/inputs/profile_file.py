"""The TOML file of a profile, and single values in TOML: parsed and validated, whatever they hold."""

import math
import tomllib
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from kvcli.errors import KvcliError, usage_error

_SHOWN = 60  # characters of a value in a message


class ProfileFile(BaseModel):
    """What a profile's file may hold; the settings are validated by their method."""

    model_config = ConfigDict(extra="forbid", strict=True)

    method: str
    description: str | None = None
    paper: str | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    provenance: dict[str, JsonValue] = Field(default_factory=dict)


def parse_profile(name: str, data: bytes) -> ProfileFile:
    """Read a profile's file; a byte order mark is dropped.

    Raises:
        KvcliError: no UTF-8 text, bad TOML (with line and column), an unknown key or a value of another kind (usage).
    """
    try:
        found = parse_toml(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise usage_error(f"profile {name}: not UTF-8 text (byte {error.start})", "save it as UTF-8") from None
    except ValueError as error:
        raise usage_error(f"profile {name}: bad TOML: {error}", "values: 2048, 0.9, true, or text in quotes") from None
    try:
        return ProfileFile(**found)
    except ValidationError as error:
        raise _refused(name, error, found) from None


def parse_toml(text: str) -> dict[str, Any]:
    """Read TOML whose numbers are finite and fit into 64 bits, with line ends as they come.

    Raises:
        ValueError: what is wrong, in one line.
    """
    try:
        found = tomllib.loads(text.replace("\r\n", "\n"))
        _check_numbers("", found)
    except RecursionError:
        raise ValueError("brackets are nested too deeply") from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError as error:
        # Python refuses to convert numbers of thousands of digits, with advice that is not for us.
        raise ValueError("a number is beyond 64 bits" if "digits" in str(error) else str(error)) from None
    return found


def shown(value: object) -> str:
    """Write a value into a message: in quotes where it is text, and cut where it is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def nearest(name: str, known: Iterable[str], kind: str) -> str:
    """Make a hint of the known name nearest to one that is unknown; of all names of that kind where none is near."""
    known = list(known)
    if close := get_close_matches(name, known, n=1):
        return f"did you mean {close[0]!r}?"
    return f"{kind}: {', '.join(known)}" if known else f"it takes no {kind}"


def _name(key: str) -> str:
    return key if key.isidentifier() else shown(key)


def _check_numbers(key: str, value: object) -> None:
    if isinstance(value, dict):
        for name, entry in value.items():
            _check_numbers(name, entry)
    elif isinstance(value, list):
        for entry in value:
            _check_numbers(key, entry)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"{_name(key)} is beyond 64 bits")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{_name(key)} = {value} is not a finite number")


def _refused(name: str, error: ValidationError, found: dict[str, Any]) -> KvcliError:
    problem = error.errors(include_url=False)[0]
    key = str(problem["loc"][0])
    keys = list(ProfileFile.model_fields)
    if problem["type"] == "extra_forbidden":
        hint = nearest(key, keys, "keys") if get_close_matches(key, keys) else "settings go below [settings]"
        return usage_error(f"profile {name}: unknown key {shown(key)}", hint)
    if problem["type"] == "missing":
        return usage_error(f"profile {name}: no method", 'add a line such as method = "freekv"')
    if len(problem["loc"]) > 1:
        place = ".".join(map(str, problem["loc"][:2]))
        return usage_error(
            f"profile {name}: {place} = {shown(problem['input'])} is no value of JSON", "put it in quotes"
        )
    expected = "a table" if key in ("settings", "provenance") else "text in quotes"
    return usage_error(f"profile {name}: {key} = {shown(found[key])} is not {expected}", "see kvcli methods NAME")
