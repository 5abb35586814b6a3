"""The end of every command: every outcome becomes an exit code and, at most, two lines on stderr."""

import logging
import os
import re
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any

import typer

from kvcli.cli.process import caught_signals, give_up_stdout, open_missing_streams
from kvcli.errors import ExitCode, KvcliError, is_out_of_memory, usage_error
from kvcli.ui.escape import visible

# The code that a shell reports for a process ended by SIGPIPE, which Python ignores: the reader of stdout went away.
BROKEN_PIPE = 141
# Packages that transformers imports or weights are multiplied by, and the part of torch that one of them makes
# complain: they log what they could do on other machines, and, at each product, that inputs are rounded.
_LOUD = ("bitsandbytes", "torchao", "torch.utils._pytree")


def run(app: typer.Typer, arguments: Sequence[str], started: float | None = None) -> int:
    """Run `app` and return the exit code. Tracebacks are shown only with --debug or KVCLI_DEBUG=1.

    `started` is when the process began, on the clock of `time.perf_counter`; commands find it as their context's `obj`.
    """
    # Errors can come before the options are parsed, so --debug is looked up in the raw arguments.
    debug = "--debug" in arguments or os.environ.get("KVCLI_DEBUG", "").lower() in ("1", "true", "yes", "on")
    open_missing_streams()
    for name in _LOUD:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # A text that the terminal's encoding cannot show must not cost the run.
    with suppress(AttributeError):
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    if os.environ.get("COLUMNS", "").strip("0") == "":  # 0 means unknown to a shell, and no width at all to rich
        os.environ.pop("COLUMNS", None)
    with caught_signals() as received:
        code = _run(app, arguments, debug, received, started)
    # The code that a shell reports for a process that a signal ended.
    return 128 + received[0] if received and code == ExitCode.INTERRUPTED else code


def _run(
    app: typer.Typer, arguments: Sequence[str], debug: bool, received: Sequence[int], started: float | None
) -> int:
    try:
        code = app(list(arguments), prog_name="kvcli", standalone_mode=False, obj=started)
        sys.stdout.flush()
    except (SystemExit, BrokenPipeError) as end:
        # typer turns a broken pipe into a plain exit
        if isinstance(end, SystemExit) and not isinstance(end.__context__, BrokenPipeError):
            raise
        give_up_stdout()
        return BROKEN_PIPE
    except BaseException as error:
        # Some libraries, interrupted while they load, raise an error of their own.
        if received and not isinstance(error, KvcliError):
            return _show(as_kvcli_error(KeyboardInterrupt()))
        if debug and not _is_usage_error(error):
            sys.stderr.write(visible(traceback.format_exc()))
        return _show(_with_variable(as_kvcli_error(error), arguments))
    if code == ExitCode.INTERRUPTED and not isinstance(code, ExitCode):
        # Typer turned Ctrl-C into an exit: no command has reported it.
        return _show(as_kvcli_error(KeyboardInterrupt()))
    return int(code or 0)


def as_kvcli_error(error: BaseException) -> KvcliError:
    """Turn any exception into kvcli's terms: what, hint and exit code."""
    if isinstance(error, KvcliError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return KvcliError("interrupted", exit_code=ExitCode.INTERRUPTED)
    if _is_usage_error(error):
        return _usage(error)
    if is_out_of_memory(error):
        what = f"out of memory: {_first_line(error)}" if str(error) else "out of memory"
        return KvcliError(
            what, "shorten the input, lower --budget or --num-samples, or try --dtype bfloat16", ExitCode.WILL_NOT_FIT
        )
    what = f"{type(error).__name__}: {_first_line(error)}" if str(error) else type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        what = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return KvcliError(what, "run again with --debug for the traceback")


def _show(error: KvcliError) -> int:
    from kvcli.ui.console import print_error

    with suppress(OSError):
        print_error(error)
    try:
        sys.stdout.flush()
    except OSError:
        give_up_stdout()
    return int(error.exit_code)


def _is_usage_error(error: BaseException) -> bool:
    # Duck-typed: typer's own exceptions are click's in some versions and a copy of them in others.
    return hasattr(error, "format_message") and hasattr(error, "exit_code")


def _usage(error: Any) -> KvcliError:
    command = getattr(getattr(error, "ctx", None), "command_path", "kvcli")
    message = " ".join(str(getattr(error, "message", "") or error.format_message()).split())
    if type(error).__name__ == "NoArgsIsHelpError":
        return usage_error("no command", "see kvcli --help")
    if type(error).__name__ in ("BadParameter", "MissingParameter"):
        message = " ".join(error.format_message().replace("Value error, ", "").split())
    hint = f"see {command} --help"
    if close := _nearest(error):
        hint = f"did you mean {close}? {hint}"
    return usage_error(f"{message[:1].lower()}{message[1:].rstrip('.')}", hint)


def _nearest(error: Any) -> str | None:
    """Find the known option or command nearest to the unknown one."""
    context = getattr(error, "ctx", None)
    if context is None or not hasattr(error, "option_name"):
        return None
    known = [name for parameter in context.command.get_params(context) for name in parameter.opts]
    return next(iter(get_close_matches(error.option_name, known, n=1)), None)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")


def _with_variable(error: KvcliError, arguments: Sequence[str]) -> KvcliError:
    """Name the variable that a refused value came from, if the command line does not give that option itself."""
    if error.exit_code != ExitCode.USAGE:
        return error
    for name, value in os.environ.items():
        option = "--" + name.removeprefix("KVCLI_").lower().replace("_", "-")
        setting = re.escape(option[2:].replace("-", "_"))
        if not name.startswith("KVCLI_") or any(given.partition("=")[0] == option for given in arguments):
            continue
        if re.search(rf"(?<![\w-])({re.escape(option)}|{setting} =)(?![\w-])", error.what) or repr(value) in error.what:
            hint = f"{name}={value} is set in the environment; {error.hint}"
            return KvcliError(error.what, hint, error.exit_code)
    return error
