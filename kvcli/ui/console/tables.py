"""What the shown is made of: grids, tables and bars."""

from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from kvcli.ui import summary

_EIGHTHS = " ▏▎▍▌▋▊▉█"


def grid_of(*columns: tuple[str, bool]) -> Table:
    """A table without head and frame; its columns by style, and whether they must not wrap."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for style, no_wrap in columns:
        table.add_column(style=style, no_wrap=no_wrap)
    return table


def bar_of(share: float, width: int, console: Console) -> str:
    """A bar of a share 0..1 in at most `width` characters that the terminal can show."""
    if console.options.ascii_only:
        return "#" * round(share * width)
    eighths = round(share * width * 8)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def pairs_of(rows: Iterable[tuple[str, str]]) -> RenderableType:
    """Labels with their values."""
    table = grid_of(("dim", True), ("", False))
    for label, value in rows:
        table.add_row(label, Text(value))
    return table


def table_of(content: summary.Table) -> Table:
    """A table with a head; all but its first column are numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for i, column in enumerate(content.columns):
        if i:
            table.add_column(column, justify="right", no_wrap=True)
        else:
            table.add_column(column, overflow="ellipsis", min_width=8)
    for row in content.rows:
        table.add_row(*map(Text, row))
    return table
