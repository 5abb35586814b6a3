"""`kvcli batch`: a file of prompts in, a file of answers out."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup
from typing_extensions import override

from kvcli.cli.command import command, hush_libraries, profile_of
from kvcli.cli.output import check_files, demo_notice, progress, write_result
from kvcli.cli.process import handled_by
from kvcli.errors import ExitCode, KvcliError, usage_error
from kvcli.inputs import options

if TYPE_CHECKING:
    from kvcli.batch.on_ray import Cluster
    from kvcli.batch.run import BatchRequest
    from kvcli.batch.stop import Stop
    from kvcli.batch.tally import Tally
    from kvcli.models.loading import ModelSpec
    from kvcli.ui.console import BatchDisplay

_ROWS, _MACHINES = options.Panel("Rows"), options.Panel("Machines")


class _WithDefault(TyperGroup):
    """A group of commands, the first of which is the default."""

    @override
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = bool(args) and args[0] in self.commands
        return super().parse_args(ctx, args if named else [next(iter(self.commands)), *args])


def share(text: object) -> float:
    """Read a share: above 0, at most 1."""
    if (value := options.positive(text)) > 1:
        raise ValueError(f"{text} is above 1")
    return value


@options.group
class Files:
    """The sources of rows, the place of results, and the question for rows that have none."""

    source: str = options.argument(
        ..., "IN", "Rows file (.jsonl, .jsonl.gz, .jsonl.zst; - is standard input) or folder of documents."
    )
    output: Path | None = options.OUTPUT(
        None, "--output -o", "OUT.jsonl", "Write results to OUT; run again to resume.", options.output_file
    )
    prompt: str | None = options.INPUT(
        None, "--prompt -p", "TEXT", "Question for documents without one.", env=False, utf8="-p"
    )


@options.group
class Rows:
    """The rows to do, and how many together."""

    validate_only: bool = _ROWS.flag("--validate-only", "Check all rows, list all problems, and exit.")
    overwrite: bool = _ROWS.flag("--overwrite", "Redo rows whose text or options changed, instead of refusing OUT.")
    retry_errors: bool = _ROWS.flag("--retry-errors", "Redo rows that failed.")
    max_inflight: int = _ROWS(
        16, "--max-inflight", "N", "Most rows decoded together, if memory holds them.", options.positive_count
    )
    prefill_share: float = _ROWS(
        0.8,
        *("--prefill-share", "0..1"),
        "Share of time for new prompts while rows decode; 1 pauses decoding.",
        share,
    )
    grace: float = _ROWS(
        20.0,
        "--grace",
        "SECONDS",
        "Time for rows in flight to finish after Ctrl-C or SIGTERM.",
        options.at_least(0, options.number),
    )


@options.group
class Machines:
    """Other workers and machines that do rows."""

    shard: str | None = _MACHINES(
        None,
        *("--shard", "I/N|slurm"),
        "Run part I of N into a file next to OUT; slurm takes both from the job array.",
    )
    engine: Literal["local", "ray"] = _MACHINES(
        "local", "--engine", None, "ray: run one shard per worker and join their files."
    )
    workers: int | None = _MACHINES(
        None, "--workers", "N", "Ray workers. Default: one per GPU.", options.positive_count
    )
    gpus_per_worker: float | None = _MACHINES(
        None, "--gpus-per-worker", "N", "GPUs per Ray worker. Default: 1.", options.at_least(0, options.number)
    )
    address: str | None = _MACHINES(None, "--address", "HOST:PORT", "Ray cluster. Default: start one here.")


@options.group
class Watched(options.Output):
    """How to watch a run, even from elsewhere."""

    log_json: bool = options.OUTPUT.flag(
        "--log-json", "Write a line of JSON to stderr every minute, instead of the display."
    )
    metrics_port: int | None = options.OUTPUT(
        None, "--metrics-port", "PORT", "Serve metrics to Prometheus on this port.", options.at_least(1, options.whole)
    )


@command
def run(
    context: typer.Context,
    files: Files,
    template: options.Template,
    rows: Rows,
    kv: Annotated[options.KVOptions, options.Some("kv_cache kv_cache_size")],
    model: options.ModelOptions,
    method: options.MethodOptions,
    disk: options.DiskOptions | None,
    sampling: options.Sampling,
    machines: Machines,
    shown: Annotated[Watched, options.Some("log_json metrics_port quiet debug")],
) -> None:
    """Run a file of prompts; run it again to resume.

    kvcli batch prompts.jsonl -o answers.jsonl -m DIR --max-inflight 32

    Rows are OpenAI batch requests, or short rows: custom_id, document or document_file,
    prompt. Every result is written to disk when its row ends. To resume, run the same
    command again. kvcli batch merge joins the files of shards, and kvcli batch status
    shows the progress.

    Exit codes: 0 done, 1 failed, 2 usage, 4 some rows failed, 130 interrupted (143 by
    SIGTERM, 129 by SIGHUP), 141 stdout was closed.
    """
    from kvcli.batch.order import Shard
    from kvcli.batch.run import BatchRequest
    from kvcli.batch.stop import Stop

    source, output, prompt = files.source, files.output, files.prompt
    read = [] if Path(source).is_dir() else [source]
    check_files({"-o": output}, model, read, [method.profile], settings=method.settings)
    if prompt is not None and not prompt.strip():
        raise usage_error(f"the prompt {prompt!r} is empty", "give -p some text, or leave it out")
    part = None if machines.shard is None else Shard.named(machines.shard, os.environ)
    if part is not None and output is None:
        raise usage_error("--shard needs -o: a shard writes a file next to OUT", "name OUT with -o")
    by_ray, of_ray = machines.engine == "ray", (machines.address, machines.workers, machines.gpus_per_worker)
    if not by_ray and any(given is not None for given in of_ray):
        raise usage_error("--workers, --gpus-per-worker and --address need --engine ray", "add it, or leave them out")
    if by_ray and (output is None or source == "-"):
        raise usage_error("--engine ray needs files that all workers see", "name IN, and OUT with -o")
    if by_ray and (part is not None or rows.validate_only):
        what = f"--engine ray does not work with {'--shard' if part is not None else '--validate-only'}"
        raise usage_error(what, "leave one of them out")
    hush_libraries(False)
    request = BatchRequest(
        source=source,
        output=output,
        profile=profile_of(context, method),
        sampling=sampling,
        template=template,
        question=prompt,
        kv=kv,
        disk=disk,
        shard=part,
        max_inflight=rows.max_inflight,
        prefill_share=rows.prefill_share,
        overwrite=rows.overwrite,
        retry_errors=rows.retry_errors,
        validate_only=rows.validate_only,
    )

    from kvcli.batch.on_ray import Cluster
    from kvcli.ui.console import print_error

    cluster = Cluster(*of_ray) if by_ray else None
    end = Stop(rows.grace)
    with handled_by(lambda number, _: end.ask(number)):
        try:
            code = _run(model.spec(), request, end, cluster, shown)
        except KeyboardInterrupt:
            if end.signal is None:
                raise
            print_error(KvcliError("interrupted while no row was in flight"))
            code = 128 + end.signal
    raise typer.Exit(code)


def _run(
    spec: ModelSpec,
    request: BatchRequest,
    stop: Stop,
    cluster: Cluster | None,
    shown: Watched,
) -> int:
    """Run a batch with its displays and metrics; return the exit code."""
    from kvcli.batch.on_ray import run_on_ray
    from kvcli.batch.run import run as run_batch
    from kvcli.batch.tally import Tally
    from kvcli.ui import console

    tally = Tally()
    with progress(shown.quiet) as observer:
        if spec.name is None:
            observer.notice(demo_notice([request.source]))
        display = console.BatchDisplay(shown.quiet or shown.log_json, observer.console)
        with _watched(tally, display, shown):
            if cluster is None:
                run_batch(spec, request, observer, tally, stop)
            else:
                run_on_ray(spec, request, cluster, observer, tally, stop)
    if not shown.quiet:
        console.print_batch_summary(tally.progress(), request.validate_only)
    found = tally.progress()
    if stop.signal is not None and found.ended < found.total:
        observer.notice(f"interrupted; {tally.dropped:,} rows in flight were dropped. To resume, run the same command")
        return 128 + stop.signal
    return ExitCode.PARTIAL if found.failed + found.earlier_failed else ExitCode.OK


@contextmanager
def _watched(tally: Tally, display: BatchDisplay, shown: Watched) -> Iterator[None]:
    """Show the progress of a batch within this context: on the terminal or as lines of JSON, and to Prometheus."""
    from kvcli.batch.tally import Regularly, json_log

    tally.watchers.append(Regularly(60, json_log(sys.stderr)) if shown.log_json else Regularly(0.2, display.show))
    stop_serving: Callable[[], None] = lambda: None  # noqa: E731
    if shown.metrics_port is not None:
        from kvcli.batch.tally import serve

        stop_serving = serve(tally, shown.metrics_port)
    try:
        yield
    finally:
        display.end()
        stop_serving()


@options.group
class Shards:
    """The files of shards."""

    source: str = options.argument(..., "IN", "The IN of the shards.")
    output: Path = options.OUTPUT(..., "--output -o", "OUT.jsonl", "The OUT of the shards; their files are next to it.")


@options.group
class Results:
    """The file of a run."""

    output: Path = options.argument(..., "OUT", "The file given to -o, with or without --shard.")


@command
def merge(
    files: Shards,
    shown: Annotated[options.Output, options.Some("quiet debug")],
) -> None:
    """Join the files of shards into one, in the order of the rows.

    kvcli batch merge prompts.jsonl -o answers.jsonl

    Every row needs exactly one result, all from one model and profile. Otherwise nothing
    is written, and the error names the missing rows.

    Exit codes: 0 done, 1 not all rows have a result, 2 usage, 4 some rows failed.
    """
    from kvcli.batch.merge import merge as join
    from kvcli.ui import console

    found = join(files.source, files.output)
    if not shown.quiet:
        console.print_batch_summary(found)
    raise typer.Exit(ExitCode.PARTIAL if found.earlier_failed else ExitCode.OK)


@command
def status(
    results: Results,
    shown: Annotated[options.Output, options.Some("json debug")],
) -> None:
    """Show the progress of a batch, from another terminal.

    kvcli batch status answers.jsonl

    Exit codes: 0 done, 1 failed, 2 usage, 141 stdout was closed.
    """
    from kvcli.batch.merge import state
    from kvcli.ui import console

    found, running = state(results.output)
    if shown.as_json:
        text = found.model_dump_json() + "\n"
    else:
        text = console.render_batch(found) + f"{'state':<10} {'running' if running else 'no run writes to it'}\n"
    write_result(None, text)


batch = typer.Typer(cls=_WithDefault, rich_markup_mode="rich")
batch.command("run")(run)
batch.command("merge")(merge)
batch.command("status")(status)
