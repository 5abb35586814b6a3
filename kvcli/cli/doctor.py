"""`kvcli doctor`: check whether this machine is ready, and say what to do if it is not."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from kvcli.cli.command import command
from kvcli.cli.output import check_outputs, progress, write_result
from kvcli.errors import ExitCode
from kvcli.inputs.options import ModelOptions, Output, Panel, Some, group


@group
class Warmth:
    """Work in addition to the checks."""

    warm: bool = Panel("Machine").flag(
        "--warm", "Compile the loops for this processor now instead of in the first run."
    )


@command
def doctor(
    model: Annotated[
        ModelOptions,
        Some(
            "model dtype weights offline",
            model={
                "metavar": "NAME",
                "help": "Check this checkpoint, config.json, hub id or shape instead; needs no weights.",
                "env": False,
            },
        ),
    ],
    output: Annotated[Output, Some("json output quiet debug")],
    also: Warmth,
) -> None:
    """Check this machine: versions, device, memory, bandwidths, Triton, threads, disk.

    kvcli doctor -m qwen3-next-80b-a3b

    Names a remedy for every problem. With -m, checks from the model's config alone
    whether kvcli runs it in this machine's memory, and lists the layers that retrieve.

    Exit codes: 0 kvcli works, and runs the model if one is given; 1 something that it
    needs is broken, or it does not run the model; 2 usage, 3 the model will not fit in
    memory, 130 interrupted, 141 stdout was closed.
    """
    check_outputs({"-o": output.output})

    from kvcli.bench.doctor import examine, examine_model, lacks_memory, usable, warm
    from kvcli.ui import console

    with progress(output.quiet) as observer:
        observer.stage("examine")
        spec = model.spec(load_format="dummy")
        checks = list(examine(output.debug) if spec.name is None else examine_model(spec))
        if also.warm:
            checks.append(warm(observer))
    ready = usable(checks)
    if output.as_json:
        body = {"schema_version": 1, "usable": ready, "checks": [asdict(check) for check in checks]}
        text = json.dumps(body, ensure_ascii=False) + "\n"
    else:
        rows = [(check.name, check.state, check.found, check.fix) for check in checks]
        text = console.render(console.findings(rows), to_file=output.output is not None)
    write_result(output.output, text)
    short = spec.name is not None and lacks_memory(checks)
    raise typer.Exit(ExitCode.OK if ready else ExitCode.WILL_NOT_FIT if short else ExitCode.RUNTIME)
