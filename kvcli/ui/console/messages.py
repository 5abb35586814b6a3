"""Lines on stderr: errors and notes."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from kvcli.errors import KvcliError
from kvcli.ui.console.terminal import stderr_console
from kvcli.ui.escape import one_line


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
