"""`kvcli batch`: a file of prompts in, a file of answers out; `merge` and `status` of such files."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup
from typing_extensions import override

from kvcli.cli import asked, options
from kvcli.cli.asked import INPUT, hush_libraries, json_object, profile_of
from kvcli.cli.options import OUTPUT, Panel, at_least, number, positive, positive_count, require_text, whole
from kvcli.cli.output import progress, write_result
from kvcli.cli.reads import check_files
from kvcli.cli.signals import handled_by
from kvcli.errors import ExitCode, usage_error

if TYPE_CHECKING:
    from kvcli.batch.order import Shard
    from kvcli.batch.run import BatchRequest
    from kvcli.batch.stop import Stop
    from kvcli.batch.tally import Tally
    from kvcli.models.loading import ModelSpec
    from kvcli.ui.console import BatchDisplay

_ROWS, _MACHINES = Panel("Rows"), Panel("Machines")


class _WithDefault(TyperGroup):
    """A group of commands, the first of which is meant where none is named."""

    @override
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = bool(args) and args[0] in self.commands
        return super().parse_args(ctx, args if named else [next(iter(self.commands)), *args])


batch = typer.Typer(cls=_WithDefault, rich_markup_mode="rich")


def share(text: object) -> float:
    """Read a part of a whole: above 0, at most 1."""
    if (value := positive(text)) > 1:
        raise ValueError(f"{text} is above 1")
    return value


@batch.command("run")
def run(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            metavar="IN",
            help="A file of rows (.jsonl, .jsonl.gz, .jsonl.zst; - is standard input) or a folder of documents.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path | None,
        OUTPUT.option(
            "--output -o", "OUT.jsonl", "Write results to OUT, and go on from it when run again.", options.output_file
        ),
    ] = None,
    prompt: Annotated[
        str | None, INPUT.option("--prompt -p", "TEXT", "Question on documents without one of their own.", env=False)
    ] = None,
    system: asked.System = None,
    raw: asked.Raw = False,
    chat_template_kwargs: asked.ChatTemplateKwargs = None,
    validate_only: Annotated[
        bool, _ROWS.flag("--validate-only", "Check all rows, list what is wrong with them, and end.")
    ] = False,
    overwrite: Annotated[
        bool, _ROWS.flag("--overwrite", "Do rows again whose text or options changed, instead of refusing OUT.")
    ] = False,
    retry_errors: Annotated[bool, _ROWS.flag("--retry-errors", "Do rows again that failed.")] = False,
    max_inflight: Annotated[
        int, _ROWS.option("--max-inflight", "N", "Rows decoded together, as far as memory holds them.", positive_count)
    ] = 16,
    prefill_share: Annotated[
        float,
        _ROWS.option(
            "--prefill-share",
            "0..1",
            "Part of the time that reading new prompts gets while rows run: 1 stalls them, less keeps them going.",
            share,
        ),
    ] = 0.8,
    grace: Annotated[
        float,
        _ROWS.option(
            "--grace", "SECONDS", "After Ctrl-C or SIGTERM, time for rows in flight to end.", at_least(0, number)
        ),
    ] = 20.0,
    model: options.Model = None,
    device: options.Device = "auto",
    dtype: options.DType = "auto",
    load_format: options.LoadFormat = "auto",
    offline: options.Offline = False,
    method: asked.Method = None,
    profile: asked.Profile = None,
    settings: asked.Settings = None,
    max_tokens: asked.MaxTokens = 256,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k: asked.TopK = 0,
    min_p: asked.MinP = 0.0,
    seed: asked.Seed = 0,
    stop: asked.StopTexts = None,
    ignore_eos: asked.IgnoreEos = False,
    num_samples: options.NumSamples = 1,
    shard: Annotated[
        str | None,
        _MACHINES.option(
            "--shard",
            "I/N|slurm",
            "Do part I of N, into a file of its own beside OUT; slurm takes both from the job array.",
        ),
    ] = None,
    log_json: Annotated[
        bool, OUTPUT.flag("--log-json", "A line of JSON a minute on stderr, instead of the display.")
    ] = False,
    metrics_port: Annotated[
        int | None, OUTPUT.option("--metrics-port", "PORT", "Serve metrics to Prometheus.", at_least(1, whole))
    ] = None,
    quiet: options.Quiet = False,
    debug: options.Debug = False,  # noqa: ARG001 - read by the guard around every command
) -> None:
    """Run a file of prompts; only rows in flight are ever lost.

    kvcli batch prompts.jsonl -o answers.jsonl -m DIR --max-inflight 32

    Rows are those of OpenAI's batch files, or short ones: custom_id, document or
    document_file, prompt. A result is on disk before the next row takes its place; the
    same command goes on where it stopped. kvcli batch merge joins the files of shards,
    kvcli batch status shows how a run gets on.

    Exit codes: 0 done, 1 failed, 2 usage, 4 some rows failed, 130 interrupted (143 by
    SIGTERM, 129 by SIGHUP), 141 stdout was closed.
    """
    from kvcli.batch.run import BatchRequest
    from kvcli.batch.stop import Stop
    from kvcli.inputs.encoding import Template
    from kvcli.inputs.sampling import Sampling

    outputs = {"-o": output}
    folder = Path(source).is_dir()
    files = [] if folder else [source]
    check_files(outputs, model=model, load_format=load_format, documents=files, profiles=[profile], settings=settings)
    sampling = Sampling(max_tokens, temperature, top_p, top_k, min_p, seed, tuple(stop or ()), ignore_eos, num_samples)
    texts = {"-p": [prompt], "--system": [system], "--stop": stop, "--chat-template-kwargs": [chat_template_kwargs]}
    require_text(texts)
    if prompt is not None and not prompt.strip():
        raise usage_error(f"the prompt {prompt!r} is empty", "give -p some text, or leave it out")
    part = None if shard is None else shard_of(shard)
    if part is not None and output is None:
        raise usage_error("--shard without -o: a shard writes a file of its own beside OUT", "name OUT with -o")
    hush_libraries(False)
    request = BatchRequest(
        source=source,
        output=output,
        profile=profile_of(context, method, profile, settings or [], {}),
        sampling=sampling,
        template=Template(system, raw, json_object(chat_template_kwargs)),
        question=prompt,
        shard=part,
        max_inflight=max_inflight,
        prefill_share=prefill_share,
        overwrite=overwrite,
        retry_errors=retry_errors,
        validate_only=validate_only,
    )

    from kvcli.models.loading import ModelSpec

    spec = ModelSpec(model, device, dtype, load_format, offline)
    end = Stop(grace)
    with handled_by(lambda number, _: end.ask(number)):
        code = _run(spec, request, end, quiet, log_json, metrics_port)
    raise typer.Exit(code)


def _run(
    spec: ModelSpec, request: BatchRequest, stop: Stop, quiet: bool, log_json: bool, metrics_port: int | None
) -> int:
    """Run a batch with those that watch it; returns the exit code."""
    from kvcli.batch.run import run as run_batch
    from kvcli.batch.tally import Tally
    from kvcli.ui import console

    tally = Tally()
    with progress(quiet, demo=spec.name is None) as observer:
        display = console.BatchDisplay(quiet or log_json, observer.console)
        with _watched(tally, display, log_json, metrics_port):
            run_batch(spec, request, observer, tally, stop)
    if not quiet:
        console.print_batch_summary(tally.progress())
    failed = tally.failed + tally.earlier_failed
    if stop.signal is not None and tally.progress().ended < tally.total:
        observer.notice(f"interrupted; {tally.dropped:,} rows in flight were dropped, the same command goes on")
        return 128 + stop.signal
    return ExitCode.PARTIAL if failed else ExitCode.OK


@contextmanager
def _watched(tally: Tally, display: BatchDisplay, log_json: bool, metrics_port: int | None) -> Iterator[None]:
    """Within, show how a batch gets on: on the terminal or as lines of JSON, and to Prometheus."""
    from kvcli.batch.tally import Regularly, json_log

    tally.watchers.append(Regularly(60, json_log(sys.stderr)) if log_json else Regularly(0.2, display.show))
    stop_serving: Callable[[], None] = lambda: None  # noqa: E731
    if metrics_port is not None:
        from kvcli.batch.metrics import serve

        stop_serving = serve(tally, metrics_port)
    try:
        yield
    finally:
        display.end()
        stop_serving()


def shard_of(text: str) -> Shard:
    """Read --shard: I/N with I from 1 on, or slurm.

    Raises:
        KvcliError: it is neither, or this is no job of a SLURM array (usage).
    """
    from kvcli.batch.order import Shard

    if text == "slurm":
        task, first, step, count = map(_slurm, ("ID", "MIN", "STEP", "COUNT"), (-1, 0, 1, 0))
        if task < 0 or count < 1:
            what = "--shard slurm: there is no SLURM_ARRAY_TASK_ID and SLURM_ARRAY_TASK_COUNT"
            raise usage_error(what, "submit with sbatch --array=1-N, or give --shard I/N")
        return Shard((task - first) // step + 1, count)
    number_of, slash, count_of = text.partition("/")
    if not (slash and number_of.isdecimal() and count_of.isdecimal() and 1 <= int(number_of) <= int(count_of)):
        raise usage_error(f"--shard {text!r} is not I/N", "count from 1: --shard 1/4 to --shard 4/4")
    return Shard(int(number_of), int(count_of))


def _slurm(name: str, default: int) -> int:
    value = os.environ.get(f"SLURM_ARRAY_TASK_{name}", "")
    return int(value) if value.isdecimal() else default


@batch.command("merge")
def merge(
    source: Annotated[str, typer.Argument(metavar="IN", help="The rows, as the shards were given them.")],
    output: Annotated[
        Path, OUTPUT.option("--output -o", "OUT.jsonl", "As the shards were given it: their files lie beside it.")
    ],
    quiet: options.Quiet = False,
    debug: options.Debug = False,  # noqa: ARG001 - read by the guard around every command
) -> None:
    """Join the files of shards into one, in the order of the rows.

    kvcli batch merge prompts.jsonl -o answers.jsonl

    Every row has to have one result, all by one model and profile; otherwise nothing is
    written, and what is missing is named.

    Exit codes: 0 done, 1 not all rows have a result, 2 usage, 4 some rows failed.
    """
    from kvcli.batch.merge import merge as join
    from kvcli.ui import console

    found = join(source, output)
    if not quiet:
        console.print_batch_summary(found)
    raise typer.Exit(ExitCode.PARTIAL if found.earlier_failed else ExitCode.OK)


@batch.command("status")
def status(
    output: Annotated[Path, typer.Argument(metavar="OUT", help="The file that -o was given, with or without --shard.")],
    as_json: options.AsJson = False,
    debug: options.Debug = False,  # noqa: ARG001 - read by the guard around every command
) -> None:
    """Show how a batch gets on, from another terminal.

    kvcli batch status answers.jsonl

    Exit codes: 0 done, 1 failed, 2 usage, 141 stdout was closed.
    """
    from kvcli.batch.merge import state
    from kvcli.ui import console

    found, running = state(output)
    if as_json:
        text = found.model_dump_json() + "\n"
    else:
        text = console.render_batch(found) + f"{'state':<10} {'running' if running else 'no run writes to it'}\n"
    write_result(None, text)
