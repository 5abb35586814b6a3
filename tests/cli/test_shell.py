"""What holds for every command: help, version, usage errors, and how a process ends."""

import contextlib
import itertools
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from command import COMMAND, MODULE, assert_refused, environment, kvcli

from kvcli import __version__
from kvcli.cli.guard import BROKEN_PIPE, as_kvcli_error, run
from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.profiles import DEFAULT_PROFILE

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["generate", "--help"], ["methods", "--help"]])
def test_help(warm, arguments):
    result = warm(*arguments)
    assert result.returncode == 0
    assert "Usage: kvcli" in result.stdout
    assert result.stderr == ""


def test_help_loads_no_heavy_library():
    code = (
        "import sys; sys.argv = ['kvcli', 'generate', '--help']\n"
        "import kvcli.cli\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "assert 'rich' not in loaded, 'rich before it is needed'\n"
        "try: kvcli.cli.main()\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'kvcli.ui.console'} & set(sys.modules)), file=sys.stderr)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True)
    assert result.stderr == "[]\n"


WATCHED = """
import importlib.abc, os, sys

class Watch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            os.write(2, b"<torch>")
            os._exit(0)

sys.meta_path.insert(0, Watch())
sys.argv = ["kvcli", *sys.argv[1:]]
from kvcli.cli import main
main()
"""


def on_a_terminal(*arguments):
    """What the program shows on a terminal that has stderr, until it imports torch."""
    master, slave = pty.openpty()
    with os.fdopen(master, "rb", buffering=0) as screen:
        command = [sys.executable, "-c", WATCHED, *arguments]
        with subprocess.Popen(command, stdin=slave, stdout=subprocess.PIPE, stderr=slave, env=environment()):
            os.close(slave)
            seen = b""
            with contextlib.suppress(OSError):  # the end of a terminal on Linux
                while piece := screen.read(4096):
                    seen += piece
    return seen.decode()


@pytest.mark.parametrize("arguments", [["generate", "-p", "x"], ["chat"], ["eval", "--tasks", "vt"]])
def test_a_terminal_shows_something_before_the_libraries_are_imported(arguments):
    assert on_a_terminal(*arguments) == "kvcli: starting<torch>"
    assert on_a_terminal(*arguments, "-q") == "<torch>"


def test_what_is_shown_first_is_gone_before_anything_else():
    seen = on_a_terminal("generate", "missing.txt")
    begun, gone, rest = seen.partition(f"\r{' ' * len('kvcli: starting')}\r")
    assert (begun, bool(gone)) == ("kvcli: starting", True)
    assert "missing.txt" in rest
    assert "starting" not in on_a_terminal("generate", "--help") + on_a_terminal("kv", "list")


def test_help_names_groups_units_and_defaults():
    text = kvcli("generate", "--help").stdout
    for group in ("Input", "Model", "Method", "Sampling", "Output"):
        assert f" {group} " in text
    assert "TOKENS" in text
    assert "[default: 256]" in text


def test_version():
    assert kvcli("--version").stdout == f"kvcli {__version__}\n"


@pytest.mark.parametrize("cwd", [ROOT, ROOT.parent])
def test_the_module_runs_like_the_command(cwd):
    assert kvcli("--version", command=MODULE, cwd=cwd).stdout == f"kvcli {__version__}\n"


def test_no_command_shows_the_help():
    result = kvcli()
    assert result.returncode == ExitCode.USAGE
    assert "Usage: kvcli" in result.stdout + result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generat"], ["'generat'"]),
        (["generate", "--bugdet", "2K"], ["--bugdet"]),
        (["generate", "--max-tokens"], ["--max-tokens"]),
        (["generate", "-p", "x", "--max-tokens", "many"], ["--max-tokens", "'many'"]),
        (["generate", "-p", "x", "--max-tokens", "0"], ["--max-tokens", "0"]),
        (["generate", "-p", "x", "--temperature", "warm"], ["--temperature", "warm"]),
        (["generate", "-p", "x", "--top-k", "1.5"], ["--top-k", "1.5"]),
        (["generate", "-p", "x", "--load-format", "fast"], ["--load-format", "fast"]),
        (["generate", "-p", "x", "--temperature", "inf"], ["--temperature", "'inf' is not a finite number"]),
        (["generate", "-p", "x", "--temperature", "-1"], ["--temperature -1.0"]),
        (["generate", "-p", "x", "--audit", "-1"], ["--audit", "-1 is not at least 1"]),
        (["generate", "-p", "x", "--stop", ""], ["--stop '' is out of range"]),
        (["generate", "-p", "x", "--device", "tpu"], ["--device", "'tpu'"]),
        (["generate", "-p", "x", "--dtype", "int3"], ["--dtype", "'int3'"]),
        (["generate", "-p", "x", "-p", " "], ["is empty"]),
        (["generate", "-p", os.fsdecode(b"\xff\xfe")], ["-p holds bytes that are not UTF-8 text"]),
        (["generate", "-p", "x", "--chat-template-kwargs", "[" * 99_999], ["--chat-template-kwargs", "bad JSON"]),
        (["methods", "freekv", "quest"], ["quest"]),
    ],
)
def test_usage_errors_have_one_style(warm, arguments, words):
    assert_refused(warm(*arguments), ExitCode.USAGE, *words)


REFUSED_AT_ONCE = [
    ["generate", "-p", "x", "--temperature", "-1"],
    ["generate", "-p", "x", "--method", "frekv"],
    ["generate", "-p", "x", "--profile", "frekv"],
    ["generate", "-p", "x", "--set", "bugdet=2K"],
    ["generate", "-p", "x", "-m", "./no-such-directory"],
    ["eval", "--tasks", "vt", "--method", "full,frekv"],
    ["plan", "--method", "quest", "--set", "bugdet=2K"],
    ["profile", "-m", "./no-such-directory"],
    ["calibrate", "tau", "-m", "./no-such-directory"],
]


def test_bad_input_is_refused_before_the_heavy_libraries_are_loaded():
    """One process refuses all of it, one after the other, and has loaded none of them after any."""
    code = (
        "import sys, kvcli.cli\n"
        f"for arguments in {REFUSED_AT_ONCE}:\n"
        "    sys.argv = ['kvcli', *arguments]\n"
        "    try: kvcli.cli.main()\n"
        "    except SystemExit as end: print(end.code, sorted({'torch', 'transformers'} & set(sys.modules)))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True)
    assert result.stdout == "2 []\n" * len(REFUSED_AT_ONCE)


@pytest.mark.parametrize(("name", "value"), [("KVCLI_MAX_TOKENS", "lots"), ("KVCLI_TEMPERATURE", "-1")])
def test_the_variable_that_a_bad_value_came_from_is_named(warm, name, value):
    result = warm("generate", "-p", "x", **{name: value})
    assert_refused(result, ExitCode.USAGE, value)
    assert f"{name}={value} is set in the environment" in result.stderr
    option = "--" + name.removeprefix("KVCLI_").lower().replace("_", "-")
    assert name not in warm("generate", "-p", " ", option, 1, **{name: value}).stderr


def test_a_variable_that_sets_nothing_is_told(warm):
    told = "kvcli: the environment variable KVCLI_MODLE sets nothing; did you mean KVCLI_MODEL?\n"
    assert warm("methods", KVCLI_MODLE="x").stderr == told
    assert warm("doctor", "-q", "-o", "none/out", KVCLI_MODLE="x").stderr.startswith("kvcli: error: -o none/out")


def test_shell_completion():
    assert (
        "_KVCLI_COMPLETE" in kvcli("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1").stdout
    )
    completed = kvcli(_KVCLI_COMPLETE="complete_bash", COMP_WORDS="kvcli generate --method fr", COMP_CWORD="3")
    assert completed.stdout.split() == ["freekv", "freekv_layer"]


def test_help_tells_the_defaults_that_a_profile_decides(warm):
    text = " ".join(warm("generate", "--help").stdout.split())
    assert f"[default: (full if it fits, else {DEFAULT_PROFILE})]" in text
    assert "freekv: 2K" in text


def test_a_mistyped_option_comes_with_the_nearest(warm):
    assert "did you mean --budget?" in warm("generate", "--bugdet", "2K").stderr


def failing(error):
    app = typer.Typer()

    @app.command()
    def command(debug: bool = False):
        raise error

    return app


@pytest.mark.parametrize(
    ("error", "code", "what"),
    [
        (KvcliError("will not fit", "try", ExitCode.WILL_NOT_FIT), 3, "will not fit"),
        (ZeroDivisionError("division by zero\nsecond line"), 1, "ZeroDivisionError: division by zero"),
        (OSError(28, "No space left on device", "a.txt"), 1, "a.txt: No space left on device"),
        (AssertionError(), 1, "AssertionError"),
        (MemoryError(), 3, "out of memory"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
            3,
            "out of memory: DefaultCPUAllocator",
        ),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory."), 3, "out of memory: CUDA"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_any_error_becomes_one_line_and_a_code(capsys, error, code, what):
    assert as_kvcli_error(error).exit_code == code
    assert run(failing(error), []) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert what in lines[0]
    assert len(lines) <= 2
    assert "Traceback" not in captured.err


def test_the_traceback_is_for_debug(capsys, monkeypatch):
    assert run(failing(ZeroDivisionError("no")), ["--debug"]) == ExitCode.RUNTIME
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("KVCLI_DEBUG", "1")
    run(failing(ZeroDivisionError("no")), [])
    assert "Traceback" in capsys.readouterr().err


def test_a_closed_stdout_ends_quietly():
    process = subprocess.Popen(
        [*COMMAND, "methods"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) == BROKEN_PIPE


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_stdout_is_one_line():
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(
            [*COMMAND, "--version"], stdout=full, stderr=subprocess.PIPE, text=True, env=environment(), check=False
        )
    assert result.returncode == ExitCode.RUNTIME
    assert "No space left on device" in result.stderr.splitlines()[0]
    assert "Traceback" not in result.stderr
    assert "Exception ignored" not in result.stderr


@pytest.mark.parametrize(
    "name", ["batch", "calibrate", "chat", "doctor", "eval", "generate", "plan", "prefill", "profile"]
)
def test_paragraphs_of_a_help_page_fill_the_terminal(warm, name):
    shown = warm(name, "--help", COLUMNS="80").stdout
    text = [line.strip() for line in shown.partition("╭")[0].splitlines()]
    for line, following in itertools.pairwise(text):
        if following and line and not line.startswith("kvcli "):
            assert len(line) + 1 + len(following.split()[0]) > 78, (line, following)
