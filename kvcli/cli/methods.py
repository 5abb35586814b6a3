"""`kvcli methods`: what there is to choose from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcli.cli.options import flag, option
from kvcli.cli.output import check_writable, write_file

_OUTPUT = "Output"


def methods(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Show the settings and profiles of this method.", show_default=False),
    ] = None,
    as_json: Annotated[bool, flag("--json", panel=_OUTPUT, env=False, help="One JSON object instead.")] = False,
    output: Annotated[
        Path | None,
        option("--output", "-o", panel=_OUTPUT, env=False, metavar="FILE", help="Write to FILE instead of stdout."),
    ] = None,
    debug: Annotated[  # noqa: ARG001 - read by the guard around every command
        bool, flag("--debug", panel=_OUTPUT, help="Show the traceback of an error.")
    ] = False,
) -> None:
    """List the KV-cache methods and their profiles.

    kvcli methods freekv
    """
    from kvcli import console
    from kvcli.methods import method_names

    if output is not None:
        check_writable(output, "-o")
    entries = [describe(each) for each in ([name] if name is not None else method_names())]
    if as_json:
        text = json.dumps({"schema_version": 1, "methods": entries}, ensure_ascii=False) + "\n"
    elif name is not None:
        text = console.render(console.method_page(entries[0]), to_file=output is not None)
    else:
        text = console.render(console.method_list(entries), to_file=output is not None)
    if output is not None:
        write_file(output, text)
    else:
        typer.echo(text, nl=False)


def describe(name: str) -> dict[str, Any]:
    """One method as data: title, paper, settings, and the profiles with what each of them sets.

    Raises `KvcliError` (usage) for an unknown name.
    """
    from kvcli.methods import get_method
    from kvcli.profile import profile_names, resolve_profile

    method = get_method(name)
    profiles = [resolve_profile(profile=each) for each in profile_names()]
    return {
        "name": name,
        "title": method.title,
        "paper": method.paper,
        "settings": [_setting(key, field) for key, field in method.Config.model_json_schema()["properties"].items()],
        "profiles": [profile.as_dict() for profile in profiles if profile.method == name],
    }


def _setting(key: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": key,
        "type": schema.get("type", "any"),
        "default": schema.get("default"),
        "unit": schema.get("unit", ""),
        "minimum": schema.get("minimum", schema.get("exclusiveMinimum")),
        "maximum": schema.get("maximum", schema.get("exclusiveMaximum")),
        "choices": schema.get("enum"),
        "description": schema.get("description", ""),
    }
