"""Run a kvcli command in a terminal of 100 columns and draw what it shows as SVG.

python examples/picture.py examples/generate.svg kvcli generate --method freekv examples/needle-4k.txt
"""

import os
import pty
import re
import shlex
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS = 100


def run_in_terminal(command: list[str]) -> str:
    """Run a command on a pseudo-terminal and return all that it wrote, escape sequences included."""
    chunks: list[bytes] = []

    def read(descriptor: int) -> bytes:
        data = os.read(descriptor, 4096)
        chunks.append(data)
        return data

    os.environ.update(COLUMNS=str(COLUMNS), TERM="xterm-256color", FORCE_COLOR="1")
    status = pty.spawn(command, read)
    if status:
        sys.exit(f"{shlex.join(command)} ended with status {os.waitstatus_to_exitcode(status)}")
    return b"".join(chunks).decode()


def last_screen(output: str) -> list[str]:
    """Apply carriage returns, line erasure and cursor-up to what was written: the lines that remain."""
    lines, row, column = [""], 0, 0
    for part in re.split(r"(\x1b\[\d*[AKJ]|\x1b\[\?25[lh]|\r|\n)", output):
        if part == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif part == "\r":
            column = 0
        elif part.endswith("A") and part.startswith("\x1b["):
            row = max(0, row - int(part[2:-1] or 1))
        elif part.startswith("\x1b[") and part[-1] in "KJ":
            lines[row] = ""
        elif part and not part.startswith("\x1b[?25"):
            lines[row] = part if column == 0 else lines[row] + part
            column = 1
    return lines


def main() -> None:
    """Draw."""
    target, *command = sys.argv[1:]
    screen = last_screen(run_in_terminal(command))
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True, color_system="truecolor")
        console.print(Text.assemble(("$ ", "green"), (shlex.join(command), "bold")))
        for line in screen:
            console.print(Text.from_ansi(line))
        svg = re.sub(r"@font-face \{.*?\}", "", console.export_svg(title="kvcli"), flags=re.DOTALL)  # fetch no fonts
        Path(target).write_text(svg)


if __name__ == "__main__":
    main()
