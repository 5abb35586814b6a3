"""`kvcli profile`: measure the time of a decode step and of its phases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvcli.cli.command import command, compared, distinct, names
from kvcli.cli.output import OutputWriter, check_files, progress
from kvcli.errors import ExitCode
from kvcli.inputs import options

if TYPE_CHECKING:
    from kvcli.bench.report import ProfileReport

_LOAD, _RUNS = options.Panel("Load"), options.Panel("Runs")


@options.group
class Start:
    """The state before the first step."""

    file: str | None = options.argument(None, "FILE", "Text to prefill instead of random KV; - is standard input.")
    context: str | None = _LOAD(None, "--context", "TOKENS,...", "Tokens before the first step. Default: 8K.")
    batch_size: str = _LOAD("1", "--batch-size", "N,...", "Sequences decoded together.")
    output_len: int = _LOAD(32, "--output-len", "N", "Timed steps per run.", options.positive_count)
    read: bool = _LOAD.flag("--read", "Prefill random tokens with the model instead of using random KV.")


@options.group
class Runs:
    """The methods to time, and the number of runs."""

    peers: bool = options.METHODS.flag("--peers", "Add transformers' own caches on the same weights.")
    repeat: int = _RUNS(5, "--repeat", "N", "Runs of each method; methods alternate.", options.positive_count)
    warmup: int = _RUNS(
        2, "--warmup", "N", "Untimed steps at the start of each run.", options.at_least(0, options.whole)
    )
    seed: int = _RUNS(0, "--seed", "N", "Random seed of KV and tokens.", options.whole, env=True)


@options.group
class Measured(options.Output, options.Tracing):
    """Where results and spans go."""

    nvtx: bool = options.OUTPUT.flag("--nvtx", "Also mark the spans as NVTX ranges (CUDA).")


@command
def profile(
    load: Start,
    model: options.ModelOptions,
    chosen: Annotated[options.Compared, options.Some("method profile set kv_dtype ablate")],
    disk: options.DiskOptions | None,
    runs: Runs,
    output: Annotated[Measured, options.Some("html figure trace nvtx json output quiet debug")],
) -> None:
    """Measure the time of a decode step, its phases, and its distance from the roofline.

    kvcli profile --method full,quest,freekv --context 8K,32K --html profile.html

    Compares all rows with the first one: the first method named, or with --ablate its
    first ablation. The runs of all methods alternate. The phases of a step come from
    separate runs with clocks inside.

    Exit codes: 0 done, 1 failed, 2 usage, 3 will not fit in memory, 4 some cases
    failed, 130 interrupted, 141 stdout was closed.
    """
    from kvcli.inputs.prompts import read_document

    html, trace = output.html, output.trace
    check_files(
        {"-o": output.output, "--trace": trace, "--html": html, "--figure": output.figure},
        model,
        documents=[load.file] if load.file else (),
        profiles=names(chosen.profile, "--profile"),
        settings=chosen.settings,
    )
    variants = compared(chosen)
    contexts, batches = distinct(load.context, "--context"), distinct(load.batch_size, "--batch-size")
    document = None if load.file is None else read_document(load.file)

    from kvcli.bench.profiler import ProfileRequest
    from kvcli.bench.profiler import profile as run
    from kvcli.bench.report import notes, tables
    from kvcli.bench.runs import entries
    from kvcli.telemetry.timeline import chrome_trace
    from kvcli.ui import console

    request = ProfileRequest(
        model=model.spec(),
        entries=entries(variants, chosen.ablate),
        contexts=tuple(contexts),
        batches=tuple(batches),
        steps=load.output_len,
        repeat=runs.repeat,
        warmup=runs.warmup,
        seed=runs.seed,
        document=document,
        read=load.read,
        peers=runs.peers,
        ablate=chosen.ablate,
        nvtx=output.nvtx,
        disk=disk,
    )
    with progress(output.quiet, demo=model.model is None) as observer:
        outcome = run(request, observer)
    report = outcome.report
    explained = [] if output.quiet else notes(report)
    text = (
        report.to_json() + "\n"
        if output.as_json
        else console.render_tables(tables(report), output.output is not None, explained)
    )
    writer = OutputWriter()
    writer.result(output.output, text)
    if trace is not None:
        writer.file(trace, chrome_trace(outcome.spans))
    if html is not None and report.cases:
        from kvcli.bench.html import page

        writer.file(html, page(outcome))
    if output.figure is not None:
        from kvcli.bench.html import figure

        for line in writer.picture(output.figure, figure(report, output.figure)):
            observer.notice(line)
    writer.finish()
    if not report.finished:
        kept = "the measurements so far were kept" if report.cases else "nothing was measured yet"
        observer.notice(f"interrupted; {kept}")
    raise typer.Exit(exit_code(report))


def exit_code(report: ProfileReport) -> ExitCode:
    """Choose the exit code of a profile: interrupted, or by how many of its cases failed."""
    if not report.finished:
        return ExitCode.INTERRUPTED
    failed = [case.error is not None for case in report.cases]
    return ExitCode.OK if not any(failed) else ExitCode.RUNTIME if all(failed) else ExitCode.PARTIAL
