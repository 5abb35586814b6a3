"""`kvcli eval`: how good the answers of methods are, and what they cost, as one table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kvcli.cli.options import assignments, each, flag, names, number, option, positive_count, whole
from kvcli.cli.output import check_writable, write_file
from kvcli.errors import ExitCode

if TYPE_CHECKING:
    from kvcli.eval.table import Table

_TASKS, _MODEL, _METHOD, _SAMPLING, _OUTPUT = "Tasks", "Model", "Methods", "Sampling", "Output"


def evaluate(
    tasks: Annotated[
        str,
        option(
            "--tasks",
            panel=_TASKS,
            env=False,
            metavar="A,B",
            help="Synthetic tasks, needle_grid, ppl, ppl:FILE, or .jsonl files of benchmarks.",
        ),
    ],
    length: Annotated[
        str | None,
        option("--length", panel=_TASKS, env=False, metavar="TOKENS,...", help="Lengths of the prompts, as in 4K,8K."),
    ] = None,
    depths: Annotated[
        int,
        option(
            "--depths", panel=_TASKS, env=False, parser=positive_count, metavar="N", help="Depths of the needle grid."
        ),
    ] = 5,
    max_length: Annotated[
        int | None,
        option(
            "--max-length",
            panel=_TASKS,
            env=False,
            parser=positive_count,
            metavar="TOKENS",
            help="Cut longer prompts in the middle; by default to what the model was made for.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[
        int, option("--limit", panel=_TASKS, env=False, parser=positive_count, metavar="N", help="Documents of each.")
    ] = 20,
    method: Annotated[
        str | None, option("--method", panel=_METHOD, env=False, metavar="A,B", help="Methods, comma-separated.")
    ] = None,
    profile: Annotated[
        str | None,
        option("--profile", panel=_METHOD, env=False, metavar="A,B", help="Profiles beside them, names or files."),
    ] = None,
    budget: Annotated[
        str | None,
        option("--budget", panel=_METHOD, env=False, metavar="TOKENS,...", help="Budgets, each for every method."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        option(
            "--set", panel=_METHOD, env=False, metavar="KEY=VALUE", help="A setting for all that have it; repeatable."
        ),
    ] = None,
    model: Annotated[
        str | None,
        option("--model", "-m", panel=_MODEL, metavar="DIR|ID", help="Checkpoint; without it, the small demo model."),
    ] = None,
    device: Annotated[
        str, option("--device", panel=_MODEL, metavar="NAME", help="Where to run: auto, cpu, cuda, cuda:1.")
    ] = "auto",
    dtype: Annotated[
        str, option("--dtype", panel=_MODEL, metavar="NAME", help="Weights and KV: auto, bfloat16, float16, float32.")
    ] = "auto",
    load_format: Annotated[
        Literal["auto", "dummy"],
        option("--load-format", panel=_MODEL, help="dummy makes random weights up."),
    ] = "auto",
    offline: Annotated[bool, flag("--offline", panel=_MODEL, help="Use local files only, never the hub.")] = False,
    max_tokens: Annotated[
        int | None,
        option(
            "--max-tokens",
            panel=_SAMPLING,
            metavar="TOKENS",
            parser=positive_count,
            help="Longest answer; the task's own by default.",
            show_default=False,
        ),
    ] = None,
    temperature: Annotated[
        float,
        option("--temperature", panel=_SAMPLING, parser=number, metavar="T", help="0 takes the likeliest token."),
    ] = 0.0,
    top_p: Annotated[
        float,
        option("--top-p", panel=_SAMPLING, parser=number, metavar="P", help="Likeliest tokens of this probability."),
    ] = 1.0,
    seed: Annotated[
        int, option("--seed", panel=_SAMPLING, parser=whole, metavar="N", help="Same seed, same documents and answers.")
    ] = 0,
    num_samples: Annotated[
        int, option("--num-samples", panel=_SAMPLING, parser=whole, metavar="N", help="Answers to each question.")
    ] = 1,
    predictions: Annotated[
        Path | None,
        option(
            "--predictions",
            panel=_OUTPUT,
            env=False,
            metavar="FILE",
            help="Keep every answer in FILE as it comes, and go on from it when run again.",
        ),
    ] = None,
    as_json: Annotated[
        bool, flag("--json", panel=_OUTPUT, env=False, help="One JSON object instead of the table.")
    ] = False,
    output: Annotated[
        Path | None,
        option("--output", "-o", panel=_OUTPUT, env=False, metavar="FILE", help="Write to FILE instead of stdout."),
    ] = None,
    html: Annotated[
        Path | None,
        option(
            "--html", panel=_OUTPUT, env=False, metavar="FILE", help="Also write a page with charts, for a browser."
        ),
    ] = None,
    quiet: Annotated[bool, flag("--quiet", "-q", panel=_OUTPUT, help="Only the table: no progress or notes.")] = False,
    debug: Annotated[  # noqa: ARG001 - read by the guard around every command
        bool, flag("--debug", panel=_OUTPUT, help="Show the traceback of an error.")
    ] = False,
) -> None:
    """Measure the answers of methods on long-context tasks.

    kvcli eval --tasks niah_single,vt --length 4K,8K --method full,quest --budget 256,512

    The table goes to stdout. With --predictions FILE a run that was cut off goes on
    where it stopped when the same command is given again.

    Exit codes: 0 done, 1 failed, 2 usage, 3 will not fit in memory, 130 interrupted,
    141 stdout was closed.
    """
    from kvcli.variants import variants

    for path, name in ((output, "-o"), (html, "--html"), (predictions, "--predictions")):
        if path is not None:
            check_writable(path, name)
    if html is not None:
        from kvcli.pages import check_installed

        check_installed()
    methods, profiles = names(method, "--method"), names(profile, "--profile")
    compared = variants(
        methods or ([] if profiles else ["full", "freekv"]),
        profiles,
        each(budget, "--budget", positive_count),
        assignments(settings or []),
    )

    from kvcli import console
    from kvcli.eval.evaluate import Plan
    from kvcli.eval.evaluate import evaluate as run
    from kvcli.model import ModelSpec
    from kvcli.sampling import Sampling

    observer = console.RunConsole(None, quiet, text_on_screen=False)
    if model is None:
        observer.notice("no -m: using the small demo model that comes with kvcli")
    if num_samples > 1 and temperature == 0:
        observer.notice(f"--num-samples {num_samples} without --temperature: all samples will be the same")
    plan = Plan(
        model=ModelSpec(model, device, dtype, load_format, offline),
        variants=compared,
        tasks=names(tasks, "--tasks"),
        lengths=each(length, "--length", positive_count),
        depths=depths,
        limit=limit,
        max_tokens=max_tokens,
        max_length=max_length,
        sampling=Sampling(temperature=temperature, top_p=top_p, seed=seed, num_samples=num_samples),
        predictions=predictions,
    )
    try:
        table = run(plan, observer)
    finally:
        observer.stage_done()
    text = table.to_json() + "\n" if as_json else _text(table, to_file=output is not None)
    if output is not None:
        write_file(output, text)
    else:
        typer.echo(text, nl=False)
    if html is not None:
        from kvcli.eval.page import page

        write_file(html, page(table))
    if not table.complete:
        kept = f"answers so far are in {predictions}" if predictions else "no --predictions FILE kept the answers"
        observer.notice(f"interrupted; the table is not complete, {kept}")
        raise typer.Exit(ExitCode.INTERRUPTED)


def _text(table: Table, to_file: bool) -> str:
    """The table for people; the needle grid's heat maps below it."""
    from kvcli import console
    from kvcli.eval import layout

    maps = [
        console.HeatMap(f"{found.variant}: score in %", "depth", found.rows, found.columns, found.values)
        for found in layout.heat_maps(table)
    ]
    text = console.render_tables(layout.tables(table), to_file)
    return text + console.render_heat_maps(maps, to_file) if maps else text
