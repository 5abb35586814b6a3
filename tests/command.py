"""Running the real command, in a process of its own or as a child of one that has torch loaded already."""

import json
import os
import select
import socket
import subprocess
import sys
import sysconfig
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

COMMAND = [str(Path(sysconfig.get_path("scripts")) / "kvcli")]
MODULE = [sys.executable, "-m", "kvcli"]
RETRIEVE = ["--method", "freekv", "--budget", "96", "--sink", "16", "--window", "32"]
RETRIEVE += ["--page-size", "16", "--ignore-eos"]
"""Options under which a tiny model has to retrieve."""


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


class WarmPopen(subprocess.Popen):
    """A child of the process that has torch loaded, with all that Popen offers; its parent tells how it ended."""

    def __init__(self, server, arguments, program=None, file_size=None, **options):
        self.server, self.more = server, {"program": program and str(program), "file_size": file_size}
        super().__init__([str(argument) for argument in arguments], **options)

    def _execute_child(self, args, *given):
        cwd, env, pipes = given[4], given[5], given[9:15]
        self.ended, theirs = os.pipe()
        try:
            given = {"arguments": args, "cwd": str(cwd or Path.cwd()), "environment": env, **self.more}
            streams = [ours if pipe == -1 else pipe for ours, pipe in enumerate((pipes[0], pipes[3], pipes[5]))]
            socket.send_fds(self.server, [json.dumps(given).encode()], [*streams, theirs])
            self.pid = int(self.server.recv(100))
        finally:
            os.close(theirs)
            self._close_pipe_fds(*pipes)
        self._child_created = True

    def _try_wait(self, wait_flags):
        if wait_flags & os.WNOHANG and not select.select([self.ended], [], [], 0)[0]:
            return 0, 0
        status = int(os.read(self.ended, 100))
        os.close(self.ended)
        return self.pid, status

    def _internal_poll(self, **_):
        if self.returncode is None and (waited := self._try_wait(os.WNOHANG))[0]:
            self._handle_exitstatus(waited[1])
        return self.returncode


class WarmCommands:
    """Called like `kvcli`; `start` gives what Popen gives. `program` names a file of Python to run in its stead."""

    def __init__(self, server, directory):
        self.server, self.directory = server, directory

    def start(self, *arguments, program=None, file_size=None, cwd=None, variables=None, **options):
        env = environment(**(variables or {}))
        return WarmPopen(
            self.server, arguments, program, file_size, cwd=cwd or self.directory, env=env, text=True, **options
        )

    def __call__(self, *arguments, text="", program=None, file_size=None, cwd=None, **variables):
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        with self.start(
            *arguments, program=program, file_size=file_size, cwd=cwd, variables=variables, **streams
        ) as process:
            stdout, stderr = process.communicate(text, timeout=120)
        return SimpleNamespace(returncode=process.returncode, stdout=stdout, stderr=stderr)


@contextmanager
def warm_commands(directory):
    """Yield what runs commands that start at once, by default in `directory`."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = Path(__file__).with_name("warm.py")
    process = subprocess.Popen(
        [sys.executable, str(server), str(theirs.fileno())], pass_fds=[theirs.fileno()], env=environment()
    )
    theirs.close()
    with ours:
        yield WarmCommands(ours, directory)
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


FAILING = """
import errno, os, sys
from kvcli.memory.disk_tier import UnbufferedFile
from kvcli.cli import main

read, left = UnbufferedFile.{method}, [int(os.environ["READS"])]

def failing(*args):
    left[0] -= 1
    if left[0] < 0:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    read(*args)

UnbufferedFile.{method} = failing
sys.exit(main())
"""
"""A program that is `kvcli` on a disk that fails after READS reads by a `method`."""
