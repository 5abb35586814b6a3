"""Lines on stderr: errors and notes."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from kvcli.errors import KvcliError


def stderr_console() -> Console:
    """The console for people: stderr, colours only on a terminal and without NO_COLOR."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False)


def print_error(error: KvcliError) -> None:
    """Two lines on stderr at most: what is wrong, and the way out."""
    console = stderr_console()
    console.print(Text.assemble(("kvcli: error: ", "bold red"), one_line(error.what)), soft_wrap=True)
    if error.hint:
        console.print(Text.assemble(("hint: ", "bold"), one_line(error.hint)), soft_wrap=True)


def print_note(message: str, console: Console | None = None) -> None:
    """One line on stderr that is no error."""
    note = Text.assemble(("kvcli: ", "dim"), one_line(message))
    (console or stderr_console()).print(note, soft_wrap=True)


def one_line(message: str) -> str:
    """Drop what would break the line or steer the terminal: file names and texts of others come through here."""
    return "".join(c if c.isprintable() else " " if c.isspace() else repr(c)[1:-1] for c in message)
