"""Write the parts of the documentation that the code itself states.

python docs/from_code.py

The command-line reference (docs/reference.md), the man page (docs/kvcli.1), the keyword arguments in docs/python.md,
the page of methods (docs/methods.md) and the README's tables of methods and of needs come from the options, commands,
methods and profiles, and from nowhere else. A test compares the files with what this program would write.
"""

from __future__ import annotations

import ast
import html
import json
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import typer.core
import typer.main

from kvcli import __version__
from kvcli.cli.app import app
from kvcli.cli.methods import describe, markdown_table
from kvcli.inputs.options import GENERATION, ModelOptions, Option, Some
from kvcli.methods import home_of, own_method_names
from kvcli.methods.card import NEEDS, Card, read_card

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from common import put_between_marks  # noqa: E402
from tables import INDEXED, indexed_row, rows_of  # noqa: E402

NAME = "kvcli"
SPEED = ROOT / "benchmarks" / "results" / "cpu_decode.json"


def main() -> None:
    """Write every generated file."""
    for path, text in generated().items():
        path.write_text(text)


def generated() -> dict[Path, str]:
    """Every file that holds generated text, with all that it should hold."""
    commands = list(read_commands())
    cards = {name: read_card(name) for name in own_method_names()}
    readme, methods, results = ROOT / "README.md", ROOT / "docs" / "methods.md", ROOT / "docs" / "results.md"
    speed, python = speed_table(), ROOT / "docs" / "python.md"
    shown = put_between_marks(readme.read_text(), short_table(cards), "methods")
    loading = put_between_marks(python.read_text(), keyword_table({ModelOptions: ""}), "load")
    return {
        python: put_between_marks(loading, keyword_table(GENERATION), "generate"),
        readme: put_between_marks(put_between_marks(shown, needs_table(), "needs"), speed, "speed"),
        methods: put_between_marks(methods.read_text(), methods_page(cards), "methods"),
        results: put_between_marks(put_between_marks(results.read_text(), speed, "speed"), indexed_table(), "indexed"),
        ROOT / "docs" / "reference.md": reference(commands),
        ROOT / "docs" / "kvcli.1": man_page(commands),
    }


# ---------------------------------------------------------------- methods


def short_table(cards: dict[str, Card]) -> str:
    """The methods as the README lists them: what a step attends to, and where all KV lies."""
    heads = ("method", "what a step attends to", "all KV on")
    lines = [_row(heads), _row(["---"] * len(heads))]
    lines += [_row((f"`{name}`", card.title, "host" if card.offloads else "device")) for name, card in cards.items()]
    return "\n".join(lines) + "\n"


def needs_table() -> str:
    """What somebody may need, and the methods that serve it."""
    return "\n".join(_table(("need", "method"), [*NEEDS.items()])) + "\n"


def methods_page(cards: dict[str, Card]) -> str:
    """The full table, then for each method what its file says, its settings and its profiles."""
    return "\n".join([markdown_table(cards), *(_method_section(name) for name in cards)])


def _method_section(name: str) -> str:
    method = describe(name)
    source = (resources.files("kvcli.methods") / f"{home_of(name).replace('.', '/')}.py").read_text()
    title, _, body = (ast.get_docstring(ast.parse(source)) or "").partition("\n")
    lines = [f"## {name}", "", title, "", _markdown(body), ""]
    if method["settings"]:
        lines += ["| setting | default | values | meaning |", "| --- | --- | --- | --- |"]
        lines += [
            _row((f"`{s['name']}`", _code(_plain(s["default"])), _values(s), s["description"]))
            for s in method["settings"]
        ]
    for profile in method["profiles"]:
        changed = [
            f"{s['name']} {_plain(profile['settings'][s['name']])}"
            for s in method["settings"]
            if profile["settings"][s["name"]] != s["default"]
        ]
        changed += [f"GPU step {profile['gpu_step']}"] if profile["gpu_step"] != method["gpu_step"] else []
        settings = ", ".join(changed) or "all defaults"
        lines += ["", f"Profile `{profile['name']}`: {profile['description']} ({profile['paper']}); {settings}."]
    return "\n".join(lines) + "\n"


def _plain(value: Any) -> str:
    """A setting's value as TOML has it; nothing for one that is not set."""
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _values(setting: dict[str, Any]) -> str:
    if setting["choices"]:
        return ", ".join(f"`{choice}`" for choice in setting["choices"])
    if setting["type"] == "boolean":
        return "`true`, `false`"
    low, high, unit = setting["minimum"], setting["maximum"], setting["unit"]
    if low is not None and high is not None:
        return f"{low} to {high} {unit}".strip()
    return f"{low} or more {unit}".strip() if low is not None else unit


# ---------------------------------------------------------------- speed


def speed_table() -> str:
    """How many times faster a decode step is than transformers', from the results of benchmarks/cpu_decode.py."""
    columns = {
        "`full`": "full_speedup",
        "`freekv`, low similarity": "turning_speedup",
        "`freekv`, high similarity": "steady_speedup",
    }
    lines = [_row(("context", *map(str.strip, columns))), _row(["---"] * (len(columns) + 1))]
    for row in json.loads(SPEED.read_text())["rows"]:
        cells = (f"{row[key]['median']:.1f}x" for key in columns.values())
        lines.append(_row((f"{row['context'] // 1024}K", *cells)))
    return "\n".join(lines) + "\n"


def indexed_table() -> str:
    """Steps of a model that selects by itself, from the results of `benchmarks/cpu_decode.py --indexed`."""
    return "\n".join(_table(INDEXED, [tuple(indexed_row(row)) for row in rows_of("cpu_indexed")])) + "\n"


# ---------------------------------------------------------------- commands


@dataclass(frozen=True)
class Parameter:
    """An option or argument of a command, as its help shows it; `names` are the option's or the argument's own."""

    names: tuple[str, ...]
    value: str
    help: str
    default: str
    variable: str
    panel: str
    is_argument: bool


@dataclass(frozen=True)
class Command:
    """A command with its help in paragraphs, the first of which is its summary; kvcli itself has no name."""

    name: str
    paragraphs: tuple[str, ...]
    parameters: tuple[Parameter, ...]

    @property
    def synopsis(self) -> str:
        """How the command is called."""
        words = [NAME, self.name, "[OPTIONS]", *(p.value for p in self.parameters if p.is_argument)]
        return " ".join(word for word in words if word) if self.name else f"{NAME} [OPTIONS] COMMAND ..."


def read_commands() -> Iterator[Command]:
    """The program itself, then its commands in the order of its help."""
    root = typer.main.get_command(app)
    commands = [pair for name, command in root.commands.items() for pair in _with_own_commands(name, command)]
    for name, command in [("", root), *commands]:
        if command.hidden:
            continue
        hints = get_type_hints(command.callback, include_extras=True)
        parameters = tuple(_parameter(each, hints.get(each.name)) for each in command.params if not each.hidden)
        yield Command(name, tuple((command.help or "").split("\n\n")), parameters)


def _with_own_commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """A command, or the commands of a group; where one needs no name, the first goes by the name of the group."""
    nameless = type(command) is not typer.core.TyperGroup
    for place, (own, each) in enumerate(getattr(command, "commands", {"": command}).items()):
        yield (name if place == 0 and nameless else f"{name} {own}"), each


def _parameter(parameter: Any, hint: Any) -> Parameter:
    is_argument = parameter.param_type_name == "argument"
    value = parameter.metavar
    if value is None:
        value = "" if parameter.is_flag else "|".join(_choices(hint)) or "TEXT"
    if is_argument:
        value = value.strip("[].")
        value = f"{value}..." if parameter.nargs == -1 else value
        value = value if parameter.required else f"[{value}]"
    default = parameter.default
    shown = default not in (None, False, True, "") and default != [] and parameter.show_default
    long_first = sorted((*parameter.opts, *parameter.secondary_opts), key=lambda name: not name.startswith("--"))
    return Parameter(
        tuple(long_first),
        value,
        (parameter.help or "").strip(),
        str(default) if shown else "",
        str(parameter.envvar or ""),
        getattr(parameter, "rich_help_panel", None) or ("Arguments" if is_argument else "Options"),
        is_argument,
    )


def _choices(hint: Any) -> list[str]:
    """The values of a `Literal` within a type hint, none where there is none."""
    if get_origin(hint) is Literal:
        return [str(value) for value in get_args(hint)]
    return [choice for part in get_args(hint) for choice in _choices(part)]


def keyword_table(groups: dict[type, str]) -> str:
    """The options of groups as keyword arguments from Python."""
    options = [option for group, names in groups.items() for option in Some(names).of(group)]
    rows = [(_code(option.name), option.help, _default(option)) for option in options]
    return "\n".join(_table(("argument", "meaning", "default"), rows)) + "\n"


def _default(option: Option) -> str:
    if isinstance(option.show, str):
        return option.show
    return "" if option.default in (None, ..., (), {}) else _code(repr(option.default).replace("'", '"'))


def reference(commands: Iterable[Command]) -> str:
    """The command-line reference as a Markdown page."""
    lines = [
        "# Command line",
        "",
        "This page is generated from the commands themselves; `kvcli COMMAND --help` and `man kvcli` say the same.",
        "Counts of tokens may end in K or M: 4K is 4,096, 1M is 1,048,576. An option that names a variable can be set",
        "in the environment, too; what the command line says counts more. Every command has `--help`, `-h`.",
    ]
    for command in commands:
        lines += ["", f"## {NAME} {command.name}".rstrip(), "", command.paragraphs[0]]
        lines += ["", "```text", command.synopsis, "```"]
        for paragraph in command.paragraphs[1:]:
            lines += ["", *(["```sh", paragraph, "```"] if paragraph.startswith(f"{NAME} ") else [paragraph])]
        for panel in dict.fromkeys(parameter.panel for parameter in command.parameters):
            shown = [parameter for parameter in command.parameters if parameter.panel == panel]
            rows = [(_usage(p), p.help, _code(p.default), _code(p.variable)) for p in shown]
            lines += ["", *_table((panel.lower(), "meaning", "default", "variable"), rows)]
    return "\n".join(lines) + "\n"


def _usage(parameter: Parameter) -> str:
    if parameter.is_argument:
        return _code(parameter.value)
    return ", ".join(_code(f"{name} {parameter.value}".rstrip()) for name in parameter.names)


def _code(text: str) -> str:
    """Text in the face of code; as HTML where it holds a bar, which Markdown's tables read as the end of a cell."""
    if "|" in text:
        return f"<code>{html.escape(text).replace('|', '&#124;')}</code>"
    return f"`{text}`" if text else ""


def _table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """A table of the columns in which any row has something to say."""
    keep = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    return [_row(row[i] for i in keep) for row in (columns, ("---",) * len(columns), *rows)]


def _row(cells: Iterable[str]) -> str:
    escaped = (cell.replace("|", "&#124;").replace("\n", " ") for cell in cells)
    return f"| {' | '.join(escaped)} |"


def _markdown(text: str) -> str:
    """A docstring as Markdown: a list stands apart from the paragraph before it."""
    return re.sub(r"\n(?!- |  |\n)([^\n]+)\n- ", r"\n\1\n\n- ", textwrap.dedent(text).strip("\n"))


def man_page(commands: Iterable[Command]) -> str:
    """The manual page kvcli(1) in the macros of man(7)."""
    program, *others = commands
    lines = [
        f'.TH KVCLI 1 "" "kvcli {__version__}" "User Commands"',
        ".SH NAME",
        f"kvcli \\- {_roff(program.paragraphs[0].rstrip('.'))}",
        ".SH SYNOPSIS",
    ]
    for command in others:
        lines += [f".B {NAME} {command.name}", _roff(command.synopsis.partition(f" {command.name} ")[2]), ".br"]
    lines += [".SH OPTIONS", *_roff_parameters(program)]
    for command in others:
        lines += [f'.SH "COMMAND {_roff(command.name.upper())}"']
        for paragraph in command.paragraphs:
            example = paragraph.startswith(f"{NAME} ")
            lines += [".PP", *([".EX", _roff(paragraph), ".EE"] if example else [_roff(paragraph)])]
        lines += _roff_parameters(command)
    lines += [
        ".SH ENVIRONMENT",
        "An option whose text names a variable can be set by it. The command line counts more.",
    ]
    return "\n".join(lines) + "\n"


def _roff_parameters(command: Command) -> Iterator[str]:
    for parameter in command.parameters:
        names = parameter.names
        value = f" \\fI{_roff(parameter.value)}\\fR" if parameter.value else ""
        usage = value.strip() if parameter.is_argument else ", ".join(f"\\fB{_roff(n)}\\fR{value}" for n in names)
        default = f" Default: {parameter.default}." if parameter.default else ""
        variable = f" Variable: {parameter.variable}." if parameter.variable else ""
        yield from (".TP", usage, _roff(parameter.help + default + variable))


def _roff(text: str) -> str:
    """Text as it stands, without what roff would take for a request or an escape."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return "\n".join(f"\\&{line}" if line.startswith((".", "'")) else line for line in escaped.splitlines())


if __name__ == "__main__":
    main()
