"""`kvcli doctor`: whether this machine is ready, and what to do where it is not."""

import json
from dataclasses import asdict

import typer

from kvcli.cli import options
from kvcli.cli.output import check_outputs, progress, write_result
from kvcli.errors import ExitCode


def doctor(
    as_json: options.AsJson = False,
    output: options.Output = None,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Check this machine: versions, device, memory, bandwidths, Triton, threads, disk.

    Every problem comes with what to do about it. Exit codes: 0 kvcli can be used,
    1 something that it needs is broken, 2 usage, 130 interrupted, 141 stdout was closed.
    """
    check_outputs({"-o": output})

    from kvcli.bench.doctor import examine, usable
    from kvcli.ui import console

    with progress(quiet) as observer:
        observer.stage("examine")
        checks = list(examine(debug))
    ready = usable(checks)
    if as_json:
        body = {"schema_version": 1, "usable": ready, "checks": [asdict(check) for check in checks]}
        text = json.dumps(body, ensure_ascii=False) + "\n"
    else:
        rows = [(check.name, check.state, check.found, check.fix) for check in checks]
        text = console.render(console.findings(rows), to_file=output is not None)
    write_result(output, text)
    raise typer.Exit(ExitCode.OK if ready else ExitCode.RUNTIME)
