"""What commands print on stdout: tables, lists and pages of text."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvcli.methods.card import LEGEND, Card
from kvcli.ui import summary
from kvcli.ui.console.tables import grid_of, pairs_of, table_of
from kvcli.ui.console.terminal import rendered

_FILE_WIDTH, _UNLIMITED = 100, 10_000  # columns
_STATES = {"ok": "green", "note": "yellow", "broken": "bold red"}


def render(content: RenderableType, to_file: bool = False) -> str:
    """Text of a list for stdout: coloured and as wide as the terminal, plain and 100 columns wide for a file."""
    return rendered(content, to_file, _FILE_WIDTH if to_file else None)


def render_tables(
    titled: Iterable[tuple[str, summary.Table]], to_file: bool = False, notes: Iterable[tuple[str, str]] = ()
) -> str:
    """Text of tables for stdout, each under its title; what is too wide for the terminal goes on below.

    `notes` stand at the end, each after what it is about.
    """
    console = Console()
    width = console.width if console.is_terminal and not to_file else _UNLIMITED
    parts: list[RenderableType] = []
    for title, content in titled:
        parts += [*([Text()] if parts else []), Text(title, style="bold")]
        parts += [table_of(part) for part in summary.folded(content, width)]
    parts += [Text(), pairs_of(notes)] if notes else []
    return rendered(Group(*parts), to_file, width)


def findings(rows: Iterable[tuple[str, str, str, str]]) -> RenderableType:
    """Name, state, what was found and what to do, of one check after another."""
    table = grid_of(("", True), ("cyan", True), ("", False))
    for name, state, found, fix in rows:
        style = _STATES.get(state, "")
        table.add_row(Text(state, style=style), name, Text(found))
        if fix:
            table.add_row("", "", Text(fix, style="bold" if style else ""))
    return table


def method_list(cards: Mapping[str, Card], profiles: Mapping[str, Sequence[str]]) -> RenderableType:
    """What every method can do, with what its steps attend to below it, and profiles where there are several."""
    widths = (12, 5, 8, 7, 10, 23)
    heads = (
        ("", "long", "", "group-", "GPU", "", ""),
        ("method", "gen.", "offload", "cons.", "step", "device memory", "paper"),
    )
    lines = [Text(_laid_out(cells, widths).rstrip(), style="dim") for cells in heads]
    for name, card in cards.items():
        cells = _laid_out(("", *card.capabilities, card.paper.removeprefix("arXiv ")), widths)
        lines.append(Text.assemble((f"{name:<{widths[0]}}", "bold cyan"), cells[widths[0] :]))
        lines.append(Text(f"  {card.title}", style="dim"))
        if len(profiles.get(name, ())) > 1:
            lines.append(Text(f"  profiles {', '.join(profiles[name])}", style="dim"))
    hint = Text("\nMore on a method: kvcli methods NAME", style="dim")
    return Group(*lines, Text(), pairs_of(LEGEND.items()), hint)


def _laid_out(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Cells side by side, all but the last as wide as `widths` says."""
    return "".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=False)) + cells[-1]


def method_page(entry: dict[str, Any]) -> RenderableType:
    """One method: title, paper, settings with default, unit and bounds, ablations and profiles with what they set."""
    settings = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    settings.add_column("setting", no_wrap=True, style="cyan")
    settings.add_column("default", no_wrap=True)
    settings.add_column("values", no_wrap=True)
    settings.add_column("meaning")
    for setting in entry["settings"]:
        default = json.dumps(setting["default"]) if isinstance(setting["default"], bool) else str(setting["default"])
        settings.add_row(setting["name"], default, _values(setting), setting["description"])
    profiles = grid_of(("cyan", True), ("", False))
    defaults = {setting["name"]: setting["default"] for setting in entry["settings"]}
    for profile in entry["profiles"]:
        changed = [f"{key} {value}" for key, value in profile["settings"].items() if value != defaults[key]]
        changed += [f"GPU step {profile['gpu_step']}"] if profile["gpu_step"] != entry["gpu_step"] else []
        profiles.add_row(profile["name"], f"{profile['description']} ({profile['paper']})")
        profiles.add_row("", Text(", ".join(changed) or "all defaults", style="dim"))
    ablations = grid_of(("cyan", True), ("", False))
    for part in entry["ablations"]:
        ablations.add_row(part["name"], ", ".join(f"{key} {value}" for key, value in part["settings"].items()))
    head = Text.assemble((entry["name"], "bold cyan"), f"  {entry['title']}\n", (entry["paper"], "dim"))
    can = pairs_of(
        zip(LEGEND, Card(**{key: entry[key] for key in Card.__dataclass_fields__}).capabilities, strict=True)
    )
    found: list[RenderableType] = [head, Text(), can, Text(), settings]
    if entry["ablations"]:
        found += [Text("\nablations, run by --ablate", style="dim"), ablations]
    return Group(*found, Text("\nprofiles", style="dim"), profiles)


def _values(setting: dict[str, Any]) -> str:
    if setting["choices"]:
        return "\n".join(map(str, setting["choices"]))
    low, high = setting["minimum"], setting["maximum"]
    if setting["type"] == "boolean":
        return "true, false"
    bounds = f"{low}..{high}" if high is not None else f"{low} or more" if low is not None else ""
    return " ".join(filter(None, (bounds, setting["unit"])))
