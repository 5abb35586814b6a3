"""`kvcli batch merge` and `kvcli batch status`: the files of batches."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcli.cli import options
from kvcli.cli.options import OUTPUT
from kvcli.cli.output import write_result
from kvcli.errors import ExitCode


def merge(
    source: Annotated[str, typer.Argument(metavar="IN", help="The rows, as the shards were given them.")],
    output: Annotated[
        Path, OUTPUT.option("--output -o", "OUT.jsonl", "As the shards were given it: their files lie beside it.")
    ],
    quiet: options.Quiet = False,
    debug: options.Debug = False,  # noqa: ARG001 - read by the guard around every command
) -> None:
    """Join the files of shards into one, in the order of the rows.

    kvcli batch merge prompts.jsonl -o answers.jsonl

    Every row has to have one result, all by one model and profile; otherwise nothing is
    written, and what is missing is named.

    Exit codes: 0 done, 1 not all rows have a result, 2 usage, 4 some rows failed.
    """
    from kvcli.batch.merge import merge as join
    from kvcli.ui import console

    found = join(source, output)
    if not quiet:
        console.print_batch_summary(found)
    raise typer.Exit(ExitCode.PARTIAL if found.earlier_failed else ExitCode.OK)


def status(
    output: Annotated[Path, typer.Argument(metavar="OUT", help="The file that -o was given, with or without --shard.")],
    as_json: options.AsJson = False,
    debug: options.Debug = False,  # noqa: ARG001 - read by the guard around every command
) -> None:
    """Show how a batch gets on, from another terminal.

    kvcli batch status answers.jsonl

    Exit codes: 0 done, 1 failed, 2 usage, 141 stdout was closed.
    """
    from kvcli.batch.merge import state
    from kvcli.ui import console

    found, running = state(output)
    if as_json:
        text = found.model_dump_json() + "\n"
    else:
        text = console.render_batch(found) + f"{'state':<10} {'running' if running else 'no run writes to it'}\n"
    write_result(None, text)
