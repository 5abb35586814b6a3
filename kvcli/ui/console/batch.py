"""A batch while it runs, and its summary."""

from __future__ import annotations

from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn
from rich.progress import Progress as Bars

from kvcli.telemetry.progress import Progress
from kvcli.ui.batch import progress_rows, shares
from kvcli.ui.console.tables import pairs_of
from kvcli.ui.console.terminal import stderr_console

_BAR = 16


class BatchDisplay:
    """One line on a terminal that stays up to date; nothing elsewhere."""

    def __init__(self, quiet: bool, console: Console | None = None):
        self._console = console or stderr_console()
        self._quiet = quiet or not self._console.is_terminal
        self._bars: Bars | None = None

    def show(self, found: Progress) -> None:
        """Show the batch as it is."""
        if self._quiet:
            return
        if self._bars is None:
            text = TextColumn("{task.description}", markup=False)
            self._bars = Bars(
                *(SpinnerColumn(), BarColumn(bar_width=_BAR), text),
                console=self._console,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._bars.add_task("", total=found.total)
            self._bars.start()
        self._bars.update(self._bars.task_ids[0], completed=found.ended, description=_line(found))

    def end(self) -> None:
        """Take the line away."""
        if self._bars is not None:
            self._bars.stop()
            self._console.show_cursor(True)


def print_batch_summary(found: Progress) -> None:
    """Say on stderr what a batch has come to."""
    console = stderr_console()
    console.print(pairs_of(progress_rows(found)))


def render_batch(found: Progress) -> str:
    """Say on stdout what a batch has come to."""
    return "".join(f"{label:<10} {value}\n" for label, value in progress_rows(found))


def _line(found: Progress) -> str:
    failed = f", {found.failed:,} failed" if found.failed else ""
    rate = f"{found.output_tokens_per_second:,.0f} tokens/s"
    left = "" if found.left_seconds is None else f", {timedelta(seconds=round(found.left_seconds))} left"
    rows = f"{found.ended:,} of {found.total:,} rows{failed}, {found.in_flight:,} in flight"
    return f"{rows}, {rate}, {shares(found)}{left}"
