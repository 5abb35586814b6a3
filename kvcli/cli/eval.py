"""`kvcli eval`: score the answers of methods, and show their cost, as one table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcli.cli.command import assignments, command, compared, each, given, names
from kvcli.cli.output import OutputWriter, check_files, progress
from kvcli.errors import ExitCode
from kvcli.inputs import options
from kvcli.quality.tasks import TASKS

if TYPE_CHECKING:
    from kvcli.quality.eval.table import EvaluationTable

_TASKS = options.Panel("Tasks")


@options.group
class Tasks:
    """The tasks."""

    tasks: str = _TASKS(
        ...,
        *("--tasks", "A,B"),
        f"Synthetic tasks ({', '.join(TASKS)}), needle_grid, needle_turns, ppl, ppl:FILE, fidelity:FILE, benchmark "
        "files, requests:FILE.",
    )
    suite: str | None = _TASKS(None, "--suite", "NAME", "Profiles, budgets and sampling of a paper's main table.")
    length: str | None = _TASKS(None, "--length", "TOKENS,...", "Prompt lengths, as in 4K,8K.")
    depths: int = _TASKS(5, "--depths", "N", "Number of depths in the needle grid.", options.positive_count)
    max_length: int | None = _TASKS(
        None,
        *("--max-length", "TOKENS", "Truncate longer prompts in the middle. Default: the model's own limit."),
        options.positive_count,
        show=False,
    )
    limit: int = _TASKS(20, "--limit", "N", "Documents per task.", options.positive_count)


@options.group
class Longest:
    """The length of an answer, for which tasks have defaults of their own."""

    max_tokens: int | None = options.SAMPLING(
        None,
        "--max-tokens",
        "TOKENS",
        "Most tokens per answer. Default: the task's own.",
        options.positive_count,
        show=False,
    )


@options.group
class Scored(options.Output):
    """Where results go, and where answers are kept."""

    predictions: Path | None = options.OUTPUT(
        None, "--predictions", "FILE", "Save every answer in FILE; run again to resume."
    )
    kvpress: Path | None = options.OUTPUT(
        None, "--kvpress", "DIR", "Write a run on a file of RULER in the form of kvpress's leaderboard."
    )


@command
def evaluate(
    context: typer.Context,
    asked: Tasks,
    chosen: Annotated[options.Compared, options.Some("method profile budget set kv_dtype ablate")],
    disk: options.DiskOptions | None,
    model: options.ModelOptions,
    own: Longest,
    sampling: Annotated[
        options.Sampling,
        options.Some(
            "temperature top_p top_k min_p repetition_penalty seed num_samples",
            seed={"help": "Random seed of documents and answers."},
        ),
    ],
    template: options.Template,
    output: Annotated[Scored, options.Some("predictions kvpress json output html figure quiet debug")],
) -> None:
    """Score the answers of methods on long-context tasks.

    kvcli eval --tasks niah_single,vt --length 4K,8K --method full,quest --budget 256,512

    The table goes to stdout. With --predictions FILE, run the same command again to
    resume an interrupted run. eval refuses a profile that was calibrated for another
    model; generate uses it and prints a notice.

    kvcli eval --tasks aime24.jsonl -m MODEL --num-samples 8 --temperature 0.6

    Benchmark files are JSONL, CSV or Parquet, as distributed. Reasoning tasks (MATH500,
    AIME, GPQA) are scored by the final answer, as avg@k and pass@k over samples.

    kvcli eval --suite paper-freekv --tasks longbench_v2.jsonl -m MODEL --predictions answers.jsonl

    --suite reproduces a paper's main table on files that you name; other options override
    it. Suites: paper-freekv, paper-freekv-generation, paper-freekv-reasoning,
    paper-shadowkv, paper-shadowkv-longbench, paper-actqkv, paper-fier, paper-refreekv.

    Exit codes: 0 done, 1 failed, 2 usage, 3 will not fit in memory, 130 interrupted,
    141 stdout was closed.
    """
    check_files(
        {"-o": output.output, "--html": output.html, "--figure": output.figure, "--predictions": output.predictions},
        model,
        documents=[each for task in asked.tasks.split(",") for each in (task, task.partition(":")[2]) if each],
        profiles=names(chosen.profile, "--profile"),
        settings=chosen.settings,
    )
    from kvcli.inputs.variants import table_suite, where_settings_go

    suite = None if asked.suite is None else table_suite(asked.suite)
    max_length, max_tokens = asked.max_length, own.max_tokens
    if suite is not None:
        profile = chosen.profile or (None if chosen.method else suite.profile)
        chosen = replace(chosen, profile=profile, budget=chosen.budget or (",".join(suite.budgets) or None))
        max_length, max_tokens = max_length or suite.max_length, max_tokens or suite.max_tokens
        drawn: dict[str, Any] = {"temperature": suite.temperature, "top_p": suite.top_p}
        sampling = replace(sampling, **{name: drawn[name] for name in drawn.keys() - given(context, drawn)})
    variants = compared(chosen)
    if chosen.ablate:
        from kvcli.inputs.variants import ablated

        variants = [each for variant in variants for each in (*ablated(variant), variant)]

    from kvcli.quality.eval.evaluate import evaluate as run
    from kvcli.quality.eval.suite import EvaluationPlan

    plan = EvaluationPlan(
        model=model.spec(),
        variants=variants,
        tasks=names(asked.tasks, "--tasks"),
        lengths=each(asked.length, "--length", options.positive_count),
        depths=asked.depths,
        limit=asked.limit,
        max_tokens=max_tokens,
        max_length=max_length,
        sampling=sampling,
        template=template,
        predictions=output.predictions,
        disk=disk,
        kvpress=output.kvpress,
    )
    with progress(output.quiet, demo=model.model is None) as observer:
        for line in where_settings_go([*assignments(chosen.settings)], variants):
            observer.notice(line)
        if suite is not None:
            observer.notice(f"{asked.suite}: {suite.table}; its files: {suite.files}")
        if sampling.alike is not None:
            observer.notice(sampling.alike)
        table = run(plan, observer)
    text = table.to_json() + "\n" if output.as_json else _text(table, to_file=output.output is not None)
    writer = OutputWriter()
    writer.result(output.output, text)
    if output.html is not None:
        from kvcli.quality.eval.html import page

        writer.file(output.html, page(table))
    if output.figure is not None:
        from kvcli.quality.eval.figure import figure

        for line in writer.picture(output.figure, figure(table, output.figure)):
            observer.notice(line)
    writer.finish()
    if not table.complete:
        where = (
            f"answers so far are in {output.predictions}"
            if output.predictions
            else "and without --predictions FILE its answers are not saved"
        )
        observer.notice(f"interrupted; the table is not complete, {where}")
        raise typer.Exit(ExitCode.INTERRUPTED)


def _text(table: EvaluationTable, to_file: bool) -> str:
    """Format the table for people, with the needle grid's heat maps below it."""
    from kvcli.quality.eval.layout import heat_maps, notes, tables
    from kvcli.ui import console

    text = console.render_tables(tables(table), to_file, notes(table))
    maps = heat_maps(table)
    return text + console.render_heat_maps(maps, to_file) if maps else text
