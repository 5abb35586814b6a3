"""Running the real command in a process of its own."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

COMMAND = [str(Path(sysconfig.get_path("scripts")) / "kvcli")]
MODULE = [sys.executable, "-m", "kvcli"]


def environment(**variables):
    """This process's environment without what would change how the command behaves."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith("KVCLI_") and name != "FORCE_COLOR"
    }
    return {**kept, "COLUMNS": "100", "HF_HUB_OFFLINE": "1", **variables}


def kvcli(*arguments, command=COMMAND, text=None, cwd=None, **variables):
    """Run it to its end; `text` is its standard input."""
    return subprocess.run(
        [*command, *map(str, arguments)],
        input=text,
        stdin=subprocess.DEVNULL if text is None else None,
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment(**variables),
        timeout=120,
        check=False,
    )


def assert_refused(result, code, *words):
    """An error as it has to be: the code, nothing on stdout, one line that holds `words`, one hint, no traceback."""
    assert result.returncode == code, result.stderr
    assert result.stdout == ""
    what, *hints = result.stderr.splitlines()
    assert what.startswith("kvcli: error: ")
    assert all(word in what for word in words), what
    assert len(hints) == 1
    assert hints[0].startswith("hint: ")
    assert len(hints[0]) > len("hint: ")
