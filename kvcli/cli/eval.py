"""`kvcli eval`: how good the answers of methods are, and what they cost, as one table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcli.cli import asked, options
from kvcli.cli.options import SAMPLING, Panel, compared, each, names, positive_count, require_text, whole
from kvcli.cli.output import OutputWriter, progress
from kvcli.cli.reads import check_files
from kvcli.cli.saved import HostMemory, KVDisk
from kvcli.errors import ExitCode

if TYPE_CHECKING:
    from kvcli.quality.eval.table import EvaluationTable

_TASKS = Panel("Tasks")


def evaluate(
    context: typer.Context,
    tasks: Annotated[
        str,
        _TASKS.option(
            "--tasks",
            "A,B",
            "Synthetic tasks, needle_grid, needle_turns, ppl, ppl:FILE, files of benchmarks, requests:FILE.",
        ),
    ],
    suite: Annotated[
        str | None,
        _TASKS.option("--suite", "NAME", "Profiles, budgets and sampling of a paper's main table."),
    ] = None,
    length: Annotated[
        str | None, _TASKS.option("--length", "TOKENS,...", "Lengths of the prompts, as in 4K,8K.")
    ] = None,
    depths: Annotated[int, _TASKS.option("--depths", "N", "Depths of the needle grid.", positive_count)] = 5,
    max_length: Annotated[
        int | None,
        _TASKS.option(
            "--max-length",
            "TOKENS",
            "Cut longer prompts in the middle; by default to what the model was made for.",
            positive_count,
            show_default=False,
        ),
    ] = None,
    limit: Annotated[int, _TASKS.option("--limit", "N", "Documents of each.", positive_count)] = 20,
    method: options.Methods = None,
    profile: options.Profiles = None,
    budget: options.Budgets = None,
    settings: options.Settings = None,
    kv_dtype: options.KVDType = None,
    kv_disk: KVDisk = None,
    host_memory: HostMemory = None,
    ablate: options.Ablate = False,
    model: options.Model = None,
    device: options.Device = "auto",
    dtype: options.DType = "auto",
    weights: options.Weights = "auto",
    load_format: options.LoadFormat = "auto",
    offline: options.Offline = False,
    max_tokens: Annotated[
        int | None,
        SAMPLING.option(
            "--max-tokens",
            "TOKENS",
            "Longest answer; the task's own by default.",
            positive_count,
            show_default=False,
        ),
    ] = None,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k: asked.TopK = 0,
    min_p: asked.MinP = 0.0,
    seed: Annotated[int, SAMPLING.option("--seed", "N", "Same seed, same documents and answers.", whole)] = 0,
    num_samples: options.NumSamples = 1,
    system: asked.System = None,
    raw: asked.Raw = False,
    chat_template_kwargs: asked.ChatTemplateKwargs = None,
    predictions: Annotated[
        Path | None,
        options.OUTPUT.option(
            "--predictions", "FILE", "Keep every answer in FILE as it comes, and go on from it when run again."
        ),
    ] = None,
    as_json: options.AsJson = False,
    output: options.Output = None,
    html: options.Html = None,
    quiet: options.Quiet = False,
    debug: options.Debug = False,  # noqa: ARG001 - read by the guard around every command
) -> None:
    """Measure the answers of methods on long-context tasks.

    kvcli eval --tasks niah_single,vt --length 4K,8K --method full,quest --budget 256,512

    The table goes to stdout. With --predictions FILE a run that was cut off goes on
    where it stopped when the same command is given again. A profile that was calibrated
    on another model is refused; generate uses it and says so.

    kvcli eval --tasks aime24.jsonl -m MODEL --num-samples 8 --temperature 0.6

    Files of benchmarks are JSONL, CSV or Parquet, as they are distributed. Reasoning
    (MATH500, AIME, GPQA) is scored by the final answer, as avg@k and pass@k over samples.

    kvcli eval --suite paper-freekv --tasks longbench_v2.jsonl -m MODEL --predictions answers.jsonl

    --suite does what a paper's main table did, on files that you name; what else is given
    comes before it. Suites: paper-freekv, paper-freekv-generation, paper-freekv-reasoning,
    paper-shadowkv, paper-shadowkv-longbench, paper-actqkv, paper-fier, paper-refreekv.

    Exit codes: 0 done, 1 failed, 2 usage, 3 will not fit in memory, 130 interrupted,
    141 stdout was closed.
    """
    require_text({"--system": [system], "--chat-template-kwargs": [chat_template_kwargs]})
    check_files(
        {"-o": output, "--html": html, "--predictions": predictions},
        model=model,
        load_format=load_format,
        documents=[task.removeprefix("ppl:") for task in tasks.split(",")],
        profiles=names(profile, "--profile"),
        settings=settings,
    )
    from kvcli.inputs.suites import table_suite

    chosen = None if suite is None else table_suite(suite)
    if chosen is not None:
        profile = profile or (None if method else chosen.profile)
        budget = budget or (",".join(chosen.budgets) or None)
        max_length, max_tokens = max_length or chosen.max_length, max_tokens or chosen.max_tokens
        own = set(options.given(context, ("temperature", "top_p")))
        temperature = temperature if "temperature" in own else chosen.temperature
        top_p = top_p if "top_p" in own else chosen.top_p
    variants = compared(method, profile, settings, budget, kv_dtype)
    if ablate:
        from kvcli.inputs.variants import ablated

        variants = [each for variant in variants for each in (*ablated(variant), variant)]

    from kvcli.inputs.encoding import Template
    from kvcli.inputs.kv_options import disk_options
    from kvcli.models.loading import ModelSpec
    from kvcli.quality.eval.evaluate import evaluate as run
    from kvcli.quality.eval.suite import EvaluationPlan
    from kvcli.runtime.sampling import Sampling

    plan = EvaluationPlan(
        model=ModelSpec(model, device, dtype, load_format, offline, weights),
        variants=variants,
        tasks=names(tasks, "--tasks"),
        lengths=each(length, "--length", positive_count),
        depths=depths,
        limit=limit,
        max_tokens=max_tokens,
        max_length=max_length,
        sampling=Sampling(
            temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, num_samples=num_samples
        ),
        template=Template(system, raw, asked.json_object(chat_template_kwargs)),
        predictions=predictions,
        disk=disk_options(kv_disk, host_memory),
    )
    with progress(quiet, demo=model is None) as observer:
        if chosen is not None:
            observer.notice(f"{suite}: {chosen.table}; it is about {chosen.files}")
        if num_samples > 1 and temperature == 0:
            observer.notice(f"--num-samples {num_samples} without --temperature: all samples will be the same")
        table = run(plan, observer)
    text = table.to_json() + "\n" if as_json else _text(table, to_file=output is not None)
    writer = OutputWriter()
    writer.result(output, text)
    if html is not None:
        from kvcli.quality.eval.html import page

        writer.file(html, page(table))
    writer.finish()
    if not table.complete:
        kept = f"answers so far are in {predictions}" if predictions else "no --predictions FILE kept the answers"
        observer.notice(f"interrupted; the table is not complete, {kept}")
        raise typer.Exit(ExitCode.INTERRUPTED)


def _text(table: EvaluationTable, to_file: bool) -> str:
    """The table for people; the needle grid's heat maps below it."""
    from kvcli.quality.eval.layout import heat_maps, tables
    from kvcli.ui import console

    text = console.render_tables(tables(table), to_file)
    maps = heat_maps(table)
    return text + console.render_heat_maps(maps, to_file) if maps else text
