"""`kvcli doctor`: whether this machine is ready, and what to do where it is not."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kvcli.cli.options import flag, option
from kvcli.cli.output import check_writable, write_file
from kvcli.errors import ExitCode

_OUTPUT = "Output"


def doctor(
    as_json: Annotated[bool, flag("--json", panel=_OUTPUT, env=False, help="One JSON object instead.")] = False,
    output: Annotated[
        Path | None,
        option("--output", "-o", panel=_OUTPUT, env=False, metavar="FILE", help="Write to FILE instead of stdout."),
    ] = None,
    quiet: Annotated[bool, flag("--quiet", "-q", panel=_OUTPUT, help="No progress.")] = False,
    debug: Annotated[  # noqa: ARG001 - read by the guard around every command
        bool, flag("--debug", panel=_OUTPUT, help="Show the traceback of an error.")
    ] = False,
) -> None:
    """Check this machine: versions, device, memory, bandwidths, Triton, threads, disk.

    Every problem comes with what to do about it. Exit codes: 0 kvcli can be used,
    1 something that it needs is broken.
    """
    if output is not None:
        check_writable(output, "-o")

    from kvcli import console
    from kvcli.doctor import examine, usable

    observer = console.RunConsole(None, quiet, text_on_screen=False)
    observer.stage("examine")
    try:
        checks = list(examine())
    finally:
        observer.stage_done()
    ready = usable(checks)
    if as_json:
        body = {"schema_version": 1, "usable": ready, "checks": [asdict(check) for check in checks]}
        text = json.dumps(body, ensure_ascii=False) + "\n"
    else:
        rows = [(check.name, check.state, check.found, check.fix) for check in checks]
        text = console.render(console.findings(rows), to_file=output is not None)
    if output is not None:
        write_file(output, text)
    else:
        typer.echo(text, nl=False)
    raise typer.Exit(ExitCode.OK if ready else ExitCode.RUNTIME)
