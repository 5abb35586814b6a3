"""`kvcli methods`: list the methods, or show one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from kvcli.cli.command import command
from kvcli.cli.output import check_outputs, write_result
from kvcli.errors import usage_error
from kvcli.inputs.options import METHODS, OUTPUT, Output, Some, argument, group

if TYPE_CHECKING:
    from kvcli.methods.card import Card


@group
class Listed:
    """What to list."""

    name: str | None = argument(None, "NAME", "Show the settings and profiles of this method.")
    paper: str | None = METHODS(
        None, "--paper", "NAME", "Show what a paper ran, with settings, tables and figures (freekv)."
    )


@group
class Listing(Output):
    """The form of the list, and where to write it."""

    markdown: bool = OUTPUT.flag("--markdown", "Print the list as a Markdown table.")


@command
def methods(
    asked: Listed,
    output: Annotated[Listing, Some("json markdown output debug")],
) -> None:
    """List the KV-cache methods and what each can do.

    kvcli methods freekv
    """
    name, paper, markdown, as_json = asked.name, asked.paper, output.markdown, output.as_json
    if markdown and (as_json or name is not None):
        other = "--json" if as_json else f"a method's page ({name})"
        raise usage_error(f"--markdown prints the list, not {other}", "leave one of them out")
    if paper is not None and (name is not None or markdown):
        raise usage_error("--paper does not work with NAME or --markdown", "leave one out")
    check_outputs({"-o": output.output})
    to_file = output.output is not None
    text = _text(name, as_json, markdown, to_file) if paper is None else _paper_text(paper, as_json, to_file)
    write_result(output.output, text)


def _text(name: str | None, as_json: bool, markdown: bool, to_file: bool) -> str:
    from kvcli.inputs.profiles import profiles_by_method
    from kvcli.methods import method_names
    from kvcli.methods.card import read_card
    from kvcli.ui import console

    if as_json:
        entries = [describe(each) for each in ([name] if name is not None else method_names())]
        return json.dumps({"schema_version": 1, "methods": entries}, ensure_ascii=False) + "\n"
    if name is not None:
        return console.render(console.method_page(describe(name)), to_file)
    cards = {each: read_card(each) for each in method_names()}
    return (
        markdown_table(cards) if markdown else console.render(console.MethodList(cards, profiles_by_method()), to_file)
    )


def _paper_text(name: str, as_json: bool, to_file: bool) -> str:
    """Describe a paper's runs: every method with the settings that differ from its own, and where it is reported."""
    from kvcli.inputs.variants import PREFIX, read_paper, variants
    from kvcli.ui import console, summary

    paper, chosen = read_paper(name), variants([], [PREFIX + name.removeprefix(PREFIX)], [], {})
    if as_json:
        body = {"schema_version": 1, "paper": paper.paper, "profiles": [each.as_dict() for each in chosen]}
        return json.dumps(body, ensure_ascii=False) + "\n"
    rows = [
        (each.name, run.method, ", ".join(f"{key} {value}" for key, value in run.settings.items()) or "-", run.where)
        for each, run in zip(chosen, paper.runs, strict=True)
    ]
    title = f"{paper.title} ({paper.paper}): --profile {PREFIX}{name.removeprefix(PREFIX)} runs all of them"
    table = summary.Table(("name", "method", "settings", "where"), rows, texts=("method", "settings", "where"))
    return console.render_tables([(title, table)], to_file)


def describe(name: str) -> dict[str, Any]:
    """Return one method as data: its card, settings, ablations, and the profiles with their settings.

    Raises `KvcliError` (usage) for an unknown name.
    """
    from kvcli.inputs.profiles import profiles_by_method, resolve_profile
    from kvcli.methods import get_method
    from kvcli.methods.card import gpu_step_of, read_card

    method = get_method(name)
    settings = method.Config.model_json_schema()["properties"]
    profiles = [resolve_profile(profile=each) for each in profiles_by_method().get(name, [])]
    return {
        "name": name,
        **asdict(read_card(name)),
        "settings": [_setting(key, field) for key, field in settings.items()],
        "ablations": [{"name": part, "settings": changed} for part, changed in method.ablation.items()],
        "profiles": [each.as_dict() | {"gpu_step": gpu_step_of(method, each.settings)} for each in profiles],
    }


def markdown_table(cards: Mapping[str, Card]) -> str:
    """Format the list as a Markdown table, with links to the papers on arXiv, and the meaning of its columns."""
    from kvcli.methods.card import LEGEND

    heads = ("method", "what a step attends to", *LEGEND, "paper")
    lines = [_markdown_row(heads), _markdown_row(["---"] * len(heads))]
    for name, card in cards.items():
        number = card.paper.removeprefix("arXiv ")
        paper = f"[{number}](https://arxiv.org/abs/{number})" if number != card.paper else card.paper
        lines.append(_markdown_row((f"`{name}`", card.title, *card.capabilities, paper)))
    return "\n".join([*lines, "", *(f"- {head}: {meaning}" for head, meaning in LEGEND.items())]) + "\n"


def _markdown_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _setting(key: str, schema: dict[str, Any]) -> dict[str, Any]:
    forms = schema.get("oneOf", [schema])  # several if a value can be one number or a list of them
    bounds = forms[0]
    return {
        "name": key,
        "type": " or ".join(form.get("type", "any") for form in forms),
        "default": schema.get("default"),
        "unit": schema.get("unit", ""),
        "minimum": bounds.get("minimum", bounds.get("exclusiveMinimum")),
        "maximum": bounds.get("maximum", bounds.get("exclusiveMaximum")),
        "choices": schema.get("enum"),
        "description": schema.get("description", ""),
    }
