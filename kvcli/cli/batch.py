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

from kvcli.cli import asked, options
from kvcli.cli.asked import INPUT, hush_libraries, json_object, profile_of
from kvcli.cli.batch_files import merge, status
from kvcli.cli.options import OUTPUT, Panel, at_least, number, positive, positive_count, require_text, whole
from kvcli.cli.output import progress
from kvcli.cli.reads import check_files
from kvcli.cli.saved import HostMemory, KVCache, KVCacheSize, KVDisk, kv_options
from kvcli.cli.signals import handled_by
from kvcli.errors import ExitCode, KvcliError, usage_error

if TYPE_CHECKING:
    from kvcli.batch.on_ray import Cluster
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


def share(text: object) -> float:
    """Read a part of a whole: above 0, at most 1."""
    if (value := positive(text)) > 1:
        raise ValueError(f"{text} is above 1")
    return value


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
    shard: Annotated[
        str | None,
        _MACHINES.option(
            "--shard",
            "I/N|slurm",
            "Do part I of N, into a file of its own beside OUT; slurm takes both from the job array.",
        ),
    ] = None,
    engine: Annotated[
        Literal["local", "ray"],
        _MACHINES.option("--engine", None, "ray runs a shard by each of several workers, and joins their files."),
    ] = "local",
    workers: Annotated[
        int | None,
        _MACHINES.option("--workers", "N", "For ray; by default as many as there are GPUs.", positive_count),
    ] = None,
    gpus_per_worker: Annotated[
        float | None, _MACHINES.option("--gpus-per-worker", "N", "For ray; by default 1.", at_least(0, number))
    ] = None,
    address: Annotated[
        str | None, _MACHINES.option("--address", "HOST:PORT", "A Ray cluster; by default one is started here.")
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
    from kvcli.batch.order import Shard
    from kvcli.batch.run import BatchRequest
    from kvcli.batch.stop import Stop
    from kvcli.inputs.encoding import Template
    from kvcli.inputs.kv_options import disk_options
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
    part = None if shard is None else Shard.named(shard, os.environ)
    if part is not None and output is None:
        raise usage_error("--shard without -o: a shard writes a file of its own beside OUT", "name OUT with -o")
    if engine == "local" and any(given is not None for given in (workers, gpus_per_worker, address)):
        raise usage_error(
            "--workers, --gpus-per-worker and --address go with --engine ray", "add it, or leave them out"
        )
    if engine == "ray" and (output is None or source == "-"):
        raise usage_error("--engine ray reads and writes files that all workers see", "name IN, and OUT with -o")
    if engine == "ray" and (part is not None or validate_only):
        what = f"--engine ray with {'--shard' if part is not None else '--validate-only'}"
        raise usage_error(what, "leave one of them out")
    hush_libraries(False)
    request = BatchRequest(
        source=source,
        output=output,
        profile=profile_of(context, method, profile, settings or [], {"kv_dtype": kv_dtype}),
        sampling=sampling,
        template=Template(system, raw, json_object(chat_template_kwargs)),
        question=prompt,
        kv=kv_options(None, None, kv_cache, kv_cache_size),
        disk=disk_options(kv_disk, host_memory),
        shard=part,
        max_inflight=max_inflight,
        prefill_share=prefill_share,
        overwrite=overwrite,
        retry_errors=retry_errors,
        validate_only=validate_only,
    )

    from kvcli.batch.on_ray import Cluster
    from kvcli.models.loading import ModelSpec
    from kvcli.ui.console import print_error

    cluster = Cluster(address, workers, gpus_per_worker) if engine == "ray" else None
    spec = ModelSpec(model, device, dtype, load_format, offline, weights, tokenizer)
    end = Stop(grace)
    with handled_by(lambda number, _: end.ask(number)):
        try:
            code = _run(spec, request, end, cluster, quiet, log_json, metrics_port)
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
    quiet: bool,
    log_json: bool,
    metrics_port: int | None,
) -> int:
    """Run a batch with those that watch it; returns the exit code."""
    from kvcli.batch.on_ray import run_on_ray
    from kvcli.batch.run import run as run_batch
    from kvcli.batch.tally import Tally
    from kvcli.ui import console

    tally = Tally()
    with progress(quiet, demo=spec.name is None) as observer:
        display = console.BatchDisplay(quiet or log_json, observer.console)
        with _watched(tally, display, log_json, metrics_port):
            if cluster is None:
                run_batch(spec, request, observer, tally, stop)
            else:
                run_on_ray(spec, request, cluster, observer, tally, stop)
    if not quiet:
        console.print_batch_summary(tally.progress())
    found = tally.progress()
    if stop.signal is not None and found.ended < found.total:
        observer.notice(f"interrupted; {tally.dropped:,} rows in flight were dropped, the same command goes on")
        return 128 + stop.signal
    return ExitCode.PARTIAL if found.failed + found.earlier_failed else ExitCode.OK


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


batch = typer.Typer(cls=_WithDefault, rich_markup_mode="rich")
batch.command("run")(run)
batch.command("merge")(merge)
batch.command("status")(status)
