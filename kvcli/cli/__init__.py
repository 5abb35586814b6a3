"""The command line, one module a command."""

import os
import sys
from typing import Annotated

import typer

from kvcli import __version__
from kvcli.cli.calibrate import calibrate
from kvcli.cli.doctor import doctor
from kvcli.cli.eval import evaluate
from kvcli.cli.generate import generate
from kvcli.cli.guard import run
from kvcli.cli.methods import methods
from kvcli.cli.plan import plan
from kvcli.cli.profile import profile

app = typer.Typer(
    name="kvcli",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(generate)
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
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, metavar="", help="Show the version and exit.")
    ] = False,
) -> None:
    """Long-context generation with the KV cache in host memory and retrieval on the device."""


def main() -> None:
    """Run the command line of this process and exit with its code."""
    code = run(app, sys.argv[1:])
    if "torch" in sys.modules:
        # Taking an interpreter with torch apart costs a second that the user would wait for. Everything is written.
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
