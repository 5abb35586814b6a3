"""`kvcli profile`: the time of a decode step, and the phases that it consists of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvcli.cli import options
from kvcli.cli.options import METHODS, Panel, at_least, compared, distinct, names, positive_count, whole
from kvcli.cli.output import OutputWriter, progress
from kvcli.cli.reads import check_files
from kvcli.cli.saved import HostMemory, KVDisk
from kvcli.errors import ExitCode

if TYPE_CHECKING:
    from kvcli.bench.report import ProfileReport

_LOAD, _RUNS = Panel("Load"), Panel("Runs")


def profile(
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE", help="Text to prefill instead of random KV; - is standard input.", show_default=False
        ),
    ] = None,
    context: Annotated[
        str | None, _LOAD.option("--context", "TOKENS,...", "Tokens before the first step, 8K by default.")
    ] = None,
    batch_size: Annotated[str, _LOAD.option("--batch-size", "N,...", "Sequences decoded together.")] = "1",
    output_len: Annotated[int, _LOAD.option("--output-len", "N", "Timed steps of a run.", positive_count)] = 32,
    read: Annotated[bool, _LOAD.flag("--read", "Prefill random tokens with the model instead of random KV.")] = False,
    model: options.Model = None,
    device: options.Device = "auto",
    dtype: options.DType = "auto",
    weights: options.Weights = "auto",
    load_format: options.LoadFormat = "auto",
    offline: options.Offline = False,
    method: options.Methods = None,
    profile: options.Profiles = None,
    settings: options.Settings = None,
    kv_dtype: options.KVDType = None,
    kv_disk: KVDisk = None,
    host_memory: HostMemory = None,
    ablate: options.Ablate = False,
    peers: Annotated[bool, METHODS.flag("--peers", "Add transformers' own caches, on the same weights.")] = False,
    repeat: Annotated[int, _RUNS.option("--repeat", "N", "Runs of each method, in turn.", positive_count)] = 5,
    warmup: Annotated[
        int, _RUNS.option("--warmup", "N", "Steps of each run that are not counted.", at_least(0, whole))
    ] = 2,
    seed: Annotated[int, _RUNS.option("--seed", "N", "Seed of random KV and tokens.", whole, env=True)] = 0,
    html: options.Html = None,
    trace: options.Trace = None,
    nvtx: Annotated[bool, options.OUTPUT.flag("--nvtx", "Mark the spans as NVTX ranges, too (CUDA).")] = False,
    as_json: options.AsJson = False,
    output: options.Output = None,
    quiet: options.Quiet = False,
    debug: options.Debug = False,  # noqa: ARG001 - read by the guard around every command
) -> None:
    """Measure the time of a decode step, its phases, and its distance from the roofline.

    kvcli profile --method full,quest,freekv --context 8K,32K --html profile.html

    The other rows are compared with the first one: the first method named, or with
    --ablate its first ablation. The runs of all methods take turns; the phases of a step
    come from separate runs with clocks inside.

    Exit codes: 0 done, 1 failed, 2 usage, 3 will not fit in memory, 4 some cases
    failed, 130 interrupted, 141 stdout was closed.
    """
    from kvcli.inputs.prompts import read_document

    check_files(
        {"-o": output, "--trace": trace, "--html": html},
        model=model,
        load_format=load_format,
        documents=[file] if file else (),
        profiles=names(profile, "--profile"),
        settings=settings,
    )
    variants = compared(method, profile, settings, kv_dtype=kv_dtype)
    contexts, batches = distinct(context, "--context"), distinct(batch_size, "--batch-size")
    document = None if file is None else read_document(file)

    from kvcli.bench.profiler import ProfileRequest
    from kvcli.bench.profiler import profile as run
    from kvcli.bench.report import notes, tables
    from kvcli.bench.runs import entries
    from kvcli.inputs.kv_options import disk_options
    from kvcli.models.loading import ModelSpec
    from kvcli.telemetry.timeline import chrome_trace
    from kvcli.ui import console

    request = ProfileRequest(
        model=ModelSpec(model, device, dtype, load_format, offline, weights),
        entries=entries(variants, ablate),
        contexts=tuple(contexts),
        batches=tuple(batches),
        steps=output_len,
        repeat=repeat,
        warmup=warmup,
        seed=seed,
        document=document,
        read=read,
        peers=peers,
        ablate=ablate,
        nvtx=nvtx,
        disk=disk_options(kv_disk, host_memory),
    )
    with progress(quiet, demo=model is None) as observer:
        outcome = run(request, observer)
    report = outcome.report
    explained = [] if quiet else notes(report)
    text = report.to_json() + "\n" if as_json else console.render_tables(tables(report), output is not None, explained)
    writer = OutputWriter()
    writer.result(output, text)
    if trace is not None:
        writer.file(trace, chrome_trace(outcome.spans))
    if html is not None and report.cases:
        from kvcli.bench.html import page

        writer.file(html, page(outcome))
    writer.finish()
    if not report.finished:
        kept = "what was measured up to here was kept" if report.cases else "nothing was measured yet"
        observer.notice(f"interrupted; {kept}")
    raise typer.Exit(exit_code(report))


def exit_code(report: ProfileReport) -> ExitCode:
    """Give the exit code of a profile: interrupted, or how many of its cases failed."""
    if not report.finished:
        return ExitCode.INTERRUPTED
    failed = [case.error is not None for case in report.cases]
    return ExitCode.OK if not any(failed) else ExitCode.RUNTIME if all(failed) else ExitCode.PARTIAL
