"""Consoles: where text for people goes, what a terminal gets to see of it, and lines on stderr."""

from collections.abc import Iterable
from io import StringIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from kvcli.errors import KvcliError
from kvcli.ui.escape import Styled, one_line, visible


class EscapingConsole(Console):
    """A console that shows control characters in its texts as escapes where it is a terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as rich does; its own control codes are segments apart and pass."""
        for segment in super().render(renderable, options):
            yield Segment(visible(segment.text), segment.style) if self._escapes(segment) else segment

    def _escapes(self, segment: Segment) -> bool:
        return self.is_terminal and not segment.control and not segment.text.isprintable()


def stderr_console() -> Console:
    """The console for notes, errors and progress: stderr, with colours only on a terminal and without NO_COLOR."""
    return EscapingConsole(stderr=True, highlight=False, markup=False, emoji=False)


def rendered(content: RenderableType, to_file: bool, width: int | None = None) -> str:
    """Text of a command's result: for a file without colours, else with those of the terminal that stdout is.

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
    console.print(content)
    return Styled(text.getvalue()) if console.is_terminal else text.getvalue()


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
