"""How a run ends that something outside of it cuts short: signals, closed streams, full disks."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest
from command import COMMAND, environment
from families import tiny_checkpoint

WORDS = "the quick brown fox jumps over the lazy dog and then the dog runs there while the other fox sleeps "


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    path = tmp_path_factory.mktemp("documents") / "fox.txt"
    path.write_text(WORDS * 12)
    return path


def python(code, **options):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=False, **options
    )


def test_an_interrupt_while_the_commands_are_imported_is_one_line():
    for number in (signal.SIGINT, signal.SIGTERM):
        result = python(
            "import os, sys, time; import kvcli.cli; from kvcli.cli.process import end_at_once\n"
            "assert 'typer' not in sys.modules, 'more is imported before a signal is caught than there need be'\n"
            f"with end_at_once(): os.kill(os.getpid(), {int(number)}); time.sleep(9)"
        )
        assert result.returncode == 128 + number
        assert result.stderr == "kvcli: error: interrupted\n"


def test_functions_for_the_exit_run():
    result = python(
        "import atexit, sys, types, kvcli.cli, kvcli.cli.guard\n"
        "sys.modules['torch'] = types.ModuleType('torch')\n"
        "kvcli.cli.guard.run = lambda *_: atexit.register(print, 'released', flush=True) and 3\n"
        "kvcli.cli.main()"
    )
    assert (result.returncode, result.stdout) == (3, "released\n")


def test_a_signal_sent_twice_at_once_counts_once():
    result = python(
        "import os, signal; from kvcli.cli.process import caught_signals\n"
        "with caught_signals() as received:\n"
        "    try: os.kill(os.getpid(), signal.SIGTERM)\n"
        "    except KeyboardInterrupt: os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print(len(received))"
    )
    assert result.stdout == "2\n", result.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_keeps_what_there_is(warm, model, document, tmp_path, number):
    ours, theirs = pty.openpty()
    arguments = ["generate", "-m", model, document, "--max-tokens", 30_000, "--ignore-eos", "--json"]
    process = warm.start(*arguments, "-o", tmp_path / "out.json", stderr=theirs, variables={"TERM": "xterm"})
    os.close(theirs)
    shown = b""
    while b"decode" not in shown:
        shown += os.read(ours, 1000)
    time.sleep(0.5)
    process.send_signal(number)
    while process.poll() is None:
        try:
            shown += os.read(ours, 1000)
        except OSError:  # nothing holds the other side any more
            break
    assert process.wait(timeout=60) == 128 + number
    (sequence,) = json.loads((tmp_path / "out.json").read_text())["sequences"]
    assert sequence["finish_reason"] == "interrupted"
    assert sequence["output_tokens"] > 0
    assert b"interrupted; the text so far was kept" in shown
    assert b"Traceback" not in shown


def shell(line):
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=environment(), check=False)


@pytest.mark.parametrize(
    ("redirection", "code", "words"),
    [
        (">&-", 1, "standard output is closed"),
        (">/dev/full", 1, "standard output cannot be written: No space left on device"),
        ("2>&-", 0, ""),
        ("2>/dev/full", 0, ""),
        ("<&- >/dev/null", 0, ""),
        (">&- 2>&- <&-", 1, ""),
    ],
)
def test_streams_that_are_closed_or_full(redirection, code, words):
    result = shell(f"{COMMAND[0]} methods {redirection}")
    assert result.returncode == code, result.stderr
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == (2 if words else 0)


def test_a_closed_standard_input_is_no_document(model):
    result = shell(f"{COMMAND[0]} generate -m {model} - <&-")
    assert result.returncode == 2
    assert result.stderr.startswith("kvcli: error: stdin: cannot be read: Bad file descriptor\nhint: ")


def test_results_have_their_colours_on_a_terminal():
    ours, theirs = pty.openpty()
    variables = environment() | {"TERM": "xterm-256color"}
    variables.pop("NO_COLOR", None)
    with subprocess.Popen([*COMMAND, "methods"], stdout=theirs, env=variables) as process:
        os.close(theirs)
        shown = b""
        with suppress(OSError):  # nothing holds the other side any more
            while part := os.read(ours, 1000):
                shown += part
    assert process.returncode == 0
    assert b"\x1b[" in shown
    assert b"\\x1b" not in shown


@pytest.mark.parametrize("columns", ["0", "00", ""])
def test_a_terminal_of_unknown_width_gets_the_output(warm, columns):
    assert "freekv" in warm("methods", COLUMNS=columns).stdout
