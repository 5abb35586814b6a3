"""Options of the commands: how one is declared, those that several commands have, and how values are read.

Where an option means the same in several commands, its name, help and environment variable stand here once; its default
stands in the command.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer

from kvcli.errors import ExitCode, KvcliError
from kvcli.sizes import parse_count

T = TypeVar("T")

# Panels of the help.
MODEL, METHOD, METHODS, SAMPLING, OUTPUT = "Model", "Method", "Methods", "Sampling", "Output"


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


def natural(text: object) -> int:
    """Read a whole number of at least one."""
    if (value := whole(text)) < 1:
        raise ValueError(f"{text} is not at least 1")
    return value


def number(text: object) -> float:
    """Read a finite number."""
    try:
        value = float(str(text))
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is not a finite number")
    return value


def device_name(text: object) -> str:
    """Read where to run; whether there is such a device is found out later."""
    if re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,4})?", str(text)) is None:
        raise ValueError(f"{text!r} is not auto, cpu, cuda or cuda:N")
    return str(text)


def dtype_name(text: object) -> str:
    """Read a dtype of weights and KV."""
    if text not in ("auto", "float32", "bfloat16", "float16"):
        raise ValueError(f"{text!r} is not auto, bfloat16, float16 or float32")
    return str(text)


def output_file(text: object) -> Path | None:
    """Read what -o names: - is stdout, as if the option were not given."""
    return None if str(text) == "-" else Path(str(text))


def complete_methods(incomplete: str) -> list[str]:
    """Names of methods for a shell's completion."""
    from kvcli.methods import method_names

    return [name for name in method_names() if name.startswith(incomplete)]


def complete_profiles(incomplete: str) -> list[str]:
    """Names of profiles for a shell's completion."""
    from kvcli.inputs.profiles import profile_names

    return [name for name in profile_names() if name.startswith(incomplete)]


def require_text(values: Mapping[str, Iterable[str | None] | None]) -> None:
    """Refuse what is no UTF-8 text: Python keeps other bytes of a command line as lone surrogates.

    Raises:
        KvcliError: names the option of such a value (usage).
    """
    for option_name, given_values in values.items():
        for value in given_values or ():
            if value is not None and any("\ud800" <= character <= "\udfff" for character in value):
                hint = "check the encoding of the terminal or script"
                raise KvcliError(f"{option_name} holds bytes that are not UTF-8 text", hint, ExitCode.USAGE)


def device(panel: str) -> Any:
    """Declare --device."""
    return option(
        "--device", panel=panel, metavar="NAME", parser=device_name, help="Where to run: auto, cpu, cuda, cuda:1."
    )


Model = Annotated[
    str | None,
    option(
        "--model",
        "-m",
        panel=MODEL,
        metavar="DIR|ID",
        help="Checkpoint directory or hub id; without it, the small demo model that comes with kvcli.",
    ),
]
Device = Annotated[str, device(MODEL)]
DType = Annotated[
    str,
    option(
        "--dtype",
        panel=MODEL,
        metavar="NAME",
        parser=dtype_name,
        help="Weights and KV: auto, bfloat16, float16, float32.",
    ),
]
LoadFormat = Annotated[
    Literal["auto", "dummy"],
    option("--load-format", panel=MODEL, help="dummy makes random weights up, of a shape or a config.json."),
]
Offline = Annotated[bool, flag("--offline", panel=MODEL, help="Use local files only, never the hub.")]

# Several methods side by side.
Methods = Annotated[
    str | None,
    option(
        "--method", panel=METHODS, env=False, metavar="A,B", help="Methods, comma-separated; full,freekv by default."
    ),
]
Profiles = Annotated[
    str | None,
    option("--profile", panel=METHODS, env=False, metavar="A,B", help="Profiles beside them, names or files."),
]
Budgets = Annotated[
    str | None,
    option("--budget", panel=METHODS, env=False, metavar="TOKENS,...", help="Budgets, each for every method."),
]
Settings = Annotated[
    list[str] | None,
    option("--set", panel=METHODS, env=False, metavar="KEY=VALUE", help="A setting for all that have it; repeatable."),
]

Temperature = Annotated[
    float,
    option(
        "--temperature",
        panel=SAMPLING,
        parser=number,
        metavar="T",
        help="0 takes the likeliest token, more is more random.",
    ),
]
TopP = Annotated[
    float,
    option(
        "--top-p",
        panel=SAMPLING,
        parser=number,
        metavar="P",
        help="Draw from the likeliest tokens that hold this probability, 0 to 1.",
    ),
]
NumSamples = Annotated[
    int, option("--num-samples", panel=SAMPLING, parser=whole, metavar="N", help="Texts to draw for each prompt.")
]

AsJson = Annotated[bool, flag("--json", panel=OUTPUT, env=False, help="One JSON object instead of text.")]
Output = Annotated[
    Path | None,
    option(
        "--output",
        "-o",
        panel=OUTPUT,
        env=False,
        metavar="FILE",
        parser=output_file,
        help="Write to FILE instead of stdout.",
    ),
]
Html = Annotated[
    Path | None,
    option("--html", panel=OUTPUT, env=False, metavar="FILE", help="Also write a page with charts, one offline file."),
]
Trace = Annotated[
    Path | None, option("--trace", panel=OUTPUT, env=False, metavar="FILE", help="Write spans as Chrome trace JSON.")
]
Quiet = Annotated[bool, flag("--quiet", "-q", panel=OUTPUT, help="Only the result: no progress or notes.")]
Debug = Annotated[bool, flag("--debug", panel=OUTPUT, help="Show the traceback of an error.")]


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
        raise KvcliError(f"{name}: {error}", f"mend it, or leave {name} out", ExitCode.USAGE) from None


def distinct(text: str | None, name: str) -> list[int]:
    """Read a comma-separated list of counts, each of them once."""
    return list(dict.fromkeys(each(text, name, positive_count)))


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
