"""`kvcli generate`: documents and a question in, text out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from kvcli.cli import asked, options
from kvcli.cli.asked import INPUT, hush_libraries, profile_of
from kvcli.cli.entries import read_entries, template_of
from kvcli.cli.options import METHOD, OUTPUT, Panel, at_least, given, positive_count, require_text, whole
from kvcli.cli.presentation import Presentation
from kvcli.cli.reads import check_files
from kvcli.cli.resume import resume_run
from kvcli.cli.saved import SAVED, HostMemory, KVCache, KVCacheSize, KVDisk, SaveKV, kv_options
from kvcli.cli.turns import check_turns, take_turns

_KEEPING = Panel("Going on")


def generate(
    context: typer.Context,
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE", help="Text documents; - is standard input.", show_default=False),
    ] = None,
    prompts: Annotated[
        list[str] | None,
        INPUT.option("--prompt -p", "TEXT", "Question put after each document; repeatable.", env=False),
    ] = None,
    questions: Annotated[
        str | None,
        INPUT.option("--questions", "FILE", "More questions: one a line, or JSONL with question and id.", env=False),
    ] = None,
    question_first: Annotated[
        Literal["no", "only", "both"],
        INPUT.option("--question-first", None, "only puts the question before the document, both before and after it."),
    ] = "no",
    turns: Annotated[
        bool, INPUT.flag("--turns", "Ask the questions one after the other, each after the answer to the one before.")
    ] = False,
    system: asked.System = None,
    raw: asked.Raw = False,
    chat_template_kwargs: asked.ChatTemplateKwargs = None,
    kv: Annotated[
        Path | None,
        SAVED.option(
            "--kv", "DIR", "Go on from what --save-kv has kept, under any method that reads exactly.", env=False
        ),
    ] = None,
    save_kv: SaveKV = None,
    kv_cache: KVCache = None,
    kv_cache_size: KVCacheSize = None,
    model: options.Model = None,
    device: options.Device = "auto",
    dtype: options.DType = "auto",
    weights: options.Weights = "auto",
    load_format: options.LoadFormat = "auto",
    offline: options.Offline = False,
    tokenizer: options.Tokenizer = None,
    method: asked.Method = None,
    profile: asked.Profile = None,
    settings: asked.Settings = None,
    budget: Annotated[
        str | None,
        METHOD.option(
            "--budget",
            "TOKENS",
            "Tokens attended per layer and KV head, as in 2K; 20% of the prompt.",
            show_default="the profile's; freekv: 2K",
        ),
    ] = None,
    sink: Annotated[str | None, METHOD.option("--sink", "TOKENS", "First tokens, always attended.")] = None,
    window: Annotated[str | None, METHOD.option("--window", "TOKENS", "Most recent tokens, always attended.")] = None,
    tau: Annotated[
        str | None, METHOD.option("--tau", "0..1", "Query similarity below which a head is corrected.")
    ] = None,
    page_size: Annotated[str | None, METHOD.option("--page-size", "TOKENS", "Tokens recalled together.")] = None,
    kv_dtype: asked.KVDType = None,
    kv_disk: KVDisk = None,
    host_memory: HostMemory = None,
    max_tokens: asked.MaxTokens = 256,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k: asked.TopK = 0,
    min_p: asked.MinP = 0.0,
    seed: asked.Seed = 0,
    stop: asked.StopTexts = None,
    ignore_eos: asked.IgnoreEos = False,
    num_samples: options.NumSamples = 1,
    checkpoint: Annotated[
        Path | None,
        _KEEPING.option("--checkpoint", "DIR", "Keep the run in a new directory, for --resume after whatever ends it."),
    ] = None,
    every: Annotated[
        int, _KEEPING.option("--every", "N", "Tokens from one writing of the checkpoint to the next.", positive_count)
    ] = 32,
    resume: Annotated[
        Path | None,
        _KEEPING.option("--resume", "DIR", "Go on with a run; prompts, model, method and sampling are those it has."),
    ] = None,
    pipeline: Annotated[
        Literal["auto", "blocking", "overlapped", "compiled"],
        METHOD.option(
            "--pipeline",
            None,
            "How a step runs: blocking, phase after phase; overlapped, in one CUDA graph; compiled, with the"
            " layers compiled (pays for long outputs), on a GPU in that graph. auto overlaps on a GPU, where the method"
            " can and nothing looks into its phases.",
        ),
    ] = "auto",
    lossless: Annotated[
        int | None,
        METHOD.option(
            "--lossless",
            "N",
            "Write the text of full attention: the method drafts N tokens, which full attention, its KV in host memory,"
            " checks in one pass.",
            at_least(1, whole),
        ),
    ] = None,
    timeline: Annotated[
        bool, OUTPUT.flag("--timeline", "Show time, corrections and recall step by step.", env=True)
    ] = False,
    trace: options.Trace = None,
    audit: Annotated[
        int | None,
        OUTPUT.option(
            "--audit",
            "N",
            "Hold every N-th step against full attention, which takes a full KV cache on the device as well.",
            at_least(1, whole),
            env=True,
        ),
    ] = None,
    stats: Annotated[
        bool | None, OUTPUT.flag("--stats/--no-stats", "Statistics at the end; shown unless -q.", env=True)
    ] = None,
    as_json: options.AsJson = False,
    output: options.Output = None,
    quiet: Annotated[
        bool, OUTPUT.flag("--quiet -q", "Only the text: no progress, notes or statistics.", env=True)
    ] = False,
    verbose: Annotated[
        bool, OUTPUT.flag("--verbose -v", "Settings, versions and per-layer counts as well.", env=True)
    ] = False,
    debug: options.Debug = False,  # noqa: ARG001 - read by the guard around every command
) -> None:
    """Generate text from long documents.

    kvcli generate report.txt -p "Who signed it?" --method freekv --budget 2K

    Text goes to stdout as it comes, everything else to stderr. The environment can
    set options: KVCLI_MODEL, KVCLI_MAX_TOKENS, and so on.

    Exit codes: 0 done, 1 failed, 2 usage, 3 will not fit in memory, 4 some prompts
    failed, 130 interrupted (143 by SIGTERM, 129 by SIGHUP), 141 stdout was closed.
    """
    from kvcli.inputs.kv_options import disk_options
    from kvcli.inputs.sampling import Sampling

    if resume is not None:
        hush_libraries(verbose)
        shown = {"quiet": quiet, "verbose": verbose, "timeline": timeline, "stats": stats}
        raise typer.Exit(resume_run(context, resume, every, model, output, trace, as_json=as_json, **shown))
    outputs = {"-o": output, "--trace": trace}
    reads = [*(files or ()), *([questions] if questions is not None else ())]
    check_files(outputs, model=model, load_format=load_format, documents=reads, profiles=[profile], settings=settings)
    sampling = Sampling(max_tokens, temperature, top_p, top_k, min_p, seed, tuple(stop or ()), ignore_eos, num_samples)
    require_text(
        {"-p": prompts, "--system": [system], "--stop": stop, "--chat-template-kwargs": [chat_template_kwargs]}
    )
    entries = read_entries(files or [], prompts or [], questions, question_first, kv)
    hush_libraries(verbose)
    settled = bool(given(context, ["system", "raw", "chat_template_kwargs"]))
    template = template_of(system, raw, chat_template_kwargs, kv, settled)
    saved_kv = kv_options(kv, save_kv, kv_cache, kv_cache_size)
    short = {"budget": budget, "sink": sink, "window": window, "tau": tau, "page_size": page_size}
    chosen = profile_of(context, method, profile, settings or [], short | {"kv_dtype": kv_dtype})

    from kvcli.generate import generate as run
    from kvcli.models.loading import ModelSpec
    from kvcli.request import GenerationRequest
    from kvcli.runtime.checkpoint.kept_run import Keep
    from kvcli.telemetry.timeline import Timeline, chrome_trace

    show = Presentation(entries, num_samples, output, as_json, quiet, verbose, timeline, stats, trace)
    if turns:
        beside: dict[str, object] = {
            "--num-samples": num_samples > 1,
            "--audit": audit,
            "--lossless": lossless,
            "--trace": trace,
            "--checkpoint": checkpoint,
            "--kv-disk": kv_disk,
        }
        stored = bool(given(context, ["kv_cache"]))
        beside |= {"--save-kv": save_kv, "--kv-cache": stored, "--question-first": question_first != "no"}
        check_turns(show, beside)
    if model is None:
        show.observer.notice(
            "no -m: using the small demo model that comes with kvcli, trained on documents like those in examples/"
        )
    if num_samples > 1 and temperature == 0:
        show.observer.notice(f"--num-samples {num_samples} without --temperature: all samples will be the same")
    keep = None if checkpoint is None else Keep(checkpoint, every)
    how = (audit, pipeline, keep, saved_kv, lossless, disk_options(kv_disk, host_memory))
    request = GenerationRequest(chosen, tuple(show.prompts), sampling, template, *how)
    spec, spans = ModelSpec(model, device, dtype, load_format, offline, weights, tokenizer), Timeline(trace is not None)
    try:
        if turns:
            report = take_turns(spec, show, chosen, sampling, template, kv)
        else:
            report = run(spec, request, show.observer, spans)
    except BaseException:
        show.abandon()
        raise
    raise typer.Exit(show.conclude(report, lambda: chrome_trace({"kvcli": spans.spans})))
