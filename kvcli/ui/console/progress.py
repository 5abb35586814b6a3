"""A run while it goes on: bars, notes, and text handed to its writer."""

from contextlib import suppress
from datetime import timedelta
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from kvcli.telemetry.observer import Observer
from kvcli.ui.console.terminal import print_note, stderr_console

_BAR = 24
_TOLD_FROM = 1 / 16  # of the work


class _TimeLeft(ProgressColumn):
    """The time left by the mean speed since the stage began.

    A prompt is read layer by layer, and within a layer ever slower: the speed of the last moments tells nothing of the
    layers to come. So does that of the first layer, which is why there is no figure before a part of the work is done.
    """

    def render(self, task: Task) -> Text:
        """Lay it out as rich's own column does."""
        if task.elapsed is None or task.total is None or task.completed < task.total * _TOLD_FROM:
            return Text("-:--:--", style="progress.remaining")
        left = timedelta(seconds=round(task.elapsed * (task.total / task.completed - 1)))
        return Text(str(left), style="progress.remaining")


class TextSink(Protocol):
    """Where the pieces of text go."""

    def text(self, sequence: int, piece: str) -> None:
        """Take a piece of text of `sequence`."""

    def finished(self, sequence: int) -> None:
        """Take note that `sequence` is complete."""


class RunConsole(Observer):
    """Shows a run while it goes on: progress bars on a terminal, notices on stderr, text wherever `sink` puts it.

    With `text_on_screen` the growing text is the progress and no bar runs beside it. Of several prompts the first
    tokens wait until all are read: the bar of the next prompt would take the line away that they stand on.
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
        self._progress: Progress | None = None
        self._waiting: list[tuple[int, str | None]] | None = [] if text_on_screen and prompts > 1 else None

    @property
    def console(self) -> Console:
        """Where it is shown: what is shown beside it has to go there, too."""
        return self._console

    def stage(self, name: str, total: int | None = None) -> None:
        """Show a bar, or a spinner where the end is not known."""
        self.stage_done()
        if self._quiet or not self._console.is_terminal:
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False))
        bar = (BarColumn(bar_width=_BAR), TaskProgressColumn(), _TimeLeft(), TextColumn("left,"))
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
        if self._waiting is not None:
            self._waiting.append((sequence, piece))
            return
        if self._text_on_screen:
            self.stage_done()
        if self._sink is not None:
            self._sink.text(sequence, piece)

    def finished(self, sequence: int) -> None:
        """Hand on that the sequence is complete."""
        if self._waiting is not None:
            self._waiting.append((sequence, None))
            return
        if self._sink is not None:
            self._sink.finished(sequence)

    def release(self) -> None:
        """Hand on what waits: all prompts are read, or the run is over."""
        waiting, self._waiting = self._waiting, None
        for sequence, piece in waiting or ():
            if piece is None:
                self.finished(sequence)
            else:
                self.text(sequence, piece)

    def notice(self, message: str) -> None:
        """Show a note above the bar."""
        if not self._quiet:
            print_note(message, self._console)

    def failure(self, message: str) -> None:
        """Show it as a note, in a quiet run as well, and not at the end of a line of text that still grows."""
        if self._text_on_screen:
            self._console.print()
        print_note(message, self._console)

    def step(self, done: int, total: int) -> None:
        """Show the decode steps as a bar where no text shows them."""
        if done > 1:
            self.release()
        if self._text_on_screen or self._quiet or not self._console.is_terminal:
            return
        if self._progress is None:
            self.stage("decode", total)
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=done, total=total)
