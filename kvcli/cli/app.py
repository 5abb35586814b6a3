"""The commands put together."""

from typing import Annotated

import typer

from kvcli import __version__
from kvcli.cli.batch import batch
from kvcli.cli.calibrate import calibrate
from kvcli.cli.chat import chat
from kvcli.cli.doctor import doctor
from kvcli.cli.environment import warn_of_unknown_variables
from kvcli.cli.eval import evaluate
from kvcli.cli.generate import generate
from kvcli.cli.kv import kv
from kvcli.cli.methods import methods
from kvcli.cli.plan import plan
from kvcli.cli.profile import profile
from kvcli.cli.saved import prefill

app = typer.Typer(
    name="kvcli",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(generate)
app.add_typer(batch, name="batch", help="Run a file of prompts; only rows in flight are ever lost.")
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
    warn_of_unknown_variables(context)
