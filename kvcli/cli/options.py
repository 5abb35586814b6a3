"""Options of the commands: how one is declared, those that several commands have, and how values are read.

Where an option means the same in several commands, its name, help and environment variable stand here once; its default
stands in the command.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from kvcli.errors import usage_error
from kvcli.sizes import parse_count, parse_count_or_share

if TYPE_CHECKING:
    from kvcli.inputs.variants import Variant

T = TypeVar("T")


class Panel:
    """A part of a command's help, and how options are declared in it."""

    def __init__(self, title: str, env: bool = False):
        self._title = title
        self._env = env
        """Whether KVCLI_NAME sets an option, after its first long name."""

    def option(
        self,
        names: str,
        metavar: str | None,
        help: str,
        parser: Callable[[object], object] | None = None,
        *,
        env: bool | None = None,
        **settings: Any,
    ) -> Any:
        """Declare an option: its names, what stands for its value, what it means, and what reads the value."""
        long = next(name for name in names.split() if name.startswith("--")).split("/")[0]
        variable = "KVCLI_" + long[2:].replace("-", "_").upper()
        return typer.Option(
            *names.split(),
            metavar=metavar,
            help=help,
            parser=parser,
            rich_help_panel=self._title,
            envvar=variable if (self._env if env is None else env) else None,
            show_envvar=False,
            **settings,
        )

    def flag(self, names: str, help: str, *, env: bool | None = None) -> Any:
        """Declare an option that takes no value."""
        return self.option(names, "", help, env=env)


MODEL, METHOD, SAMPLING = Panel("Model", env=True), Panel("Method", env=True), Panel("Sampling", env=True)
METHODS, OUTPUT = Panel("Methods"), Panel("Output")


def at_least(least: int, read: Callable[[str], float]) -> Callable[[object], Any]:
    """Make what reads a value by `read` and refuses one below `least`."""

    def reads(text: object) -> float:
        if (value := read(str(text))) < least:
            raise ValueError(f"{text} is not at least {least}")
        return value

    return reads


def whole(text: object) -> int:
    """Read a whole number."""
    try:
        return int(str(text))
    except ValueError:
        raise ValueError(f"{text!r} is not a whole number") from None


def number(text: object) -> float:
    """Read a finite number."""
    try:
        value = float(str(text))
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is not a finite number")
    return value


def positive(text: object) -> float:
    """Read a finite number above zero."""
    if (value := number(text)) <= 0:
        raise ValueError(f"{text} is not above 0")
    return value


positive_count = at_least(1, parse_count)
"""Reads a count of at least one: 512, 32K, 1M."""
token_budget = at_least(1, parse_count_or_share)
"""Reads a count as `positive_count` does, or a share of the prompt: 20%."""


def device_name(text: object) -> str:
    """Read where to run; whether there are such devices is found out later."""
    if re.fullmatch(r"auto|(cpu|cuda(:[0-9]{1,4})?)(,(cpu|cuda:[0-9]{1,4}))*", str(text)) is None:
        raise ValueError(f"{text!r} is not auto, cpu, cuda or cuda:N, nor several as in cuda:0,cuda:1")
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
                raise usage_error(f"{option_name} holds bytes that are not UTF-8 text", hint)


def device(panel: Panel) -> Any:
    """Declare --device."""
    return panel.option(
        "--device",
        "NAME",
        "Where to run: auto, cpu, cuda, cuda:1; or on several: cuda:0,cuda:1.",
        device_name,
        env=True,
    )


Model = Annotated[
    str | None,
    MODEL.option(
        "--model -m",
        "DIR|FILE|ID",
        "Checkpoint directory, GGUF file or hub id; without it, the small demo model that comes with kvcli.",
    ),
]
Device = Annotated[str, device(MODEL)]
DType = Annotated[
    Literal["auto", "bfloat16", "float16", "float32"],
    MODEL.option("--dtype", "NAME", "Weights and KV: auto, bfloat16, float16, float32."),
]
Weights = Annotated[
    Literal["auto", "wide", "int8", "int4", "fp8"],
    MODEL.option("--weights", "NAME", "auto: as stored; wide: unpacked; int8, int4 and fp8: quantised on loading."),
]
LoadFormat = Annotated[
    Literal["auto", "dummy"],
    MODEL.option("--load-format", None, "dummy makes random weights up, of a shape or a config.json."),
]
Offline = Annotated[bool, MODEL.flag("--offline", "Use local files only, never the hub.")]
Tokenizer = Annotated[
    str | None, MODEL.option("--tokenizer", "DIR|ID", "Take the tokenizer from here, not from the checkpoint.")
]

# Several methods side by side.
Methods = Annotated[str | None, METHODS.option("--method", "A,B", "Methods, comma-separated; full,freekv by default.")]
Profiles = Annotated[
    str | None,
    METHODS.option("--profile", "A,B", "Profiles beside them: names, files, or a set (paper-freekv)."),
]
Budgets = Annotated[
    str | None, METHODS.option("--budget", "TOKENS,...", "Budgets, each for every method; 20% is that of the prompt.")
]
KVDType = Annotated[
    Literal["auto", "int8", "int4"] | None,
    METHODS.option("--kv-dtype", "NAME", "How KV in host memory is held: auto as computed, int8, int4."),
]
Ablate = Annotated[bool, METHODS.flag("--ablate", "Add each method with its parts switched off, one by one.")]
Settings = Annotated[
    list[str] | None, METHODS.option("--set", "KEY=VALUE", "A setting for all that have it; repeatable.")
]

Temperature = Annotated[
    float, SAMPLING.option("--temperature", "T", "0 takes the likeliest token, more is more random.", number)
]
TopP = Annotated[
    float, SAMPLING.option("--top-p", "P", "Draw from the likeliest tokens that hold this probability, 0 to 1.", number)
]
NumSamples = Annotated[int, SAMPLING.option("--num-samples", "N", "Texts to draw for each prompt.", whole)]

AsJson = Annotated[bool, OUTPUT.flag("--json", "One JSON object instead of text.")]
Output = Annotated[Path | None, OUTPUT.option("--output -o", "FILE", "Write to FILE instead of stdout.", output_file)]
Html = Annotated[Path | None, OUTPUT.option("--html", "FILE", "Also write a page with charts, one offline file.")]
Trace = Annotated[Path | None, OUTPUT.option("--trace", "FILE", "Write spans as Chrome trace JSON.")]
Quiet = Annotated[bool, OUTPUT.flag("--quiet -q", "Only the result: no progress or notes.", env=True)]
Debug = Annotated[bool, OUTPUT.flag("--debug", "Show the traceback of an error.", env=True)]


def assignments(settings: Iterable[str], name: str = "--set") -> dict[str, str]:
    """Read what --set was given, or another option `name`: KEY=VALUE, the last of a key counts."""
    values: dict[str, str] = {}
    for assignment in settings:
        key, equals, value = assignment.partition("=")
        if not equals or not key.strip():
            raise usage_error(f"{name} {assignment!r} is not KEY=VALUE", f"for example {name} budget=4K")
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
        raise usage_error(f"{name} {text!r} has an empty entry", "separate the entries by single commas")
    try:
        return [read(entry) for entry in entries]
    except ValueError as error:
        raise usage_error(f"{name}: {error}", f"mend it, or leave {name} out") from None


def distinct(text: str | None, name: str) -> list[int]:
    """Read a comma-separated list of counts, each of them once."""
    return list(dict.fromkeys(each(text, name, positive_count)))


def compared(
    method: str | None,
    profile: str | None,
    settings: Iterable[str] | None,
    budget: str | None = None,
    kv_dtype: str | None = None,
) -> list[Variant]:
    """Resolve the methods and profiles that are set side by side: full and freekv where none is named."""
    from kvcli.inputs.variants import variants

    methods, profiles = names(method, "--method"), names(profile, "--profile")
    budgets = each(budget, "--budget", token_budget)
    wanted = assignments(settings or ()) | ({} if kv_dtype is None else {"kv_dtype": kv_dtype})
    return variants(methods or ([] if profiles else ["full", "freekv"]), profiles, budgets, wanted)


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
