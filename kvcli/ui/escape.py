"""Escape control characters in texts from elsewhere, which a terminal must not see."""

# C0 without newline and tab, DEL, C1. rich leaves ESC and C1 as they are. The longer form is valid in JSON, which
# escapes the first 32 characters itself and leaves the others as they are.
_ESCAPES = {code: f"\\x{code:02x}" for code in range(32) if chr(code) not in "\n\t"}
_ESCAPES |= {code: f"\\u{code:04x}" for code in range(127, 160)}


class Styled(str):
    """A text for a terminal whose foreign parts are escaped already; its control characters are its colours."""

    def __add__(self, other: str) -> str:
        """Join two texts; the result is such a text if both are."""
        text = super().__add__(other)
        return Styled(text) if isinstance(other, Styled) else text


def visible(text: str) -> str:
    """Escape the control characters of a text except newline and tab: model output, names and errors may hold any."""
    return text if isinstance(text, Styled) else text.translate(_ESCAPES)


def one_line(message: str) -> str:
    """Keep a message to one line of printable characters."""
    return "".join(c if c.isprintable() else " " if c.isspace() else repr(c)[1:-1] for c in message)
