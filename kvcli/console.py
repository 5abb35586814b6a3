"""Everything shown to a person: progress, statistics, timelines, lists, errors. The only importer of rich."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from kvcli import summary
from kvcli.errors import KvcliError
from kvcli.methods.card import LEGEND, Card
from kvcli.observer import Observer
from kvcli.report import Report
from kvcli.sizes import format_bytes

_TIMELINE_LINES = 40
_BAR = 24
_UNLIMITED = 10_000  # columns
_STATES = {"ok": "green", "note": "yellow", "broken": "bold red"}
_EIGHTHS = " ▏▎▍▌▋▊▉█"


class TextSink(Protocol):
    """Where the pieces of text go."""

    def text(self, sequence: int, piece: str) -> None:
        """Take a piece of text of `sequence`."""

    def finished(self, sequence: int) -> None:
        """Take note that `sequence` is complete."""


def stderr_console() -> Console:
    """The console for people: stderr, colours only on a terminal and without NO_COLOR."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False)


def print_error(error: KvcliError) -> None:
    """Two lines on stderr at most: what is wrong, and the way out."""
    console = stderr_console()
    console.print(Text.assemble(("kvcli: error: ", "bold red"), _one_line(error.what)), soft_wrap=True)
    if error.hint:
        console.print(Text.assemble(("hint: ", "bold"), _one_line(error.hint)), soft_wrap=True)


def print_note(message: str, console: Console | None = None) -> None:
    """One line on stderr that is no error."""
    note = Text.assemble(("kvcli: ", "dim"), _one_line(message))
    (console or stderr_console()).print(note, soft_wrap=True)


class RunConsole(Observer):
    """Shows a run while it goes on: progress bars on a terminal, notices on stderr, text wherever `sink` puts it.

    With `text_on_screen` the growing text is the progress and no bar runs beside it.
    """

    def __init__(self, sink: TextSink | None, quiet: bool, text_on_screen: bool, console: Console | None = None):
        self._console = console or stderr_console()
        self._sink = sink
        self._quiet = quiet
        self._text_on_screen = text_on_screen
        self._progress: Progress | None = None

    def stage(self, name: str, total: int | None = None) -> None:
        """Show a bar, or a spinner where the end is not known."""
        self.stage_done()
        if self._quiet or not self._console.is_terminal:
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}"))
        bar = (BarColumn(bar_width=_BAR), TaskProgressColumn(), TimeRemainingColumn(), TextColumn("left,"))
        counted = bar if total is not None else ()
        self._progress = Progress(
            *columns,
            *counted,
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._progress.add_task(name, total=total)
        self._progress.start()

    def advance(self, amount: int = 1) -> None:
        """Move the bar."""
        if self._progress is not None:
            self._progress.advance(self._progress.task_ids[0], amount)

    def stage_done(self) -> None:
        """Take the bar away."""
        progress, self._progress = self._progress, None
        if progress is not None:
            # Ctrl-C within rich's own start or stop leaves it half set up; the cursor has to come back all the same.
            with suppress(IndexError):
                progress.stop()
            self._console.show_cursor(True)

    def text(self, sequence: int, piece: str) -> None:
        """Hand the piece on; a bar must not share the screen with it."""
        if self._text_on_screen:
            self.stage_done()
        if self._sink is not None:
            self._sink.text(sequence, piece)

    def finished(self, sequence: int) -> None:
        """Hand on that the sequence is complete."""
        if self._sink is not None:
            self._sink.finished(sequence)

    def notice(self, message: str) -> None:
        """Show a note above the bar."""
        if not self._quiet:
            print_note(message, self._console)

    def step(self, done: int, total: int) -> None:
        """Show the decode steps as a bar where no text shows them."""
        if self._text_on_screen or self._quiet or not self._console.is_terminal:
            return
        if self._progress is None:
            self.stage("decode", total)
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=done, total=total)


def print_statistics(report: Report, titles: Sequence[str], verbose: bool, console: Console | None = None) -> None:
    """What the run took, corrected and moved; one block for one sequence, one row each for several."""
    console = console or stderr_console()
    console.print()
    console.print(Text(summary.heading(report), style="bold"))
    single = len(report.sequences) == 1
    rows = summary.sequence_rows(report, report.sequences[0]) if single else []
    if not single:
        for table in summary.batch_tables(report, titles):
            console.print(_table(table))
            console.print()
    rows += summary.memory_rows(report)
    if verbose:
        rows.append(("settings", summary.settings_line(report.profile)))
        rows.append(("versions", ", ".join(f"{key} {value}" for key, value in report.environment.items())))
    console.print(_pairs(rows))
    if verbose:
        for name, sequence in zip(titles, report.sequences, strict=True):
            layers = summary.layer_table(sequence)
            if layers.rows:
                console.print(Text(f"\n{name}" if not single else "", style="bold"))
                console.print(_table(layers))


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


def render(content: RenderableType, to_file: bool = False) -> str:
    """Text of a list for stdout: coloured and as wide as the terminal, plain and 100 columns wide for a file."""
    console = Console(highlight=False, markup=False, emoji=False, width=100 if to_file else None)
    with console.capture() as capture:
        console.print(content)
    return Text.from_ansi(capture.get()).plain + "\n" if to_file else capture.get()


def render_tables(
    titled: Iterable[tuple[str, summary.Table]], to_file: bool = False, notes: Iterable[tuple[str, str]] = ()
) -> str:
    """Text of tables for stdout, each under its title; what is too wide for the terminal goes on below.

    `notes` stand at the end, each after what it is about.
    """
    console = Console(highlight=False, markup=False, emoji=False)
    limited = console.is_terminal and not to_file
    wide = Console(highlight=False, markup=False, emoji=False, width=console.width if limited else _UNLIMITED)
    parts: list[RenderableType] = []
    for title, content in titled:
        parts += [*([Text()] if parts else []), Text(title, style="bold")]
        parts += [_table(part) for part in summary.folded(content, wide.width)]
    parts += [Text(), _pairs(notes)] if notes else []
    with wide.capture() as capture:
        wide.print(Group(*parts))
    return Text.from_ansi(capture.get()).plain + "\n" if to_file else capture.get()


def findings(rows: Iterable[tuple[str, str, str, str]]) -> RenderableType:
    """Name, state, what was found and what to do, of one check after another."""
    table = _grid(("", True), ("cyan", True), ("", False))
    for name, state, found, fix in rows:
        style = _STATES.get(state, "")
        table.add_row(Text(state, style=style), name, Text(found))
        if fix:
            table.add_row("", "", Text(fix, style="bold" if style else ""))
    return table


def method_list(cards: Mapping[str, Card], profiles: Mapping[str, Sequence[str]]) -> RenderableType:
    """What every method can do, with what its steps attend to below it, and profiles where there are several."""
    widths = (13, 6, 9, 12, 24)
    heads = (("", "long", "", "group-", "", ""), ("method", "gen.", "offload", "consistent", "device memory", "paper"))
    lines = [Text(_laid_out(cells, widths).rstrip(), style="dim") for cells in heads]
    for name, card in cards.items():
        cells = _laid_out(("", *card.capabilities, card.paper), widths)
        lines.append(Text.assemble((f"{name:<{widths[0]}}", "bold cyan"), cells[widths[0] :]))
        lines.append(Text(f"  {card.title}", style="dim"))
        if len(profiles.get(name, ())) > 1:
            lines.append(Text(f"  profiles {', '.join(profiles[name])}", style="dim"))
    hint = Text("\nMore on a method: kvcli methods NAME", style="dim")
    return Group(*lines, Text(), _pairs(LEGEND.items()), hint)


def _laid_out(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Cells side by side, all but the last as wide as `widths` says."""
    return "".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=False)) + cells[-1]


def method_page(entry: dict[str, Any]) -> RenderableType:
    """One method: title, paper, settings with default, unit and bounds, and its profiles with what they set."""
    settings = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    settings.add_column("setting", no_wrap=True, style="cyan")
    settings.add_column("default", no_wrap=True)
    settings.add_column("values", no_wrap=True)
    settings.add_column("meaning")
    for setting in entry["settings"]:
        default = json.dumps(setting["default"]) if isinstance(setting["default"], bool) else str(setting["default"])
        settings.add_row(setting["name"], default, _values(setting), setting["description"])
    profiles = _grid(("cyan", True), ("", False))
    defaults = {setting["name"]: setting["default"] for setting in entry["settings"]}
    for profile in entry["profiles"]:
        changed = [f"{key} {value}" for key, value in profile["settings"].items() if value != defaults[key]]
        profiles.add_row(profile["name"], f"{profile['description']} ({profile['paper']})")
        profiles.add_row("", Text(", ".join(changed) or "all defaults", style="dim"))
    head = Text.assemble((entry["name"], "bold cyan"), f"  {entry['title']}\n", (entry["paper"], "dim"))
    can = _pairs(zip(LEGEND, Card(**{key: entry[key] for key in Card.__dataclass_fields__}).capabilities, strict=True))
    nothing = Text("no settings", style="dim")
    return Group(
        head, Text(), can, Text(), settings if entry["settings"] else nothing, Text("\nprofiles", style="dim"), profiles
    )


def _values(setting: dict[str, Any]) -> str:
    if setting["choices"]:
        return "\n".join(map(str, setting["choices"]))
    low, high = setting["minimum"], setting["maximum"]
    if setting["type"] == "boolean":
        return "true, false"
    bounds = f"{low}..{high}" if high is not None else f"{low} or more" if low is not None else ""
    return " ".join(filter(None, (bounds, setting["unit"])))


def _grid(*columns: tuple[str, bool]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for style, no_wrap in columns:
        table.add_column(style=style, no_wrap=no_wrap)
    return table


def _timeline(rows: Sequence[summary.TimelineRow], console: Console) -> Table:
    slowest = max(row.ms for row in rows)
    ranged = any(row.last > row.first for row in rows)
    columns = {
        "steps" if ranged else "step": [f"{r.first}-{r.last}" if r.last > r.first else f"{r.first}" for r in rows],
        "mean time" if ranged else "time": [summary.duration(row.ms) for row in rows],
        "corrected": [f"{row.heads_corrected:,} / {row.heads_checked:,}" for row in rows],
        "missed": [f"{row.misses:,} / {row.pages_requested:,}" for row in rows],
        "recalled": [format_bytes(row.bytes_to_device) for row in rows],
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
        table.add_row(*cells[:2], _bar(row.ms / slowest if slowest else 0, width, console), *cells[2:])
    return table


def _timeline_style(column: str, row: summary.TimelineRow) -> str:
    return "yellow" if column == "corrected" and row.heads_corrected else ""


def _bar(share: float, width: int, console: Console) -> str:
    if console.options.ascii_only:
        return "#" * round(share * width)
    eighths = round(share * width * 8)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def _pairs(rows: Iterable[tuple[str, str]]) -> RenderableType:
    table = _grid(("dim", True), ("", False))
    for label, value in rows:
        table.add_row(label, Text(value))
    return table


def _table(content: summary.Table) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for i, column in enumerate(content.columns):
        if i:
            table.add_column(column, justify="right", no_wrap=True)
        else:
            table.add_column(column, overflow="ellipsis", min_width=8)
    for row in content.rows:
        table.add_row(*map(Text, row))
    return table


def _one_line(message: str) -> str:
    """Drop what would break the line or steer the terminal: file names and texts of others come through here."""
    return "".join(c if c.isprintable() else " " if c.isspace() else repr(c)[1:-1] for c in message)
