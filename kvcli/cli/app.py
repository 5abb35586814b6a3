"""The application, made of all commands."""

import os
import sys
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Annotated, Any

import typer

from kvcli import __version__
from kvcli.cli.batch import batch
from kvcli.cli.calibrate import calibrate
from kvcli.cli.chat import chat
from kvcli.cli.doctor import doctor
from kvcli.cli.eval import evaluate
from kvcli.cli.generate import generate
from kvcli.cli.kv import kv
from kvcli.cli.methods import methods
from kvcli.cli.plan import plan
from kvcli.cli.prefill import prefill
from kvcli.cli.profile import profile

app = typer.Typer(
    name="kvcli",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(generate)
app.add_typer(batch, name="batch", help="Run a file of prompts; run it again to resume.")
app.command()(chat)
app.command()(prefill)
app.add_typer(kv, name="kv")
app.command("eval")(evaluate)
app.command()(calibrate)
app.command()(methods)
app.command()(profile)
app.command()(plan)
app.command()(doctor)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvcli {__version__}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001 - its callback ends the process
        bool, typer.Option("--version", callback=_version, is_eager=True, metavar="", help="Show the version and exit.")
    ] = False,
) -> None:
    """Long-context generation with the KV cache in host memory and retrieval on the device."""
    _warn_of_unknown_variables(context)


def _warn_of_unknown_variables(context: typer.Context) -> None:
    """Warn on stderr of variables that set nothing, unless -q is given: a mistyped name would be silent otherwise."""
    names = sorted(name for name in os.environ if name.startswith("KVCLI_"))
    if not names or {"-q", "--quiet"} & set(sys.argv):
        return
    known = [parameter.envvar for parameter in _parameters(context.command) if parameter.envvar]
    for name in (name for name in names if name not in known):
        from kvcli.ui.console import print_note

        near = get_close_matches(name, known, n=1)
        print_note(f"the environment variable {name} sets nothing" + (f"; did you mean {near[0]}?" if near else ""))


def _parameters(command: Any) -> Iterator[Any]:
    """Yield the parameters of a command, or of all commands of a group."""
    yield from command.params
    for one in getattr(command, "commands", {}).values():
        yield from _parameters(one)
