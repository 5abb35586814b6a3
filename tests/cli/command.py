"""Running the real command, in a process of its own or as a child of one that has torch loaded already."""

import json
import os
import socket
import subprocess
import sys
import sysconfig
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

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
        [*command, *(each if isinstance(each, bytes) else str(each) for each in arguments)],
        input=text,
        stdin=subprocess.DEVNULL if text is None else None,
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment(**variables),
        timeout=120,
        check=False,
    )


@contextmanager
def warm_command(directory):
    """Yield a function like `kvcli` whose commands start at once; `directory` takes its files."""
    ours, theirs = socket.socketpair()
    server = Path(__file__).with_name("warm.py")
    process = subprocess.Popen(
        [sys.executable, str(server), str(theirs.fileno())], pass_fds=[theirs.fileno()], env=environment()
    )
    theirs.close()
    files = [directory / name for name in ("stdin", "stdout", "stderr")]
    modes = [os.O_RDONLY, os.O_WRONLY, os.O_WRONLY]
    with ours, ours.makefile("rw") as lines:

        def run(*arguments, text="", cwd=directory, **variables):
            for file in files:
                file.write_text(text if file.name == "stdin" else "")
            request = {
                "arguments": [str(argument) for argument in arguments],
                "cwd": str(cwd),
                "environment": environment(**variables),
                "streams": [(str(file), mode) for file, mode in zip(files, modes, strict=True)],
            }
            lines.write(json.dumps(request) + "\n")
            lines.flush()
            code = int(lines.readline())
            return SimpleNamespace(returncode=code, stdout=files[1].read_text(), stderr=files[2].read_text())

        yield run
    process.wait(timeout=60)


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
