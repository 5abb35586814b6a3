"""Show everything to a person: progress, statistics, timelines, lists, errors. The only importer of rich.

`summary` words the content; this module lays it out, with colours only on a terminal.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from io import StringIO
from typing import Any, Protocol

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.padding import Padding
from rich.progress import (
    BarColumn,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import Progress as Bars
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from kvcli.errors import KvcliError
from kvcli.methods.card import LEGEND, NEEDS, Card
from kvcli.sizes import format_bytes
from kvcli.telemetry.observer import Observer, Progress
from kvcli.telemetry.report import Report
from kvcli.ui import starting, summary
from kvcli.ui.escape import Styled, one_line, visible
from kvcli.ui.summary import GAP, divided

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_FILE_WIDTH, _UNLIMITED = 100, 10_000  # columns
_STATES = {"ok": "green", "note": "yellow", "broken": "bold red"}
# Red, yellow and green, even in terminals of 16 colours.
_LOW, _MIDDLE, _HIGH = (215, 90, 80), (235, 200, 90), (80, 200, 80)
_TIMELINE_LINES = 40
_BAR, _BATCH_BAR, _LEAST_BAR, _LABEL = 24, 16, 8, 20  # characters
_TOLD_FROM = 1 / 16  # of the work, before which the time left is not shown


class EscapingConsole(Console):
    """A console that escapes control characters in its texts on a terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as rich does; its own control codes are separate segments and pass."""
        for segment in super().render(renderable, options):
            yield Segment(visible(segment.text), segment.style) if self._escapes(segment) else segment

    def _escapes(self, segment: Segment) -> bool:
        return self.is_terminal and not segment.control and not segment.text.isprintable()


@dataclass(frozen=True)
class Trimmed:
    """A text whose lines end without spaces, for a file: cells are filled up to the width of their column."""

    content: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[Segment]:
        """Render the content, and drop the spaces at the end of its lines."""
        for line in Segment.split_lines(console.render(self.content, options)):
            while line and not line[-1].text.strip():
                line.pop()
            if line:
                *before, last = line
                yield from [*before, Segment(last.text.rstrip(), last.style)]
            yield Segment.line()


def put(console: Console, content: RenderableType) -> None:
    """Print something that is laid out in columns; spaces at the end of lines are for terminals alone."""
    console.print(content if console.is_terminal else Trimmed(content))


def stderr_console() -> Console:
    """Make the console for notes, errors and progress: stderr, with colours only on a terminal and without NO_COLOR."""
    starting.erase()
    return EscapingConsole(stderr=True, highlight=False, markup=False, emoji=False)


def rendered(content: RenderableType, to_file: bool, width: int | None = None) -> str:
    """Render a command's result: for a file without colours, else with those of the terminal that stdout is.

    `width` is in columns; None takes the terminal's.
    """
    text = StringIO()
    console = EscapingConsole(
        file=text,
        force_terminal=Console().is_terminal and not to_file,
        width=width,
        highlight=False,
        markup=False,
        emoji=False,
    )
    put(console, content)
    return Styled(text.getvalue()) if console.is_terminal else text.getvalue()


def print_error(error: KvcliError) -> None:
    """Print at most two lines on stderr: the problem, and the way out."""
    console = stderr_console()
    console.print(Text.assemble(("kvcli: error: ", "bold red"), one_line(error.what)), soft_wrap=True)
    if error.hint:
        console.print(Text.assemble(("hint: ", "bold"), one_line(error.hint)), soft_wrap=True)


def print_note(message: str, console: Console | None = None) -> None:
    """Print one line on stderr that is not an error."""
    note = Text.assemble(("kvcli: ", "dim"), one_line(message))
    (console or stderr_console()).print(note, soft_wrap=True)


def grid_of(*columns: tuple[str, bool]) -> Table:
    """Make a table without head and frame; columns are given by style, and whether they must not wrap."""
    table = Table.grid(padding=(0, GAP, 0, 0))
    for style, no_wrap in columns:
        table.add_column(style=style, no_wrap=no_wrap, overflow="fold")
    return table


def plain_table() -> Table:
    """Make a table with a head and no frame."""
    return Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="dim")


def bar_of(share: float, width: int, console: Console) -> str:
    """Draw a bar of a share 0..1 in at most `width` characters that the terminal can show."""
    if console.options.ascii_only:
        return "#" * round(share * width)
    eighths = round(share * width * 8)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


@dataclass(frozen=True)
class Pairs:
    """Labels with their values; a value that is too long breaks between its parts, where it has any."""

    rows: Sequence[tuple[str, str]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[RenderableType]:
        """Lay out a line for each label, or several."""
        most = max(_LABEL, options.max_width // 3)
        labels = min(most, max((len(label) for label, _ in self.rows), default=0))
        left = options.max_width - labels - GAP
        table = Table.grid(padding=(0, GAP, 0, 0))
        table.add_column(style="dim", max_width=labels, overflow="fold")
        table.add_column(overflow="fold")
        for label, value in self.rows:
            table.add_row(label, Text("\n".join(summary.broken(value, left))))
        yield table


def table_of(content: summary.Table, width: int = _UNLIMITED) -> Table:
    """Make a table with a head, for `width` columns; cells that are too long for them are wrapped."""
    table, widths = plain_table(), content.widths(width)
    for i, (column, most) in enumerate(zip(content.columns, widths, strict=True)):
        is_text = content.is_text(i)
        whole = not is_text and all(len(cells[i]) <= most for cells in (content.columns, *content.rows))
        limit = None if is_text else most  # a text takes what there is
        table.add_column(
            column, justify="left" if is_text or i == 0 else "right", no_wrap=whole, max_width=limit, overflow="fold"
        )
    for row in content.rows:
        table.add_row(*map(Text, row))
    return table


@dataclass(frozen=True)
class Fitting:
    """A table in as many parts as the terminal needs, with an empty line between two."""

    content: summary.Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[RenderableType]:
        """Lay out the parts."""
        for number, part in enumerate(summary.folded(self.content, options.max_width)):
            yield from [Text()] * bool(number)
            yield table_of(part, options.max_width)


def render(content: RenderableType, to_file: bool = False) -> str:
    """Render a list for stdout: coloured and as wide as the terminal, plain and 100 columns wide for a file."""
    return rendered(content, to_file, _FILE_WIDTH if to_file else None)


def _table_width(to_file: bool) -> int:
    """Return the columns that tables may take: a terminal's, or any number, a line for each row, for a file."""
    console = Console()
    return console.width if console.is_terminal and not to_file else _UNLIMITED


def render_tables(
    titled: Iterable[tuple[str, summary.Table]], to_file: bool = False, notes: Iterable[tuple[str, str]] = ()
) -> str:
    """Render tables for stdout, each under its title; columns too wide for the terminal continue below.

    `notes` come at the end, each after its label.
    """
    width = _table_width(to_file)
    parts: list[RenderableType] = []
    for title, content in titled:
        parts += [*([Text()] if parts else []), Text(title, style="bold"), Fitting(content)]
    parts += [Text(), Pairs([*notes])] if notes else []
    return rendered(Group(*parts), to_file, width)


def findings(rows: Iterable[tuple[str, str, str, str]]) -> RenderableType:
    """List the name, state, finding and remedy of one check after another."""
    table = grid_of(("", True), ("cyan", True), ("", False))
    for name, state, found, fix in rows:
        style = _STATES.get(state, "")
        table.add_row(Text(state, style=style), name, Text(found))
        if fix:
            table.add_row("", "", Text(fix, style="bold" if style else ""))
    return table


@dataclass(frozen=True)
class MethodList:
    """What is needed and the methods for it; then what every method can do, and profiles if there are several."""

    cards: Mapping[str, Card]
    profiles: Mapping[str, Sequence[str]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[RenderableType]:
        """Lay the list out; what the lines of a narrow terminal do not hold comes in a second list."""
        needs = grid_of(("", False), ("cyan", False))
        for need, served_by in NEEDS.items():
            needs.add_row(need, served_by.replace("`", ""))
        yield from (needs, Text())
        rows = []
        for name, card in self.cards.items():
            *can, memory = card.capabilities
            rows.append((name, *can, memory.replace(" ", ""), card.paper.removeprefix("arXiv ")))
        widths = [max(map(len, cells)) for cells in zip(*_METHOD_HEADS, *rows, strict=True)]
        # A narrow gap where that makes one list of two.
        gap, parts = next(
            ((gap, parts) for gap in (GAP, 1) if len(parts := divided(widths, options.max_width, gap=gap)) == 1),
            (GAP, divided(widths, options.max_width)),
        )
        for number, part in enumerate(parts):
            yield from [Text()] * bool(number)
            heads = (_in_columns(head, part, widths, gap) for head in _METHOD_HEADS)
            yield from (Text(head, style="dim") for head in heads if head)
            for row in rows:
                line = Text(_in_columns(row, part, widths, gap))
                line.stylize("bold cyan", 0, len(row[0]))
                yield line
                if not number:
                    yield Padding(Text(self.cards[row[0]].title, style="dim"), (0, 0, 0, GAP))
                if not number and len(found := self.profiles.get(row[0], ())) > 1:
                    yield Padding(Text(f"profiles {', '.join(found)}", style="dim"), (0, 0, 0, GAP))
        yield from (Text(), Pairs([*LEGEND.items()]), Text("\nMore on a method: kvcli methods NAME", style="dim"))


_METHOD_HEADS = (
    ("", "long", "off-", "group-", "GPU", "", ""),
    ("method", "gen.", "load", "cons.", "step", "device memory", "paper"),
)


def _in_columns(cells: Sequence[str], part: Sequence[int], widths: Sequence[int], gap: int) -> str:
    """Join the cells of some columns into a line."""
    return (" " * gap).join(f"{cells[i]:<{widths[i]}}" for i in part).rstrip()


def method_page(entry: dict[str, Any]) -> RenderableType:
    """Lay out one method: title, paper, settings with default, unit and bounds, ablations, profiles."""
    rows = []
    for setting in entry["settings"]:
        default = json.dumps(setting["default"]) if isinstance(setting["default"], bool) else str(setting["default"])
        rows.append((setting["name"], default, _values(setting), setting["description"]))
    heads = ("setting", "default", "values", "meaning")
    settings = Fitting(summary.Table(heads, rows, texts=heads[1:]))
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
    card = Card(**{key: entry[key] for key in Card.__dataclass_fields__})
    can = Pairs([*zip(LEGEND, card.capabilities, strict=True)])
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


def render_heat_maps(maps: Iterable[summary.HeatMap], to_file: bool = False) -> str:
    """Render heat maps for stdout: numbers, on colours from red over yellow to green if there are colours."""
    width = _table_width(to_file)
    parts = (
        part for heat_map in maps for part in (Text(), Text(heat_map.title, style="bold"), *_drawn(heat_map, width))
    )
    return rendered(Group(*parts), to_file, width)


def _drawn(heat_map: summary.HeatMap, width: int) -> Iterable[RenderableType]:
    """Draw a map in as many parts as `width` columns need."""
    head = GAP + max(map(len, [heat_map.down, *heat_map.rows]))
    most = max(1, (width - head) // (GAP + max(map(len, [*heat_map.columns, "100"]))))
    for start in range(0, len(heat_map.columns), most):
        shown = slice(start, start + most)
        table = Table(box=None, pad_edge=False, padding=0, header_style="dim")
        table.add_column(f"{heat_map.down}  ", justify="right", style="dim", no_wrap=True)
        for column in heat_map.columns[shown]:
            table.add_column(f" {column} ", justify="right", no_wrap=True)
        for row, values in zip(heat_map.rows, heat_map.values, strict=True):
            table.add_row(f"{row}  ", *map(_cell, values[shown]))
        yield from [Text()] * bool(start)
        yield table


def _cell(value: float | None) -> Text:
    if value is None:
        return Text(" - ", style="dim")
    low, high, share = (_LOW, _MIDDLE, value / 50) if value < 50 else (_MIDDLE, _HIGH, value / 50 - 1)
    red, green, blue = (round(a + share * (b - a)) for a, b in zip(low, high, strict=True))
    return Text(f" {value:.0f} ", style=f"black on rgb({red},{green},{blue})")


def print_statistics(report: Report, titles: Sequence[str], verbose: bool, console: Console | None = None) -> None:
    """Print the times, corrections and traffic of a run; one block for one sequence, one row each for several."""
    console = console or stderr_console()
    console.print()
    console.print(Text(summary.heading(report), style="bold"))
    single = len(report.sequences) == 1
    rows = summary.sequence_rows(report, report.sequences[0]) if single else []
    if not single:
        for table in summary.batch_tables(report, titles):
            put(console, Group(Fitting(table), Text()))
    rows += summary.origin_rows(report) + summary.placement_rows(report) + summary.memory_rows(report)
    if verbose:
        rows.append(("settings", summary.settings_line(report.profile)))
        rows.append(("versions", ", ".join(f"{key} {value}" for key, value in report.environment.items())))
    put(console, Pairs(rows))
    if verbose:
        for name, sequence in zip(titles, report.sequences, strict=True):
            layers = summary.layer_table(sequence)
            if layers.rows:
                console.print(Text(f"\n{name}" if not single else "", style="bold"))
                put(console, Fitting(layers))


def print_timeline(report: Report, titles: Sequence[str], console: Console | None = None) -> None:
    """Print time, corrected heads, misses and bytes of every step, or of ranges of steps in a long run."""
    console = console or stderr_console()
    most = max(4, _TIMELINE_LINES // max(1, len(report.sequences)) - 3)
    for name, sequence in zip(titles, report.sequences, strict=True):
        console.print()
        if len(report.sequences) > 1:
            console.print(Text(name, style="bold"))
        rows = summary.timeline_rows(sequence.steps, most)
        put(console, _timeline(rows, console) if rows else Text("no decode step to show", style="dim"))


def _timeline(rows: Sequence[summary.TimelineRow], console: Console) -> RenderableType:
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
    content = summary.Table(tuple(columns), list(zip(*columns.values(), strict=True)))
    width = min(_BAR, console.width - sum(GAP + each for each in content.widths(console.width)))
    if width < _LEAST_BAR:
        return Fitting(content)
    table = plain_table()
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


class _TimeLeft(ProgressColumn):
    """The time left by the mean speed since the stage began.

    A prompt is read layer by layer, and within a layer ever slower, so the recent speed says nothing about the layers
    to come. Neither does the speed of the first layer, so there is no figure before a part of the work is done.
    """

    def render(self, task: Task) -> Text:
        """Lay it out as rich's own column does."""
        if task.elapsed is None or task.total is None or task.completed < task.total * _TOLD_FROM:
            return Text("-:--:--", style="progress.remaining")
        left = timedelta(seconds=round(task.elapsed * (task.total / task.completed - 1)))
        return Text(str(left), style="progress.remaining")


def _bars(console: Console, *columns: ProgressColumn) -> Bars:
    """Make bars that leave nothing behind, and do not redirect stdout."""
    return Bars(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False)


class TextSink(Protocol):
    """The receiver of pieces of text."""

    def text(self, sequence: int, piece: str) -> None:
        """Take a piece of text of `sequence`."""

    def finished(self, sequence: int) -> None:
        """Take note that `sequence` is complete."""


class RunConsole(Observer):
    """Shows a run while it goes on: progress bars on a terminal, notices on stderr, text wherever `sink` puts it.

    With `text_on_screen` the growing text shows the progress, without a bar. The first tokens of several prompts wait
    until all are read: the bar of the next prompt would remove their line.
    """

    def __init__(
        self,
        sink: TextSink | None,
        quiet: bool,
        text_on_screen: bool,
        console: Console | None = None,
        prompts: int = 1,
    ):
        self._console = console or stderr_console()
        self._sink = sink
        self._quiet = quiet
        self._text_on_screen = text_on_screen
        self.line_open = False
        """Whether text on the screen has not ended its line: a note begins a new one."""
        self._progress: Bars | None = None
        self._document = ""
        self._waiting: list[tuple[int, str | None]] | None = [] if text_on_screen and prompts > 1 else None

    @property
    def console(self) -> Console:
        """The console, for other output that must not disturb this one."""
        return self._console

    def stage(self, name: str, total: int | None = None) -> None:
        """Show a bar, or a spinner if the end is not known."""
        self.stage_done()
        if self._quiet or not self._console.is_terminal:
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False))
        bar = (BarColumn(bar_width=_BAR), TaskProgressColumn(), _TimeLeft(), TextColumn("left,"))
        counted = bar if total is not None else ()
        self._progress = _bars(self._console, *columns, *counted, TimeElapsedColumn())
        self._progress.add_task(f"{name}{self._document}" if name == "prefill" else name, total=total)
        self._progress.start()

    def document(self, number: int, total: int) -> None:
        """Name the document in the bar of its prefill, if there are several."""
        self._document = f", document {number:,} of {total:,}" if total > 1 else ""

    def advance(self, amount: int = 1) -> None:
        """Move the bar."""
        if self._progress is not None:
            self._progress.advance(self._progress.task_ids[0], amount)

    def stage_done(self) -> None:
        """Remove the bar."""
        progress, self._progress = self._progress, None
        if progress is not None:
            # Ctrl-C within rich's own start or stop leaves it half set up; the cursor has to come back all the same.
            with suppress(IndexError):
                progress.stop()
            self._console.show_cursor(True)

    def text(self, sequence: int, piece: str) -> None:
        """Pass the piece on; a bar must not share the screen with it."""
        if self._waiting is not None:
            self._waiting.append((sequence, piece))
            return
        if self._text_on_screen:
            self.stage_done()
            self.line_open = not piece.endswith("\n") if piece else self.line_open
        if self._sink is not None:
            self._sink.text(sequence, piece)

    def finished(self, sequence: int) -> None:
        """Pass on that the sequence is complete."""
        if self._waiting is not None:
            self._waiting.append((sequence, None))
            return
        if self._sink is not None:
            self._sink.finished(sequence)

    def release(self) -> None:
        """Pass on what waits: all prompts are read, or the run is over."""
        waiting, self._waiting = self._waiting, None
        for sequence, piece in waiting or ():
            if piece is None:
                self.finished(sequence)
            else:
                self.text(sequence, piece)

    def notice(self, message: str) -> None:
        """Show a note above the bar."""
        if not self._quiet:
            self._end_line()
            print_note(message, self._console)

    def failure(self, message: str) -> None:
        """Show it as a note, even in a quiet run, and not at the end of a line of text that still grows."""
        self._end_line()
        print_note(message, self._console)

    def _end_line(self) -> None:
        if self.line_open:
            self._console.print()
            self.line_open = False

    def step(self, done: int, total: int) -> None:
        """Show the decode steps as a bar if no text shows them; a single token comes from the prefill."""
        if done > 1:
            self.release()
        if total == 1 or self._text_on_screen or self._quiet or not self._console.is_terminal:
            return
        if self._progress is None:
            self.stage("decode", total)
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=done, total=total)


class BatchDisplay:
    """One line on a terminal that stays up to date; nothing elsewhere."""

    def __init__(self, quiet: bool, console: Console | None = None):
        self._console = console or stderr_console()
        self._quiet = quiet or not self._console.is_terminal
        self._bars: Bars | None = None

    def show(self, found: Progress) -> None:
        """Show the current state of the batch."""
        if self._quiet:
            return
        if self._bars is None:
            text = TextColumn("{task.description}", markup=False)
            self._bars = _bars(self._console, SpinnerColumn(), BarColumn(bar_width=_BATCH_BAR), text)
            self._bars.add_task("", total=found.total)
            self._bars.start()
        self._bars.update(self._bars.task_ids[0], completed=found.ended, description=_line(found))

    def end(self) -> None:
        """Remove the line."""
        if self._bars is not None:
            self._bars.stop()
            self._console.show_cursor(True)


def print_batch_summary(found: Progress, checked: bool = False, console: Console | None = None) -> None:
    """Print the outcome of a batch on stderr, or of a check of its rows."""
    put(console or stderr_console(), Pairs([*(summary.checked_rows if checked else summary.progress_rows)(found)]))


def render_batch(found: Progress) -> str:
    """Format the outcome of a batch for stdout."""
    return "".join(f"{label:<10} {value}\n" for label, value in summary.progress_rows(found))


def _line(found: Progress) -> str:
    failed = f", {found.failed:,} failed" if found.failed else ""
    rate = f"{found.output_tokens_per_second:,.0f} tokens/s"
    left = "" if found.left_seconds is None else f", {timedelta(seconds=round(found.left_seconds))} left"
    rows = f"{found.ended:,} of {found.total:,} rows{failed}, {found.in_flight:,} in flight"
    return f"{rows}, {rate}, {summary.shares(found)}{left}"
