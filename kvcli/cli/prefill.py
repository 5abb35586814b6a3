"""`kvcli prefill`: read documents and save their KV."""

from __future__ import annotations

import json
import shlex
from typing import Annotated

import typer

from kvcli.cli.command import command, hush_libraries
from kvcli.cli.output import check_files, write_result
from kvcli.errors import ExitCode, KvcliError, usage_error
from kvcli.inputs.options import Input, KVOptions, ModelOptions, Output, Sampling, Some, Template
from kvcli.sizes import format_bytes


@command
def prefill(
    asked: Annotated[Input, Some("files", files={"default": ...})],
    kv: Annotated[KVOptions, Some("save_kv kv_cache kv_cache_size")],
    template: Template,
    model: ModelOptions,
    output: Annotated[Output, Some("json output quiet debug")],
) -> None:
    """Prefill documents and save their KV, to ask about them later.

    kvcli prefill report.txt --save-kv report.kv
    kvcli generate --kv report.kv -p "Who signed it?"

    Each of several documents gets a directory of its name in DIR. Every method that
    prefills exactly can use the KV, with any budget.
    """
    from kvcli.inputs.prompts import Prompt, read_prompts

    check_files({"-o": output.output}, model, asked.files)
    if not kv.any:
        raise usage_error("no place to save the KV", "name a directory with --save-kv or --kv-cache")
    entries = read_prompts(asked.files)
    hush_libraries(False)

    from kvcli.generate import generate
    from kvcli.inputs.profiles import resolve_profile
    from kvcli.request import GenerationRequest
    from kvcli.ui.console import RunConsole, print_error

    prompts = [entry for entry in entries if isinstance(entry, Prompt)]
    failed = [entry.error for entry in entries if not isinstance(entry, Prompt)]
    for error in failed:
        print_error(error)
    if not prompts:
        raise typer.Exit(ExitCode.USAGE)
    request = GenerationRequest(  # streaming also reads exactly, and holds next to nothing
        resolve_profile("streaming"),
        tuple(prompts),
        Sampling(max_tokens=1),
        template,
        kv=kv,
    )
    report = generate(model.spec(), request, RunConsole(None, output.quiet, False))
    if output.as_json:
        body = {"saved": [vars(entry) for entry in report.saved], "sequences": [vars(s.kv) for s in report.sequences]}
        write_result(output.output, json.dumps(body) + "\n")
    else:
        write_result(output.output, "".join(f"{entry.path}\n" for entry in report.saved if entry.path))
    reasons = {sequence.finish_reason for sequence in report.sequences}
    if "interrupted" in reasons:
        raise typer.Exit(ExitCode.INTERRUPTED)
    if (lost := next((entry.error for entry in report.saved if entry.error), None)) is not None:
        raise KvcliError(lost)
    for entry in report.saved if not output.quiet else ():
        typer.echo(f"{entry.source}: {entry.tokens:,} tokens, {format_bytes(entry.bytes)}", err=True)
        if entry.path and not entry.cached:
            typer.echo(f'To ask about it: kvcli generate --kv {shlex.quote(str(entry.path))} -p "..."', err=True)
    if failed or "error" in reasons:
        raise typer.Exit(ExitCode.PARTIAL)
