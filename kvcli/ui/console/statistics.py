"""A generation when it is over: its statistics and its steps."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvcli.sizes import format_bytes
from kvcli.telemetry.report import Report
from kvcli.ui import summary
from kvcli.ui.console.tables import bar_of, pairs_of, table_of
from kvcli.ui.console.terminal import stderr_console
from kvcli.ui.origins import origin_rows, placement_rows

_TIMELINE_LINES = 40
_BAR = 24


def print_statistics(report: Report, titles: Sequence[str], verbose: bool, console: Console | None = None) -> None:
    """What the run took, corrected and moved; one block for one sequence, one row each for several."""
    console = console or stderr_console()
    console.print()
    console.print(Text(summary.heading(report), style="bold"))
    single = len(report.sequences) == 1
    rows = summary.sequence_rows(report, report.sequences[0]) if single else []
    if not single:
        for table in summary.batch_tables(report, titles):
            for part in summary.folded(table, console.width):
                console.print(table_of(part))
                console.print()
    rows += origin_rows(report, summary.duration) + placement_rows(report) + summary.memory_rows(report)
    if verbose:
        rows.append(("settings", summary.settings_line(report.profile)))
        rows.append(("versions", ", ".join(f"{key} {value}" for key, value in report.environment.items())))
    console.print(pairs_of(rows))
    if verbose:
        for name, sequence in zip(titles, report.sequences, strict=True):
            layers = summary.layer_table(sequence)
            if layers.rows:
                console.print(Text(f"\n{name}" if not single else "", style="bold"))
                console.print(table_of(layers))


def print_timeline(report: Report, titles: Sequence[str], console: Console | None = None) -> None:
    """Time, corrected heads, misses and bytes of every step, or of ranges of steps in a long run."""
    console = console or stderr_console()
    most = max(4, _TIMELINE_LINES // max(1, len(report.sequences)) - 3)
    for name, sequence in zip(titles, report.sequences, strict=True):
        console.print()
        if len(report.sequences) > 1:
            console.print(Text(name, style="bold"))
        rows = summary.timeline_rows(sequence.steps, most)
        console.print(_timeline(rows, console) if rows else Text("no decode step to show", style="dim"))


def _timeline(rows: Sequence[summary.TimelineRow], console: Console) -> Table:
    slowest = max(row.ms for row in rows)
    ranged = any(row.last > row.step for row in rows)
    columns = {
        "steps" if ranged else "step": [f"{r.step}-{r.last}" if r.last > r.step else f"{r.step}" for r in rows],
        "mean time" if ranged else "time": [summary.duration(row.ms) for row in rows],
        "corrected": [f"{row.heads_corrected:,} / {row.heads_checked:,}" for row in rows],
        "missed": [f"{row.misses:,} / {row.pages_requested:,}" for row in rows],
        "recalled": [format_bytes(row.bytes_to_device) for row in rows],
        "from disk": [format_bytes(row.bytes_from_disk) for row in rows],
    }
    columns = {name: cells for name, cells in columns.items() if not set(cells) <= {"0 / 0", "0 B"}}
    taken = sum(2 + max(map(len, [name, *cells])) for name, cells in columns.items())
    width = min(_BAR, max(8, console.width - taken - 2))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for i, name in enumerate(columns):
        table.add_column(name, justify="right", no_wrap=True)
        if i == 1:
            table.add_column("", style="cyan", no_wrap=True)
    for i, row in enumerate(rows):
        cells = [Text(cells[i], style=_timeline_style(name, row)) for name, cells in columns.items()]
        table.add_row(*cells[:2], bar_of(row.ms / slowest if slowest else 0, width, console), *cells[2:])
    return table


def _timeline_style(column: str, row: summary.TimelineRow) -> str:
    return "yellow" if column == "corrected" and row.heads_corrected else ""
