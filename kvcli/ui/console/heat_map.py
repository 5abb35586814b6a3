"""Heat maps in the terminal."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvcli.ui.console.terminal import rendered

# Red, yellow and green in terminals of 16 colours as well.
_LOW, _MIDDLE, _HIGH = (215, 90, 80), (235, 200, 90), (80, 200, 80)


@dataclass(frozen=True)
class HeatMap:
    """A share in per cent for every row and column, None where there is none; what heads them, and what they are."""

    title: str
    corner: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float | None]]


def render_heat_maps(maps: Iterable[HeatMap], to_file: bool = False) -> str:
    """Text of heat maps for stdout: numbers, on colours from red over yellow to green where there are colours."""
    return rendered(Group(*(part for heat_map in maps for part in (Text(), _drawn(heat_map)))), to_file)


def _drawn(heat_map: HeatMap) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=0, header_style="dim")
    table.add_column(f"{heat_map.corner}  ", justify="right", style="dim", no_wrap=True)
    for column in heat_map.columns:
        table.add_column(f" {column} ", justify="right", no_wrap=True)
    for row, values in zip(heat_map.rows, heat_map.values, strict=True):
        table.add_row(f"{row}  ", *map(_cell, values))
    return Group(Text(heat_map.title, style="bold"), table)


def _cell(value: float | None) -> Text:
    if value is None:
        return Text(" - ", style="dim")
    low, high, share = (_LOW, _MIDDLE, value / 50) if value < 50 else (_MIDDLE, _HIGH, value / 50 - 1)
    red, green, blue = (round(a + share * (b - a)) for a, b in zip(low, high, strict=True))
    return Text(f" {value:.0f} ", style=f"black on rgb({red},{green},{blue})")
